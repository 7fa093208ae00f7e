"""The page: whole by itself, true to the run, safe against any text, and small."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from synthetic_run import TASKS, SyntheticRun, synthetic

from rollart.core.errors import StoreError
from rollart.core.events import header
from rollart.observe.charts import MAX_POINTS, charts_of
from rollart.observe.report import write_report
from rollart.observe.report_data import gather
from rollart.observe.report_window import MAX_ROWS, MAX_STEPS, Marks, StepMark, WindowFold
from rollart.observe.summary import summarise

MAX_PAGE_BYTES = 600_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a whole run, for tests that only read it."""
    return page_of(synthetic(), tmp_path_factory.mktemp("run"))


def page_of(run: SyntheticRun, folder: Path) -> str:
    return write_report(run.write(folder)).read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found.group(1))
    return loaded


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    addresses = set(re.findall(r"\b(?:https?:)?//[\w.]+", page)) - {"http://www.w3.org"}
    assert addresses == set()
    assert re.findall(r"<link|<img|<iframe|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest", page) == []
    assert page.count("<script") == 2
    assert not list(tmp_path.glob("*.part"))


def test_the_page_has_the_results_and_says_that_they_are_measured(page: str) -> None:
    run = synthetic()
    summary = summarise(run.events, run.header)
    for task in TASKS:
        assert task in page
        for share in summary["success"][task].values():
            assert share is None or f"<b>{share:.3f}</b>" in page
    assert page.count('<p class="kind">measured</p>') == 8
    assert "simulated" not in page.replace("simulated world", "")
    assert f"{summary['tokens']['sampled']:,}" in page
    assert "the ledger closes" in page


def test_a_virtual_run_is_called_simulated(tmp_path: Path) -> None:
    run = synthetic().write(tmp_path) / "events.jsonl"
    head = header(run="plan", incarnation=1, clock="virtual", world="virtual", git="x")
    lines = run.read_text().splitlines()
    run.write_text("\n".join([json.dumps(head, separators=(",", ":")), *lines[1:]]) + "\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count('<p class="kind">simulated</p>') == 8
    assert "measured" not in page


def test_curves_are_the_metric_rows(page: str) -> None:
    run = synthetic()
    charts = {chart["title"]: chart for chart in data_of(page)["charts"]}
    assert {"Reward", "Success", "Staleness", "Entropy", "Throughput"} <= set(charts)
    rows = [row for row in run.rows() if "time/all/train_step/sum" in row]
    drawn = {line["name"]: line["values"] for line in charts["Reward"]["lines"]}
    for task in TASKS:
        assert drawn[task] == pytest.approx([row[f"reward/{task}/trained/mean"] for row in rows], rel=1e-4)
    assert charts["Reward"]["x"] == list(range(1, 13))
    assert charts["Staleness"]["bound"] == 1
    assert [point["x"] for point in charts["Success"]["points"]] == [0, 0, 12, 12]


def test_long_runs_are_thinned_out_by_equal_means() -> None:
    rows = [
        {"train/step": n, "time/all/train_step/sum": 1.0, "trainer/all/loss/value": float(n)} for n in range(1, 1001)
    ]
    (chart,) = [chart for chart in charts_of(rows, [], {}) if chart["title"] == "Loss"]
    assert len(chart["x"]) <= MAX_POINTS
    assert chart["stride"] == 3
    assert chart["lines"][0]["values"][0] == 2.0
    assert chart["x"][-1] == 1000


def test_the_window_shows_the_last_steps_where_they_were(page: str) -> None:
    run = synthetic()
    window = data_of(page)["window"]
    assert [step for *_, step in window["steps"]] == list(range(12 - MAX_STEPS + 1, 13))
    finished = {event["step"] + 1: event for event in run.events if event["kind"] == "step_finished"}
    for start, end, step in window["steps"]:
        assert window["t0"] + end * window["tick_s"] == pytest.approx(finished[step]["t"], abs=2e-4)
        assert (end - start) * window["tick_s"] == pytest.approx(finished[step]["data"]["seconds"], abs=3e-4)
    for name, marks in window["versions"].items():
        assert name == "engine-0"
        assert all(later[1] == earlier[1] + 1 for earlier, later in pairwise(marks))
    assert window["shown"][0] == window["shown"][1] == len(window["trajectories"])


def test_trajectories_in_a_row_of_the_window_do_not_overlap(page: str) -> None:
    window = data_of(page)["window"]
    rows: dict[int, list[tuple[int, int]]] = {}
    for row, start, end, *_ in window["trajectories"]:
        rows.setdefault(row, []).append((start, window["length"] if end is None else end))
    assert len(rows) <= MAX_ROWS
    for spans in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_load_curves_integrate_to_the_turns() -> None:
    run = synthetic()
    start, end = 10.0, 14.0
    fold = WindowFold(StepMark(end_s=start, turns_before=0, alive={}, versions={}), end, TASKS)
    for event in run.events:
        fold(event)
    load = fold.result()["engines"]["engine-0"]
    seconds = sum(map(sum, load)) * (end - start) / len(load[0])
    turns = [(e["t"] - e["data"]["seconds"], e["t"]) for e in run.events if e["kind"] == "turn_done"]
    assert seconds == pytest.approx(sum(max(0.0, min(t, end) - max(since, start)) for since, t in turns), rel=0.02)


def test_a_trajectory_that_began_before_the_window_is_drawn_in_it() -> None:
    run, marks = synthetic(), Marks()
    for event in run.events:
        marks(event)
    chosen = marks.window()
    assert chosen is not None
    begin, end = chosen
    fold = WindowFold(begin, end, TASKS)
    for event in run.events:
        fold(event)
    drawn = {(traj, start) for _, start, _, _, _, traj, _ in fold.result()["trajectories"]}
    assert {traj for traj, start in drawn if start < 0} == {traj for traj, _ in begin.alive} != set()


def marks_of(turns_per_step: int, steps: int) -> Marks:
    marks = Marks()
    opened = {"group": "train/a/0/0", "task": "a", "t": 0.5, "kind": "group_opened"}
    marks(opened)
    for step in range(steps):
        for _ in range(turns_per_step):
            marks({"kind": "turn_done", "t": step + 0.6})
        marks({"kind": "step_finished", "t": step + 1.0})
    return marks


@pytest.mark.parametrize(
    ("turns", "steps", "window"),
    [
        (3_000, 19, (17.0, 19.0)),
        (10, 19, (19.0 - MAX_STEPS, 19.0)),
        (10, 3, (0.5, 3.0)),
        (10, 1, (0.5, 1.0)),
        (10, 0, None),
    ],
)
def test_many_turns_shorten_the_window(turns: int, steps: int, window: tuple[float, float] | None) -> None:
    chosen = marks_of(turns, steps).window()
    assert (chosen and (chosen[0].end_s, chosen[1])) == window


def test_readings_are_early_and_late_with_log_probabilities(page: str) -> None:
    run = synthetic()
    readings = data_of(page)["readings"]
    by_id = {(made.id, made.attempt): made for made in run.trajectories if made.instance.purpose == "train"}
    for task in TASKS:
        steps = [int(item["when"].split()[1]) for item in readings if item["task"] == task and "step" in item["when"]]
        assert min(steps) == 1
        assert max(steps) == 12
    for item in readings:
        made = by_id[item["id"], item["attempt"]]
        text = "".join(run_[1] if run_[0] == 0 else "".join(run_[1]) for run_ in item["runs"])
        assert text == "".join(piece.payload[0] for piece in made.segments[0].pieces)  # type: ignore[index]
        assert item["sampled"] == made.n_sampled == sum(len(run_[2]) for run_ in item["runs"] if run_[0] == 1)
        assert item["reward"] == made.reward


def test_no_text_of_a_run_can_leave_its_place(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script><b>'
    run = SyntheticRun(steps=2)
    for event in run.events:
        if event["kind"] == "baseline":
            event["data"]["answer"] = evil
        if event["kind"] == "run_finished":
            event["data"] |= {"status": "failed", "why": evil}
    run.header["run"] = evil
    for made in run.trajectories:
        for piece in made.segments[0].pieces:
            _, logprobs = cast(tuple[str, object], piece.payload)
            object.__setattr__(piece, "payload", ("<" * piece.n_tokens, logprobs))
    page = page_of(run, tmp_path)
    assert evil not in page
    assert page.count("<script") == 2
    assert data_of(page)["readings"]
    assert "&lt;/script&gt;" in page


def test_the_page_is_small_whatever_the_length(tmp_path: Path) -> None:
    assert len(page_of(synthetic(steps=30, engines=2), tmp_path).encode()) < MAX_PAGE_BYTES


@pytest.mark.parametrize("n_events", [0, 1, 3, 9, 400, 6000])
def test_a_run_that_was_cut_off_anywhere_has_a_report(tmp_path: Path, n_events: int) -> None:
    run = synthetic()
    run.write(tmp_path)
    (tmp_path / "trajectories.jsonl").unlink()
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[: n_events + 1]) + lines[n_events + 1][:-7])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "unfinished" in page
    assert "is torn at byte" in page
    assert data_of(page)["readings"] == []


def test_the_reason_of_a_failure_is_on_the_page(tmp_path: Path) -> None:
    run = SyntheticRun(steps=2, status="failed")
    run.events[-1]["data"]["why"] = "no engine is left: engine-0 was the last\nengine lost: process died"
    assert "engine lost: process died" in page_of(run, tmp_path)


def test_what_the_run_said_is_on_the_page(tmp_path: Path) -> None:
    run = SyntheticRun(steps=2)
    run.now += 1
    run.emit("advisory", code="x", text="a slow thing was slow")
    run.emit("wait_expired", what="groups to be trained", waited_s=12.0)
    run.emit("engine_lost", engine="engine-0", failure="engine lost: gone", lost_tokens=3)
    page = page_of(run, tmp_path)
    assert "a slow thing was slow" in page
    assert "waited 12.0 s for groups to be trained" in page
    assert "engine-0 was lost (engine lost: gone)" in page


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"events\.jsonl"):
        write_report(tmp_path)


def test_gathering_takes_nothing_but_the_folder(tmp_path: Path) -> None:
    report = gather(synthetic().write(tmp_path))
    assert report.tasks == sorted(TASKS)
    assert [name for name, *_ in report.phases] == ["warm start", "evaluation before", "training", "evaluation after"]
    assert all(start <= end for _, start, end in report.phases)
