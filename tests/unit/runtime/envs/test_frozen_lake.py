"""FrozenLake as text: gymnasium's own maps and moves, a compact view, bad actions as observations."""

from __future__ import annotations

import random

import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS

from rollart.config.schema import FrozenLakeEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.frozen_lake import MOVES, FrozenLake, solutions


def lake(**config: object) -> FrozenLake:
    return FrozenLake(FrozenLakeEnv.model_validate({"kind": "frozen_lake", **config}))


def test_default_map_is_gymnasiums_whatever_the_seed() -> None:
    env = lake()
    for seed in (0, 7, 2**31 - 1):
        assert env.rows(seed) == tuple(MAPS["4x4"])
        assert env.reset(seed) == "PFFF\nFHFH\nFFFH\nHFFG\n"
    assert env.canonical(0) == env.canonical(2**31 - 1)
    assert lake(side=8).rows(0) == tuple(MAPS["8x8"])


def test_every_shortest_solution_reaches_the_goal_and_nothing_else_is_rewarded() -> None:
    env = lake()
    found = list(solutions(env.rows(0)))
    assert found
    assert {len(moves) for moves in found} == {6}
    for moves in found:
        env.reset(0)
        *before, last = [env.step(move) for move in moves]
        assert [step.reward for step in before] == [0.0] * 5
        assert not any(step.terminated for step in before)
        assert (last.reward, last.terminated) == (1.0, True)


def test_a_hole_ends_the_episode_without_reward() -> None:
    env = lake()
    env.reset(0)
    env.step("R")
    step = env.step("D")
    assert (step.reward, step.terminated, step.text) == (0.0, True, "SFFF\nFPFH\nFFFH\nHFFG\n")
    with pytest.raises(EnvError, match="call reset first"):
        env.step("U")


def test_moves_are_gymnasiums_actions() -> None:
    """On the 8x8 map, whose first rows are free, each letter moves the player its own way."""
    env = lake(side=8)
    env.reset(0)
    seen = [env.step(move).text.replace("\n", "").index("P") for move in "DRRULU"]
    assert seen == [8, 9, 10, 2, 1, 1]


@pytest.mark.parametrize("action", ["", "X", "LL", "l", "left", "�", "L D"])
def test_a_bad_action_is_an_observation_and_changes_nothing(action: str) -> None:
    env = lake(bad_action_reward=-0.25)
    view = env.reset(0)
    step = env.step(action)
    assert step.bad_action
    assert step.text == "?\n" + view
    assert (step.reward, step.terminated, step.truncated) == (-0.25, False, False)
    assert not env.step(" R ").bad_action


def test_random_maps_are_solvable_and_named_by_their_holes() -> None:
    env = lake(map="random")
    ids: dict[int, tuple[str, ...]] = {}
    for seed in range(200):
        rows = env.rows(seed)
        moves = next(solutions(rows))
        env.reset(seed)
        assert [env.step(move) for move in moves][-1].reward == 1.0
        assert env.rows(seed) == rows
        assert ids.setdefault(env.canonical(seed), rows) == rows
    assert 100 < len(ids) < 200


def test_unsolvable_maps_have_no_solution() -> None:
    assert list(solutions(["SH", "HG"])) == []


def test_slipping_is_decided_by_the_chance_seed_not_by_the_problem() -> None:
    def walk(chance: int) -> str:
        env = lake(slippery=True, side=8)
        env.seed_chance(chance)
        env.reset(0)
        return "".join(env.step(move).text for move in "RRDD")

    assert walk(1) == walk(1)
    assert len({walk(chance) for chance in range(10)}) > 1


def test_random_actions_are_uniform_moves() -> None:
    env = lake()
    draw = random.Random(0)
    counts = [0] * 4
    for _ in range(4000):
        counts[MOVES.index(env.random_action(draw))] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 21.1  # chi-square, 3 degrees, p = 1e-4


def test_constant_answers_hold_the_solutions_of_the_default_map_and_all_straight_ways_of_random_ones() -> None:
    assert {*solutions(MAPS["4x4"])} < {*map("".join, lake().constant_answers())}
    straight = [answer for answer in lake(map="random").constant_answers() if len(answer) > 1]
    assert len(set(straight)) == 20
    assert {"".join(sorted(answer)) for answer in straight} == {"DDDRRR"}
    large = [answer for answer in lake(map="random", side=16).constant_answers() if len(answer) > 1]
    assert 32 <= len(large) <= 64
    assert {"".join(sorted(answer)) for answer in large} == {"D" * 15 + "R" * 15}


def test_a_side_without_a_default_map_is_refused_when_the_configuration_is_read() -> None:
    with pytest.raises(ValueError, match="side 4 or 8 only; use one of them, or map=random"):
        FrozenLakeEnv(kind="frozen_lake", side=5)
