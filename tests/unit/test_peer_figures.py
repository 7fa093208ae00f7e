"""The pure parts of the measurements beside peers, on times and matrices written by hand."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import loaded

figures, tasks, run = (loaded(name) for name in ("peers_figures", "peers_tasks", "peers_run"))
rollout = loaded("async_vs_sync_rollout")
sides, vs_trl = loaded("vs_trl_sides"), loaded("vs_trl")
async_vs_sync, overhead = loaded("async_vs_sync"), loaded("overhead")

# --- rates and bounds ----------------------------------------------------------------------------------------------------


def steps(*times: tuple[float, float]) -> list[Any]:
    return [figures.Step(released, finished, 64) for released, finished in times]


def test_a_rate_leaves_the_warm_up_out_and_splits_a_step_into_rollout_and_training() -> None:
    """A slow first step, then steps of 2 s of which 0.5 are waited for the batch."""
    found = figures.rate(steps((8, 10), (10.5, 12), (12.5, 14), (14.5, 16)), 1)
    assert (found.steps, found.step_s, found.per_s) == (3, 2.0, 32.0)
    assert (found.rollout_s, found.train_s) == (0.5, 1.5)


def test_a_batch_that_was_there_before_the_trainer_costs_no_wait() -> None:
    """Released while the step before it was published: the time of a step is never counted twice."""
    found = figures.rate(steps((1, 2), (1.9, 3), (2.9, 4)), 1)
    assert (found.rollout_s, found.train_s, found.step_s) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(("number", "warm_up"), [(2, 2), (0, 1), (5, 0)])
def test_too_few_steps_are_no_measurement(number: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="leave nothing to measure"):
        figures.rate(steps(*[(i, i + 1) for i in range(number)]), warm_up)


def test_steps_are_read_from_a_log_in_which_a_batch_may_be_released_before_the_last_one_is_trained() -> None:
    def event(kind: str, step: int, t: float, **data: object) -> dict[str, object]:
        return {"kind": kind, "step": step, "t": t, "data": data}

    log = [
        event("batch_released", 0, 1.0, trajectories=64), event("batch_released", 1, 1.5, trajectories=32),
        event("step_finished", 0, 2.0), event("step_finished", 1, 3.0), event("batch_released", 2, 3.5, trajectories=64),
    ]  # fmt: skip
    assert figures.steps_of(log) == [(1.0, 2.0, 64), (1.5, 3.0, 32)]


def test_a_measurement_is_over_when_it_has_both_its_time_and_its_steps() -> None:
    quick, slow = steps(*[(i, i + 0.5) for i in range(5)]), steps(*[(10 * i, 10 * i + 9) for i in range(4)])
    assert run.over(quick, 2, 2.5)
    assert not run.over(quick, 2, 3.5), "time is short"
    assert not run.over(slow, 2, 2.5), "a step is missing"


@pytest.mark.parametrize(("rollout_s", "train_s", "overlap"), [(1.0, 1.0, 2.0), (0.5, 1.0, 1.5), (3.0, 1.0, 4 / 3)])
def test_bounds_come_from_the_parts_alone(rollout_s: float, train_s: float, overlap: float) -> None:
    bounds = figures.Bounds(rollout_s, train_s)
    assert bounds.overlap == pytest.approx(overlap)
    row = bounds.row(theirs_step_s=3.0)
    assert row["one_core_each"] == pytest.approx(3 / max(rollout_s, train_s), abs=1e-4)
    assert row["two_cores_balanced"] == pytest.approx(6 / (rollout_s + train_s), abs=1e-4)
    assert row["two_cores_balanced"] >= row["one_core_each"]


def test_the_fastest_setting_of_a_sweep_is_the_one_that_trains_most() -> None:
    slow, quick = figures.rate(steps((1, 2), (3, 4)), 1), figures.rate(steps((1, 2), (2, 3)), 1)
    assert figures.fastest({"a": slow, "b": quick}) == "b"
    assert figures.median_rate([quick, slow]) == slow, "of two, the slower one"


# --- schedules -----------------------------------------------------------------------------------------------------------


def test_the_least_times_of_three_schedules_by_hand() -> None:
    """Two environments, two batches; in the first batch the slow turn is another one for each of the two."""
    rows = [[1.0, 3.0], [3.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert figures.per_turn_s(rows, 2, 0.0) == 6 + 2
    assert figures.per_batch_s(rows, 2, 0.0) == 4 + 2
    assert figures.per_trajectory_s(rows, 2, 0.0) == 6
    assert figures.per_trajectory_s([[4.0], [1.0], [1.0], [1.0]], 2, 0.0) == 4, "three short ones beside the long one"
    assert figures.per_turn_s(rows, 2, 0.5) == 8 + 4 * 0.5
    assert figures.per_batch_s(rows, 2, 0.5) == 6 + 4 * 0.5


@pytest.mark.parametrize("cv", [0.0, 0.1, 1.0])
def test_a_weaker_barrier_never_takes_longer_and_without_spread_none_costs_anything(cv: float) -> None:
    rows = [tasks.waits_s(seed, 0.2, cv) for seed in range(192)]
    turn, batch, each = (
        law(rows, 64, 0.01) for law in (figures.per_turn_s, figures.per_batch_s, figures.per_trajectory_s)
    )
    assert turn >= batch >= each - 1e-9
    assert (turn / each > 1.05) == (cv > 0)


def test_latencies_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    drawn = [one for seed in range(4000) for one in tasks.waits_s(seed, 0.2, 0.6)]
    assert statistics.mean(drawn) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(drawn) / statistics.mean(drawn) == pytest.approx(0.6, rel=0.05)
    assert list(tasks.waits_s(7, 0.0, 0.5)) == [0.0] * tasks.WAITING_TURNS


def test_a_rollout_goes_through_the_control_code_and_its_matrix_is_that_of_its_episodes() -> None:
    """A short one: every schedule trains all, and takes at least as long as its matrix allows."""
    draw = rollout.Draw(environments=8, batches=2, mean_s=0.01, cv=0.5, seed=1)
    rows = rollout.matrix(draw, rollout.specs_of(rollout.config(draw, "per_batch"))[0])
    assert len(rows) == 16
    for schedule, ideal in rollout.IDEAL.items():
        found = rollout.roll(draw, schedule)
        assert found.seconds >= ideal(rows, 8, 0.0), schedule
        assert found.dropped == 0


# --- tasks ---------------------------------------------------------------------------------------------------------------


def test_letters_are_counted_over_the_whole_turn() -> None:
    letters = tasks.Letters()
    assert " c " in letters.reset(2)
    assert letters.step("c" * tasks.TURN_TOKENS).reward == 1
    assert letters.step("cabc").reward == 2 / tasks.TURN_TOKENS


def test_a_lake_moves_by_the_last_move_that_was_written_and_pays_the_way() -> None:
    lake = tasks.Lake()
    text = lake.reset(3)
    assert text.startswith("P")
    moved = [lake.move(action) for action in ("xyz", "left is L")]
    assert [one.reward for one in moved] == [0, 0], "no move; against the wall"
    assert moved[0].bad_action
    step = lake.move("LL R")
    assert step.reward == pytest.approx(1 / tasks.LAKE_WAY)
    lake.close()


def test_a_lakes_latencies_are_drawn_by_its_chance_alone() -> None:
    def drawn(seed: int) -> list[float]:
        lake = tasks.Lake(latency_s=0.05, spread_s=0.05)
        lake.seed_chance(seed)
        return [lake.draw_s() for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert min(drawn(1)) == 0
    assert statistics.mean(drawn(1)) == pytest.approx(0.054, abs=0.01)
    assert tasks.Lake().draw_s() == 0


# --- processes and reports -----------------------------------------------------------------------------------------------


def test_cpu_time_is_that_between_two_looks_by_role() -> None:
    before = {1: ("driver", 5.0), 2: ("ray", 1.0), 3: ("engines", 10.0)}
    after = {1: ("driver", 6.0), 2: ("ray", 1.5), 3: ("engines", 25.0), 4: ("trainer", 13.5)}
    cpu = run.spent(before, after)
    assert cpu.by_role == {"driver": 1.0, "ray": 0.5, "engines": 15.0, "trainer": 13.5}
    assert cpu.overhead == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("words", "role"),
    [("ray::EngineActor.start", "engines"), ("ray::TrainerActor", "trainer"), ("ray::EnvHostActor", "env hosts"),
     ("ray::IDLE", "ray"), ("/somewhere/raylet --node", "ray")],
)  # fmt: skip
def test_processes_are_told_by_their_command_lines(words: str, role: str) -> None:
    assert run.role_of(words, is_driver=False) == role
    assert run.role_of(words, is_driver=True) == "driver"


def test_a_case_has_what_readers_of_the_json_look_for() -> None:
    found = figures.case("single_x", [1.5, 1.2, 1.9], target=1.3, ours={"a": 1}, theirs={"a": 2}, bound=1.6)
    assert json.loads(json.dumps(found)) == {
        "case": "single_x", "ratio_median": 1.5, "ratio_min": 1.2, "ratio_max": 1.9, "pairs": 3, "target": 1.3,
        "met": True, "ours": {"a": 1}, "theirs": {"a": 2}, "bound": 1.6,
    }  # fmt: skip
    assert figures.case("x", [1.0], target=1.3)["met"] is False
    assert figures.case("x", [1.0], target=None)["met"] is None


@pytest.mark.parametrize("task", ["single", "multi", "latency"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_runs_that_are_measured_have_a_valid_configuration(task: str, staleness: int, tmp_path: Path) -> None:
    from rollart.config.schema import RunConfig

    setting = run.Setting(scratch=tmp_path, model=tmp_path, cores=[0, 1], seconds=1)
    config = RunConfig.model_validate(run.config(task, run.ONE_CORE_EACH, setting, staleness=staleness, seed=3))
    assert config.schedule.groups_per_batch * config.schedule.group_size == run.BATCH
    assert len(run.ALPHABET) + 1 == len({*run.ALPHABET}) + 1 == 512
    assert config.tasks[task].max_turns * config.tasks[task].max_tokens == 64


def test_a_reward_is_the_mean_of_the_last_part_of_the_wall_time() -> None:
    rewards = [(float(second), second / 100) for second in range(200)]
    assert sides.last_reward(rewards, 100) == pytest.approx(0.9)
    with pytest.raises(run.PeerFailed, match="learn for longer"):
        sides.last_reward(rewards[:50], 100)


def test_both_sides_of_a_case_and_the_bound_stand_in_its_figures() -> None:
    def rate(step_s: float) -> Any:
        return figures.rate(steps((0, 0), *[(i * step_s, (i + 1) * step_s) for i in range(4)]), 1)

    def ran(step_s: float) -> Any:
        cpu = run.Cpu({"driver": 1.0, "engines": 9.0})
        return run.Ran(rate=rate(step_s), cpu=cpu, steps=[], rewards=[], tokens=60.0)

    def theirs(step_s: float) -> Any:
        return sides.Theirs(rate=rate(step_s), rewards=[], tokens=61.0, cpu_s=1.0, versions={"trl": "1"})

    case = sides.Case(
        task="single", ours=[ran(0.5), ran(0.6)], theirs=[theirs(0.9), theirs(1.0)], sync=[ran(0.8)],
        alone=figures.Bounds(0.3, 0.5), peer_setting={"threads": 2},
    )  # fmt: skip
    found = json.loads(json.dumps(sides.figures(case)))
    assert found["bound"] == pytest.approx(1.0 / 0.5)
    assert found["sync"]["ratio_median"] == pytest.approx(0.9 / 0.8, abs=1e-4)
    assert found["ours"]["overhead_of_cpu"] == pytest.approx(0.1)
    assert found["theirs"]["threads"] == 2


def test_a_case_whose_sides_did_not_sample_alike_is_not_met() -> None:
    def one(ours: float) -> Any:
        sides = {"ours": {"tokens_per_trajectory": ours}, "theirs": {"tokens_per_trajectory": 60.0}}
        return vs_trl.judged(figures.case("single", [1.5], target=1.3, **sides))

    assert [one(ours)["met"] for ours in (56.0, 57.5, 62.5, 64.0)] == [False, True, True, False]
    assert "MISSED" in vs_trl.told(one(64.0))
    assert "6.7%" in vs_trl.told(one(64.0))


def test_rewards_are_told_by_their_difference_and_as_a_ratio_only_where_both_learned() -> None:
    def runs(*last: float) -> list[list[tuple[float, float]]]:
        return [[(1.0, 0.25), (7.0, 0.75), (59.0, one), (61.0, 9.0)] for one in last]

    both = vs_trl.learned("multi", runs(0.6, 0.5, 0.4), runs(0.4, 0.4, 0.5), {"threads": 1}, wall_s=60.0)
    assert (both["difference_median"], both["ratio_median"], both["met"]) == (0.1, 1.25, True)
    assert "difference +0.100  1.250" in vs_trl.told(both)
    assert both["ours"]["curves"][0] == [0.25, 0.75, *[None] * 7, 0.6], "means of tenths of the time, none after its end"
    nothing = vs_trl.learned("multi", runs(0.3, 0.02, 0.3), runs(0.0, 0.04, 0.4), {"threads": 1}, wall_s=60.0)
    assert (nothing["difference_median"], nothing["met"]) == (-0.02, False)
    assert "ratio_median" not in nothing
    assert nothing["theirs"]["rewards"] == [0.0, 0.04, 0.4]
    assert "MISSED" in vs_trl.told(nothing)


def test_what_is_asked_for_by_default_fits_twenty_minutes() -> None:
    assert vs_trl.seconds_for(vs_trl.arguments([]))[1] <= 20 * 60 + 1
    assert async_vs_sync.seconds_for(async_vs_sync.arguments([]))[1] <= 20 * 60 + 1


def test_more_time_goes_into_the_measurements_and_too_little_is_told() -> None:
    seconds, total_s = vs_trl.seconds_for(vs_trl.arguments(["--minutes", "60"]))
    assert total_s == pytest.approx(3600)
    assert seconds > vs_trl.seconds_for(vs_trl.arguments([]))[0]
    assert vs_trl.seconds_for(vs_trl.arguments(["--minutes", "1"]))[1] > 60, "what it takes, not what was hoped for"


def test_a_rollouts_ratio_is_the_gain_over_its_bound() -> None:
    drawn = [rollout.Draw(environments=64, batches=3, mean_s=0.2, cv=0.6, seed=seed) for seed in range(2)]
    turns = {"per_turn": rollout.Rolled(1.0, 0.02, 0), "per_trajectory": rollout.Rolled(1.0, 0.01, 1)}
    limits = [rollout.bound(one, "per_turn", turns) for one in drawn]
    found = [
        {
            "per_turn": turns["per_turn"]._replace(seconds=limit * 4.0),
            "per_trajectory": turns["per_trajectory"]._replace(seconds=4.0 / random.Random(index).uniform(0.95, 0.96)),
        }
        for index, limit in enumerate(limits)
    ]
    case = async_vs_sync.rollout_case("per_turn", 0.6, drawn, found)
    assert 0.95 <= case["ratio_min"] <= case["ratio_max"] <= 0.96
    assert case["met"]
    assert case["ours"]["groups_dropped"] == 2
    assert case["bound"] > 1.5


def test_a_rollouts_bound_has_each_schedules_own_time_of_a_turn() -> None:
    """Fewer environments generate at once without a barrier: that turns are shorter then can be gained as well."""
    draw = rollout.Draw(environments=8, batches=2, mean_s=0.0, cv=0.0, seed=0)
    for own_s, gain in ((0.02, 1.0), (0.01, 2.0)):
        found = {"per_batch": rollout.Rolled(1.0, 0.02, 0), "per_trajectory": rollout.Rolled(1.0, own_s, 0)}
        assert rollout.bound(draw, "per_batch", found) == pytest.approx(gain)


def test_overhead_is_that_of_the_driver_and_ray() -> None:
    cpu = run.Cpu({"driver": 0.3, "ray": 0.2, "engines": 5.0, "trainer": 4.5})
    ran = run.Ran(rate=figures.rate(steps((0, 1), (1, 2)), 1), cpu=cpu, steps=[], rewards=[], tokens=1.0)
    assert overhead.case("multi", [ran])["value"] == pytest.approx(0.05)
