"""What an engine holds while it fetches a version is what is planned for it, on the host and on a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollart.config.schema import RunConfig
from rollart.recipes.registry import resolve
from rollart.runtime import room
from rollart.runtime.doctor import Device, device_findings, device_memory_finding, engine_device_finding, plan_findings
from rollart.runtime.memory_plan import memory_plan
from rollart.runtime.model_sizes import model_sizes

MODEL = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1536, "max_positions": 64}
"""7 M parameters, of which queries and keys are a sixth."""
MACHINE = room.Machine(
    cores=2, cores_by="this machine", memory_bytes=64 * room.GIB, memory_by="this machine", shm_bytes=8 * room.GIB,
    temp_bytes=8 * room.GIB,
)  # fmt: skip
MEASURE = """
import asyncio
from pathlib import Path
import torch
from rollart.config.schema import EngineConfig, ScratchModel
from rollart.runtime.engine.actor import EngineActor
from rollart.runtime.weights import manifest, pack

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

async def serve_and_fetch(dtype):
    engine = EngineActor(ScratchModel(**MODEL), 97, EngineConfig(dtype=dtype, kv_tokens=64, max_live=1))
    named = engine._core._backend.new_weights().named
    index, buckets = pack({name: torch.zeros(size) for name, (_, size) in named.items()}, 1 << 23)
    del named
    before = status("VmRSS")
    await engine.prefetch(manifest(1, index, buckets, ""))
    await engine.apply(1, "rebuild", 0.0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    await engine.prefetch(manifest(2, index, buckets, ""))
    return status("VmHWM") - before

for dtype in ("fp32", "bf16"):
    print(asyncio.run(serve_and_fetch(dtype)))
"""


def config(**sections: Any) -> RunConfig:
    words = [f"{dotted.replace('__', '.')}={value}" for dotted, value in sections.items()]
    return resolve("first_run", [*(f"model.{key}={value}" for key, value in MODEL.items()), *words]).config


def by_name(asked: RunConfig) -> dict[str, int]:
    return {one.what: one.n_bytes for one in room.engine_memory(asked)}


def test_an_engine_that_fetches_a_version_holds_what_is_planned_for_it() -> None:
    """Of a process that gives back what it frees, so that only what is held at once counts."""
    done = subprocess.run(
        [sys.executable, "-c", f"MODEL = {MODEL}\n{MEASURE}"], capture_output=True, text=True, check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for dtype, peak in zip(("fp32", "bf16"), map(int, done.stdout.split()), strict=True):
        planned = sum(by_name(config(engine__dtype=dtype, engine__kv_tokens=64)).values())
        assert 0.9 < peak / planned < 1.1, f"{dtype}: {peak} bytes where {planned} are planned"


def test_weights_take_the_bytes_of_the_dtype_and_come_in_fp32() -> None:
    parameters = model_sizes(config()).parameters
    whole, half = by_name(config()), by_name(config(engine__dtype="bf16"))
    assert (whole["weights"], half["weights"]) == (8 * parameters, 4 * parameters)
    assert whole["weights in passing"] == half["weights in passing"] == 4 * parameters
    assert whole["KV cache"] == 2 * half["KV cache"]
    assert half["weights read back"] == 2 * 2 * 2 * 512 * 512, "queries and keys are laid out anew"
    assert by_name(config(engine__dtype="bf16", engine__path="transformers"))["weights read back"] == 0


def test_the_plan_of_the_language_model_is_what_its_page_says() -> None:
    page = Path(__file__).parents[3] / "docs" / "smollm2.md"
    [said] = re.findall(r"plans its memory,\s+([\d.]+) GiB", page.read_text(encoding="utf-8"))
    _, whole = plan_findings(resolve("smollm2_textworld").config, MACHINE)
    assert whole.found.startswith(f"{said} GiB of ")


def test_on_a_device_weights_and_cache_are_not_the_hosts() -> None:
    here, there = config(engine__count=2), config(engine__count=2, engine__device="cuda")
    place = {part.what: part.place for part in memory_plan(there)}
    assert {what for what, where in place.items() if where == "device"} == {"engines: weights", "engines: KV cache"}
    moved = room.device_bytes(there)
    named = by_name(there)
    assert moved == 2 * (named["weights"] + named["KV cache"])
    assert room.memory_parts(here)["engines"] - room.memory_parts(there)["engines"] == moved
    assert room.device_bytes(here) == 0
    host = sum(part.n_bytes for part in memory_plan(there) if part.place == "host")
    assert plan_findings(there, MACHINE)[1].found.startswith(f"{host / room.GIB:.2f} GiB of ")


def test_a_device_that_is_not_there_or_too_small_is_found() -> None:
    asked = config(engine__device="cuda")
    small, large = (Device(name="A card", memory_bytes=n) for n in (room.GIB // 8, 64 * room.GIB))
    missing = engine_device_finding(asked, ())
    assert missing is not None
    assert not missing.will_do
    assert "torch finds no CUDA device" in missing.found
    assert "engine.device=cpu" in missing.fix
    assert device_memory_finding(asked, ()) is None
    for device, fits in ((small, False), (large, True)):
        there, has_room = engine_device_finding(asked, (device,)), device_memory_finding(asked, (device,))
        assert there is not None
        assert there.will_do
        assert has_room is not None
        assert has_room.will_do is fits
    for devices in (None, (), (large,)):
        assert engine_device_finding(config(), devices) is None
        assert device_memory_finding(config(), devices) is None
    assert [one.what for one in device_findings((large, small))] == ["cuda:0", "cuda:1"]
