"""The machine's own C compiler, and the libraries that it makes of this package's C sources once per user.

Owns the libraries, `DECODING` of the engine and `TRAINING` of the trainer, and how it is told whether one is used. Invariants:
nothing here waits longer than `VERSION_S` and twice `COMPILE_S` for one of them, together well below `deadlines.start_s`; what
is loaded is byte for byte what was compiled here; where there is no library, the reason is the answer. Knows nothing of torch,
so that a machine can be looked at without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from rollart.core.errors import StoreError
from rollart.runtime.made_once import made_once

FOLDER = Path(__file__).parent
PASSES = FOLDER / "passes.c"
DECODING = (*(FOLDER / "engine" / name for name in ("attention.c", "heads.c", "drawing.c")), PASSES)
TRAINING = (PASSES, FOLDER / "trainer" / "attention_passes.c")
"""Sources of one library each, which is named after the first."""
NORM_FORWARD = (*(ctypes.c_void_p,) * 4, ctypes.c_float, *(ctypes.c_int64,) * 2)
GATE_FORWARD = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 2)
"""Arguments of the functions of `PASSES` that both call."""
COMPILERS = ("cc", "gcc", "clang")
"""The first that is found is used."""
# Sums may be taken in another order; values that are not finite keep their meaning (-ffast-math would lose it).
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
WIDE_VECTORS = "-mprefer-vector-width=512"
"""Understood by x86 only; tried first."""
VERSION_S = 10.0
COMPILE_S = 30.0
"""Longest wait for a compiler, per try: some seconds are usual."""
WITHOUT_KERNEL = "decoding attention takes several times as long where rows differ in length"
WITHOUT_PASSES = "a training step of a small model takes about a quarter as long again"
TOLD_CHARS = 300
"""Of what a compiler says."""


K = TypeVar("K")
Wanted = Literal["auto", "off", "required"]


@dataclass(frozen=True, slots=True)
class Native(Generic[K]):
    """What something is computed by."""

    kernel: K | None
    """The functions of a library; None: torch alone."""
    why: str = ""
    """Why there is no library."""
    mendable: bool = False
    """Whether it is the machine that lacks something."""

    def __str__(self) -> str:
        return "compiled" if self.kernel is not None else f"torch: {self.why}"

    @property
    def lacks(self) -> str:
        """Why, where somebody could mend that; else empty."""
        return self.why if self.mendable else ""


def native(sources: tuple[Path, ...], make: Callable[[ctypes.CDLL], K], *, unfit: str = "") -> Native[K]:
    """What `make` makes of the library, compiled if need be, or why there is none. `unfit`: why there is no use for it."""
    found = unfit or library(sources)
    return Native(None, found, not unfit) if isinstance(found, str) else Native(make(found))


class Helpers:
    """Threads beside the calling one, which wait for work as long as this lives."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0

    def of(self, threads: int) -> ThreadPoolExecutor:
        """So many, or more."""
        if self._pool is None or self._threads < threads:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._pool, self._threads = ThreadPoolExecutor(threads), threads
        return self._pool


@functools.cache
def library(sources: tuple[Path, ...]) -> ctypes.CDLL | str:
    """The sources compiled, or why not. The same answer for as long as the process lives."""
    return build(sources)


def build(
    sources: Sequence[Path], *, search: str | None = None, root: Path | None = None, limit_s: float = COMPILE_S
) -> ctypes.CDLL | str:
    """The library, compiled if it is not there yet or was damaged, or why there is none.

    `search`: folders in which the compiler is looked for, as in PATH, which is the default; `root`: where libraries are kept,
    by default the user's cache; `limit_s`: longest wait for a compiler.
    """
    compiler = next(filter(None, (shutil.which(name, path=search) for name in COMPILERS)), None)
    if compiler is None:
        return f"no C compiler ({', '.join(COMPILERS)}) is on the PATH"
    stem = sources[0].stem
    try:
        name = f"native/{stem}-{_identity(compiler, sources, min(limit_s, VERSION_S))}"
        # what is loaded runs in this process, so every byte is looked at
        folder = made_once(name, functools.partial(_compile, compiler, sources, limit_s), root, every_byte=True)
        return ctypes.CDLL(str(folder / f"{stem}.so"))
    except (StoreError, OSError) as error:
        return str(error)


def _compile(compiler: str, sources: Sequence[Path], limit_s: float, folder: Path) -> None:
    """Raises StoreError when the compiler refuses."""
    said = ""
    made = folder / f"{sources[0].stem}.so"
    for flags in ([WIDE_VECTORS, *FLAGS], FLAGS):
        command = [compiler, *flags, f"-I{FOLDER}", "-o", str(made), *map(str, sources), "-lm"]
        code, said = _ran(command, limit_s)
        if code == 0:
            return
    names = ", ".join(source.name for source in sources)
    raise StoreError(f"{compiler} does not compile {names}: {' '.join(said.split())[-TOLD_CHARS:]}")


def _identity(compiler: str, sources: Sequence[Path], limit_s: float) -> str:
    """Of everything that decides the code: sources, flags, compiler, and what this CPU can do."""
    _, version = _ran([compiler, "--version"], limit_s)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    able = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    said = "\n".join([*FLAGS, WIDE_VECTORS, platform.machine(), *able])
    read = b"".join(source.read_bytes() for source in (*sources, *sorted(FOLDER.glob("*.h"))))
    return hashlib.blake2b(read + version.encode() + said.encode(), digest_size=8).hexdigest()


def _ran(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output. Raises StoreError after `limit_s`, with nothing of the command left."""
    # A session of its own: a compiler is several processes, and one that is left would keep the pipe open.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"{' '.join(command[:2])} .. had not ended after {limit_s:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, said.decode(errors="replace")
