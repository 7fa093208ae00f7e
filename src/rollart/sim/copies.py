"""Copies of the checkout, and commands that run in one of them.

Invariant: a command in a copy imports the copy's package, sees no repository around it, writes its temporary files beside
the copy, and leaves no process behind. Why: what is found in a copy must be the copy's doing, and the checkout, its byte
code and its users' files stay as they are.
"""

from __future__ import annotations

import asyncio
import compileall
import filecmp
import os
import py_compile
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.core.errors import ConfigError

COPIED = (
    "src", "tests", "docs", "benchmarks", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile",
)  # fmt: skip
"""What of a checkout a copy has, as far as it is there."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")
MEMORY_KIB = 16 * 2**20
"""Address space of each process, in KiB: a mutant that fills its memory must not take the machine's."""
TAIL_CHARS = 4000
"""Of a command's output, where the reason for its end is looked for."""
SHORT_S = 60.0
"""The longest that applying a patch, or looking where a package is, may take."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy and what belongs to it, in one folder."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "copy"

    @property
    def source(self) -> Path:
        """What is to be imported, without links."""
        return (self.root / "src").resolve()

    @property
    def out(self) -> Path:
        """A file that a command may write."""
        return self.home / "out.json"

    @property
    def log(self) -> Path:
        return self.home / "output.txt"

    @property
    def temporary(self) -> Path:
        return self.home / "tmp"


@dataclass(frozen=True, slots=True)
class Ended:
    code: int | None
    """None: it was ended at its limit."""
    output: str
    """The end of it."""


# --- making ------------------------------------------------------------------------------------------------------------


def checkout() -> Path:
    """The repository that this package is imported from. Raises ConfigError for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not ((root / "pyproject.toml").is_file() and (root / "tests").is_dir() and (root / "src").is_dir()):
        raise ConfigError(
            f"mutants need a checkout with its tests, and {root} is none: use a clone of the repository, installed with "
            "`pip install -e .`"
        )
    return root


def copy_checkout(root: Path, home: Path) -> Copy:
    """Copy what tests and torture need. Byte code is checked by content, so that no stale one hides a patch."""
    copy = Copy(home)
    copy.root.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, copy.root / name, ignore=LEFT_OUT, symlinks=True)
        elif source.is_file():
            shutil.copy2(source, copy.root / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(copy.root / "src", quiet=2, invalidation_mode=by_content)
    return copy


def copy_again(pristine: Copy, home: Path) -> Copy:
    copy = Copy(home)
    shutil.copytree(pristine.root, copy.root, symlinks=True)
    return copy


def changed(pristine: Copy, copy: Copy) -> tuple[str, ...]:
    """Files that differ between two copies, byte code aside."""
    there, here = (
        {path.relative_to(top) for path in top.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        for top in (pristine.root, copy.root)
    )
    differing = there ^ here
    for name in there & here:
        if not filecmp.cmp(pristine.root / name, copy.root / name, shallow=False):
            differing.add(name)
    return tuple(sorted(map(str, differing)))


# --- running -----------------------------------------------------------------------------------------------------------


async def apply(copy: Copy, patch: Path) -> str:
    """Why a patch does not apply; empty when it did. `git apply` refuses what does not fit instead of guessing."""
    ended = await _process(["git", "apply", "-p1", "--whitespace=nowarn", str(patch)], copy, SHORT_S)
    return "" if ended.code == 0 else last_line(ended.output)


async def imports_another(copy: Copy) -> str:
    """What a process in the copy imports instead of the copy's package; empty when it imports that."""
    find = "import importlib.util, os; print(os.path.realpath(importlib.util.find_spec('rollart').origin))"
    ended = await _process([sys.executable, "-c", find], copy, SHORT_S)
    origin = last_line(ended.output)
    return "" if ended.code == 0 and Path(origin).is_relative_to(copy.source) else origin


async def python(copy: Copy, words: Sequence[str], *, limit_s: float) -> Ended:
    """Run this interpreter in a copy; {out} in its words stands for the path of `copy.out`."""
    copy.out.unlink(missing_ok=True)
    return await _process([sys.executable, *(word.replace("{out}", str(copy.out)) for word in words)], copy, limit_s)


async def _process(words: Sequence[str], copy: Copy, limit_s: float) -> Ended:
    """One command, in a process group of its own that is ended with it."""
    copy.temporary.mkdir(exist_ok=True)
    with copy.log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f'ulimit -v {MEMORY_KIB}; exec "$@"', "sh", *words,
            cwd=copy.root, env=_environment(copy), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
        except TimeoutError:
            code = None
        finally:
            _end_group(process.pid)
            await process.wait()
    return Ended(code, copy.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:])


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _environment(copy: Copy) -> dict[str, str]:
    foreign = ("GIT_", "PYTEST_", "HYPOTHESIS_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        "PYTHONPATH": str(copy.root / "src"),
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(copy.temporary),
        "GIT_CEILING_DIRECTORIES": str(copy.home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
