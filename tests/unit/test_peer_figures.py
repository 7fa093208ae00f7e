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
    assert run.over(quick, 2, 2.5, 3)
    assert not run.over(quick, 2, 2.5, 4), "a step of those that a measurement has"


def test_the_warm_up_trains_what_was_sampled_ahead_and_a_window_is_long_beside_what_is_in_flight() -> None:
    for staleness in (0, 1, 3):
        batches_in_flight = staleness + 1
        assert figures.warm_up_steps(staleness) > batches_in_flight
        assert figures.least_steps(staleness) == 10 * batches_in_flight
    assert run.window_s("latency", 3) == pytest.approx(40 * run.TASKS["latency"].step_s)
    assert run.window_s("single", 0) == pytest.approx(20 * run.TASKS["single"].step_s), "its parts add up"


def test_what_was_sampled_ahead_of_a_measurement_shows_beside_what_was_trained_in_it() -> None:
    """Steps end at 1, 2, 3, 4 s; the first is warm-up; each trains two trajectories of 5 tokens."""

    def sampled_over_trained(*finished_s: float) -> float:
        log: list[dict[str, Any]] = [
            {"kind": "traj_finished", "t": t, "data": {"sampled": 5, "purpose": "train"}} for t in finished_s
        ]
        log.append({"kind": "traj_finished", "t": 2.5, "data": {"sampled": 99, "purpose": "eval"}})
        for step in range(4):
            log.append({"kind": "batch_released", "step": step, "t": step + 0.5, "data": {"tokens": 10}})
            log.append({"kind": "step_finished", "step": step, "t": step + 1.0, "data": {}})
        log.append({"kind": "batch_released", "step": 4, "t": 3.9, "data": {"tokens": 10}})
        found: float = figures.sampled_over_trained(sorted(log, key=lambda one: one["t"]), 1)
        return found

    assert sampled_over_trained(0.2, 0.4, 1.2, 1.4, 2.2, 2.4, 3.2, 3.4, 4.1) == 1.0, "one that finished after the end"
    assert sampled_over_trained(0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 3.2, 4.0) == pytest.approx(1 / 3), "a head start"
    with pytest.raises(ValueError, match="leave nothing to measure"):
        figures.sampled_over_trained([], 1)


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
    cpu = run.spent(before, after, 10.0)
    assert cpu.by_role == {"driver": 1.0, "ray": 0.5, "engines": 15.0, "trainer": 13.5}
    assert cpu.overhead == pytest.approx(0.05)
    assert cpu.busy_of(cores=4) == pytest.approx(30 / 40)


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
        cpu = run.Cpu({"driver": 1.0, "engines": 9.0}, 8.0)
        return run.Ran(rate=rate(step_s), cpu=cpu, steps=[], rewards=[], tokens=60.0, sampled_over_trained=1.01)

    def theirs(step_s: float) -> Any:
        return sides.Theirs(rate=rate(step_s), rewards=[], tokens=61.0, cpu_s=1.0, versions={"trl": "1"})

    def case(task: str) -> Any:
        one = sides.Case(
            task=task, ours=[ran(0.5), ran(0.6)], theirs=[theirs(0.9), theirs(1.0)], sync=[ran(0.8)],
            alone=figures.Bounds(0.3, 0.5), peer_setting={"threads": 2}, cores=2,
        )  # fmt: skip
        return json.loads(json.dumps(sides.figures(one)))

    found = case("single")
    assert found["bound"] == pytest.approx(1.0 / 0.5)
    assert case("latency")["bound"] is None, "measured with one batch in flight, it is none for four"
    assert found["ours"]["busy_of_cores"] == pytest.approx(10 / 16)
    assert found["bounds"]["cores_busy"] == pytest.approx(1.0 / 0.6 * 16 / 10, abs=1e-3)
    assert found["ours"]["sampled_over_trained"] == 1.01
    assert found["sync"]["ratio_median"] == pytest.approx(0.9 / 0.8, abs=1e-4)
    assert found["ours"]["overhead_of_cpu"] == pytest.approx(0.1)
    assert found["theirs"]["threads"] == 2


def judged(ours: float, sampled_over_trained: float) -> Any:
    """A case with this many tokens a trajectory on our side, beside 60."""
    sides = {
        "ours": {"tokens_per_trajectory": ours, "sampled_over_trained": sampled_over_trained},
        "theirs": {"tokens_per_trajectory": 60.0},
    }
    return vs_trl.judged(figures.case("single", [1.5], target=1.3, **sides))


def test_a_case_that_trained_what_it_did_not_sample_meanwhile_is_not_met() -> None:
    assert [judged(60.0, ratio)["met"] for ratio in (0.85, 0.92, 1.08, 1.15)] == [False, True, True, False]
    assert judged(60.0, 0.85)["sampled_over_trained"] == 0.85
    assert "sampled 85.0% of what it trained" in vs_trl.told(judged(60.0, 0.85))


def test_every_arm_of_ours_is_measured_next_to_the_peer_and_who_is_first_changes() -> None:
    assert sides.turns(0, with_sync=True) == ("ours", "theirs", "sync")
    assert sides.turns(1, with_sync=True) == ("sync", "theirs", "ours")
    assert [sides.turns(pair, with_sync=False) for pair in (2, 3)] == [("ours", "theirs"), ("theirs", "ours")]


def test_both_sides_are_measured_for_as_long_as_our_steps_take_by_their_parts() -> None:
    alone = figures.Bounds(0.5, 0.4)
    assert sides.seconds_of(8.0, 1, alone) == pytest.approx(20 * 0.5 / 0.85)
    assert sides.seconds_of(30.0, 1, alone) == 30.0


def test_a_case_whose_sides_did_not_sample_alike_is_not_met() -> None:
    assert [judged(ours, 1.0)["met"] for ours in (56.0, 57.5, 62.5, 64.0)] == [False, True, True, False]
    assert "MISSED" in vs_trl.told(judged(64.0, 1.0))
    assert "6.7%" in vs_trl.told(judged(64.0, 1.0))


def runs(*last: float) -> list[list[tuple[float, float]]]:
    return [[(1.0, 0.25), (7.0, 0.75), (59.0, one), (61.0, 9.0)] for one in last]


def test_rewards_are_told_by_their_difference_and_as_a_ratio_where_the_peer_learned() -> None:
    both = vs_trl.learned("multi", runs(0.6, 0.5, 0.4), runs(0.4, 0.4, 0.5), {"threads": 1}, wall_s=60.0)
    assert (both["case"], both["difference_median"], both["ratio_median"], both["met"]) == (
        "multi_learning", 0.1, 1.25, True,
    )  # fmt: skip
    assert "difference +0.100  1.250" in vs_trl.told(both)
    assert both["ours"]["curves"][0] == [0.25, 0.75, *[None] * 7, 0.6], "of tenths of the time, none after its end"
    mixed = vs_trl.learned("multi", runs(0.3, 0.02, 0.3), runs(0.0, 0.04, 0.4), {"threads": 1}, wall_s=60.0)
    assert (mixed["difference_median"], mixed["met"]) == (-0.02, False)
    assert "ratio_median" not in mixed
    assert mixed["theirs"]["rewards"] == [0.0, 0.04, 0.4]
    assert "MISSED" in vs_trl.told(mixed)


@pytest.mark.parametrize(("task", "reward"), [("single", 0.003), ("multi", 0.05)])
def test_where_nothing_was_learned_nothing_is_met_or_missed(task: str, reward: float) -> None:
    """Beside the mean of the initial policy, which is 0.0018 and 0.036."""
    nothing = vs_trl.learned(task, runs(reward), runs(reward), {}, wall_s=60.0)
    assert (nothing["met"], nothing["note"]) == (None, "nothing learned")
    assert "nothing learned" in vs_trl.told(nothing)
    assert vs_trl.learned(task, runs(3 * reward), runs(reward), {}, wall_s=60.0)["met"] is True
    assert vs_trl.learned(task, runs(reward), runs(3 * reward), {}, wall_s=60.0)["met"] is False
    letters = sum((1 - 1 / 512) ** place / 512 for place in range(64)) / 64
    assert vs_trl.INITIAL_REWARD["single"] == pytest.approx(letters, rel=0.05), "turns end with the newline"


def test_what_is_asked_for_by_default_fits_its_minutes() -> None:
    asked = vs_trl.arguments([])
    assert vs_trl.seconds_for(asked)[1] <= asked.minutes * 60 + 1 <= 32 * 60
    asked = async_vs_sync.arguments([])
    assert async_vs_sync.seconds_for(asked)[1] <= asked.minutes * 60 + 1


def test_more_time_goes_into_the_measurements_and_too_little_is_told() -> None:
    asked = vs_trl.arguments(["--minutes", "60"])
    seconds, total_s = vs_trl.seconds_for(asked)
    assert total_s == pytest.approx(3600)
    assert "never shortened" not in vs_trl.time_told(asked, seconds, total_s)
    short = vs_trl.arguments(["--minutes", "1"])
    least, least_s = vs_trl.seconds_for(short)
    assert least_s > 60, "what it takes, not what was hoped for"
    assert least == {task: run.window_s(task, one.staleness) for task, one in run.TASKS.items()}
    assert all(seconds[task] > least[task] for task in least)
    assert "--minutes 1 leaves no more than the least windows need" in vs_trl.time_told(short, least, least_s)


def test_a_rollouts_ratio_is_the_gain_over_its_bound() -> None:
    drawn = [rollout.Draw(environments=64, batches=3, mean_s=0.2, cv=0.6, seed=seed) for seed in range(2)]
    turns = {"per_turn": rollout.Rolled(1.0, 0.02, 0, {}), "per_trajectory": rollout.Rolled(1.0, 0.01, 1, {})}
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
        found = {"per_batch": rollout.Rolled(1.0, 0.02, 0, {}), "per_trajectory": rollout.Rolled(1.0, own_s, 0, {})}
        assert rollout.bound(draw, "per_batch", found) == pytest.approx(gain)


def test_overhead_is_that_of_the_driver_and_ray() -> None:
    cpu = run.Cpu({"driver": 0.3, "ray": 0.2, "engines": 5.0, "trainer": 4.5}, 5.0)
    rate = figures.rate(steps((0, 1), (1, 2)), 1)
    ran = run.Ran(rate=rate, cpu=cpu, steps=[], rewards=[], tokens=1.0, sampled_over_trained=1.0)
    assert overhead.case("multi", [ran])["value"] == pytest.approx(0.05)


def test_rewards_are_compared_after_less_time_as_well() -> None:
    """Of the same runs; where a run had no batch in the last fifth of that time there is nothing to compare."""
    ours, theirs = ([[(9.5, one), (23.0, 2 * one), (60.0, 9.0)]] for one in (0.5, 0.25))
    found = vs_trl.learned("multi", ours, theirs, {}, wall_s=60.0)
    assert found["after_s"] == {
        "12": None, "24": {"ours": 1.0, "theirs": 0.5, "difference_median": 0.5, "above": 1}, "36": None, "48": None,
    }  # fmt: skip
