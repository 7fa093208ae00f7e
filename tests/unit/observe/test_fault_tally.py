"""What was lost in a run, counted from events that are written down by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollart.observe.fault_tally import FaultFigures, FaultTally
from rollart.observe.log import Event


def an_event(t: float, kind: str, data: dict[str, Any] | None = None, **ids: Any) -> Event:
    return {"seq": 0, "t": t, "kind": kind, "data": data or {}, **ids}


def routed(t: float, traj: str, engine: str, attempt: int = 0) -> Event:
    return an_event(t, "turn_routed", {"part": 0}, traj=traj, attempt=attempt, engine=engine)


def finished(t: float, traj: str, sampled: int, failure: str = "") -> Event:
    more = {"failure": failure} if failure else {}
    return an_event(t, "traj_finished", {"sampled": sampled, **more}, traj=traj, attempt=0)


def lost(t: float, engine: str, tokens: int = 0, why: str = "engine lost: process died") -> Event:
    return an_event(t, "engine_lost", {"failure": why, "lost_tokens": tokens}, engine=engine)


def joined(t: float, engine: str) -> Event:
    return an_event(t, "engine_joined", {"pool": "p"}, engine=engine, version=0)


def told(*events: Event) -> FaultFigures | None:
    tally = FaultTally()
    for event in events:
        tally(event)
    return tally.result()


END = an_event(100.0, "run_finished", {"status": "done", "why": ""})


def test_a_run_that_lost_nothing_has_no_figures_unless_it_was_simulated_that_it_may() -> None:
    plain = (joined(0.0, "engine-0"), routed(1.0, "a", "engine-0"), finished(2.0, "a", 5), END)
    assert told(*plain) is None
    found = told(an_event(0.0, "simulated", {"fails": True}), *plain)
    assert found is not None
    assert (found.happened, found.wasted_tokens) == ({}, 0)


def test_time_without_an_engine_goes_from_its_loss_to_whoever_comes_next() -> None:
    found = told(
        joined(0.0, "engine-0"), joined(0.0, "engine-1"), lost(20.0, "engine-0"),
        joined(30.0, "engine-2"), lost(90.0, "engine-1"), END,
    )  # fmt: skip
    assert found is not None
    assert found.happened == {"engine": 2}
    assert found.engines_down_s == 10.0 + 10.0
    assert found.engines_down == pytest.approx(20.0 / 200.0)


def test_an_engine_that_dies_before_it_serves_leaves_no_second_seat_empty() -> None:
    found = told(
        joined(0.0, "engine-0"), lost(10.0, "engine-0"), lost(20.0, "engine-1"), joined(50.0, "engine-2"), END
    )  # fmt: skip
    assert found is not None
    assert found.happened == {"engine": 2}
    assert found.engines_down_s == 40.0
    assert (found.unserved, found.lost) == (1, "2 engines (1 that never served)")


def test_trajectories_are_moved_when_their_engine_was_lost_and_not_when_they_choose_another() -> None:
    found = told(
        joined(0.0, "engine-0"), joined(0.0, "engine-1"),
        routed(1.0, "lost", "engine-0"), routed(1.0, "free", "engine-1"), routed(2.0, "free", "engine-0"),
        routed(3.0, "free", "engine-1"), lost(5.0, "engine-0", tokens=7), routed(6.0, "lost", "engine-1"),
        routed(7.0, "lost", "engine-1"), routed(7.0, "free", "engine-1"), END,
    )  # fmt: skip
    assert found is not None
    assert (found.moved, found.wasted_tokens) == (1, 7)


def test_attempts_that_a_fault_ended_are_told_from_those_that_failed_by_themselves() -> None:
    found = told(
        joined(0.0, "engine-0"), an_event(0.0, "host_joined", host="host-0"),
        an_event(9.0, "host_lost", {"failure": "process died"}, host="host-0"),
        finished(9.0, "a", 40, "env lost: process died"), finished(9.0, "b", 3, "env raised: ZeroDivisionError"),
        finished(9.5, "c", 20, "scorer lost: away"), finished(9.6, "d", 11, "env timeout: late"),
        an_event(19.0, "host_joined", host="host-1"),
        an_event(20.0, "ledger", {"trained": 150, "dropped": {"env_failed": 54, "unscored": 20, "stale": 16}}), END,
    )  # fmt: skip
    assert found is not None
    assert found.happened == {"env_host": 1}
    assert found.hosts_down_s == 10.0
    assert (found.again, found.wasted_tokens) == (2, 60)
    assert found.wasted == pytest.approx(60 / 240)


def test_trainers_transfers_and_outages_are_counted_by_what_the_log_says_of_them() -> None:
    found = told(
        an_event(5.0, "fault", {"what": "trainer", "subject": "trainer-0"}),
        an_event(6.0, "trainer_lost", {"failure": "trainer lost: process died"}),
        an_event(46.0, "trainer_restarted", {"steps": 2, "seconds": 40.0}),
        an_event(50.0, "fault", {"what": "weights", "subject": "p/0"}),
        an_event(51.0, "fault", {"what": "weights", "subject": "p/0"}),
        an_event(60.0, "fault", {"what": "rewards", "subject": "rewards", "lasts_s": 30.0}),
        an_event(70.0, "fault", {"what": "node", "subject": "p/0", "workers": []}), END,
    )  # fmt: skip
    assert found is not None
    assert found.happened == {"node": 1, "rewards": 1, "trainer": 1, "weights": 2}
    assert (found.trainer_down_s, found.repeated_steps, found.rewards_down_s) == (40.0, 2, 30.0)


def away(t: float, lasts_s: float) -> Event:
    return an_event(t, "fault", {"what": "rewards", "subject": "rewards", "lasts_s": lasts_s})


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=6), st.integers(300, 400))
@example([(100, 60), (101, 60)], 300)
def test_time_without_rewards_is_that_in_which_at_least_one_outage_lasted(
    spans: list[tuple[int, int]], end: int
) -> None:
    found = told(*(away(t, lasts_s) for t, lasts_s in sorted(spans)), an_event(end, "run_finished"))
    without = {second for t, lasts_s in spans for second in range(t, min(t + lasts_s, end))}
    assert (0.0 if found is None else found.rewards_down_s) == len(without)


def test_an_outage_ends_with_the_run_at_the_latest() -> None:
    found = told(away(184.0, 1e300), an_event(190.0, "run_finished"))
    assert found is not None
    assert found.rewards_down_s == 6.0


def test_a_trainer_that_nothing_is_repeated_for_is_away_from_its_fault_to_what_the_next_publishes() -> None:
    lost = an_event(7.0, "trainer_lost", {"failure": "trainer lost: process died"})
    failed = an_event(5.0, "fault", {"what": "node", "subject": "p/0", "workers": ["engine-0", "trainer-0"]})
    again = an_event(50.0, "trainer_lost", {"failure": "trainer lost: process died"})
    back = an_event(67.0, "published")
    for events, down_s in (
        ((failed, lost, back), 62.0), ((failed, lost, again, back), 62.0), ((lost, back), 60.0), ((failed, lost), 95.0),
        ((failed, lost, back, an_event(67.0, "trainer_restarted", {"steps": 1, "seconds": 60.0})), 60.0),
        ((failed, lost, back, an_event(90.0, "trainer_lost")), 72.0),
    ):  # fmt: skip
        found = told(*events, END)
        assert found is not None
        assert found.trainer_down_s == down_s


def test_a_resumed_run_does_not_count_the_engines_that_it_had_before() -> None:
    found = told(
        joined(0.0, "engine-0"), an_event(10.0, "resumed", {"from_seq": 3, "lost": 2}),
        lost(10.0, "engine-0", tokens=9, why="the run ended"), joined(15.0, "engine-1"), END,
    )  # fmt: skip
    assert found is None
