"""The batch of `benchmarks/trainer_step.py` is what it says: groups that share their prompt, turns as `vs_trl` plays them."""

from __future__ import annotations

from benchmark_modules import loaded

loaded("peers_figures")
loaded("peers_tasks")
loaded("peers_run")
trainer_step = loaded("trainer_step")


def test_the_batch_is_that_of_four_turns() -> None:
    batch = trainer_step.samples()
    assert len(batch) == 64
    prompts = [one.segment.pieces[0].payload.ids.tobytes() for one in batch]
    assert len(set(prompts)) == 8
    assert all(len(set(prompts[at : at + 8])) == 1 for at in range(0, 64, 8))
    assert {one.segment.n_tokens for one in batch} == {4 * (16 + 21)}
    assert all(sum(piece.sampled for piece in one.segment.pieces) == 4 for one in batch)


def test_another_call_draws_the_same_batch() -> None:
    first, again = trainer_step.samples(), trainer_step.samples()
    assert [one.advantage for one in first] == [one.advantage for one in again]
