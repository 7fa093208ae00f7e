"""The figures of `explain` against what control and learn do with the same configuration, on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config.explain import Sizes, sizes
from rollart.config.schema import RunConfig
from rollart.core.types import Sample, TaskSpec
from rollart.learn.batching import split
from rollart.sim.world import SimCluster
from simruns import SimRun, a_task, check, random_env, simulate

STEPS = 8
"""Enough for the shares of the mix to show."""


@st.composite
def configurations(draw: st.DrawFn) -> tuple[RunConfig, list[TaskSpec]]:
    group_size, per_step = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    steps_per_batch, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    limits = {name: (draw(st.integers(1, 5)), draw(st.integers(1, 9))) for name in ("a", "b")}
    ratios = {name: draw(st.integers(1, 4)) for name in limits}
    tasks = [
        a_task(name, ratio=ratios[name], max_turns=turns, max_tokens=tokens) for name, (turns, tokens) in limits.items()
    ]
    config = RunConfig.model_validate(
        {
            "tasks": {
                name: {"env": {"kind": "max_digit"}, "ratio": ratios[name], "max_turns": turns, "max_tokens": tokens}
                for name, (turns, tokens) in limits.items()
            },
            "schedule": {
                "steps": STEPS,
                "batch": group_size * per_step * steps_per_batch,
                "group_size": group_size,
                "steps_per_batch": steps_per_batch,
                "max_staleness": draw(st.integers(0, 2)),
                "redundancy": draw(st.integers(0, 2)),
            },
            "trainer": {"ranks": ranks},
            "eval": {"episodes": 0},
        }
    )
    return config, tasks


@given(configurations())
@settings(max_examples=6)
def test_a_run_does_what_explain_works_out(made: tuple[RunConfig, list[TaskSpec]]) -> None:
    """Field case 39: prompts, groups, trajectories and tokens per step, optimizer steps per batch and sizes per rank, as the
    run has them; what explain calls a bound is never passed."""
    config, tasks = made
    found = sizes(config)
    sim = simulate(config, tasks, SimCluster(env=random_env(most_turns=5)))
    check(sim)
    released = sim.of("batch_released")
    assert len(released) == found.batches
    assert len(sim.cluster.trainers[-1].batches) == found.batches * found.steps_per_batch
    for batch in released:
        assert batch["trajectories"] == found.trajectories_per_batch
        assert len(batch["groups"]) == found.prompts_per_batch
        assert batch["tokens"] <= found.most_tokens_per_batch
    for step in sim.cluster.trainers[-1].batches:
        the_step_is(found, step, config)
    assert peak_of_open_groups(sim) <= found.groups_window
    shares_are_kept(found, sim)


def the_step_is(found: Sizes, step: Sequence[Sample], config: RunConfig) -> None:
    trajectories = {sample.traj for sample in step}
    assert len(trajectories) == found.trajectories_per_step
    assert len({traj.rpartition("/")[0] for traj in trajectories}) == found.groups_per_step
    of_rank = split([7] * len(step), ranks=config.trainer.ranks, micro_batch_tokens=14)
    rows = [sum(map(len, micro_batches)) for micro_batches in of_rank]
    assert max(rows) == found.trajectories_per_rank_step
    assert max(rows) - min(rows) <= 1


def peak_of_open_groups(sim: SimRun) -> int:
    """Groups that were open, buffered or in training at once."""
    held, peak = set[str](), 0
    trained: dict[int, list[str]] = {}
    for row in sim.rows:
        if row["kind"] == "group_opened":
            held.add(row["group"])
        elif row["kind"] == "batch_released":
            trained[row["step"]] = row["groups"]
        elif row["kind"] == "step_finished":
            held -= set(trained[row["step"]])
        elif row["kind"] == "group_dropped":
            held.discard(row["group"])
        peak = max(peak, len(held))
    return peak


def shares_are_kept(found: Sizes, sim: SimRun) -> None:
    """Each task's trained trajectories are those of its share, but for less than two groups."""
    groups = Counter(name.split("/")[1] for batch in sim.of("batch_released") for name in batch["groups"])
    for name, task in found.tasks.items():
        assert abs(groups[name] - task.groups_per_batch * found.batches) < 2
