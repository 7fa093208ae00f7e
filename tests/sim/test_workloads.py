"""Workloads: every file reads and says its sources; draws match what was published and depend on nothing but their address."""

from __future__ import annotations

import math
import statistics

import pytest

from rollart.core.errors import ConfigError
from rollart.core.seeds import unit
from rollart.core.types import RequestId, Sampling, Segment, Span, Tokens, TrajId, TurnRequest
from rollart.sim.laws import ClippedNormal, Constant, Law, LogNormal, Mixture, Uniform
from rollart.sim.workload import CERTAINTY, Draws, Workload, workload, workload_names

NAMES = workload_names()


def request(traj: str, *, turn: int = 0, part: int = 0, sampled: int = 0) -> TurnRequest:
    pieces = [Tokens(n_tokens=10)]
    if sampled:
        pieces.append(Tokens(n_tokens=sampled, spans=(Span(version=0, n_tokens=sampled),)))
    return TurnRequest(
        id=RequestId(TrajId(traj), 0, turn, part), model="policy", purpose="train", domain="t",
        context=Segment(pieces=tuple(pieces)), max_tokens=16384, sampling=Sampling(),
    )  # fmt: skip


def lengths(draws: Draws, problems: int, members: int, epoch: int = 0) -> list[list[int]]:
    return [
        [draws.sampled_tokens(request(f"train/t/{epoch}/{index}/{member}")) for member in range(members)]
        for index in range(problems)
    ]


def test_there_is_one_file_per_task() -> None:
    assert set(NAMES) == {"swe_bench", "webshop", "frozen_lake", "gem_math", "gem_game", "math", "code", "judge"}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_source(name: str) -> None:
    load = workload(name)
    own = set(Workload.model_fields) - {"about", "sources", "step_failure"}
    assert set(load.sources) == {field for field in own if getattr(load, field) is not None}
    assert load.certainty in CERTAINTY


def test_an_unknown_workload_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean swe_bench"):
        workload("swe-bench")


def test_lengths_of_math_have_the_published_quantiles() -> None:
    """TailSieve: P50 1,160 and P90 4,115 at a cap of 16k, about 3 % cut there."""
    all_lengths = sorted(length for group in lengths(Draws(workload("math"), 0), 4000, 8) for length in group)
    at = {share: all_lengths[int(share * len(all_lengths))] for share in (0.5, 0.9)}
    cut = sum(length >= 16384 for length in all_lengths) / len(all_lengths)
    assert at[0.5] == pytest.approx(1160, rel=0.06)
    assert at[0.9] == pytest.approx(4115, rel=0.15)
    assert 0.015 < cut < 0.04


def test_lengths_of_one_prompt_are_alike_within_a_group_and_across_epochs() -> None:
    """TailSieve's raw shares: prompt 65, interaction 7, sampling 26 %; so 0.73 within a group and 0.66 across epochs."""
    draws = Draws(workload("code"), 1)
    first = [[math.log(length) for length in group] for group in lengths(draws, 3000, 2)]
    later = [[math.log(length) for length in group] for group in lengths(draws, 3000, 2, epoch=3)]
    within = statistics.correlation([one for one, _ in first], [two for _, two in first])
    across = statistics.correlation([one for one, _ in first], [one for one, _ in later])
    assert within == pytest.approx(0.80, abs=0.03)  # of the logarithms: (0.86^2 + 0.23^2) / 0.98
    assert across < within
    assert across == pytest.approx(0.79, abs=0.03)


def test_a_draw_depends_on_nothing_that_was_asked_before() -> None:
    one, two = Draws(workload("swe_bench"), 5), Draws(workload("swe_bench"), 5)
    for index in range(50):
        two.turns(TrajId(f"train/t/0/{index}/0"), 0)
        two.latency_s(TrajId(f"train/t/0/{index}/0"), 0, "open", 0)
    traj = TrajId("train/t/1/7/3")
    assert one.turns(traj, 0) == two.turns(traj, 0)
    assert one.sampled_tokens(request(traj, turn=4)) == two.sampled_tokens(request(traj, turn=4))
    assert one.reward(traj, 1) == two.reward(traj, 1)
    assert Draws(workload("swe_bench"), 6).turns(traj, 0) != one.turns(traj, 0) or one.turns(traj, 0) > 0


def test_siblings_read_one_prompt_and_have_turns_of_their_own() -> None:
    draws = Draws(workload("swe_bench"), 0)
    siblings = [TrajId(f"train/t/0/3/{member}") for member in range(8)]
    assert len({draws.observed_tokens(traj, 0, 0) for traj in siblings}) == 1
    turns = [draws.turns(traj, 0) for traj in siblings]
    assert all(30 <= number <= 50 for number in turns)
    assert len(set(turns)) > 1


def test_a_turn_that_goes_on_elsewhere_samples_the_rest_only() -> None:
    draws = Draws(workload("code"), 0)
    whole = draws.sampled_tokens(request("train/t/0/1/0"))
    assert draws.sampled_tokens(request("train/t/0/1/0", part=1, sampled=whole - 3)) == 3


def test_storms_come_to_neighbours_together_and_are_rare() -> None:
    draws = Draws(workload("swe_bench"), 0)
    slow = [
        sum(draws.latency_s(TrajId(f"train/t/0/{64 * block + index}/0"), 0, "open", 0) > 55 for index in range(64))
        for block in range(200)
    ]
    stormy = [count for count in slow if count >= 3]
    assert 5 <= len(stormy) <= 40
    assert sum(slow) < 1.5 * sum(stormy) + 20


def test_rewards_are_as_often_won_as_the_workload_says_and_problems_differ() -> None:
    draws = Draws(workload("math"), 0)
    groups = [[draws.reward(TrajId(f"train/t/0/{index}/{member}"), 0) for member in range(8)] for index in range(2000)]
    assert statistics.fmean(statistics.fmean(group) for group in groups) == pytest.approx(0.4, abs=0.02)
    assert statistics.pvariance([statistics.fmean(group) for group in groups]) > 1.5 * 0.4 * 0.6 / 8


def mean(law: Law) -> float:
    """Over equally likely places."""
    return statistics.fmean(law.at((index + 0.5) / 400) for index in range(400))


def test_laws_have_their_means_and_stay_in_their_bounds() -> None:
    assert mean(Constant(value=3.0)) == pytest.approx(3.0)
    assert mean(Uniform(law="uniform", low=1, high=3)) == pytest.approx(2.0)
    assert mean(LogNormal(law="lognormal", median=10, sigma=0.5)) == pytest.approx(10 * math.exp(0.125), rel=0.01)
    clipped = ClippedNormal(law="normal", mean=10, sigma=10)
    assert mean(clipped) == pytest.approx(10.833, rel=0.01)  # 16 % of the mass is put at 0
    both = Mixture(law="mixture", usual=Constant(value=1.0), other=Constant(value=30.0), chance=0.05)
    assert mean(both) == pytest.approx(0.95 + 1.5, rel=0.01)
    numbers = [unit("even", index) for index in range(20000)]
    assert 0 < min(numbers) < max(numbers) < 1
    assert statistics.fmean(numbers) == pytest.approx(0.5, abs=0.01)
    assert abs(statistics.correlation(numbers[:-1], numbers[1:])) < 0.03
