"""Predictions of real models: captured on this machine, without weights, and near to what their shape alone says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.optrace.job import job_from
from rollart.optrace.predict import Predicted, predict, predicted, setting_of
from rollart.optrace.prediction import Prediction
from rollart.perf.device_profile import DeviceProfile, OpTime, Origin, OverlapTime
from rollart.perf.devices import device
from rollart.perf.train_calibration import predict_step

GPT = "gpt:layers=4,hidden=1024,heads=16,vocab=8192"
BASE: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "seq": 1024, "global_batch": 16}
BAND = 0.25
"""Between a captured step and the closed form by one law: what the model does beside its matrices is counted, not assumed."""


@cache
def _told(model: str, options: str) -> Predicted:
    return predicted(setting_of(job_from(model, {**BASE, **json.loads(options)})))


def told(model: str = GPT, **options: Any) -> Prediction:
    return _told(model, json.dumps(options)).prediction


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mixtral-8x7b", {"ep": 2, "dp": 2}),
        ("llama3-70b", {"tp": 8, "pp": 4, "dp": 32, "seq": 8192, "global_batch": 1024}),
    ],
)
def test_a_captured_step_is_near_the_closed_form(model: str, options: dict[str, Any]) -> None:
    found, job = told(model, **options), job_from(model, {**BASE, **options})
    shape = setting_of(job).source.shape
    assert shape is not None
    closed = predict_step(shape, job.plan, "H100", job.framework)
    assert found.step_s == pytest.approx(closed.total_s, rel=BAND)
    assert found.classes[0].memory.total == pytest.approx(closed.memory.total, rel=BAND)
    assert not (found.plan.ep > 1 and not found.exposed_s["ep"])
    assert found.hardware_flops == pytest.approx(found.model_flops, rel=0.02)
    assert any("norm" in line for line in found.assumptions)


def test_layers_that_were_not_built_are_like_those_that_were() -> None:
    few, all_of_them = told(), told(built_layers=0)
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=1e-3)
    assert few.peak_memory_bytes == pytest.approx(all_of_them.peak_memory_bytes, rel=1e-3)


def test_without_a_clip_no_norm_is_taken() -> None:
    assert not any("norm of all gradients" in line for line in told(clip=False).assumptions)
    assert told(clip=False).step_s < told().step_s


def test_a_profile_says_what_it_measured(tmp_path: Path) -> None:
    made = _told(GPT, "{}")
    part = made.trace.parts[made.trace.layers[0]]
    op = max((op for op in part.forward if op.kind == "gemm"), key=lambda op: op.flops)
    priced_s = 3e-3
    row = OpTime(
        kind=op.kind, name=op.name, dtype=op.dtype, shape=op.shape, flops=op.flops, moved_bytes=op.moved_bytes,
        seconds=priced_s, log_std=0.01,
    )  # fmt: skip
    path = tmp_path / "profile.json"
    origin = Origin(kind="cuda", versions={"torch": "2.13.0"})
    beside = OverlapTime(
        kernel="gemm", solo_s=1e-3, seconds=1.5e-3, overlap_ratio=1.0, collective="all_reduce", payload_bytes=1e6, ranks=2
    )  # fmt: skip
    DeviceProfile(device=device("H100"), origin=origin, ops=(row,), overlaps=(beside,)).save(path)
    found = told(profile=str(path))
    assert found.provenance["measured"] > 0
    assert found.step_s > told().step_s
    assert any(source.startswith("profile of") for source in found.sources)
    assert found.overlap_basis["kernel name"] > 0 < found.overlap_basis["physical"]
    assert told().overlap_basis == {"physical": 1.0}
    assert told(overlap_level="0").overlap_basis == {"none": 1.0}
    with pytest.raises(ConfigError, match="the profile is of H100"):
        told(profile=str(path), device="A100")


def test_a_value_that_host_code_reads_needs_an_assumption() -> None:
    where = "reading_model.py:18"
    job = job_from("reading_model:build", {"device": "a100", "global_batch": 4})
    with pytest.raises(ConfigError, match=re.escape(where)):
        predict(job)
    found = predict(replace(job, assume={where: "0.5"}))
    assert any(where in line for line in found.assumptions)
    assert found.framework == "PyTorch"
    assert found.parameters == pytest.approx(64 * 64 + 64)
    assert predict(replace(job, assume={where: "2.0"})).step_s > found.step_s


def test_a_module_of_ones_own_is_predicted_in_the_dtype_asked_for_or_its_own() -> None:
    job = job_from("reading_model:build", {"assume": ["reading_model.py=0.5"], "global_batch": 4})
    own = predict(job)
    cast_to = predict(replace(job_from("reading_model:build", {"dtype": "bf16", "global_batch": 4}), assume=job.assume))
    assert (own.plan.dtype, cast_to.plan.dtype) == ("fp32", "bf16")
    chip = device("H100")
    assert (own.peak_flops, cast_to.peak_flops) == (chip.peak_flops("fp32"), chip.peak_flops("bf16"))
