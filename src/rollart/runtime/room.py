"""Whether a run fits on this machine, told before anything of it is started.

Owns the comparison of what is asked with what is there. Invariants: nothing is started and neither torch nor Ray is
imported, and no model inside a package is converted; limits of a container count where they are lower than the machine's;
every line says asked, available and which key asks. Cores are shared by all roles, so five workers of one thread on two cores
are no error; a worker with more threads than there are cores is. Memory is an estimate from below (activations are not in
it): what it refuses cannot run.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollart.config.explain import FP32_BYTES
from rollart.config.real import engine_of
from rollart.config.schema import EngineConfig, LocalWorld, RunConfig, VllmEngine
from rollart.control.weights import VERSIONS_KEPT
from rollart.core.errors import ClusterError
from rollart.runtime.model_sizes import model_sizes

TRAIN_COPIES = 4
"""fp32 arrays of a parameter's size in a training rank: weights, gradients and AdamW's two moments."""
PASSING_COPIES = 1
"""In each rank, for a while. At the end of a step a copy of its part of the weights, to tell whether they changed. While it
publishes all weights, gathered, and in the first rank their buckets, which take the place of the gradients."""
ENGINE_COPIES = 2
"""In the native engine, of its dtype: what it serves and what it has fetched."""
WORKER_BYTES = 300 << 20
"""Of a worker before it holds anything: the interpreter with torch and transformers (measured: 274 MiB of its own, 312 with
its part of what is shared)."""
VLLM_BYTES = 1600 << 20
"""Of a vLLM server's two processes and shared memory before it holds anything."""
RAY_BYTES = 300 << 20
"""Of Ray's servers and agents together (measured: 292 MiB)."""
SLOW_STORE_BYTES = 10**10
"""Largest object store for which Ray makes do with a file on disk."""
LEAST_STORE_MB = 80
"""Of Ray, and of the configuration."""
GIB = 1 << 30
UNLIMITED = 1 << 60
"""A cgroup of the first version that has no limit says a number near 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is, with the name of what limits it."""

    cores: int
    cores_by: str
    memory_bytes: int
    memory_by: str
    shm_bytes: int
    """Free in /dev/shm."""
    temp_bytes: int
    """Free in the folder for temporary files."""


class Need(NamedTuple):
    """One line of the comparison: amounts in cores or bytes."""

    what: str
    asked: float
    available: float
    by: str
    """What limits it."""
    change: str
    unit: str
    parts: tuple[str, ...] = ()
    """Lines below it: what the amount is made of."""

    @property
    def met(self) -> bool:
        return self.asked <= self.available


def require(config: RunConfig, machine: Machine | None = None) -> None:
    """Raises ClusterError, which lists what is asked and what is there, when the run cannot fit."""
    problem = engine_problem(config)
    if problem is not None:
        raise ClusterError(problem)
    asked = list(needs(config, machine or this_machine()))
    short = [need for need in asked if not need.met]
    if short:
        lines = [line for need in asked for line in (line_of(need), *need.parts)]
        changes = "; ".join(dict.fromkeys(need.change for need in short))
        raise ClusterError("\n".join(["this machine has no room for the run:", *lines, f"use {changes}"]))


def engine_problem(config: RunConfig) -> str | None:
    """What is missing of the engine's own environment; None: nothing, or it has none."""
    engine = config.engine
    if not isinstance(engine, VllmEngine) or os.access(Path(engine.python).expanduser(), os.X_OK):
        return None
    return (
        f"engine.python={engine.python} is not there; `make vllm` makes the environment with vLLM, or name the "
        "interpreter of another one"
    )


def line_of(need: Need) -> str:
    """What is asked and what is there."""
    if need.unit == "cores":
        asked, available = f"{need.asked:.0f}", f"{need.available:.0f} cores"
    else:
        asked, available = f"{need.asked / GIB:.2f} GiB", f"{need.available / GIB:.2f} GiB"
    too_little = "" if need.met else "   <- too little"
    return f"  {need.what:32} asked {asked}, available {available} ({need.by}){too_little}"


def needs(config: RunConfig, machine: Machine) -> Iterator[Need]:
    """Everything that the run asks of the machine, met or not."""
    cores = machine.cores
    for role, asked in (("trainer", config.trainer.threads), ("engine", engine_of(config).threads)):
        key = f"{role}.threads"
        yield Need(key, asked, cores, machine.cores_by, f"{key}={cores} or fewer", "cores")
    if isinstance(config.world, LocalWorld):
        yield _store(config.world.object_store_mb << 20, machine)
    parts = memory_parts(config)
    largest = max(parts, key=lambda name: parts[name])
    yield Need(
        "memory, at least", sum(parts.values()), machine.memory_bytes, machine.memory_by,
        f"less memory, most of which goes into {largest} ({saver(largest, config)})", "bytes",
        tuple(f"    {name:30} {amount / GIB:6.2f} GiB" for name, amount in parts.items()),
    )  # fmt: skip


def _store(asked: int, machine: Machine) -> Need:
    """Ray takes a file in the folder for temporary files where /dev/shm is too small, but not for a large store."""
    room, by = machine.shm_bytes, "free in /dev/shm"
    if asked <= SLOW_STORE_BYTES and machine.temp_bytes > room:
        room, by = machine.temp_bytes, "free in the folder for temporary files"
    change = f"world.object_store_mb={room >> 20} or less, or " if room >> 20 >= LEAST_STORE_MB else ""
    change += "a larger /dev/shm (docker run --shm-size)"
    return Need("world.object_store_mb", asked, room, by, change, "bytes")


def saver(part: str, config: RunConfig) -> str:
    """The keys to which a part of the memory owes its size, as they are."""
    if part == "object store" and isinstance(config.world, LocalWorld):
        return f"world.object_store_mb={config.world.object_store_mb}"
    if part == "engines":
        engine = engine_of(config)
        if on_device(config):
            return f"engine.count={engine.count}, or a smaller model"
        cache = f"kv_gb={engine.kv_gb}" if isinstance(engine, VllmEngine) else f"kv_tokens={engine.kv_tokens}"
        return f"engine.count={engine.count}, engine.{cache}, or a smaller model"
    if part == "trainer":
        kl = f"algorithm.kl.kind={config.algorithm.kl.kind}, " if has_reference(config) else ""
        return f"{kl}trainer.ranks={config.trainer.ranks}, or a smaller model"
    if part == "published":
        return "a smaller model"
    return f"envs.hosts={config.envs.hosts}" if part == "env hosts" else f"world.kind={config.world.kind}"


def memory_parts(config: RunConfig) -> dict[str, int]:
    """Bytes by part. The inline world has all parts in one process, and no store."""
    shape = model_sizes(config)
    weights = FP32_BYTES * shape.parameters
    vllm = isinstance(config.engine, VllmEngine)
    trainer = (TRAIN_COPIES + has_reference(config) + PASSING_COPIES * config.trainer.ranks) * weights
    engines = config.engine.count * sum(one.n_bytes for one in engine_memory(config) if not one.on_device)
    if not isinstance(config.world, LocalWorld):
        return {
            "trainer": trainer, "engines": engines, "published": VERSIONS_KEPT * weights, "this process": WORKER_BYTES,
        }  # fmt: skip
    return {
        "object store": config.world.object_store_mb << 20,
        "trainer": trainer + config.trainer.ranks * WORKER_BYTES,
        "engines": engines + config.engine.count * (WORKER_BYTES + (VLLM_BYTES if vllm else 0)),
        "env hosts": config.envs.hosts * WORKER_BYTES,
        "Ray": RAY_BYTES,
    }


class Held(NamedTuple):
    """A part of what one engine holds when it holds most: while it fetches a version."""

    what: str
    n_bytes: int
    how: str
    on_device: bool = False


def engine_memory(config: RunConfig) -> tuple[Held, ...]:
    """Of one engine, apart from its process. Weights travel in fp32, whatever it computes with."""
    engine, shape = engine_of(config), model_sizes(config)
    width, weights = _width(config), FP32_BYTES * shape.parameters
    tokens = kv_tokens_of(config)
    apart = on_device(config)
    cache = Held("KV cache", kv_token_bytes(config) * tokens, f"{tokens} tokens of {engine.dtype}", apart)
    unpacked = Held("weights in passing", weights, "fp32, as a version was unpacked, until it is laid out")
    if isinstance(engine, VllmEngine):
        served = Held("weights", width * shape.parameters, f"served, {engine.dtype}")
        return (served, unpacked, Held("weights to load", weights, "fp32, a file in shared memory"), cache)
    held = [Held("weights", ENGINE_COPIES * width * shape.parameters, f"served and fetched, {engine.dtype}", apart)]
    if width != FP32_BYTES:  # what the cast made is read back while what came in is still there
        turned = (
            0
            if engine.path == "transformers"
            else width * shape.layers * shape.hidden * (shape.q_width + shape.kv_width)
        )
        read = width * shape.parameters if apart else turned
        held.append(Held("weights read back", read, f"{engine.dtype}, to be compared with what the cast made"))
    return (*held, unpacked, cache)


def on_device(config: RunConfig) -> bool:
    """Whether engines keep weights and cache on an accelerator."""
    return isinstance(config.engine, EngineConfig) and config.engine.device != "cpu"


def device_bytes(config: RunConfig) -> int:
    """What all engines together ask of the one device that they share."""
    return config.engine.count * sum(one.n_bytes for one in engine_memory(config) if one.on_device)


def _width(config: RunConfig) -> int:
    """Bytes of a number in an engine's weights and cache."""
    return 2 if config.engine.dtype == "bf16" else FP32_BYTES


def has_reference(config: RunConfig) -> bool:
    """Whether the trainer keeps a copy of the weights for the KL term."""
    return config.algorithm.kl.kind != "none"


def kv_tokens_of(config: RunConfig) -> int:
    """Tokens of key/value cache in an engine."""
    engine = engine_of(config)
    return (
        (engine.kv_gb << 30) // max(1, kv_token_bytes(config)) if isinstance(engine, VllmEngine) else engine.kv_tokens
    )


def kv_token_bytes(config: RunConfig) -> int:
    """Of one token, keys and values of all layers, in an engine."""
    shape = model_sizes(config)
    return _width(config) * 2 * shape.layers * shape.kv_width


# --- the machine ---------------------------------------------------------------------------------------------------------


def this_machine(root: Path = Path("/")) -> Machine:
    """What this process may use. `root`: where /proc and /sys are looked for."""
    cores, cores_by = len(os.sched_getaffinity(0)), "this machine"
    memory, memory_by = _total_memory(root), "this machine"
    for group in _groups(root):
        allowed = _core_limit(group)
        # part of a core still runs a thread, slowly
        if allowed is not None and math.ceil(allowed) < cores:
            cores, cores_by = max(1, math.ceil(allowed)), f"limit of the container: {allowed:g}"
        limit = _memory_limit(group)
        if limit is not None and limit < memory:
            memory, memory_by = limit, "limit of the container"
    return Machine(
        cores=cores, cores_by=cores_by, memory_bytes=memory, memory_by=memory_by,
        shm_bytes=_free(root / "dev" / "shm"), temp_bytes=_free(Path(tempfile.gettempdir())),
    )  # fmt: skip


def _total_memory(root: Path) -> int:
    for line in (root / "proc" / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) << 10
    return UNLIMITED


def _free(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _groups(root: Path) -> Iterator[Path]:
    """The control groups of this process with all above them, of both versions, as they are seen from here.

    In a container the path may be that of the host, of which only the end, or nothing, is mounted.
    """
    base = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = base if not controllers else base / controllers
        if controllers and controllers not in ("memory", "cpu", "cpu,cpuacct"):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _core_limit(group: Path) -> float | None:
    words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
    if len(words) < 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _words(group / name)
        if words and words[0] != "max" and int(words[0]) < UNLIMITED:
            return int(words[0])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
