"""A chat in tokens: only what the template adds is encoded; where it takes something back, another sequence begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.config.schema import CharsTokenizer, HFTokenizer
from rollart.core.errors import ConfigError
from rollart.core.types import Segment
from rollart.runtime.envs.turns import ChatTurns, PlainTurns, turns_of
from rollart.runtime.payload import ids_of
from rollart.runtime.tokenizers import HF, Ids, build_tokenizer

BEGIN, END, THINK, THOUGHT = range(4)
"""Ids of the special tokens below."""
APPENDS = (
    "{% for message in messages %}<|s|>{{ message.role }}:{{ message.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)
DROPS = APPENDS.replace(
    "{{ message.content }}",
    "{{ message.content.split('</t>')[-1] if message.role == 'assistant' else message.content }}",
)


def hf(folder: Path, template: str | None, *, system: str = "") -> HF:
    """A byte-level tokenizer: one id per byte, and four special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|s|>", "<|e|>", "<t>", "</t>"]
    vocab = {text: index for index, text in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.add_special_tokens(special)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=inner, eos_token="<|e|>")
    if template is not None:
        made.chat_template = template
    made.save_pretrained(folder)
    return HF(HFTokenizer(kind="hf", path=str(folder), template="chat", system=system))


def chat(tokenizer: HF) -> ChatTurns:
    turns = turns_of(tokenizer)
    assert isinstance(turns, ChatTurns)
    return turns


def said(tokenizer: HF, text: str) -> Ids:
    return tokenizer.encode(text)


def test_the_first_text_is_system_user_and_where_the_assistant_begins(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, APPENDS, system="be brief")
    assert (tokenizer.stop_ids, tokenizer.turn_end_ids, tokenizer.begin_ids) == ((END,), (END,), ())
    first = chat(tokenizer).first("hello")
    assert tokenizer.decode(first) == "<|s|>system:be brief<|e|><|s|>user:hello<|e|><|s|>assistant:"
    assert [int(id_) for id_ in first if id_ < 4] == [BEGIN, END, BEGIN, END, BEGIN]


def test_a_turn_adds_what_the_template_adds_whether_or_not_it_was_cut(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, APPENDS)
    turns = chat(tokenizer)
    turns.first("hello")
    whole = said(tokenizer, "go<|e|>")
    assert turns.action(whole) == "go"
    added = turns.reply(whole, "well")
    assert not isinstance(added, Segment)
    assert tokenizer.decode(added) == "<|s|>user:well<|e|><|s|>assistant:"
    cut = said(tokenizer, "on")
    assert turns.action(cut) == "on"
    added = turns.reply(cut, "good")
    assert not isinstance(added, Segment)
    assert tokenizer.decode(added) == "<|e|><|s|>user:good<|e|><|s|>assistant:"
    assert turns.segments == 1


def test_half_a_character_and_special_tokens_in_an_action_break_nothing(tmp_path: Path) -> None:
    """What they read as is not what they are; they are kept as they were sampled."""
    tokenizer = hf(tmp_path, APPENDS)
    turns = chat(tokenizer)
    turns.first("hello")
    half = said(tokenizer, "é")[:1]
    action = np.concatenate([said(tokenizer, "<|s|>user:"), half, [END]]).astype(np.int32)
    assert turns.action(action) == "<|s|>user:\N{REPLACEMENT CHARACTER}"
    added = turns.reply(action, "well")
    assert not isinstance(added, Segment)
    assert tokenizer.decode(added) == "<|s|>user:well<|e|><|s|>assistant:"


def test_a_thought_that_the_template_drops_opens_a_segment_where_the_two_part(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path, DROPS)
    turns = chat(tokenizer)
    seen = [turns.first("hello"), said(tokenizer, "<t>hm</t>go<|e|>")]
    branch = turns.reply(seen[1], "well")
    assert isinstance(branch, Segment)
    assert tokenizer.decode(ids_of(branch)) == (
        "<|s|>user:hello<|e|><|s|>assistant:go<|e|><|s|>user:well<|e|><|s|>assistant:"
    )
    assert (branch.parent, branch.shared_tokens, branch.n_sampled) == (0, len(seen[0]), 0)
    assert ids_of(branch)[: branch.shared_tokens].tolist() == seen[0].tolist()
    before = ids_of(branch)
    plain = turns.reply(said(tokenizer, "on<|e|>"), "good")
    assert not isinstance(plain, Segment), "without a thought the second segment goes on"
    again = turns.reply(said(tokenizer, "a<t>b</t>on<|e|>"), "so")
    assert isinstance(again, Segment)
    assert (again.parent, turns.segments) == (1, 3)
    shared = ids_of(again)[: again.shared_tokens]
    assert again.shared_tokens == len(before) + len(said(tokenizer, "on<|e|>")) + len(plain)
    assert shared[: len(before)].tolist() == before.tolist()


def test_sampled_ids_that_stay_in_the_text_are_shared_as_they_were_sampled(tmp_path: Path) -> None:
    """The template takes back a part in the middle: what stands before it in the same turn keeps its ids, also where the text
    of them would be encoded otherwise; half a character that the text does not have is not shared."""
    takes_back = APPENDS.replace("{{ message.content }}", "{{ message.content.replace('#', '') }}")
    tokenizer = hf(tmp_path, takes_back)
    turns = chat(tokenizer)
    first = turns.first("hello")
    action = said(tokenizer, "go#on<|e|>")
    branch = turns.reply(action, "well")
    assert isinstance(branch, Segment)
    assert branch.shared_tokens == len(first) + len("go")
    assert ids_of(branch)[: branch.shared_tokens].tolist() == [*first.tolist(), *action[:2].tolist()]


def test_a_template_that_rewrites_the_beginning_shares_nothing(tmp_path: Path) -> None:
    counts = "{{ messages|length }}" + APPENDS
    tokenizer = hf(tmp_path, counts)
    turns = chat(tokenizer)
    turns.first("hello")
    branch = turns.reply(said(tokenizer, "go<|e|>"), "well")
    assert isinstance(branch, Segment)
    assert (branch.parent, branch.shared_tokens, len(branch.pieces)) == (0, 0, 1)


def test_a_session_begun_anew_forgets(tmp_path: Path) -> None:
    turns = chat(hf(tmp_path, DROPS))
    first = turns.first("hello")
    turns.reply(first, "well")
    assert turns.first("hello").tolist() == first.tolist()
    assert turns.segments == 1


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (None, "", "has no chat template"),
        (APPENDS.replace("<|e|>", "\n"), "", r"does not end an assistant's turn with a special token"),
        ("{{ raise_exception('no ' ~ messages[0].role) }}", "be", r"refuses .* roles system user assistant: no system"),
        ("fixed", "", "does not end an assistant's turn"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_told(
    tmp_path: Path, template: str | None, system: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hf(tmp_path, template, system=system)


def test_plain_is_the_default_and_has_no_template(tmp_path: Path) -> None:
    hf(tmp_path, APPENDS)
    for config in (HFTokenizer(kind="hf", path=str(tmp_path)), CharsTokenizer()):
        tokenizer = build_tokenizer(config)
        assert tokenizer.chat is None
        assert isinstance(turns_of(tokenizer), PlainTurns)
