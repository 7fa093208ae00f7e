"""Mutants: patches that break the program on purpose, each in a copy of the checkout that tests and torture examine.

Owns the verdict on each patch: found (by which test, which seed, or by hanging), survived, or error. Invariant: a find is
the patch's doing. The same steps pass on an unpatched copy first, and a patch that does not apply or changes nothing is an
error, never a find. Why: a promise that no test would miss is not kept for long.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rollart.core.errors import ConfigError, RollartError
from rollart.sim.copies import (
    Copy,
    apply,
    changed,
    checkout,
    copy_again,
    copy_checkout,
    imports_another,
    last_line,
    python,
)

UNITS = ("tests/unit/sched", "tests/unit/control", "tests/unit/core", "tests/unit/learn")
"""Tests of decisions and of control's parts: seconds."""
WHOLES = ("tests/sim", "tests/unit/sim", "tests/field")
"""Tests of whole runs on virtual time, after the seeds, which find more in less time."""
NOT_THESE = ("--ignore-glob=*/test_mutants_*", "--ignore-glob=*/test_torture*")
"""Tests of this module, which make copies themselves, and of the torture machine, whose seeds are run anyway."""
SEEDS = 300
FIRST_SEEDS = 20
"""Looked at before the tests: they take seconds and find most."""
SLOWER = 5.0
"""A patched copy may take so many times as long as the unpatched one, which ran while nothing else did, .."""
GRACE_S = 30.0
""".. and this much more, before it counts as hanging."""
BASELINE_LIMIT_S = 1800.0
"""The longest that one step may take on the unpatched copy."""

Outcome = Literal["found", "survived", "error"]
By = Literal["test", "torture", "timeout", "crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command that ends with 0 in a copy in which nothing is wrong."""

    name: str
    words: tuple[str, ...]
    """Words after the interpreter; {out} stands for a file that the command may write."""
    by: By
    detail: Callable[[str, Path], str]
    """What it found, from the end of its output and the file that it may have written; empty: nothing, whatever its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    patch: str
    outcome: Outcome
    by: By | None = None
    step: str = ""
    detail: str = ""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    """What the patch changed."""
    about: str = ""
    """What stands in the patch file before the diff."""

    def __str__(self) -> str:
        why = f"{self.step}: {self.detail}" if self.step else self.detail
        return f"{self.outcome:<9}{self.seconds:6.1f} s  {self.patch}  {why}".rstrip()


# --- what is run in a copy ---------------------------------------------------------------------------------------------


def failed_test(output: str, out: Path) -> str:
    """The first test in pytest's summary that failed or could not be collected, with its reason."""
    match = re.search(r"^(?:FAILED|ERROR) (.+)$", output, re.MULTILINE)
    return match.group(1) if match else last_line(output)


def broken_promise(output: str, out: Path) -> str:
    """The first seed that broke a promise, from torture's JSON. A seed that only held too little is no find."""
    if not out.is_file():
        return last_line(output)
    broken = json.loads(out.read_text(encoding="utf-8"))["broken"]
    return f"seed {broken[0]['seed']}: {broken[0]['promises'][0]}" if broken else ""


def _torture(first: int, seeds: int) -> Step:
    words = ("--first", str(first), "--seeds", str(seeds), "--workers", "1", "--stop", "--json", "{out}")
    return Step(
        name=f"seeds {first} to {first + seeds - 1}", words=("-m", "rollart.cli.main", "torture", *words), by="torture",
        detail=broken_promise,
    )  # fmt: skip


def _tests(name: str, *paths: str) -> Step:
    words = ("-m", "pytest", "-x", "-rfE", "--tb=line", "-m", "not long and not gpu and not ray", *NOT_THESE, *paths)
    return Step(name=name, words=words, by="test", detail=failed_test)


STEPS = (
    _torture(0, FIRST_SEEDS),
    _tests("unit tests", *UNITS),
    _torture(FIRST_SEEDS, SEEDS - FIRST_SEEDS),
    _tests("tests of whole runs", *WHOLES),
)


# --- entry -------------------------------------------------------------------------------------------------------------


def run(directory: str | Path, json_path: str | Path | None, workers: int) -> int:
    """Examine every `*.patch` of a directory; returns 0 when all are found, else 1.

    Raises ConfigError where there is no checkout or no patch, RollartError when an unpatched copy fails.
    """
    patches = [path.resolve() for path in sorted(Path(directory).glob("*.patch"))]
    if not patches:
        raise ConfigError(f"no *.patch in {directory}: name a folder with unified diffs against the repository's root")
    if workers < 1:
        raise ConfigError(f"workers={workers}: at least 1")
    verdicts = asyncio.run(examine(checkout(), patches, STEPS, workers=workers, say=_say))
    outcomes = [verdict.outcome for verdict in verdicts]
    found, survived, errors = (outcomes.count(outcome) for outcome in ("found", "survived", "error"))
    if json_path is not None:
        report = {
            "seeds": SEEDS, "tests": [*UNITS, *WHOLES], "found": found, "survived": survived, "errors": errors,
            "mutants": [asdict(verdict) for verdict in verdicts],
        }  # fmt: skip
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _say(f"{found} of {len(verdicts)} found, {survived} survived, {errors} errors")
    return 0 if found == len(verdicts) else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def examine(
    root: Path, patches: Sequence[Path], steps: Sequence[Step], *, workers: int, say: Callable[[str], None],
    slower: float = SLOWER, grace_s: float = GRACE_S,
) -> list[Verdict]:  # fmt: skip
    """A verdict on each patch, in the order given. Raises RollartError when the unpatched copy fails a step."""
    verdicts: dict[Path, Verdict] = {}
    slots = asyncio.Semaphore(workers)
    with tempfile.TemporaryDirectory(prefix="rollart-mutants-") as scratch:
        homes = Path(scratch)
        pristine = copy_checkout(root, homes / "pristine")
        say(f"{len(patches)} patches; first all steps on an unpatched copy ..")
        taken_s = await _baseline(pristine, homes / "baseline", steps)
        limits_s = [slower * seconds + grace_s for seconds in taken_s]

        async def one(number: int, patch: Path) -> None:
            async with slots:
                verdicts[patch] = await _verdict(pristine, homes / str(number), patch, steps, limits_s)
            say(str(verdicts[patch]))

        async with asyncio.TaskGroup() as group:
            for number, patch in enumerate(patches):
                group.create_task(one(number, patch))
    return [verdicts[patch] for patch in patches]


async def _baseline(pristine: Copy, home: Path, steps: Sequence[Step]) -> list[float]:
    """Run all steps unpatched; returns how long each took, in seconds."""
    copy = copy_again(pristine, home)
    other = await imports_another(copy)
    if other:
        raise RollartError(
            f"a copy of the checkout does not import its own package but {other}; nothing can be found so"
        )
    taken_s: list[float] = []
    for step in steps:
        started = time.monotonic()
        ended = await python(copy, step.words, limit_s=BASELINE_LIMIT_S)
        detail = step.detail(ended.output, copy.out) if ended.code else ""
        if ended.code is None or detail:
            raise RollartError(
                f"without any patch a copy fails at {step.name} (exit code {ended.code}), so no find would mean a thing: "
                f"{detail or 'too slow'}\nrun it in the checkout: python {' '.join(step.words)}"
            )
        taken_s.append(time.monotonic() - started)
    shutil.rmtree(home)
    return taken_s


async def _verdict(
    pristine: Copy, home: Path, patch: Path, steps: Sequence[Step], limits_s: Sequence[float]
) -> Verdict:
    """Apply one patch to a copy of its own, and run the steps up to the first that fails."""
    started = time.monotonic()
    try:
        copy = copy_again(pristine, home)
        refused = await apply(copy, patch)
        files = changed(pristine, copy)
        if refused:
            verdict = Verdict(patch=patch.name, outcome="error", detail=f"does not apply: {refused}")
        elif not files:
            verdict = Verdict(patch=patch.name, outcome="error", detail="it changes nothing")
        elif other := await imports_another(copy):
            detail = f"the copy does not import its own package but {other}"
            verdict = Verdict(patch=patch.name, outcome="error", detail=detail)
        else:
            verdict = await _found(copy, patch.name, steps, limits_s)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return replace(verdict, files=files, about=_preamble(patch), seconds=round(time.monotonic() - started, 1))


async def _found(copy: Copy, patch: str, steps: Sequence[Step], limits_s: Sequence[float]) -> Verdict:
    for step, limit_s in zip(steps, limits_s, strict=True):
        ended = await python(copy, step.words, limit_s=limit_s)
        by: By = "timeout" if ended.code is None else step.by if ended.code >= 0 else "crash"
        if by == "timeout":
            detail = f"not done after {limit_s:.0f} s"
        elif ended.code == -signal.SIGKILL:  # from outside: the machine ran out of memory, say
            return Verdict(patch=patch, outcome="error", step=step.name, detail="the process was killed")
        else:
            detail = step.detail(ended.output, copy.out) if ended.code else ""
        if detail:
            return Verdict(patch=patch, outcome="found", by=by, step=step.name, detail=detail)
    return Verdict(patch=patch, outcome="survived")


def _preamble(patch: Path) -> str:
    """The text before the diff."""
    text = patch.read_text(encoding="utf-8", errors="replace")
    return re.split(r"^(?:diff |--- |Index: )", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
