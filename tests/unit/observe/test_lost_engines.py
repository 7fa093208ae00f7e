"""Engines and trainers that are lost before they did anything: what the figures and the interruptions make of them."""

from __future__ import annotations

from test_metrics_fold import Script
from test_outlook import Log

from rollart.observe.interruptions import InterruptionsFold, told
from rollart.observe.outlook import outlook


def test_an_engine_that_never_served_makes_no_pool_of_its_own() -> None:
    log = Log()
    log.record("engine_lost", engine="e-2", failure="engine lost: process died", lost_tokens=0)
    for step in range(2):
        log.step(step)
    found = outlook(log.events)
    assert found is not None
    assert set(found.pools) == {"fast", "slow"}
    assert found.faults is not None
    assert (found.faults.lost, found.faults.unserved) == ("1 engine (1 that never served)", 1)


def test_engines_that_never_served_interrupt_nothing_and_are_counted_apart() -> None:
    script = Script()
    script.at(1, "engine_lost", engine="e", failure="engine lost: died", lost_tokens=0)
    script.at(2, "engine_lost", engine="e2", failure="engine lost: died", lost_tokens=0)
    script.at(3, "engine_joined", engine="e3", pool="p", version=0)
    script.at(4, "resumed", from_seq=3, lost=0, step=1, version=1)
    script.at(4, "engine_lost", engine="e3", failure="the run ended", lost_tokens=0)
    script.at(4, "engine_lost", engine="e4", failure="the run ended", lost_tokens=0)
    fold = InterruptionsFold()
    for event in script.events:
        fold(event)
    found = fold.result()
    times = {"mean": 2.0, "max": 2.0}
    assert found["engine"] == {"count": 1, "recovered": 1, "recover_s": times, "unserved": 1}
    assert "engines lost 1 x (went on within 2.0 s), 1 more that never served" in list(told(found))


def test_a_trainer_that_is_replaced_before_there_was_a_checkpoint_is_there_again_when_it_publishes() -> None:
    script = Script()
    script.at(5, "trainer_lost", failure="trainer lost: died")
    script.at(65, "published", step=-1, version=1, seconds=1.0, bytes=1, buckets=1, digest="d")
    script.at(90, "trainer_lost", failure="trainer lost: died")
    script.at(99, "published", step=-1, version=2, seconds=1.0, bytes=1, buckets=1, digest="d", again=1)
    script.at(99, "trainer_restarted", steps=3, seconds=9.0)
    script.at(120, "trainer_lost", failure="trainer lost: died")
    fold = InterruptionsFold()
    for event in script.events:
        fold(event)
    assert [(one.recover_s, one.lost) for one in fold.found] == [
        (60.0, ""), (9.0, "3 steps were repeated from the last checkpoint"), (None, "")
    ]  # fmt: skip
