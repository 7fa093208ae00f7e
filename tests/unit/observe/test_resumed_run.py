"""What is computed from the events of a run that was resumed, or lost some of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import encode, pieces, synthetic
from test_metrics_fold import Script

from rollart.core.errors import StoreError
from rollart.core.types import Trajectory
from rollart.observe.interruptions import InterruptionsFold, told
from rollart.observe.jsonl import LineWriter, write_rows
from rollart.observe.live import LiveState, plain_line
from rollart.observe.log import EventWriter
from rollart.observe.past import Broken, Past, past_of
from rollart.observe.readings import Picks
from rollart.observe.report import write_report
from rollart.observe.summary import summarise
from rollart.observe.timeline import trace_events
from rollart.observe.trajectories import TrajectoryWriter, read_trajectories
from rollart.observe.waits import WaitsFold


def turn(script: Script, t: float, kind: str, traj: str, engine: str) -> None:
    facts: dict[str, Any] = {"traj": traj, "attempt": 0, "turn": 0, "part": 0, "engine": engine}
    if kind == "turn_routed":
        script.at(t, kind, **facts, load=0, sticky=False)
    else:
        script.at(t, kind, **facts, seconds=0.5, sampled=2, spans=[[0, 2]], finish="stop", prefilled=1, rebuilt=0)


def published(script: Script, t: float, version: int, **more: Any) -> None:
    script.at(t, "published", step=-1, version=version, seconds=0.1, bytes=1, buckets=1, digest="d", **more)


# --- staleness -------------------------------------------------------------------------------------------------------


def test_staleness_counts_batches_where_version_numbers_jump() -> None:
    """Sampled at version 1; the same weights are published again as 6; one batch later, at 7, it is one batch old."""
    script = Script()
    published(script, 0, 1)
    script.group(1, "a/0/0", 1.0, 0.0, oldest_version=1, newest_version=6)
    published(script, 2, 6, again=1)
    script.step(3, 6, "a/0/0")  # trained at version 7
    row = script.rows()[-1]
    assert row["staleness/a/oldest/max"] == 1
    assert row["staleness/a/newest/mean"] == 1
    assert summarise(script.events)["staleness"]["max"] == 1
    picks = Picks()
    for event in script.events:
        picks(event)
    assert {pick.staleness for pick in picks.chosen()} == {1}


# --- interruptions ---------------------------------------------------------------------------------------------------


def interrupted() -> Script:
    """Everything is lost once, and comes back, but for the second host."""
    script = Script()
    script.at(0, "host_joined", host="host-0")
    script.at(1, "engine_lost", engine="e", failure="engine lost: died", lost_tokens=7)
    script.at(3, "engine_joined", engine="e2", pool="p", version=0)
    script.at(4, "host_lost", host="host-0", failure="env lost: died")
    script.at(4.5, "host_joined", host="host-1")
    script.at(5, "trainer_lost", failure="trainer lost: died")
    script.at(9, "trainer_restarted", steps=3, seconds=4.0)
    script.at(10, "resumed", from_seq=9, lost=120, step=20, version=21)
    script.at(10, "engine_lost", engine="e2", failure="engine lost: the run ended", lost_tokens=0)
    script.at(11, "engine_joined", engine="e3", pool="p", version=22)
    turn(script, 12, "turn_routed", "train/a/0/0/0", "e3")
    turn(script, 12.5, "turn_done", "train/a/0/0/0", "e3")
    script.at(13, "host_lost", host="host-1", failure="env lost: died")
    return script


def test_each_interruption_is_told_with_its_cost_and_the_time_to_recover() -> None:
    fold = InterruptionsFold()
    for event in interrupted().events:
        fold(event)
    assert [str(one) for one in fold.found] == [
        "1.0 s: e was lost (engine lost: died); 7 tokens lost; went on after 2.0 s",
        "4.0 s: host-0 was lost (env lost: died); went on after 0.5 s",
        "5.0 s: the trainer was lost (trainer lost: died); 3 steps were repeated from the last checkpoint; "
        "went on after 4.0 s",
        "10.0 s: the run was resumed after step 20; 120 events were taken back and done again; went on after 2.5 s",
        "13.0 s: host-1 was lost (env lost: died); not recovered by the end",
    ]


def test_the_summary_counts_them_by_role() -> None:
    found = summarise(interrupted().events)["interruptions"]
    assert found == {
        "run": {"count": 1, "recovered": 1, "recover_s": {"mean": 2.5, "max": 2.5}},
        "trainer": {"count": 1, "recovered": 1, "recover_s": {"mean": 4.0, "max": 4.0}},
        "engine": {"count": 1, "recovered": 1, "recover_s": {"mean": 2.0, "max": 2.0}},
        "host": {"count": 2, "recovered": 1, "recover_s": {"mean": 0.5, "max": 0.5}},
    }
    assert list(told(found)) == [
        "resumed 1 x (went on within 2.5 s)",
        "trainer lost 1 x (went on within 4.0 s)",
        "engines lost 1 x (went on within 2.0 s)",
        "env hosts lost 2 x (went on within 0.5 s), 1 not recovered",
    ]
    assert summarise(synthetic().events)["interruptions"] == {}


def test_the_report_lists_them_and_says_nothing_where_there_were_none(tmp_path: Path) -> None:
    script = interrupted()
    with EventWriter(tmp_path / "events.jsonl", synthetic().header) as writer:
        for event in script.events:
            # the first line of a resume stands right after what it leaves
            writer(
                {**event, "data": {**event["data"], "from_seq": event["seq"] - 1}} if "lost" in event["data"] else event
            )
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<h2>Interruptions</h2>" in page
    assert "the run was resumed after step 20; 120 events were taken back and done again" in page
    (tmp_path / "whole").mkdir()
    assert "<h2>Interruptions</h2>" not in write_report(synthetic().write(tmp_path / "whole")).read_text()


# --- what lives ------------------------------------------------------------------------------------------------------


def test_nothing_is_live_on_engines_of_before_a_resume() -> None:
    """Requests that were under way never end in the log: they must not count as load for ever."""
    script = Script()
    turn(script, 1, "turn_routed", "train/a/0/0/0", "e")
    script.at(2, "resumed", from_seq=3, lost=0, step=1, version=1)
    script.at(3, "engine_joined", engine="e2", pool="p", version=1)
    script.group(3, "a/0/0", 1.0, 1.0)
    script.step(3, 0, "a/0/0")
    state, waits = LiveState(), WaitsFold()
    for event in script.events:
        state(event)
        waits(event)
    assert dict(state.picture().live) == {"e2": 0}
    assert waits.engine_idle == 1.0
    loads = [one["args"]["live"] for one in trace_events(script.events) if one["name"].endswith("live requests")]
    assert loads == [1, 0]


def test_the_display_tells_of_what_was_lost_and_resumed() -> None:
    state = LiveState()
    for event in interrupted().events:
        state(event)
    news = list(state.news)
    assert "the trainer was lost: trainer lost: died; another one is started" in news
    assert "the trainer is back after 4.0 s and 3 repeated steps" in news
    assert "resumed after step 20; 120 events after that are taken back and done again" in news
    assert not any("the run ended" in line for line in news)
    assert state.picture().checkpoint == 20
    assert state.phase == "resuming"


def test_what_a_resume_changes_of_the_schedule_is_shown() -> None:
    script = Script()
    script.group(1, "a/0/0", 1.0, 0.0)
    script.step(2, 0, "a/0/0")
    script.at(4, "resumed", from_seq=99, lost=0, step=1, version=1, steps=50, max_staleness=3)
    state = LiveState()
    for event in script.events:
        state(event)
    assert plain_line(state.picture()).startswith("step 1/50")
    assert summarise(script.events)["staleness"]["bound"] == 3


# --- files -----------------------------------------------------------------------------------------------------------


def test_rows_of_trajectories_stand_as_long_as_the_events_that_ended_them(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    rows = LineWriter(path)
    for row in (
        {"traj": "a", "seq": 3}, {"traj": "b", "seq": 8}, {"traj": "c", "seq": 9},
        {"resumed": True, "from_seq": 8}, {"traj": "c", "seq": 10}, {"traj": "d", "seq": 11},
        {"resumed": True, "from_seq": 5}, {"traj": "b", "seq": 7}, {"traj": "d", "seq": 20},
    ):  # fmt: skip
        rows.put(row)
    rows.close()
    assert [(row["traj"], row["seq"]) for row in read_trajectories(path)] == [("a", 3), ("b", 7), ("d", 20)]


def test_a_row_has_the_number_of_the_event_that_ended_its_trajectory(tmp_path: Path) -> None:
    """Also when it is handed over later, after other events."""
    run = synthetic()
    keep = TrajectoryWriter(tmp_path / "trajectories.jsonl", encode, pieces)
    made = iter(run.trajectories)
    ended: list[tuple[str, int, int]] = []
    late: list[Trajectory] = []
    for event in run.events:
        keep.note(event)
        for trajectory in late:
            keep(trajectory)
        late = []
        if event["kind"] == "traj_finished":
            late, ended = [next(made)], [*ended, (event["traj"], event["attempt"], event["seq"])]
    keep.close()
    rows = read_trajectories(tmp_path / "trajectories.jsonl")
    assert [(row["traj"], row["attempt"], row["seq"]) for row in rows] == ended


def test_the_past_of_a_log_counts_what_was_taken_back(tmp_path: Path) -> None:
    run = synthetic(engines=2, status="killed")
    path = run.write(tmp_path) / "events.jsonl"
    past = past_of(path)
    assert past.incarnations == 1
    assert past.last_seq == len(run.events)
    assert past.lost(past.last_seq - 9) == 9
    assert past.highest_version == run.version
    assert (past.next_engine, past.next_host) == (2, 1)
    assert (past.trained, past.checkpointed, past.ended, past.torn) == (True, False, None, None)
    with EventWriter(path, run.header, append=True) as writer:
        writer({"seq": 11, "t": 1.0, "kind": "resumed", "data": {"from_seq": 10, "lost": 1}})
        writer({"seq": 12, "t": 1.0, "kind": "run_finished", "data": {"status": "cancelled", "why": "x"}})
    path.write_bytes(path.read_bytes() + b'{"seq')
    past = past_of(path)
    assert (past.incarnations, past.last_seq, past.highest_version) == (2, 12, run.version)
    assert past.ended == {"status": "cancelled", "why": "x"}
    assert past.torn is not None


@pytest.mark.parametrize("exists", [True, False])
def test_the_past_of_nothing_is_nothing(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "events.jsonl"
    if exists:
        path.touch()
    assert (past_of(path).incarnations, past_of(path).last_seq, past_of(path).highest_version) == (0, 0, -1)


def went_on() -> Past:
    """Incarnation 0 came to event 20; 1 went on after 10 and came to 18; 2 went on after 14 and came to 30."""
    broken = (Broken(incarnation=0, seq=12, why="a"), Broken(incarnation=1, seq=13, why="b"))
    return Past(incarnations=3, ends=(20, 18, 30), resumes=((1, 10), (2, 14)), broken=broken, last_seq=30)


@pytest.mark.parametrize(
    ("incarnation", "seq", "said"),
    [
        (0, 10, ""),
        (0, 11, "taken back: the run went on after event 10 "),
        (1, 12, ""),
        (1, 14, "is broken before that: b"),
        (1, 15, "taken back: the run went on after event 14 "),
        (2, 20, "is broken before that: b"),
        (2, 31, "ends at 30"),
        (3, 20, "incarnation 3"),
    ],
)
def test_only_what_survives_and_can_be_read_is_gone_on_from(incarnation: int, seq: int, said: str) -> None:
    against = went_on().against(incarnation, seq)
    assert said in against
    assert bool(said) == bool(against)


def test_a_break_counts_after_a_checkpoint_when_it_is_in_the_course_that_survives() -> None:
    assert [one.why for one in went_on().broken_after(1, 12)] == ["b"]
    assert went_on().broken_after(2, 20) == ()


def test_rows_that_cannot_all_be_made_leave_the_file_as_it_was(tmp_path: Path) -> None:
    def rows() -> Iterator[object]:
        yield {"a": 1}
        raise StoreError("the log is broken at byte 7")

    path = tmp_path / "metrics.jsonl"
    write_rows(path, [{"a": 0}])
    with pytest.raises(StoreError, match=r"^the log is broken at byte 7$"):
        write_rows(path, rows())
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert path.read_text(encoding="utf-8") == '{"a":0}\n'
