"""What the commands call, as a value: tests hand in their own, the real one imports its packages when it is called.

Invariant: importing this module imports neither torch nor Ray, so `--help`, `explain` and every refusal of a
configuration come at once and without the extras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollart.config.load import Resolved

if TYPE_CHECKING:
    from rollart.observe.outlook import Outlook
    from rollart.optrace.job import Job
    from rollart.optrace.prediction import Prediction


class Train(Protocol):
    """Run to the end; returns the process's exit code. Raises RollartError."""

    def __call__(self, resolved: Resolved, *, plain: bool) -> int: ...


class Resume(Protocol):
    """Go on with the run in a folder, to the end; returns the process's exit code. Raises RollartError."""

    def __call__(self, run_dir: Path, resolved: Resolved, *, plain: bool) -> int: ...


class Evaluate(Protocol):
    """Score a finished run's model on `count` instances from `instance_seed` on; returns the exit code. Raises RollartError."""

    def __call__(self, run_dir: Path, *, instance_seed: int, count: int, greedy: bool) -> int: ...


class ResumeCheck(Protocol):
    """Compare an uninterrupted run with one that is killed and resumed; True: they agree. Raises RollartError."""

    def __call__(self, resolved: Resolved, *, steps: int, say: Callable[[str], None]) -> bool: ...


class Simulate(Protocol):
    """Simulate into a run's folder, real parts as a calibration file says. Raises RollartError."""

    def __call__(self, resolved: Resolved, *, folder: Path, calibration: Path | None) -> Outlook: ...


class Replay(Protocol):
    """A recorded run as the models predict it, and as it was measured. Raises RollartError."""

    def __call__(self, run_dir: Path, *, calibration: Path | None) -> tuple[Outlook, Outlook]: ...


class Trace(Protocol):
    """Predict a training step; writes a timeline and a table of step times where it is told to. Raises RollartError."""

    def __call__(
        self, job: Job, *, timeline: Path | None, table: Path | None, lengths: Sequence[int]
    ) -> Prediction: ...


def _simulate(resolved: Resolved, *, folder: Path, calibration: Path | None) -> Outlook:
    from rollart.sim import launch

    return launch.simulate(resolved, folder, calibration)


def _predict(resolved: list[Resolved], done: Callable[[Outlook], None]) -> None:
    from rollart.sim import launch

    for one in resolved:
        launch.prepare(one)  # what cannot be is refused before the first is run
    for one in resolved:
        done(launch.predict(launch.prepare(one)))


def _replay(run_dir: Path, *, calibration: Path | None) -> tuple[Outlook, Outlook]:
    from rollart.sim import launch

    return launch.replay(run_dir, calibration)


def _calibrate(run_dir: Path, out: Path) -> list[str]:
    from rollart.sim import launch

    return launch.calibrate(run_dir, out)


def _trace(job: Job, *, timeline: Path | None, table: Path | None, lengths: Sequence[int]) -> Prediction:
    from rollart.optrace import predict

    return predict.run(job, timeline=timeline, table=table, lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The calls behind the commands."""

    train: Train
    resume: Resume
    evaluate: Evaluate
    report: Callable[[Path], Path]
    """Write the report of a run; returns its path."""
    resume_check: ResumeCheck
    end_earlier: Callable[[Path], object] = lambda folder: None
    """End the processes that the run in a folder has left."""
    can_go_on: Callable[[Path], bool] = lambda folder: False
    """Whether the run in a folder has a whole checkpoint that `resume` would go on from."""
    simulate: Simulate = _simulate
    predict: Callable[[list[Resolved], Callable[[Outlook], None]], None] = _predict
    """Simulate one after the other without a folder; all are refused before the first begins. Raises RollartError."""
    replay: Replay = _replay
    calibrate: Callable[[Path, Path], list[str]] = _calibrate
    """Write the models that a recorded run gives to a file; returns lines about them. Raises RollartError."""
    trace: Trace = _trace


def _train(resolved: Resolved, *, plain: bool) -> int:
    from rollart.runtime import launch

    return launch.train(resolved, plain=plain)


def _resume(run_dir: Path, resolved: Resolved, *, plain: bool) -> int:
    from rollart.runtime import launch

    return launch.resume(run_dir, resolved, plain=plain)


def _evaluate(run_dir: Path, *, instance_seed: int, count: int, greedy: bool) -> int:
    from rollart.runtime import launch

    return launch.evaluate(run_dir, instance_seed=instance_seed, count=count, greedy=greedy)


def _report(run_dir: Path) -> Path:
    from rollart.observe.report import write_report

    return write_report(run_dir)


def _resume_check(resolved: Resolved, *, steps: int, say: Callable[[str], None]) -> bool:
    from rollart.runtime import resume_check

    return resume_check.check(resolved, steps=steps, say=say)


def _end_earlier(folder: Path) -> object:
    from rollart.runtime import reap

    return reap.end_earlier(folder)


def _can_go_on(folder: Path) -> bool:
    try:
        from rollart.runtime.folder import can_go_on
    except ModuleNotFoundError:  # then nothing was run either, and what is missing is told
        return False
    return can_go_on(folder)


REAL = Work(
    train=_train,
    resume=_resume,
    evaluate=_evaluate,
    report=_report,
    resume_check=_resume_check,
    end_earlier=_end_earlier,
    can_go_on=_can_go_on,
)
