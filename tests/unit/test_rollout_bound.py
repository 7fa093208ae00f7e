"""The bound of the rollout-only cases: from drawn latencies and each schedule's own log of generations."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark_modules import loaded

_figures, _tasks = loaded("peers_figures"), loaded("peers_tasks")
rollout = loaded("async_vs_sync_rollout")


def test_a_barriers_least_time_has_its_slowest_generation_and_not_the_mean_one() -> None:
    """Eight environments, two batches of four turns: one generation of each turn takes 0.08 s, the other seven 0.01 s."""
    draw = rollout.Draw(environments=8, batches=2, mean_s=0.0, cv=0.0, seed=0)
    names = list(rollout.drawn_rows(draw, rollout.specs_of(rollout.config(draw, "per_turn"))[0]))
    slow_at = [
        {0, 3, 5, 7},
        {0, 1, 2, 3},
    ]  # which turn of which trajectory: another one each turn, then always one of four
    events: list[dict[str, Any]] = [{"kind": "traj_started", "t": 0.5}, {"kind": "batch_released", "t": 2.5}]
    for index, traj in enumerate(names):
        batch, row = divmod(index, 8)
        for turn in range(4):
            slow = sorted(slow_at[batch])[turn] == row
            data = {"seconds": 0.08 if slow else 0.01}
            events.append({"kind": "turn_done", "t": 1.0, "traj": traj, "turn": turn, "data": data})
    found = rollout.rolled(events)
    assert found.turn_s == pytest.approx((0.08 + 7 * 0.01) / 8)
    assert rollout.ideal_s(draw, "per_turn", found) == pytest.approx(2 * 4 * 0.08)
    assert rollout.ideal_s(draw, "per_batch", found) == pytest.approx(2 * (0.08 + 3 * 0.01))
    assert rollout.ideal_s(draw, "per_trajectory", found) == pytest.approx(0.11 + 0.04)
    assert rollout.over_ideal(draw, "per_turn", found) == pytest.approx(8 * 0.08 / 2.0)
    ours = found._replace(seconds=1.0)
    gain = found.seconds / ours.seconds
    ratio = gain / rollout.bound(draw, "per_turn", {"per_turn": found, "per_trajectory": ours})
    both = rollout.over_ideal(draw, "per_trajectory", ours) / rollout.over_ideal(draw, "per_turn", found)
    assert ratio == pytest.approx(both)
