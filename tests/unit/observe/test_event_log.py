"""The log on disk: nothing is lost unnoticed, and a resumed run reads as if the lost part had never been."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import synthetic

from rollart.core.errors import StoreError
from rollart.core.events import Recorder, header
from rollart.observe.jsonl import LineWriter, Torn, read_rows
from rollart.observe.log import EventLog, EventWriter, read_events

HEAD = header(run="r", incarnation=1, clock="monotonic", world="local", git="x")
NEXT = header(run="r", incarnation=2, clock="monotonic", world="local", git="x")


def event(seq: int, kind: str = "group_opened", **data: Any) -> dict[str, Any]:
    return {"seq": seq, "t": seq / 10, "kind": kind, "data": data}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
    return path


def write_until_it_fails(writer: EventWriter) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        writer(event(1))
        time.sleep(0.01)


def seqs(path: Path) -> list[int]:
    return [item["seq"] for item in read_events(path)[1]]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = synthetic()
    with EventWriter(tmp_path / "events.jsonl", run.header) as writer:
        for item in run.events:
            writer(item)
    head, events = read_events(tmp_path / "events.jsonl")
    assert head == run.header
    assert list(events) == run.events


def test_lines_are_on_disk_soon_without_closing(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", HEAD)
    writer(event(1))
    until = time.monotonic() + 30
    while (tmp_path / "events.jsonl").read_bytes().count(b"\n") < 2:
        assert time.monotonic() < until, "nothing was written"
        time.sleep(0.01)
    writer.close()


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_left_out_and_reported_with_file_and_offset(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1), event(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn: list[Torn] = []
    _, events = read_events(path, torn.append)
    assert [item["seq"] for item in events] == [1]
    start = whole[:-1].rindex(b"\n") + 1
    assert torn == [Torn(path, start, len(whole) - cut - start)]
    assert str(path) in str(torn[0])
    assert str(start) in str(torn[0])


def test_a_torn_line_is_logged_when_nobody_asks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1))
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_events(path)[1]) == []
    assert "torn at byte" in caplog.text


def test_a_broken_line_inside_is_an_error_with_its_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1), event(2), event(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:-9] + b"\n" + lines[3])
    with pytest.raises(StoreError, match=f"byte {len(lines[0] + lines[1])} is not JSON"):
        list(read_events(path)[1])


def test_a_missing_event_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1), event(3))
    with pytest.raises(StoreError, match=r"event 3 .* follows event 1"):
        list(read_events(path)[1])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no header"),
        ([{"schema": 99}], "schema 99 .* reads schema 1"),
        ([event(1)], "no header"),
        ([HEAD, {"t": 1}], "no event"),
        ([HEAD, [1]], "not an object"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, lines: list[object], said: str) -> None:
    path = write(tmp_path / "events.jsonl", *lines)
    with pytest.raises(StoreError, match=said):
        list(read_events(path)[1])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"events\.jsonl: cannot be read"):
        read_events(tmp_path / "events.jsonl")


def test_a_part_of_the_log_is_the_end_of_the_whole(tmp_path: Path) -> None:
    run = synthetic()
    log = EventLog(run.write(tmp_path) / "events.jsonl")
    for since_s in (0.0, 3.4, 15.0, 1e9):
        assert list(log.events(since_s)) == [item for item in run.events if item["t"] >= since_s]


def test_a_resumed_run_takes_back_what_was_lost(tmp_path: Path) -> None:
    lost_twice = [
        HEAD,
        *(event(seq) for seq in range(1, 8)),
        NEXT,
        event(5, "resumed", from_seq=4, lost=3),
        event(6),
        event(7),
        NEXT,
        event(6, "resumed", from_seq=5, lost=2),
        event(7),
    ]
    path = write(tmp_path / "events.jsonl", *lost_twice)
    head, events = read_events(path)
    found = list(events)
    assert head["incarnation"] == 2
    assert [(item["seq"], item["kind"]) for item in found] == [
        (1, "group_opened"),
        (2, "group_opened"),
        (3, "group_opened"),
        (4, "group_opened"),
        (5, "resumed"),
        (6, "resumed"),
        (7, "group_opened"),
    ]


def test_a_second_resume_may_go_back_before_the_first(tmp_path: Path) -> None:
    lines = [
        HEAD,
        *(event(seq) for seq in range(1, 6)),
        NEXT,
        event(6, "resumed", from_seq=4, lost=1),
        event(7),
        NEXT,
        event(8, "resumed", from_seq=2, lost=4),
        event(9),
    ]
    assert seqs(write(tmp_path / "events.jsonl", *lines)) == [1, 2, 8, 9]


def test_appending_cuts_a_torn_end_and_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1), event(2))
    path.write_bytes(path.read_bytes()[:-5])
    with EventWriter(path, NEXT, append=True) as writer:
        writer(event(2, "resumed", from_seq=1, lost=0))
        writer(event(3))
    torn: list[Torn] = []
    head, events = read_events(path, torn.append)
    assert [item["seq"] for item in events] == [1, 2, 3]
    assert head == NEXT
    assert torn == []


def test_without_append_an_old_log_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", HEAD, event(1), event(2))
    EventWriter(path, NEXT).close()
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_with_the_file_and_never_silent() -> None:
    writer = EventWriter(Path("/dev/full"), HEAD)
    with pytest.raises(StoreError, match=r"/dev/full: cannot be written.*No space left"):
        write_until_it_fails(writer)
    with pytest.raises(StoreError, match="/dev/full"):
        writer.close()


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("x")
    with pytest.raises(StoreError, match="cannot be opened"):
        EventWriter(tmp_path / "a file" / "events.jsonl", HEAD)


def test_writing_after_close_is_an_error(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", HEAD)
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="after close"):
        writer(event(1))


def test_what_json_cannot_hold_is_reported(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "rows.jsonl")
    writer.put({"fine": 1})
    writer.put({"value": object()})
    with pytest.raises(StoreError, match="cannot be encoded: TypeError"):
        writer.close()


def test_numbers_become_strict_json(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "rows.jsonl")
    writer.put({"nan": float("nan"), "inf": [float("inf"), 1.5], "np": np.float32(0.5), "array": np.arange(2)})
    writer.close()
    text = (tmp_path / "rows.jsonl").read_text()
    assert text == '{"nan":null,"inf":[null,1.5],"np":0.5,"array":[0,1]}\n'
    assert list(read_rows(tmp_path / "rows.jsonl")) == [json.loads(text)]


def test_the_recorder_writes_through_the_sink(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl", HEAD) as writer:
        record = Recorder((writer,), lambda: 2.5, origin=1.0)
        record("ledger", sampled=3, trained=1, dropped={"stale": 1}, buffered=0, in_flight=0, eval=1, engines={"e": 3})
    (found,) = read_events(tmp_path / "events.jsonl")[1]
    assert found["t"] == 1.5
    assert found["eval"] == 1
    assert found["data"]["dropped"] == {"stale": 1}
