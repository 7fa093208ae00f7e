"""Whether a run fits on this machine, told before anything of it is started.

Owns the comparison of what is asked with what is there. Invariants: nothing is started and neither torch nor Ray is
imported, and no model inside a package is converted; limits of a container count where they are lower than the machine's;
every line says asked, available and which key asks. Cores are shared by all roles, so five workers of one thread on two cores
are no error; a worker with more threads than there are cores is. Memory is an estimate from below (activations are not in
it): what it refuses cannot run.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollart.config.explain import FP32_BYTES, parameters_of
from rollart.config.real import engine_of, model_of
from rollart.config.schema import CharsTokenizer, LocalWorld, RunConfig, ScratchModel, VllmEngine
from rollart.control.weights import VERSIONS_KEPT
from rollart.core.errors import ClusterError, ConfigError
from rollart.runtime.gguf_header import header_of
from rollart.runtime.pretrained import gguf_of, package_of

TRAIN_COPIES = 4
"""fp32 arrays of a parameter's size in a training rank: weights, gradients and AdamW's two moments."""
PASSING_COPIES = 1
"""In each rank, for a while. At the end of a step a copy of its part of the weights, to tell whether they changed. While it
publishes all weights, gathered, and in the first rank their buckets, which take the place of the gradients."""
ENGINE_COPIES = 2
"""In an engine: what it serves and what it has fetched."""
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
    cache = kv_token_bytes(config) * kv_tokens_of(config)
    trainer = (TRAIN_COPIES + has_reference(config) + PASSING_COPIES * config.trainer.ranks) * weights
    engines = config.engine.count * (ENGINE_COPIES * weights + cache)
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
    return (2 if config.engine.dtype == "bf16" else FP32_BYTES) * 2 * shape.layers * shape.kv_width


# --- the model's sizes ---------------------------------------------------------------------------------------------------


UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, struct.error)
"""What reading a foreign model's description may raise."""


class ModelSizes(NamedTuple):
    parameters: int
    layers: int
    kv_width: int
    """Elements of a token's keys in one layer."""
    hidden: int
    ffn: int
    vocabulary: int


def model_sizes(config: RunConfig) -> ModelSizes:
    """Zeros for a folder or file that cannot be read: building the model tells what is wrong with it. Raises ConfigError for a
    package that is not installed."""
    model = model_of(config)
    if isinstance(model, ScratchModel):
        # of a tokenizer from a folder the size is not known here; its part is left out of an estimate from below
        vocabulary = len(config.tokenizer.alphabet) + 1 if isinstance(config.tokenizer, CharsTokenizer) else 0
        width = model.kv_heads * (model.hidden // model.heads)
        return ModelSizes(parameters_of(model, vocabulary), model.layers, width, model.hidden, model.ffn, vocabulary)
    try:
        return sizes_of_path(model.path)
    except ConfigError:
        raise
    except UNREADABLE:
        return ModelSizes(0, 0, 0, 0, 0, 0)


def sizes_of_path(path: str) -> ModelSizes:
    """Of a model in a folder, or inside a package, which is not converted for it. Raises ConfigError for a package that is not
    installed, or one of `UNREADABLE`."""
    package = package_of(path)
    return _of_folder(Path(path)) if package is None else _of_gguf(gguf_of(package))


@functools.cache
def _of_gguf(path: Path) -> ModelSizes:
    header = header_of(path)
    kind = header.facts["general.architecture"]
    layers, hidden, ffn, heads = (
        int(header.facts[f"{kind}.{name}"])
        for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    )
    head = int(header.facts.get(f"{kind}.attention.key_length", hidden // heads))
    kv_heads = int(header.facts.get(f"{kind}.attention.head_count_kv", heads))
    return ModelSizes(header.elements, layers, kv_heads * head, hidden, ffn, header.tensors["token_embd.weight"][1])


def _of_folder(folder: Path) -> ModelSizes:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = told["num_attention_heads"]
    head = told.get("head_dim") or told["hidden_size"] // heads
    parameters = sum(_elements(path) for path in folder.glob("*.safetensors"))
    return ModelSizes(
        parameters, told["num_hidden_layers"], (told.get("num_key_value_heads") or heads) * head,
        told["hidden_size"], told.get("intermediate_size") or 0, told.get("vocab_size") or 0,
    )  # fmt: skip


def _elements(path: Path) -> int:
    """Elements of all tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        head: Mapping[str, Mapping[str, list[int]]] = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__")


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
