"""What this machine has, looked at and tried rather than assumed: limits, devices, writable folders, a start of Ray.

Invariant: no process stays behind. A finding says what was found, whether it will do, and what to do where it will not. torch
and Ray are imported only when they are installed, Ray is started only when asked for.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.config.explain import FP32_BYTES
from rollart.config.real import engine_of, model_of
from rollart.config.schema import EngineConfig, HFTokenizer, LocalWorld, PretrainedModel, RunConfig, TrainerConfig
from rollart.core.errors import ClusterError, ConfigError, StoreError
from rollart.runtime import compiled, room
from rollart.runtime.memory_plan import Part, memory_plan
from rollart.runtime.model_sizes import UNREADABLE, sizes_of_path
from rollart.runtime.pretrained import is_converted, package_of

LEAST_FILES = 1024
"""Descriptors that Ray's servers and a few dozen workers keep open on one machine."""
SMALL_STORE_MB = 80
"""Of the Ray that is started to see whether it starts: Ray's own least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    area: str
    what: str
    found: str
    will_do: bool = True
    fix: str = ""


def machine_findings(machine: room.Machine) -> Iterator[Finding]:
    """Cores, memory, shared memory, file descriptors."""
    yield Finding(area="machine", what="cores", found=f"{machine.cores} ({machine.cores_by})")
    yield Finding(area="machine", what="memory", found=f"{_gib(machine.memory_bytes)} ({machine.memory_by})")
    yield Finding(area="machine", what="/dev/shm", found=f"{_gib(machine.shm_bytes)} free")
    yield Finding(
        area="machine", what="temporary files", found=f"{_gib(machine.temp_bytes)} free in {tempfile.gettempdir()}"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = soft == resource.RLIM_INFINITY or soft >= LEAST_FILES
    yield Finding(
        area="machine", what="open files", found=f"{soft} (may be raised to {most})", will_do=enough,
        fix="" if enough else f"ulimit -n {LEAST_FILES} or more before the start",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator that torch can compute on."""

    name: str
    memory_bytes: int
    """All of it, free or not."""


def devices_of_torch() -> tuple[Device, ...] | None:
    """CUDA devices in the order of their numbers; None: torch is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return ()
    all_ = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Device(name=has.name, memory_bytes=has.total_memory) for has in all_)


def device_findings(devices: Sequence[Device] | None) -> Iterator[Finding]:
    """Accelerators, as torch sees them."""
    if not devices:
        found = "unknown: torch is not installed" if devices is None else "none: everything runs on the CPU"
        yield Finding(area="devices", what="accelerators", found=found)
    for index, has in enumerate(devices or ()):
        yield Finding(area="devices", what=f"cuda:{index}", found=f"{has.name}, {_gib(has.memory_bytes)}")


def engine_device_finding(config: RunConfig, devices: Sequence[Device] | None) -> Finding | None:
    """Whether the device that engines are to compute on is there; None where they need none, or torch cannot be asked."""
    if not room.on_device(config) or devices is None:
        return None
    if devices:
        return Finding(area="this run", what="engine.device", found=f"cuda: {devices[0].name}")
    return Finding(
        area="this run", what="engine.device", found="cuda, but torch finds no CUDA device", will_do=False,
        fix="use engine.device=cpu, or a machine with a CUDA device and a torch that is built for it",
    )  # fmt: skip


def device_memory_finding(config: RunConfig, devices: Sequence[Device] | None) -> Finding | None:
    """Whether weights and cache of the engines have room on the first device, which all of them use; None as above."""
    if not room.on_device(config) or not devices:
        return None
    asked, has = room.device_bytes(config), devices[0].memory_bytes
    fits = asked <= has
    return Finding(
        area="this run", what="memory of cuda:0", found=f"asked {_gib(asked)}, available {_gib(has)}", will_do=fits,
        fix="" if fits else "lower engine.kv_tokens or engine.count, or use engine.dtype=bf16 or a smaller model",
    )  # fmt: skip


def output_finding(output_dir: str) -> Finding:
    """Whether runs can be written there, by writing a file."""
    folder = Path(output_dir).expanduser()
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    at = f"{folder}" if nearest == folder else f"{folder} (to be made in {nearest})"
    if nearest.is_dir():
        try:
            with tempfile.NamedTemporaryFile(dir=nearest, prefix=".rollart-doctor-"):
                free = os.statvfs(nearest)
            return Finding(
                area="machine", what="output_dir", found=f"{at}: writable, {_gib(free.f_bavail * free.f_frsize)} free"
            )
        except OSError as error:
            why = error.strerror or str(error)
    else:
        why = f"{nearest} is not a folder"
    return Finding(
        area="machine", what="output_dir", found=f"{at}: {why}", will_do=False, fix="output_dir=A_FOLDER_YOU_OWN"
    )


def ray_finding() -> Finding:
    """A Ray of one machine, started, asked for a task, and ended."""
    from rollart.runtime.actors import start_ray, stop_ray

    begun = time.monotonic()
    try:
        start_ray(LocalWorld(kind="local", object_store_mb=SMALL_STORE_MB), namespace="doctor")
        import ray

        answer = ray.get(ray.remote(_pid).options(num_cpus=0).remote(), timeout=60)
    except ClusterError as error:
        return Finding(
            area="Ray",
            what="a start",
            found=str(error),
            will_do=False,
            fix="see the error; world.kind=inline needs no Ray",
        )
    finally:
        stop_ray()
    return Finding(
        area="Ray", what="a start", found=f"a worker (pid {answer}) answered after {time.monotonic() - begun:.1f} s"
    )


def _pid() -> int:
    return os.getpid()


def compiler_finding(config: RunConfig | None) -> Finding | None:
    """Whether the libraries that the run has a use for can be had, by compiling them; None where it has none."""
    engine, trainer = (EngineConfig(), TrainerConfig()) if config is None else (engine_of(config), config.trainer)
    uses: list[tuple[str, str, tuple[Path, ...], str, str]] = []
    if isinstance(engine, EngineConfig) and engine.device == "cpu":
        uses.append(("engine", engine.native, compiled.DECODING, "kernel for decoding", compiled.WITHOUT_KERNEL))
    uses.append(("trainer", trainer.native, compiled.TRAINING, "passes of training", compiled.WITHOUT_PASSES))
    uses = [use for use in uses if use[1] != "off"]
    if not uses:
        return None
    answers = [(use, compiled.library(use[2])) for use in uses]
    missing = [(use, answer) for use, answer in answers if isinstance(answer, str)]
    if not missing:
        return Finding(
            area="machine", what="C compiler", found=f"compiles the {' and the '.join(use[3] for use in uses)}"
        )
    needed = [f"{use[0]}.native=auto" for use, _ in missing if use[1] == "required"]
    whys = "; ".join(dict.fromkeys(answer for _, answer in missing))
    return Finding(
        area="machine",
        what="C compiler",
        found=f"none: {whys}; {'; '.join(use[4] for use, _ in missing)}",
        will_do=not needed,
        fix="install a C compiler, or mend what it says" + "".join(f", or use {other}" for other in needed),
    )


def needs_findings(config: RunConfig) -> Iterator[Finding]:
    """Models and interpreters that the run names, looked for and not loaded."""
    for path in dict.fromkeys(_paths(config)):
        yield _model_finding(path)
    problem = room.engine_problem(config)
    if problem is not None:
        yield Finding(area="this run", what="engine.python", found="not there", will_do=False, fix=problem)


def _paths(config: RunConfig) -> Iterator[str]:
    """Of the model, and of the tokenizer where it comes from a package as well."""
    model = model_of(config)
    if isinstance(model, PretrainedModel):
        yield model.path
    if isinstance(config.tokenizer, HFTokenizer) and package_of(config.tokenizer.path) is not None:
        yield config.tokenizer.path


def _model_finding(path: str) -> Finding:
    what = f"model {path}"
    try:
        sizes, package = sizes_of_path(path), package_of(path)
        n_bytes = FP32_BYTES * sizes.parameters
        later = package is not None and not is_converted(package)
    except (ConfigError, StoreError) as error:
        return Finding(area="this run", what=what, found="not to be had", will_do=False, fix=str(error))
    except UNREADABLE as error:
        return Finding(
            area="this run", what=what, found=f"cannot be read: {type(error).__name__}: {error}", will_do=False,
            fix="a local folder in the Hugging Face layout, with config.json and safetensors files",
        )  # fmt: skip
    found = f"{sizes.parameters / 1e6:.1f} M parameters, {_gib(n_bytes)} in fp32"
    found += "; converted on first use, into the cache of the user" * later
    return Finding(area="this run", what=what, found=found)


def room_findings(config: RunConfig, machine: room.Machine) -> Iterator[Finding]:
    """What the run asks of the machine against what is there."""
    for need in room.needs(config, machine):
        found = " ".join(room.line_of(need).split()).removeprefix(need.what).strip()
        yield Finding(
            area="this run", what=need.what, found=found, will_do=need.met, fix="" if need.met else f"use {need.change}"
        )


def plan_findings(config: RunConfig, machine: room.Machine) -> tuple[list[Part], Finding]:
    """The parts of the memory, largest first, and whether all those of the host, activations too, fit."""
    parts = sorted(memory_plan(config), key=lambda part: -part.n_bytes)
    host = [part for part in parts if part.place == "host"]
    total = sum(part.n_bytes for part in host)
    fits = total <= machine.memory_bytes
    changes = "; ".join(f"{part.what}: {part.keys}" for part in host[:2])
    return parts, Finding(
        area="this run", what="memory, all parts", found=f"{_gib(total)} of {_gib(machine.memory_bytes)}", will_do=fits,
        fix="" if fits else f"change what is largest ({changes})",
    )  # fmt: skip


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / room.GIB:.2f} GiB"
