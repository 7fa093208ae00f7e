"""Devices: what the spec sheet of an accelerator says, in SI units, found by the name that people write.

Owns: the table of chips (`tables/devices.json`) and the reading of names. Invariant: peaks are dense (no sparsity) and per
device as software sees it; memory is what the driver reports, links are per direction. Why: every cost model of the
package starts from these few public numbers, so a device that is not in the table needs nothing but its spec sheet.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rollart.core.errors import ConfigError
from rollart.perf.names import best_entries, unknown, words

GIB = 1 << 30
DEFAULT_LAUNCH_S = 3e-6
"""A kernel that does nothing: the constant of aiconfigurator's roofline, close to what CUDA launches cost."""
_SIZE = re.compile(r"(\d+)\s*gi?b?(?![a-z/])")
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*tb/s")
_LIMIT = re.compile(r"(\d{2,4})\s*w\b")
_FORMS = ("sxm", "pcie", "nvl")
_STAND_INS = {
    "fp4": ("fp8", "bf16", "fp16"), "fp8": ("bf16", "fp16"), "int8": ("fp8", "bf16", "fp16"), "tf32": ("fp32",),
    "fp16": ("bf16",), "bf16": ("fp16", "fp32"), "fp32": (),
}  # fmt: skip
"""What computes a dtype that the chip has no units for: weights are unpacked to the next wider one."""
OTHER_MEMORY = 0.5
"""A size that is further than this from every variant is not the device's memory (`GH200 480GB` names its host's)."""
SAME_MEMORY = 0.06
"""A size within 6 % of an entry's is that entry: 80 GB, 80 GiB and the 79.6 GiB of the driver are one memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator. Rates are peaks of the spec sheet; what software reaches is the business of the cost models."""

    name: str
    flops: Mapping[str, float]
    """Dense FLOP/s by dtype: bf16 (fp16 alike), fp8, fp4, tf32, fp32, int8; what is absent has no units of its own."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To its peers in the node, per direction, all links together."""
    link: str = "nvlink"
    """nvlink (switched or all to all), bridge (pairs), fabric (other vendors), pcie."""
    sms: int = 0
    """Streaming multiprocessors or compute units; 0: not known, wave effects are left out."""
    power_w: float = 0.0
    launch_s: float = DEFAULT_LAUNCH_S
    family: str = ""
    """Architecture: kernels of one generation share their efficiency."""
    source: str = "user"

    def __post_init__(self) -> None:
        numbers = {
            "memory_bytes": self.memory_bytes, "memory_bytes_per_s": self.memory_bytes_per_s,
            "link_bytes_per_s": self.link_bytes_per_s, "launch_s": self.launch_s,
            **{f"flops[{dtype}]": value for dtype, value in self.flops.items()},
        }  # fmt: skip
        for label, value in numbers.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"device {self.name!r}: {label} is {value}; give a finite number above 0")
        if not self.flops or not set(self.flops) <= set(_STAND_INS):
            raise ConfigError(
                f"device {self.name!r}: flops has dtypes {sorted(self.flops)}; known: {sorted(_STAND_INS)}"
            )

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s with which `dtype` is computed, that of the next wider one where the chip has no units for it."""
        return self.flops[self.computes(dtype)]

    def computes(self, dtype: str) -> str:
        """The dtype in which operands of `dtype` are multiplied on this chip."""
        if dtype not in _STAND_INS:
            raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_STAND_INS)}")
        for candidate in (dtype, *_STAND_INS[dtype]):
            if candidate in self.flops:
                return candidate
        raise ConfigError(f"device {self.name!r} has no rate for {dtype}; it has {', '.join(self.flops)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    device: Device
    form: str = ""
    needs: tuple[str, ...] = field(default=())


def _entry(row: Mapping[str, Any]) -> _Entry:
    device = Device(
        name=row["name"], flops={dtype: tera * 1e12 for dtype, tera in row["tflops"].items()},
        memory_bytes=row["memory_gib"] * GIB, memory_bytes_per_s=row["memory_gb_per_s"] * 1e9,
        link_bytes_per_s=row["link_gb_per_s"] * 1e9, link=row["link"], sms=row["sms"], power_w=row["power_w"],
        family=row["family"], source=row["source"],
    )  # fmt: skip
    return _Entry(device=device, form=row.get("form", ""), needs=words(row["chip"]))


@cache
def _table() -> dict[str, _Entry]:
    text = files("rollart.perf").joinpath("tables/devices.json").read_text(encoding="utf-8")
    return {row["name"]: _entry(row) for row in json.loads(text)["devices"]}


def known_devices() -> tuple[str, ...]:
    """Names of the table, the usual form of a chip first."""
    return tuple(_table())


def device(name: str, extra: Mapping[str, Device] | None = None) -> Device:
    """The device that `name` means: `H100 SXM`, `A100-SXM4-80GB`, `NVIDIA H200`; notes in parentheses are ignored.

    Form and memory choose among the variants of a chip, else its usual variant is taken. A memory size, a memory bandwidth
    (`2.4TB/s`) or a power limit (`500W`) that the name states replaces the table's. `extra` holds the user's own devices,
    found by exact name. An unknown name raises `ConfigError` with the nearest known ones.
    """
    if extra and name in extra:
        return extra[name]
    table = _table()
    fits = best_entries(name, {key: entry.needs for key, entry in table.items()})
    if not fits:
        raise unknown("device", name, [*table, *(extra or ())], "or define it with its peak rates and memory")
    text = name.lower()
    size = _SIZE.search(text)
    form = next((form for form in _FORMS if any(word.startswith(form) for word in words(name))), "")
    wanted = float(size[1]) * GIB if size else None
    if wanted and min(abs(table[key].device.memory_bytes / wanted - 1) for key in fits) > OTHER_MEMORY:
        wanted = None

    def distance(key: str) -> tuple[bool, float]:
        entry = table[key]
        off = abs(entry.device.memory_bytes / wanted - 1) if wanted else 0.0
        return bool(form) and entry.form != form, off

    found = table[min(fits, key=distance)].device
    return _as_stated(found, wanted, _BANDWIDTH.search(text), _LIMIT.search(text))


def _as_stated(
    found: Device, memory: float | None, bandwidth: re.Match[str] | None, limit: re.Match[str] | None
) -> Device:
    if memory and abs(found.memory_bytes / memory - 1) > SAME_MEMORY:
        found = replace(found, memory_bytes=memory)
    if bandwidth:
        found = replace(found, memory_bytes_per_s=float(bandwidth[1]) * 1e12)
    if limit:
        found = replace(found, power_w=float(limit[1]))
    return found
