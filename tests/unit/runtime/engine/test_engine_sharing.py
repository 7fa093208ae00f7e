"""Siblings of a group: what they begin with alike is computed once, and what they sample does not change by it."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import VOCAB, by_traj, engine, ids, logprobs, mismatch, one, random_ids, request, run, update
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollart.core.types import Generation, TrajId, TurnRequest

GROUP = "train/echo/0/7"
PROMPT = random_ids(60)


def siblings(n: int, prompt: NDArray[np.int32] = PROMPT, *, turn: int = 0, max_tokens: int = 8) -> list[TurnRequest]:
    return [request(f"{GROUP}/{member}", prompt, turn=turn, max_tokens=max_tokens) for member in range(n)]


def grown(answer: Generation, new: int, seed: int, prompt: NDArray[np.int32] = PROMPT) -> NDArray[np.int32]:
    return np.concatenate([prompt, ids(answer), random_ids(new, seed)]).astype(np.int32)


@pytest.mark.parametrize("prefill_tokens", [7, 64, 4096])
def test_siblings_that_come_together_compute_their_prompt_once(prefill_tokens: int) -> None:
    core = engine(prefill_tokens=prefill_tokens)
    core.submit(siblings(6))
    answers = by_traj(core)
    assert sorted(answer.prefilled_tokens for answer in answers.values()) == [1, 1, 1, 1, 1, 60]
    assert all(mismatch(PROMPT, answer) < 1e-5 for answer in answers.values())


def test_a_sibling_that_comes_later_takes_the_prompt_from_a_live_one_and_from_an_idle_one() -> None:
    core = engine()
    core.submit(siblings(1, max_tokens=30))
    core.step()
    core.step()
    core.submit(siblings(2)[1:])
    assert run(core)[siblings(2)[1].id].prefilled_tokens == 1
    late = request(f"{GROUP}/2", [*PROMPT, 1, 2, 3])
    answer = one(core, late)
    assert (answer.prefilled_tokens, answer.rebuilt_tokens) == (3, 0)
    assert mismatch([*PROMPT, 1, 2, 3], answer) < 1e-5


def test_a_sibling_that_begins_otherwise_shares_up_to_the_first_other_token() -> None:
    core, changed = engine(), PROMPT.copy()
    changed[25] = (changed[25] + 1) % VOCAB
    core.submit([siblings(1)[0], request(f"{GROUP}/1", changed)])
    answers = by_traj(core)
    assert answers[f"{GROUP}/1"].prefilled_tokens == 35
    assert mismatch(changed, answers[f"{GROUP}/1"]) < 1e-5


def test_trajectories_of_other_groups_share_nothing() -> None:
    core = engine()
    core.submit([request("train/echo/0/7/0", PROMPT), request("train/echo/0/8/0", PROMPT), request("alone", PROMPT)])
    assert [answer.prefilled_tokens for answer in by_traj(core).values()] == [60, 60, 60]


def test_a_prefix_too_short_to_wait_for_is_computed_by_each() -> None:
    core, short = engine(), PROMPT[:7]
    core.submit(siblings(3, short))
    assert [answer.prefilled_tokens for answer in by_traj(core).values()] == [7, 7, 7]


def test_after_new_weights_a_group_rebuilds_its_prompt_once() -> None:
    shared, alone = (engine(prefill_tokens=4096, share_prefixes=share) for share in (True, False))
    rebuilt = {}
    for core in (shared, alone):
        core.submit(siblings(5, max_tokens=20))
        for _ in range(6):
            core.step()
        update(core, 2)
        answers = by_traj(core)
        assert all(mismatch(PROMPT, answer) < 1e-5 for answer in answers.values())
        assert core.book().rebuilt_tokens == sum(answer.rebuilt_tokens for answer in answers.values())
        rebuilt[core is shared] = core.book().rebuilt_tokens
    assert rebuilt[False] - rebuilt[True] >= 4 * len(PROMPT)


def test_an_idle_trajectory_takes_the_rebuilt_prompt_from_a_sibling_at_its_next_turn() -> None:
    core = engine()
    core.submit(siblings(2))
    first = by_traj(core)
    update(core, 2)
    contexts = {traj: grown(answer, 5, n) for n, (traj, answer) in enumerate(first.items())}
    for n, (traj, context) in enumerate(contexts.items()):
        answer = one(core, request(traj, context, turn=1))
        known = len(PROMPT) + 8 - 1
        taken = len(PROMPT) if n else 0
        assert (answer.prefilled_tokens, known - taken - answer.rebuilt_tokens) == (6, 0)
        assert mismatch(context, answer) < 1e-5


def test_a_waiting_sibling_goes_on_alone_when_the_one_it_waits_for_is_aborted() -> None:
    core = engine(prefill_tokens=16)
    core.submit(siblings(3))
    core.step()
    core.abort([siblings(1)[0].id])
    answers = by_traj(core)
    assert answers[f"{GROUP}/0"].finish == "aborted"
    assert answers[f"{GROUP}/0"].tokens.n_tokens == 0
    # What the first left behind in its slot is taken, the rest is computed by one of the two.
    assert answers[f"{GROUP}/1"].prefilled_tokens == 60 - 16
    assert answers[f"{GROUP}/2"].prefilled_tokens == 1
    assert all(mismatch(PROMPT, answers[f"{GROUP}/{member}"]) < 1e-5 for member in (1, 2))


def test_a_forgotten_sibling_gives_nothing_any_more() -> None:
    core = engine()
    one(core, siblings(1)[0])
    core.forget(TrajId(f"{GROUP}/0"), 0)
    assert one(core, siblings(2)[1]).prefilled_tokens == 60


@settings(max_examples=12)
@given(
    members=st.integers(2, 6),
    n_prompt=st.integers(1, 70),
    kv_tokens=st.sampled_from([384, 4096]),
    prefill_tokens=st.sampled_from([5, 33, 4096]),
)
def test_draws_are_the_same_with_and_without_sharing(
    members: int, n_prompt: int, kv_tokens: int, prefill_tokens: int
) -> None:
    """Over two turns with new weights between them; preemption where the room is small."""
    prompt, contexts = random_ids(n_prompt, n_prompt), dict[str, NDArray[np.int32]]()
    cores = [
        engine(kv_tokens=kv_tokens, prefill_tokens=prefill_tokens, share_prefixes=share) for share in (True, False)
    ]
    for turn in range(2):
        answers = []
        for core in cores:
            core.submit([
                request(f"{GROUP}/{m}", contexts.get(f"{GROUP}/{m}", prompt), turn=turn, max_tokens=9)
                for m in range(members)
            ])  # fmt: skip
            answers.append(by_traj(core))
        for traj, shared in answers[0].items():
            alone, context = answers[1][traj], contexts.get(traj, prompt)
            assert ids(shared) == ids(alone)
            assert np.abs(logprobs(shared) - logprobs(alone)).max() < 1e-4
            assert 0 <= shared.prefilled_tokens <= alone.prefilled_tokens <= len(context)
            assert mismatch(context, shared) < 1e-5
            contexts[traj] = grown(shared, 6, turn, context)
        for core in cores:
            update(core, 2 + turn)
