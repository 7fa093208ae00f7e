"""Whole runs on a local Ray, through the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.observe.log import read_events

pytestmark = pytest.mark.ray

ROLLART = Path(sys.executable).with_name("rollart")
GONE_S = 30.0
"""How long after its last step a run's processes may still be there."""
SMALL = [
    "baselines.episodes=4",
    "warm_start.steps=1",
    "warm_start.episodes=8",
    "eval.episodes=8",
    "schedule.batch=8",
    "schedule.group_size=4",
]


def _interruptible() -> None:
    """A shell starts background jobs deaf to Ctrl-C, and what they start inherits it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`rollart train smoke` in `folder`; ended for sure."""
    command = [str(ROLLART), "train", "smoke", "--plain", f"output_dir={folder}", *SMALL, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        preexec_fn=_interruptible,  # noqa: PLW1509 (the tests have no threads)
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(
    folder: Path, kind: str, process: subprocess.Popen[str], *, count: int = 1, within_s: float = 120.0
) -> None:
    """Wait until the run's log holds `count` events of a kind."""
    log, until = folder / "smoke" / "events.jsonl", time.monotonic() + within_s
    while time.monotonic() < until and process.poll() is None:
        if log.is_file() and log.read_text().count(f'"kind":"{kind}"') >= count:
            return
        time.sleep(0.2)
    raise AssertionError(f"no {count} {kind} events; exit code {process.poll()}: {process.communicate(timeout=5)}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive, [one.cmdline() for one in alive if one.is_running()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    run: Path
    gone_s: float
    """From the run's last event to the end of its last process."""
    left: int
    """Processes that it had at its last event."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A small run that ended well, with two engines, two env hosts and two training ranks."""
    folder = tmp_path_factory.mktemp("runs")
    # so small a run may earn equal rewards only: weight decay moves the weights in every step all the same
    words = ["engine.count=2", "envs.hosts=2", "trainer.ranks=2", "eval.every=1", "optimizer.weight_decay=0.1"]
    with started(folder, *words) as process:
        wait_for(folder, "published", process)
        wait_for(folder, "run_finished", process)
        processes = family(process)
        ended = time.monotonic()
        out, err = process.communicate(timeout=GONE_S)
        assert_gone(processes)
        gone_s = time.monotonic() - ended
    assert process.returncode == 0, out + err
    return Finished(run=folder / "smoke", gone_s=gone_s, left=len(processes))


@pytest.fixture
def finished(outcome: Finished) -> Path:
    """The folder of that run."""
    return outcome.run


def events(run: Path) -> list[dict[str, Any]]:
    return list(read_events(run / "events.jsonl")[1])


def test_after_its_last_event_a_run_is_gone_within_half_a_minute(outcome: Finished) -> None:
    """Field case 8: the command has ended, and every process that was there when its log was complete."""
    assert outcome.left > 0
    assert outcome.gone_s < GONE_S


def test_a_run_leaves_everything_that_its_folder_promises(finished: Path) -> None:
    names = {"config.yaml", "events.jsonl", "metrics.jsonl", "summary.json", "report.html", "trajectories.jsonl"}
    assert names <= {path.name for path in finished.iterdir()}
    summary = json.loads((finished / "summary.json").read_text())
    tokens = summary["tokens"]
    assert summary["steps"] == 3
    assert summary["trajectories"] == 24
    assert tokens["sampled"] == (
        tokens["trained"] + sum(tokens["dropped"].values()) + tokens["buffered"] + tokens["in_flight"] + tokens["eval"]
    )
    assert summary["staleness"]["max"] <= 1
    assert set(summary["success"]) == {"frozen_lake", "max_digit"}


def test_after_every_sync_engines_serve_what_the_trainer_published(finished: Path) -> None:
    """Field case 24: three syncs in a row, on every engine, bit by bit."""
    published = {e["version"]: e["data"]["digest"] for e in events(finished) if e["kind"] == "published"}
    applied = [e for e in events(finished) if e["kind"] == "applied"]
    assert {e["engine"] for e in applied} == {"engine-0", "engine-1"}
    assert len({e["version"] for e in applied}) >= 3
    assert len(set(published.values())) == len(published)
    for event in applied:
        assert event["data"]["digest"] == published[event["version"]]


def test_the_final_evaluation_is_written_though_an_interval_divides_the_last_step(finished: Path) -> None:
    """Field case 5: for real, an evaluation after every step, the last of which is the final one."""
    scored = [e for e in events(finished) if e["kind"] == "eval_scored"]
    assert {e["eval"] for e in scored} >= {"before", "after"}
    assert all(e["data"]["complete"] for e in scored if e["eval"] in {"before", "after"})
    assert events(finished)[-1]["kind"] == "run_finished"


def test_the_resolved_mix_is_kept_with_the_run(finished: Path) -> None:
    """Field case 40: as the first event of the log has it."""
    first = events(finished)[0]
    assert first["kind"] == "run_started"
    assert first["data"]["mix"] == pytest.approx({"frozen_lake": 1 / 3, "max_digit": 2 / 3})


def test_stored_trajectories_hold_what_was_sampled(finished: Path) -> None:
    """Ids, mask, log-probabilities and versions have one length; sampled tokens add up to the ledger's."""
    rows = [json.loads(line) for line in (finished / "trajectories.jsonl").read_text().splitlines()]
    for row in rows:
        assert len(row["ids"]) == len(row["loss_mask"]) == len(row["rollout_logprobs"])
        assert sum(n for _, n in row["spans"]) == sum(row["loss_mask"])
        assert all((p is not None) == bool(m) for p, m in zip(row["rollout_logprobs"], row["loss_mask"], strict=True))
    summary = json.loads((finished / "summary.json").read_text())
    assert sum(sum(row["loss_mask"]) for row in rows) == summary["tokens"]["sampled"]


def test_eval_scores_instances_of_the_readers_choice(finished: Path) -> None:
    command = [str(ROLLART), "eval", str(finished), "--instance-seed", "7", "--count", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "frozen_lake" in done.stdout
    assert "never trained on" in done.stdout


def test_a_run_whose_name_is_taken_is_refused(finished: Path) -> None:
    with started(finished.parent) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--overwrite" in err


def test_ctrl_c_leaves_no_process_and_a_readable_run(tmp_path: Path) -> None:
    with started(tmp_path, "schedule.steps=5000") as process:
        wait_for(tmp_path, "step_finished", process)
        processes = family(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=GONE_S)
        assert process.returncode == 130
        assert_gone(processes)
    run = tmp_path / "smoke"
    assert events(run)[-1]["data"]["status"] == "cancelled"
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(("actor", "role"), [("EnvHostActor", "env"), ("EngineActor", "mixed")])
def test_when_the_last_producer_dies_the_run_ends_with_its_error(tmp_path: Path, actor: str, role: str) -> None:
    """Field case 2: for real, where nothing is started again: exit non-zero long before the watchdog, the cause in the last
    lines."""
    with started(tmp_path, "schedule.steps=5000", "failure.restarts=0") as process:
        wait_for(tmp_path, "step_finished", process)
        processes = family(process)
        # Ray writes the actor's class into the process title of its worker
        for one in processes:
            if any(actor in word for word in one.cmdline()):
                os.kill(one.pid, signal.SIGKILL)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert time.monotonic() - began < 60
        assert f"a worker of role {role} was lost once" in err
        assert "and none is left" in err
        assert f"{'env' if role == 'env' else 'engine'} lost: " in err
        assert_gone(processes)
