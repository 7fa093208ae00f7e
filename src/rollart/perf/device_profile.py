"""What was measured of one device: operators, collectives, kernels beside a collective, and the host that launches them.

Owns the records, their file (`rollart profile-device`) and what makes a file credible. Invariant: every number of a
profile was measured on one device under one set of software versions, none says more than `ABOVE_PEAK` of what the device
can do, and no operator is twice in it. Why: published tables of operators hold rates above the peak and newer software
doubles a kernel's speed, so a table that is not checked, or is pieced together, is worse than a law.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from rollart.core.errors import ConfigError
from rollart.perf.devices import Device
from rollart.perf.overlap import DEFAULT_SMS, Kernel, OverlapModel
from rollart.perf.overlap_fit import Measured, fit

FORMAT = "rollart.perf.device_profile/1"
REMEDY = "write it anew with `rollart profile-device --out FILE`"
ABOVE_PEAK = 1.05
"""Clocks are 5 % above the specified boost at most; what exceeds that was not computed, or not waited for."""
SLOWER = 1.3
"""An operator that takes so much longer than one that is larger in every respect was disturbed: tiles and waves explain
less.
"""
IN_CACHE = 4.0
"""Bytes in caches: operators that move more than so many of them are bound by memory, whose peak then counts."""
_LEAST_MEASURED_S = 20e-6
"""Shorter ones are as long as their launch, whatever their size, and are not compared."""

T = TypeVar("T")


class Signature(NamedTuple):
    """What makes two operators the same kernel on the same amount of work."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    amount: int
    """Bytes of a pass, FLOPs of attention (causal or not), 0 of a product."""
    layout: str
    """Of a product: `tn` for weight gradients, else empty."""


def base_name(name: str) -> str:
    """`mul` of `aten.mul.Tensor`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


class Work(NamedTuple):
    """What an operator does, wherever it stands."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    flops: float
    moved_bytes: float
    layout: str = ""

    @property
    def signature(self) -> Signature:
        """A product is known by its shape, whatever called it."""
        amount = {"gemm": 0, "pass": round(self.moved_bytes)}.get(self.kind, round(self.flops))
        called = base_name(self.name) if self.kind == "pass" else ""
        return Signature(self.kind, called, self.dtype, self.shape, amount, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One operator alone; the fields of work are those of a traced operator."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    flops: float
    moved_bytes: float
    seconds: float
    log_std: float
    """Of the log of `seconds`, by repetition."""
    layout: str = ""

    @property
    def work(self) -> Work:
        return Work(self.kind, self.name, self.dtype, self.shape, self.flops, self.moved_bytes, self.layout)

    @property
    def signature(self) -> Signature:
        return self.work.signature


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """One collective of `ranks` ranks spread over `domains`; bytes as `collectives.Request` counts them."""

    op: str
    library: str
    ranks: int
    domains: int
    payload_bytes: float
    seconds: float
    log_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTime:
    """A kernel beside a collective for a share of its time."""

    kernel: str
    solo_s: float
    seconds: float
    overlap_ratio: float
    collective: str
    payload_bytes: float
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of the host per operator that it launches; `serial`: the host is the device, so they add to the kernels'."""

    op_s: float
    """Of an operator that nothing records, its call included."""
    recorded_op_s: float
    """Of one that autograd records."""
    backward_op_s: float
    """Of one node of the backward pass."""
    serial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a profile comes from."""

    kind: str
    """cpu or cuda."""
    versions: Mapping[str, str]
    """Of all software that a time depends on: torch, the driver, the libraries of products and collectives."""
    threads: int = 1
    cache_bytes: float = 0.0
    """Of the last level of cache."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """All that was measured of a device. `device` holds the spec sheet's rates or, of a device that no table knows, the
    best that were reached.
    """

    device: Device
    origin: Origin
    ops: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[OverlapTime, ...] = ()
    host: HostTimes | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_distinct(self.ops)
        for row in self.ops:
            wrong = implausible(row, self.device, self.origin)
            if wrong:
                raise ConfigError(f"profile: {wrong}: the time cannot be right; {REMEDY}")

    def save(self, path: Path) -> None:
        """Write JSON. Raises ConfigError when the file cannot be written."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}; name another file") from error


def suspects(profile: DeviceProfile) -> dict[Signature, str]:
    """Operators that took longer than larger ones of their kind, and why; they say nothing of their neighbours."""
    found: dict[Signature, str] = {}
    groups: dict[tuple[str, ...], list[OpTime]] = {}
    for row in profile.ops:
        key = (row.kind, row.signature.name, row.dtype, row.layout, str(len(row.shape)))
        groups.setdefault(key, []).append(row)
    for rows in groups.values():
        by_time = sorted(rows, key=lambda row: row.seconds)
        for at, small in enumerate(by_time):
            larger = next((row for row in by_time[:at] if _exceeds(row, small)), None)
            if larger and small.seconds > max(SLOWER * larger.seconds, _LEAST_MEASURED_S):
                found[small.signature] = (
                    f"{small.kind} {small.name} {small.shape} {small.dtype} took {small.seconds:.3g} s, the larger "
                    f"{larger.shape} {larger.seconds:.3g} s: not interpolated from"
                )
    return found


def _exceeds(large: OpTime, small: OpTime) -> bool:
    if large.flops < small.flops or large.moved_bytes < small.moved_bytes or large.shape == small.shape:
        return False
    return all(a >= b for a, b in zip(large.shape, small.shape, strict=True))


def merged(profiles: Sequence[DeviceProfile]) -> DeviceProfile:
    """One profile of several of the same device, the first one's row where two have the same operator.

    Raises ConfigError when device or software differ.
    """
    if not profiles:
        raise ConfigError("no profile was given; name at least one file")
    first = profiles[0]
    for other in profiles[1:]:
        differing = _differing(first, other)
        if differing:
            raise ConfigError(f"profiles of unlike origin cannot be one: {'; '.join(differing)}; measure both anew")
    ops = {row.signature: row for profile in reversed(profiles) for row in profile.ops}
    return dataclasses.replace(
        first, ops=tuple(ops.values()),
        collectives=tuple(dict.fromkeys(row for profile in profiles for row in profile.collectives)),
        overlaps=tuple(dict.fromkeys(row for profile in profiles for row in profile.overlaps)),
        notes=tuple(dict.fromkeys(note for profile in profiles for note in profile.notes)),
    )  # fmt: skip


def _differing(first: DeviceProfile, other: DeviceProfile) -> list[str]:
    said = {
        "device": (first.device.name, other.device.name),
        "kind": (first.origin.kind, other.origin.kind),
        "threads": (str(first.origin.threads), str(other.origin.threads)),
    }
    for name in sorted({*first.origin.versions, *other.origin.versions}):
        said[name] = (first.origin.versions.get(name, "absent"), other.origin.versions.get(name, "absent"))
    return [f"{name} {one} and {two}" for name, (one, two) in said.items() if one != two]


def overlap_model(profile: DeviceProfile) -> OverlapModel | None:
    """What the profile's kernels beside collectives say; None: nothing was measured."""
    rows = [
        Measured(
            kernel=Kernel(name=row.kernel, solo_s=row.solo_s, sms=profile.device.sms or DEFAULT_SMS),
            overlap_ratio=row.overlap_ratio, seconds=row.seconds,
        )
        for row in profile.overlaps
    ]  # fmt: skip
    return fit(rows) if any(row.overlap_ratio > 0 for row in rows) else None


# ---- what is refused


def _check_numbers(profile: DeviceProfile) -> None:
    rows: Iterable[Any] = (*profile.ops, *profile.collectives, *profile.overlaps)
    for row in rows:
        for name in ("seconds", "solo_s", "payload_bytes"):
            value = getattr(row, name, 1.0)
            if not 0.0 < value < math.inf:
                raise ConfigError(f"profile: {name} of {row} is {value}, not a finite number above 0; {REMEDY}")
        if not 0.0 <= getattr(row, "log_std", 0.0) < math.inf:
            raise ConfigError(f"profile: log_std of {row} is not a finite number of 0 or more; {REMEDY}")
    if not profile.origin.versions.get("torch"):
        raise ConfigError(f"profile: the version of torch is not recorded, so its times may be of any; {REMEDY}")


def _check_distinct(ops: Sequence[OpTime]) -> None:
    seen: set[Signature] = set()
    for row in ops:
        if row.signature in seen:
            raise ConfigError(f"profile: {row.name} {row.shape} {row.dtype} is in it twice; keep one or {REMEDY}")
        seen.add(row.signature)


def implausible(row: OpTime, device: Device, origin: Origin) -> str | None:
    """Why the time of an operator cannot be right on `device`; None: it can."""
    peak = device.peak_flops(row.dtype) if row.flops > 0 else math.inf
    if row.flops > ABOVE_PEAK * peak * row.seconds:
        return (
            f"{row.name} {row.shape} {row.dtype} would run at {row.flops / row.seconds / 1e12:.4g} TFLOP/s, "
            f"{device.name} has {peak / 1e12:.4g}"
        )
    if row.kind == "pass" and row.moved_bytes > IN_CACHE * origin.cache_bytes > 0:
        rate = row.moved_bytes / row.seconds
        if rate > ABOVE_PEAK * device.memory_bytes_per_s:
            return (
                f"{row.name} {row.shape} {row.dtype} would move {rate / 1e9:.4g} GB/s, {device.name} has "
                f"{device.memory_bytes_per_s / 1e9:.4g}"
            )
    return None


# ---- the file


def read_profile(path: Path) -> DeviceProfile:
    """Read what `DeviceProfile.save` wrote. Raises ConfigError with the file and the field for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}; write one with `rollart profile-device --out {path}`") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {REMEDY}") from error
    form = found.pop("format", None) if isinstance(found, dict) else None
    if form != FORMAT:
        raise ConfigError(f"{path} has format {form}, this version reads {FORMAT}; {REMEDY}")
    try:
        return DeviceProfile(
            device=_row(Device, found["device"], "device"),
            origin=_row(Origin, found["origin"], "origin"),
            ops=_rows(OpTime, found["ops"], "ops"),
            collectives=_rows(CollectiveTime, found["collectives"], "collectives"),
            overlaps=_rows(OverlapTime, found["overlaps"], "overlaps"),
            host=None if found["host"] is None else _row(HostTimes, found["host"], "host"),
            notes=tuple(found["notes"]),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}; {REMEDY}") from error


def _rows(cls: type[T], entries: Sequence[Mapping[str, Any]], at: str) -> tuple[T, ...]:
    return tuple(_row(cls, entry, f"{at}[{index}]") for index, entry in enumerate(entries))


def _row(cls: type[T], entry: Mapping[str, Any], at: str) -> T:
    """A dataclass from plain values. What is unknown or of another type is an error that names its place."""
    hints = get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in hints:
            raise ValueError(f"{at}.{name} is not known")
        wanted = hints[name]
        if get_origin(wanted) is tuple:
            made[name] = tuple(value)
            continue
        fits: Any = {float: int | float, int: int, str: str, bool: bool}.get(wanted, object)
        if not isinstance(value, fits) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{at}.{name}={value!r} is not {getattr(wanted, '__name__', wanted)}")
        made[name] = float(value) if wanted is float else value
    return cls(**made)
