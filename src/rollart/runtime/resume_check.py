"""Does a resumed run consume what an uninterrupted one does? Runs both as a user would and compares their logs.

Train 2K steps; train again, kill the driver hard after step K's checkpoint and some steps more, resume, train to 2K. Under
`max_staleness` 0 without redundancy both must have trained the same multiset of problems. Under other schedules which
problems fall into the first 2K steps depends on timing, so each run is held to its cursors: what was issued is a prefix of
each task's order, and everything issued was trained once, dropped with a reason, buffered or in flight (field case 35).

Invariant: nothing is compared but the two event logs, so the verdict needs no trust in what the runs think of themselves.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollart.config.load import Resolved, dump
from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError, RunFailed
from rollart.core.types import TaskSpec
from rollart.observe.log import read_events
from rollart.runtime.consumed import Account, account, differences, faults, prompts
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.follow import COMMAND, Following, alive_after, family
from rollart.runtime.tokenizers import build_tokenizer

LOOK_S = 0.5
"""How often a command that is left alone is looked at."""
AIM_S = 0.005
"""How often the log is looked at for the kill: it must come within the last steps, which may take a tenth of a second."""
AIMS = 5
"""How often a run that was over before it could be killed is begun anew."""
LATER_SHARE = 3
"""The kill comes K / this many steps after the checkpoint (at least one), so that there is work to be done again."""
GONE_S = 30.0
"""How long after the last command processes of any of the runs may still be there."""
TAIL_CHARS = 2000
"""Of the error output of a run that failed."""
STRAIGHT, RESUMED = "straight", "resumed"
"""Names of the two runs."""

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    compared: tuple[str, ...]
    """What was looked at, a line each."""
    wrong: tuple[str, ...]
    """What does not hold."""


def check(resolved: Resolved, *, steps: int, say: Say) -> bool:
    """Run both, compare, and say what was compared and found; True: it holds. Both folders stay.

    Takes about the time of 4 x `steps` steps and three starts.

    Raises ConfigError when `steps` is too small, RunFailed when a run fails or is over before it could be killed.
    """
    if steps < 2:
        raise ConfigError(
            f"--steps={steps}: too small; with 2 or more there is a step to lose between checkpoint and kill"
        )
    scratch = Path(tempfile.mkdtemp(prefix="rollart-resume-check-"))
    written = scratch / "config.yaml"
    written.write_text(dump(resolved), encoding="utf-8")
    words = [f"output_dir={scratch}", f"schedule.steps={2 * steps}", f"checkpoint.every={steps}"]
    say(f"training {2 * steps} steps without interruption: {scratch / STRAIGHT}")
    seen = _whole(["train", str(written), f"name={STRAIGHT}", *words], scratch)
    say(f"training {2 * steps} steps, to be killed after step {steps}: {scratch / RESUMED}")
    seen += _killed(["train", str(written), f"name={RESUMED}", *words], scratch, steps)
    say("resuming it")
    seen += _whole(["resume", str(scratch / RESUMED)], scratch, profile=False)
    left = alive_after(seen, GONE_S)
    config = resolved.config
    specs = task_specs(config, build_tokenizer(config.tokenizer))
    straight, resumed = (account(read_events(scratch / name / "events.jsonl")[1]) for name in (STRAIGHT, RESUMED))
    verdict = judged(straight, resumed, config, specs, steps)
    wrong = [*verdict.wrong, *(f"a process was left: {one}" for one in left)]
    for line in (*verdict.compared, "all commands: processes that outlived them"):
        say(f"compared  {line}")
    for line in wrong:
        say(f"WRONG     {line}")
    say("does not hold" if wrong else "holds: a resumed run consumes what an uninterrupted one does")
    say(f"both runs: {scratch / STRAIGHT} {scratch / RESUMED}")
    return not wrong


def judged(straight: Account, resumed: Account, config: RunConfig, specs: Sequence[TaskSpec], steps: int) -> Verdict:
    """Compare a straight and a resumed run of 2 x `steps` steps."""
    wrong: list[str] = []
    for name, one in ((STRAIGHT, straight), (RESUMED, resumed)):
        if not one.done or one.steps != tuple(range(2 * steps)):
            wrong.append(f"{name}: trained {len(one.steps)} of {2 * steps} steps, done: {one.done}")
        wrong += [f"{name}: {line}" for line in faults(one, specs, config.seed)]
    if straight.resumed:
        wrong.append(f"{STRAIGHT}: was resumed {len(straight.resumed)} times")
    if not any(from_seq > 0 and lost > 0 for from_seq, lost in resumed.resumed):
        wrong.append(f"{RESUMED}: was not resumed from a checkpoint with work to be done again: {resumed.resumed}")
    compared = [
        _told(STRAIGHT, straight),
        _told(RESUMED, resumed),
        "each run: what was issued is a prefix of each task's cursor order; each issued instance was trained once, or "
        "dropped once with a reason, or is buffered or in flight",
    ]
    schedule = config.schedule
    if schedule.max_staleness == schedule.redundancy == schedule.redundant_groups == 0:
        mine, theirs = prompts(straight, specs), prompts(resumed, specs)
        compared.append(f"both: the multiset of trained problems ({mine.total()} and {theirs.total()})")
        wrong += [f"both: {line}" for line in differences(mine, theirs)]
    else:
        compared.append(
            "not compared: the multiset of trained problems; it depends on timing unless schedule.max_staleness, "
            "redundancy and redundant_groups are 0"
        )
    return Verdict(compared=tuple(compared), wrong=tuple(wrong))


def _told(name: str, found: Account) -> str:
    again = "".join(f", resumed after event {from_seq} with {lost} taken back" for from_seq, lost in found.resumed)
    return (
        f"{name}: {len(found.steps)} steps, {len(found.issued)} groups issued, {sum(found.trained.values())} trained, "
        f"{len(found.dropped)} dropped{again}"
    )


# --- the runs --------------------------------------------------------------------------------------------------------


def _start(words: Sequence[str], folder: Path, *, profile: bool) -> tuple[subprocess.Popen[bytes], Path]:
    """A command of this installation; its output goes to a file, which nobody has to read for it to go on."""
    # the configuration is resolved already, so the machine's profile must not be laid over it again
    command = [*COMMAND, *words, "--plain", *(["--profile", "none"] if profile else [])]
    output = folder / f"output-{sum(1 for _ in folder.glob('output-*'))}.txt"
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder), output


def _whole(words: Sequence[str], folder: Path, *, profile: bool = True) -> list[psutil.Process]:
    """Run a command to its end; the processes that it had. Raises RunFailed when it fails."""
    process, output = _start(words, folder, profile=profile)
    seen: dict[psutil.Process, None] = {}
    try:
        while process.poll() is None:
            seen.update(dict.fromkeys(family(process.pid)))
            time.sleep(LOOK_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise _failed(words, f"ended with exit code {process.returncode}", output)
    return list(seen)


def _killed(words: Sequence[str], folder: Path, steps: int) -> list[psutil.Process]:
    """Start a run and kill its driver some steps after the checkpoint of step `steps`; the processes that it had.

    A busy machine may look too late for a short run; then the run is begun anew.
    """
    seen: list[psutil.Process] = []
    for _ in range(AIMS):
        shutil.rmtree(folder / RESUMED, ignore_errors=True)
        process, output = _start(words, folder, profile=True)
        progress = _Progress(Following(folder / RESUMED / "events.jsonl"))
        try:
            while process.poll() is None and not progress.due(steps):
                time.sleep(AIM_S)
                progress.look()
            if process.returncode:
                raise _failed(words, f"ended with exit code {process.returncode} before it could be killed", output)
            process.send_signal(signal.SIGSTOP)  # it must not go on while its processes are counted
            seen += family(process.pid)
        finally:
            process.kill()
            process.wait()
        progress.look()
        if steps in progress.kept and 2 * steps not in progress.kept:
            return seen
    raise _failed(words, f"was over {AIMS} times before it could be killed; use a larger --steps", output)


class _Progress:
    """How far a run has come, from what is new in its log at each look."""

    def __init__(self, log: Following) -> None:
        self._log = log
        self._trained = 0
        self.kept: set[int] = set()
        """Steps whose checkpoints are whole."""

    def look(self) -> None:
        for event in self._log.events():
            self._trained += event["kind"] == "step_finished"
            if event["kind"] == "checkpointed":
                self.kept.add(event["step"])

    def due(self, steps: int) -> bool:
        """Is there something to lose: the checkpoint of step `steps` and steps after it?"""
        return steps in self.kept and self._trained >= steps + max(1, steps // LATER_SHARE)


def _failed(words: Sequence[str], what: str, output: Path) -> RunFailed:
    tail = output.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
    return RunFailed(f"rollart {' '.join(words)} {what}; its output ({output}) ends in\n{tail.rstrip()}")
