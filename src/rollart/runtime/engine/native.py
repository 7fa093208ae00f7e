"""Attention of decoding rows as a function in C, compiled on first use by the machine's own compiler.

Owns the library and its calls. Invariants: the result is that of `scaled_dot_product_attention` over each row's own length up
to rounding; without a compiler, or for another device or dtype, there is no kernel and the engine uses torch alone. torch's
kernel on CPUs reads every row to the length of the longest, and waits for memory: this one takes a third of its time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rollart.core.errors import StoreError
from rollart.runtime.engine.reads import Reads
from rollart.runtime.made_once import is_unchanged, made_once

SOURCE = Path(__file__).with_name("attention.c")
COMPILERS = ("cc", "gcc", "clang")
# Sums may be taken in another order; values that are not finite keep their meaning (-ffast-math would lose it).
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
WIDE_VECTORS = "-mprefer-vector-width=512"
"""Understood by x86 only; tried first."""
COMPILE_S = 120
NAMES = {torch.float32: "attend_f32", torch.bfloat16: "attend_bf16"}
MAX_HEAD_DIM = 256


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "lead", "shared", "ends")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "sharing", "capacity", "query_stride", "out_stride")),
        ("scale", ctypes.c_float),
    )


class DecodeKernel:
    """The function for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = getattr(library, NAMES[dtype])
        self._attend.argtypes = (*(ctypes.c_void_p,) * 5, *(ctypes.c_int64,) * 3)
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> Tensor:
        """(n, heads, head_dim) for queries of that shape; keys and values are a layer's (slots, kv_heads, capacity, head_dim).

        Uses as many threads as torch does here.
        """
        n, heads, size = queries.shape
        _, kv_heads, capacity, _ = keys.shape
        if queries.stride()[1:] != (size, 1):
            queries = queries.contiguous()
        out = queries.new_empty(n, heads, size)
        arrays = (reads.slots, reads.lead, reads.shared, reads.ends)
        rows = _Rows(
            *(array.ctypes.data for array in arrays),
            kv_heads, heads // kv_heads, capacity, queries.stride(0), heads * size, size**-0.5,
        )  # fmt: skip
        tensors = (queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), ctypes.addressof(rows))
        threads = min(torch.get_num_threads(), n)
        if threads == 1:
            failed = self._attend(*tensors, 0, n, size)
        else:
            self._pool = self._pool or ThreadPoolExecutor(threads)
            cuts = [n * part // threads for part in range(threads + 1)]
            parts = [functools.partial(self._attend, *tensors, *cuts[at : at + 2], size) for at in range(1, threads)]
            others = [self._pool.submit(part) for part in parts]
            failed = self._attend(*tensors, *cuts[:2], size) + sum(other.result() for other in others)
        if failed:
            raise MemoryError("attention over decoding rows found no memory for its scores")
        return out


def decode_kernel(dtype: torch.dtype, device: torch.device, head_dim: int) -> DecodeKernel | None:
    """The kernel, compiled if need be; None where there is none for this dtype, device or machine."""
    if dtype not in NAMES or device.type != "cpu" or head_dim > MAX_HEAD_DIM:
        return None
    library = _library()
    return None if library is None else DecodeKernel(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    try:
        folder = made_once(f"native/attention-{_identity(compiler)}", functools.partial(_compile, compiler))
        # What is loaded runs in this process: a file that changed on disk is not.
        return ctypes.CDLL(str(folder / "attention.so")) if is_unchanged(folder) else None
    except (StoreError, OSError):
        return None


def _compile(compiler: str, folder: Path) -> None:
    """Raises StoreError when the compiler refuses."""
    for flags in ([WIDE_VECTORS, *FLAGS], FLAGS):
        command = [compiler, *flags, "-o", str(folder / "attention.so"), str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise StoreError(f"{compiler} took more than {COMPILE_S} s over {SOURCE.name}") from error
        if done.returncode == 0:
            return
    raise StoreError(f"{compiler} does not compile {SOURCE.name}: {done.stderr[-500:]}")


def _identity(compiler: str) -> str:
    """Of everything that decides the code: source, flags, compiler, and what this CPU can do."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    able = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    said = "\n".join([*FLAGS, WIDE_VECTORS, platform.machine(), *able])
    return hashlib.blake2b(SOURCE.read_bytes() + version + said.encode(), digest_size=8).hexdigest()
