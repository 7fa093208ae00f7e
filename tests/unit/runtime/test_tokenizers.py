"""Text to ids and back: lossless on the alphabet, loud outside it, and nothing added behind the caller's back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.config.schema import CharsTokenizer, HFTokenizer
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.tokenizers import PAD_TEXT, build_tokenizer


def test_chars_round_trip_over_the_whole_alphabet() -> None:
    tokenizer = build_tokenizer(CharsTokenizer())
    alphabet = CharsTokenizer().alphabet
    ids = tokenizer.encode(alphabet)
    assert ids.dtype == np.int32
    assert sorted(ids.tolist()) == list(range(1, tokenizer.vocab_size))
    assert tokenizer.decode(ids) == alphabet
    assert tokenizer.pad_id not in ids


def test_chars_newline_stops_a_turn() -> None:
    tokenizer = build_tokenizer(CharsTokenizer())
    assert tokenizer.stop_ids == tuple(tokenizer.encode("\n").tolist()) == tokenizer.turn_end_ids
    assert tokenizer.begin_ids == ()


def test_unknown_character_is_named_with_its_place() -> None:
    with pytest.raises(EnvError, match=r"'é' \(U\+00E9\) at position 3 of 'café'.*tokenizer\.alphabet"):
        build_tokenizer(CharsTokenizer()).encode("café")


def test_sampled_padding_is_seen_and_ids_outside_are_refused() -> None:
    tokenizer = build_tokenizer(CharsTokenizer())
    left = int(tokenizer.encode("L")[0])
    assert tokenizer.decode([tokenizer.pad_id, left]) == PAD_TEXT + "L"
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(EnvError, match="outside the vocabulary"):
            tokenizer.decode([outside])


def byte_level(folder: Path, *, bos: bool) -> str:
    """A byte-level BPE tokenizer with a merge over 'ab', saved as transformers keeps them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(["<s>", "</s>", *symbols, "ab"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


def test_hf_adds_no_special_tokens_but_says_what_begins_a_text(tmp_path: Path) -> None:
    plain = build_tokenizer(HFTokenizer(kind="hf", path=byte_level(tmp_path / "plain", bos=False)))
    begun = build_tokenizer(HFTokenizer(kind="hf", path=byte_level(tmp_path / "begun", bos=True)))
    for tokenizer in (plain, begun):
        ids = tokenizer.encode("abba\n")
        assert len(ids) == 4
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == "abba\n"
        assert tokenizer.decode([0, *ids, 1]) == "<s>abba\n</s>"
        assert tokenizer.stop_ids == (1, int(ids[-1]))
        assert tokenizer.pad_id == 1
        assert tokenizer.vocab_size == 259
    assert plain.begin_ids == ()
    assert begun.begin_ids == (0,)


def test_hf_folder_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        build_tokenizer(HFTokenizer(kind="hf", path=str(tmp_path / "none")))
