"""From a device to its profile: `rollart profile-device`, and the operators of one job on this machine.

Owns `profile_ops` and `profile_device`. Invariant: what is written was measured in this call, under one set of versions;
what could not be measured, or cannot be right, is left out and said in the notes. Why: a profile is worth as much as what
it admits to lack.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from rollart.core.errors import ClusterError, ConfigError
from rollart.optrace.measured_ops import distinct
from rollart.optrace.ops import Op
from rollart.optrace.profiling import beside, groups
from rollart.optrace.profiling.grid import GRIDS, STREAMS, Grid, gemm_op, operators, pass_op, within
from rollart.optrace.profiling.host import host_times
from rollart.optrace.profiling.neighbours import neighbours as at_work
from rollart.optrace.profiling.timing import Outcome, Reading, measure, quiet
from rollart.perf.device_profile import DeviceProfile, OpTime, Origin, base_name, implausible
from rollart.perf.devices import GIB, Device
from rollart.perf.devices import device as known_device

ROUNDS = 15
"""Of an operator: the median of so many is within a fifth of its spread."""
DEVICE_ROUNDS = 7
"""Of a GPU, each of many launches."""
DEFAULT_CACHE_BYTES = 32.0 * (1 << 20)
"""Where the system does not say; large for most, and operands too large for the cache are what is wanted."""
ROOM = 0.25
"""Share of the free memory that operands may take."""
MOST_ROOM_BYTES = 2.0 * GIB
"""On a CPU, which others use too."""
CEILING_SIDE = {"cpu": 512, "cuda": 8192}
OPERATORS_SHARE = 0.7
"""Of the time, where there are collectives to measure as well."""
OVERLAP_KERNELS = 8
LEAST_STREAMED_BYTES = 1 << 20
"""Passes that move fewer are as long as their launch and say nothing of the memory."""


def profile_ops(
    ops: Iterable[Op], *, device: str = "cpu", threads: int = 1, rounds: int = ROUNDS, neighbours: int = 0,
    minutes: float = math.inf, clock: Callable[[], float] = time.perf_counter,
) -> DeviceProfile:  # fmt: skip
    """Times of the distinct compute operators of `ops`, in their order, on this machine, and of its host.

    `neighbours`: so many processes run the same operators meanwhile. `clock`: `time.thread_time` leaves out what others
    take of this core, for one thread of a CPU. Raises ConfigError for a device that is not here, or
    when nothing can be measured.
    """
    wanted = distinct(ops)
    where = torch_device(device)
    origin = origin_of(where, threads)
    ends_at = clock() + 60.0 * minutes
    with quiet(threads):
        ceilings = _ceilings(wanted, where)
        busy = at_work(wanted, neighbours, threads) if neighbours else nullcontext()
        with busy:
            outcomes = measure(
                [*ceilings, *wanted], device=where, rounds=rounds, cache_bytes=origin.cache_bytes, room_bytes=_room(where),
                ends_at=ends_at, clock=clock,
            )  # fmt: skip
        host = host_times(where, clock)
    rows, notes = _rows([*ceilings, *wanted], outcomes)
    if neighbours:
        notes.append(f"measured while {neighbours} other process(es) ran the same operators")
    described = _described(where, threads, rows)
    wrong = {row.signature: said for row in rows if (said := implausible(row, described, origin))}
    notes += [f"left out: {said}" for said in wrong.values()]
    kept = {row.signature: row for row in rows if row.signature not in wrong}
    return DeviceProfile(
        device=described, origin=origin, ops=tuple(kept.values()), host=host, notes=tuple(dict.fromkeys(notes))
    )  # fmt: skip


def profile_device(
    out: Path, *, device: str = "cuda", minutes: float = 5.0, threads: int = 1, grid: str = "", ranks: int | None = None,
    first: Sequence[Op] = (),
) -> DeviceProfile:  # fmt: skip
    """Measure `first` (the operators of a job), the grid of operators, collectives between `ranks` local processes (None: all
    GPUs, 2 on a CPU; below 2: none) and kernels beside them, within about `minutes`; write it to `out`.

    Raises ConfigError for a device that is not here, an unknown grid or a file that cannot be written.
    """
    if not 0.0 < minutes < math.inf:
        raise ConfigError(f"minutes is {minutes}; give a finite number above 0, say 5")
    where = torch_device(device)
    sizes = _grid(grid or ("large" if where.type == "cuda" else "small"))
    group = (torch.cuda.device_count() if where.type == "cuda" else 2) if ranks is None else ranks
    share = OPERATORS_SHARE if group > 1 else 1.0
    asked = within([op for dtype in _dtypes(where) for op in operators(sizes, dtype)], _room(where) / 4)
    asked = [*first, *asked]
    rounds = DEVICE_ROUNDS if where.type == "cuda" else ROUNDS
    found = profile_ops(asked, device=device, threads=threads, rounds=rounds, minutes=minutes * share)
    found = (
        with_collectives(found, where, sizes, group, threads, 60.0 * minutes * (1.0 - share)) if group > 1 else found
    )
    if group <= 1:
        found = replace(found, notes=(*found.notes, "no collectives: there is one device, or they were not asked for"))
    found.save(out)
    return found


def with_collectives(
    found: DeviceProfile, where: torch.device, sizes: Grid, ranks: int, threads: int, seconds: float
) -> DeviceProfile:
    """The profile with collectives among `ranks` local processes, and kernels beside them; what fails becomes a note."""
    backend = "nccl" if where.type == "cuda" else "gloo"
    dtype = _dtypes(where)[0]
    kernels = [op for op in operators(sizes, dtype) if op.kind != "gemm" or op.shape[3] == 1][:OVERLAP_KERNELS]
    limit_s = max(seconds, 30.0)
    counts = sorted({2, *[count for count in (4, 8) if count < ranks], ranks})
    try:
        asked = [one for one in groups.standard() if one.payload_bytes <= _largest_payload(seconds)]
        rows = [
            row for count in counts
            for row in groups.profile_collectives(count, asked, backend=backend, threads=threads, deadline_s=limit_s)
        ]  # fmt: skip
        overlaps = beside.profile_overlaps(kernels, ranks=ranks, backend=backend, threads=threads, deadline_s=limit_s)
    except ClusterError as error:
        return replace(found, notes=(*found.notes, f"collectives were not measured: {error}"))
    return replace(found, collectives=tuple(rows), overlaps=overlaps)


def _largest_payload(seconds: float) -> float:
    """What a group of a budget of seconds can move often enough: its slowest links move some 500 MB/s."""
    return max(float(groups.SIZES[0]), seconds * 5e8 / (20 * 6))


# ---- the device


def torch_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:1`. Raises ConfigError for one that is not here."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; give cpu or cuda") from error
    if found.type not in CEILING_SIDE:
        raise ConfigError(f"device {name!r} cannot be measured; give cpu or cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r}: torch finds {torch.cuda.device_count()} GPUs here; run this on a GPU or give cpu"
        )
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def origin_of(where: torch.device, threads: int) -> Origin:
    """Versions of all that a time depends on, and the size of the cache."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if where.type == "cpu":
        versions["instructions"] = torch.backends.cpu.get_cpu_capability()
        return Origin(kind="cpu", versions=versions, threads=threads, cache_bytes=_cpu_cache_bytes())
    properties = torch.cuda.get_device_properties(where)
    versions["cuda"] = str(torch.version.cuda or torch.version.hip)
    versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if torch.version.cuda and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cache = float(getattr(properties, "L2_cache_size", 0)) or DEFAULT_CACHE_BYTES
    return Origin(kind="cuda", versions=versions, threads=threads, cache_bytes=cache)


def _cpu_cache_bytes() -> float:
    try:
        return (
            float(max(os.sysconf(name) for name in ("SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE")))
            or DEFAULT_CACHE_BYTES
        )
    except (ValueError, OSError):  # this system has no such names
        return DEFAULT_CACHE_BYTES


def _cpu_name(threads: int) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    said = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"cpu {said}, {threads} thread{'s' * (threads > 1)}"


def _room(where: torch.device) -> float:
    if where.type == "cuda":
        return ROOM * float(torch.cuda.mem_get_info(where)[0])
    try:
        free = float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # this system has no such names
        free = MOST_ROOM_BYTES
    return min(MOST_ROOM_BYTES, ROOM * free)


def _dtypes(where: torch.device) -> tuple[str, ...]:
    if where.type == "cpu":
        return ("fp32",)
    return ("bf16", "fp8") if torch.cuda.get_device_capability(where) >= (8, 9) else ("bf16",)


def _grid(name: str) -> Grid:
    if name not in GRIDS:
        raise ConfigError(f"unknown grid {name!r}; known: {', '.join(GRIDS)}")
    return GRIDS[name]


# ---- rows


def _ceilings(ops: Sequence[Op], where: torch.device) -> list[Op]:
    """A large product of every dtype of `ops`, and a large copy: the best that the device reaches."""
    side = CEILING_SIDE[where.type]
    dtypes = sorted({op.dtype for op in ops if op.kind != "pass"} | {"fp32" if where.type == "cpu" else "bf16"})
    copy = pass_op("clone", (int(2 * DEFAULT_CACHE_BYTES / 4),), 2.0, dtype="fp32")
    return [*[gemm_op(side, side, side, dtype=dtype) for dtype in dtypes if dtype != "fp8"], copy]


def _rows(ops: Sequence[Op], outcomes: Sequence[Outcome]) -> tuple[list[OpTime], list[str]]:
    rows: list[OpTime] = []
    notes: list[str] = []
    for op, taken in zip(ops, outcomes, strict=True):
        if not isinstance(taken, Reading):
            notes.append(f"not measured: {base_name(op.name)} {op.shape} {op.dtype}: {taken}")
            continue
        if not taken.exact:
            notes.append(f"{base_name(op.name)}: a copy of as many bytes stood in")
        rows.append(
            OpTime(
                kind=op.kind, name=op.name, dtype=op.dtype, shape=op.shape, flops=op.flops, moved_bytes=op.moved_bytes,
                seconds=taken.seconds, log_std=taken.log_std,
                layout="tn" if op.kind == "gemm" and op.weight_gradient else "",
            )
        )  # fmt: skip
    if not rows:
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(notes))}; give it more minutes")
    late = [note for note in notes if note.endswith("out of time")]
    others = [note for note in notes if not note.endswith("out of time")]
    return rows, [*others, *([f"{len(late)} of {len(ops)} operators were not measured: out of time"] if late else [])]


def _described(where: torch.device, threads: int, rows: Sequence[OpTime]) -> Device:
    """The device by its table, else by the best rates that were reached."""
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else _cpu_name(threads)
    if where.type == "cuda":
        try:
            return known_device(name)
        except ConfigError:
            pass  # no table knows it: the best that it reached is what it has
    flops = {row.dtype: 0.0 for row in rows if row.flops > 0}
    for row in rows:
        if row.flops > 0:
            flops[row.dtype] = max(flops[row.dtype], row.flops / row.seconds)
    moving = [
        row.moved_bytes / row.seconds
        for row in rows
        if row.kind == "pass" and row.moved_bytes > LEAST_STREAMED_BYTES and base_name(row.name) in STREAMS
    ]
    rate = max(moving, default=max(row.moved_bytes / row.seconds for row in rows))
    memory = (
        float(torch.cuda.get_device_properties(where).total_memory) if where.type == "cuda" else
        float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    )  # fmt: skip
    return Device(
        name=name, flops=flops or {"fp32": 1e9}, memory_bytes=memory, memory_bytes_per_s=rate, link_bytes_per_s=rate,
        link="pcie", source="measured: best rates reached",
    )  # fmt: skip
