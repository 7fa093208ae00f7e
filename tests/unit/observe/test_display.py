"""What is shown while a run goes on, with and without a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import TASKS, synthetic

from rollart.core.errors import StoreError
from rollart.observe.display import Display, print_scores, print_summary, render
from rollart.observe.live import LiveState, plain_line, sparkline, waiting
from rollart.observe.metrics import MetricsFold
from rollart.observe.report import write_results


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class Score:
    """Any object with these names can be printed."""

    def __init__(self, split: str, success: float, *, complete: bool) -> None:
        self.task, self.split, self.mode, self.episodes = "max_digit", split, "sampled", 40
        self.success, self.reward_mean, self.complete = success, success, complete


def shown(state: LiveState, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(render(state.picture(), now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def state_at(kind: str, step: int) -> LiveState:
    state = LiveState()
    for event in synthetic().events:
        state(event)
        if event["kind"] == kind and event["step"] == step:
            return state
    raise AssertionError(kind)


def plain_lines(every_steps: int) -> list[str]:
    stream = io.StringIO()
    with Display(stream, every_steps=every_steps, every_s=1e9) as display:
        for event in synthetic().events:
            display(event)
    return stream.getvalue().splitlines()


def test_plain_lines_tell_the_course_of_the_run_in_ascii() -> None:
    lines = plain_lines(every_steps=1)
    text = "\n".join(lines)
    assert lines[0].startswith(
        "first_run: 12 steps of 64 trajectories in groups of 8, max staleness 1; mix: frozen_lake 50%"
    )
    assert "frozen_lake: best constant answer 'DDRRDR' succeed 1.000 (256 episodes)" in lines
    assert "warm start: 100 supervised steps in 5.1 s, loss 0.830" in lines
    assert "evaluation after, max_digit: success" in text
    assert "held-back instances" in text
    assert "step 12/12" in text
    assert "trainer waited" in text
    assert "done: 12 steps are trained" in lines
    assert text.isascii()


def test_the_last_step_is_told_even_between_intervals() -> None:
    assert [line for line in plain_lines(every_steps=1000) if line.startswith("step ")][-1].startswith("step 12/12")


def test_failures_are_told_a_few_times_and_then_counted() -> None:
    state = LiveState()
    for member in range(20):
        failed = {"failure": "env raised: boom", "decision": "Retry"}
        state(
            {
                "seq": member,
                "t": 0.0,
                "kind": "failure_decided",
                "traj": f"train/a/0/0/{member}",
                "attempt": 0,
                "data": failed,
            }
        )
    assert sum("env raised" in line for line in state.news) == 5
    assert state.failures == 20
    assert "more failures" in state.news[-1]


def test_the_panel_says_who_waits_for_what() -> None:
    training = shown(state_at("step_started", 6), 60.0)
    assert "training step 7 since" in training
    assert "requests live; serves v" in training
    for task in TASKS:
        assert task in training
    assert "step 6 of 12" in training

    state = state_at("batch_released", 6)
    words = dict(waiting(state.picture(), state.t))
    assert words["trainer"].startswith("waiting for a batch since")
    assert "a batch is 64" in words["trainer"]
    assert "generating" in words["trajectories"]


def test_counts_of_what_is_live_agree_with_the_events() -> None:
    state, run = LiveState(), synthetic()
    routed = done = 0
    for event in run.events:
        state(event)
        routed += event["kind"] == "turn_routed"
        done += event["kind"] == "turn_done"
        assert state.at["generating"] == routed - done == sum(state.metrics.live.values())
        assert min(state.at.values(), default=0) >= 0
        assert len(state.metrics.members) >= 0
    assert +state.at == {}
    assert state.picture().ready == 0


def test_a_state_that_follows_the_fold_of_the_metrics_is_the_state_with_a_fold_of_its_own() -> None:
    fold, alone = MetricsFold(), LiveState()
    follows = LiveState(fold)
    for event in synthetic().events:
        fold(event)
        alone(event)
        follows(event)
        if event["kind"] in ("step_finished", "traj_finished", "run_finished"):
            assert follows.picture() == alone.picture()
    assert follows.news == alone.news
    assert alone.step == 12


def test_a_display_that_follows_says_the_same_and_looks_at_what_it_shows_only() -> None:
    fold, stream = MetricsFold(), io.StringIO()
    with Display(stream, every_steps=1, every_s=1e9) as display:
        display.follow(fold)
        for event in synthetic().events:
            fold(event)
            display(event)
    assert stream.getvalue().splitlines()[-1] == plain_lines(every_steps=1)[-1]
    lines = {line for line in plain_lines(every_steps=1) if not line.startswith("step ")}
    assert lines <= set(stream.getvalue().splitlines())
    assert not LiveState(fold, whole=False).shows("turn_done")
    assert LiveState(fold).shows("turn_done")
    assert LiveState(fold, whole=False).shows("step_finished")
    assert not LiveState(fold).shows("loop_lag")


def test_a_terminal_gets_a_panel_with_sparklines() -> None:
    stream = Terminal()
    with Display(stream) as display:
        for event in synthetic().events:
            display(event)
    text = stream.getvalue()
    assert "done · step 12 of 12" in text
    assert "frozen_lake" in text
    assert any(bar in text for bar in "▁▂▃▄▅▆▇█")
    assert "evaluation before, frozen_lake" in text


def test_plain_wins_over_a_terminal() -> None:
    stream = Terminal()
    with Display(stream, plain=True) as display:
        for event in synthetic().events[:10]:
            display(event)
    assert stream.getvalue().isascii()


def test_a_closed_pipe_ends_the_display_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with Display(Closed()) as display:
        for event in synthetic().events:
            display(event)
    assert "the display stops" in caplog.text


def test_a_run_without_steps_can_be_shown() -> None:
    state = LiveState()
    assert "starting" in shown(state, 0.0)
    for event in synthetic().events[:6]:
        state(event)
    assert "preparing" in shown(state, 5.0)
    assert "has no weights yet" in shown(state, 5.0)
    assert plain_line(state.picture()).startswith("step 0/12")


def test_sparklines_span_their_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0], 0.0, 1.0) == "▁▅██▁"


def test_the_final_table_has_every_figure(tmp_path: Path) -> None:
    run = synthetic()
    run.write(tmp_path)
    write_results(tmp_path)
    stream = io.StringIO()
    print_summary(tmp_path, stream)
    text = stream.getvalue()
    for words in (
        "frozen_lake",
        "0.271",
        "held back",
        "768 trained",
        "(bound 1)",
        "report.html",
        "'DDRRDR'",
        "measured",
    ):
        assert words in text


def test_a_missing_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"summary\.json"):
        print_summary(tmp_path)


def test_scores_say_what_was_known_and_what_is_missing() -> None:
    stream = io.StringIO()
    scores = [Score("held_out", 0.975, complete=True), Score("train", 1.0, complete=False)]
    print_scores(scores, instance_seed=7, known={"max_digit": 12, "other": 0}, stream=stream)
    text = stream.getvalue()
    assert "seed 7" in text
    assert "never trained on" in text
    assert "0.975" in text
    assert "0.871 .. 0.996" in text
    assert "40 (incomplete)" in text
    assert "12 of the drawn instances" in text
    assert "other" not in text
