"""Predictions: each option changes what it must, the closed form is near, and the figures hang together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.optrace.accounts import TRACED_LOG_STD
from rollart.optrace.costs import step_log_std
from rollart.optrace.job import OPTIONS, Job, job_from
from rollart.optrace.ops import Trace
from rollart.optrace.predict import Predicted, Setting, by_numbers, predict, predicted, run, setting_of
from rollart.optrace.prediction import Prediction
from rollart.optrace.sources import Source
from rollart.perf.device_profile import DeviceProfile, OpTime, Origin
from rollart.perf.devices import device
from rollart.perf.links import fabric
from rollart.perf.step_table import read_step_table
from rollart.perf.train_calibration import predict_step

MODEL = "llama3-8b"
GPT = "gpt:layers=4,hidden=1024,heads=8,vocab=4096"
LAYERS = 8
BAND = 0.2
"""Between a traced step and the closed form by one law."""
COUNTS = ("layers", "attention_layers", "dense_layers", "moe_layers")
BASE: Mapping[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "seq": 4096, "global_batch": 32}


def small(of: Setting) -> Setting:
    """The job for a model of few layers, which costs a test less and is split alike."""
    assert of.source.shape is not None
    shape = of.source.shape
    few: dict[str, Any] = {name: min(LAYERS, getattr(shape, name)) for name in COUNTS}
    return replace(of, source=replace(of.source, shape=replace(shape, **few)))


@cache
def _told(model: str, options: str) -> Predicted:
    return predicted(small(setting_of(job_from(model, json.loads(options)))), capture=by_numbers)


def told(model: str = MODEL, **options: Any) -> Prediction:
    return _told(model, json.dumps({**BASE, **options})).prediction


def moved(axis: str) -> Callable[[Prediction], float]:
    return lambda found: max(one.comm_s.get(axis, 0.0) for one in found.classes)


def held(name: str) -> Callable[[Prediction], float]:
    return lambda found: float(getattr(found.classes[0].memory, name))


def step(found: Prediction) -> float:
    return found.step_s


EFFECTS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], Callable[[Prediction], float], str]] = {
    "tp": ({}, {"tp": 4}, held("weights"), "<"),
    "pp": ({}, {"pp": 4}, lambda found: len(found.classes), ">"),
    "dp": ({}, {"dp": 8}, step, "<"),
    "cp": ({}, {"cp": 2}, moved("cp"), ">"),
    "ep": ({"model": "qwen3-30b-a3b", "ep": 1}, {"ep": 4}, moved("ep"), ">"),
    "chunks": ({}, {"chunks": 2}, lambda found: found.bubble_share, "<"),
    "seq": ({}, {"seq": 8192}, lambda found: found.step_s / 2.0, ">"),
    "micro_batch": ({}, {"micro_batch": 2}, held("activations"), ">"),
    "global_batch": ({}, {"global_batch": 64}, step, ">"),
    "shards": ({"shards": 0}, {"shards": 1}, held("optimizer"), "<"),
    "dtype": ({}, {"dtype": "fp8"}, step, "<"),
    "recompute": ({"recompute": "none"}, {"recompute": "full"}, held("activations"), "<"),
    "recompute_share": ({"recompute": "full"}, {"recompute_share": 0.5}, lambda found: found.hardware_flops, "<"),
    "schedule": ({}, {"schedule": "gpipe"}, held("activations"), ">"),
    "sequence_parallel": ({"sequence_parallel": False}, {"sequence_parallel": True}, held("activations"), "<"),
    "device": ({}, {"device": "A100"}, step, ">"),
    "interconnect": ({"tp": 8, "dp": 8}, {"interconnect": "10 Gb/s"}, moved("dp"), ">"),
    "framework": ({}, {"framework": "Megatron-LM"}, step, ">"),
    "straggler": ({}, {"straggler": {"3": "1.5x"}}, step, ">"),
    "jitter": ({}, {"jitter": 0.1}, step, ">"),
    "seed": ({"jitter": 0.1}, {"seed": 2}, step, "!="),
    "overlap_level": ({"overlap_level": "0", "dp": 8}, {"overlap_level": "1"}, step, ">"),
}  # fmt: skip
ELSEWHERE = {"profile", "assume", "clip", "built_layers", "capture"}
"""Options of what is captured and measured: tests of the real model below and of prices."""


def test_no_option_is_left_out() -> None:
    assert {option.name for option in OPTIONS} == set(EFFECTS) | ELSEWHERE


@pytest.mark.parametrize("name", list(EFFECTS))
def test_an_option_changes_what_it_must(name: str) -> None:
    before, after, read, how = EFFECTS[name]
    model = str(before.get("model", MODEL))
    plain = {key: value for key, value in before.items() if key != "model"}
    first, second = read(told(model, **plain)), read(told(model, **{**plain, **after}))
    assert {"<": second < first, ">": second > first, "!=": second != first}[how], (first, second)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, {}),
        (MODEL, {"tp": 1, "pp": 1, "dp": 8, "shards": 3}),
        (MODEL, {"tp": 1, "pp": 1, "dp": 1, "micro_batch": 1, "global_batch": 4}),
        ("llama3-70b", {"tp": 8, "pp": 4, "dp": 32, "seq": 8192, "global_batch": 512}),
        ("llama3-70b", {"tp": 8, "pp": 4, "dp": 4, "chunks": 2, "global_batch": 32}),
        (
            "llama3-70b",
            {
                "tp": 8,
                "pp": 4,
                "dp": 4,
                "global_batch": 32,
                "recompute": "full",
                "framework": "Megatron-LM",
                "device": "A100",
            },
        ),
        ("qwen3-30b-a3b", {"tp": 2, "pp": 2, "dp": 8, "ep": 8}),
    ],
)
def test_the_closed_form_is_near(model: str, options: dict[str, Any]) -> None:
    """The same law prices both; they differ in overlap, in ends of pipelines and in what is counted as a pass."""
    found, job = told(model, **options), job_from(model, {**BASE, **options})
    shape = small(setting_of(job)).source.shape
    assert shape is not None
    closed = predict_step(shape, job.plan, job.device or "H100", job.framework)
    assert found.step_s == pytest.approx(closed.total_s, rel=BAND)
    assert found.model_flops == pytest.approx(closed.model_flops)
    assert found.scale == closed.scale


def test_the_figures_of_a_class_make_the_step() -> None:
    found = told()
    for one in found.classes:
        exposed = math.fsum(one.exposed_s.values())
        parts = one.busy_s + one.optimizer_s + one.host_s + exposed + one.bubble_s
        beside = found.jitter_s + setting_of(job_from(MODEL, dict(BASE))).pricer(found.plan).step_host_s
        assert parts + beside == pytest.approx(found.step_s, rel=1e-9)
    assert sum(found.provenance.values()) == pytest.approx(1.0)
    assert sum(found.sources.values()) == pytest.approx(1.0)
    assert found.low_s < found.step_s < found.high_s
    assert found.mfu <= found.hfu < 1
    assert sum(one.ranks for one in found.classes) == found.plan.devices


def test_the_same_job_gives_the_same_prediction_and_timeline() -> None:
    of = small(setting_of(job_from(MODEL, {**BASE, "jitter": 0.05, "global_batch": 16})))
    first, second = (predicted(of, capture=by_numbers) for _ in range(2))
    assert first.prediction == second.prediction
    assert list(first.timeline.slices("ops")) == list(second.timeline.slices("ops"))


def test_ranks_do_not_change_a_class_and_a_wider_job_costs_no_more_classes() -> None:
    assert len(told(dp=4096, global_batch=32768).classes) == len(told().classes)


def test_twice_the_rates_never_slow_a_step() -> None:
    of = small(setting_of(job_from(MODEL, dict(BASE))))
    chip, links = device("H100"), fabric("H100")
    twice = replace(
        of,
        device=replace(
            chip, flops={name: 2 * rate for name, rate in chip.flops.items()},
            memory_bytes_per_s=2 * chip.memory_bytes_per_s, link_bytes_per_s=2 * chip.link_bytes_per_s,
        ),
        fabric=replace(
            links, intra_bytes_per_s=2 * links.intra_bytes_per_s, inter_bytes_per_s=2 * links.inter_bytes_per_s,
            nvls_bytes_per_s=2 * links.nvls_bytes_per_s,
        ),
    )  # fmt: skip
    plain, fast = (predicted(one, capture=by_numbers).prediction for one in (of, twice))
    assert fast.step_s < plain.step_s


def test_a_plan_that_does_not_fit_says_what_fills_the_device() -> None:
    found = told("llama3-70b", tp=1, pp=1, dp=1, shards=0, global_batch=1, seq=1024)
    assert not found.fits
    assert "this plan cannot run; use more --dp with --shards 1, or more --tp or --pp" in found.notes[0]
    assert told().fits


def test_what_cannot_be_is_refused_before_anything_is_captured(tmp_path: Path) -> None:
    measured = tmp_path / "profile.json"
    row = OpTime(kind="gemm", name="aten.mm", dtype="bf16", shape=(64, 64, 64, 1), flops=524288.0, moved_bytes=24576.0,
                 seconds=1e-5, log_std=0.01)  # fmt: skip
    origin = Origin(kind="cuda", versions={"torch": "2.13.0"})
    DeviceProfile(device=device("H100"), origin=origin, ops=(row,)).save(measured)

    def never(source: Source, job: Job) -> Trace:
        raise AssertionError("captured")

    for options, says in (
        ({"tp": 3}, "does not divide"),
        ({"device": "H1000"}, "unknown device"),
        ({"profile": "/nowhere.json"}, "there is no /nowhere.json"),
        ({"profile": str(measured), "device": "A100"}, "the profile is of H100"),
        ({"dtype": "fp8", "device": "A100"}, "dtype=fp8: A100 .* use dtype=bf16"),
        ({"straggler": {"stage 9": "1"}}, "no rank class called 'stage 9' to delay; there are stage 0, stage 1"),
        ({"straggler": {"16": "2x"}}, "straggler 16: ranks are 0 to 15; use 15"),
    ):
        with pytest.raises(ConfigError, match=says):
            predict(job_from(MODEL, {**BASE, **options}), capture=never)
    with pytest.raises(ConfigError, match="unknown model"):
        predict(job_from("llama9", dict(BASE)), capture=never)


def test_what_is_taken_for_granted_is_said() -> None:
    assert any("gradients are held and reduced in 16 bits" in line for line in told().notes)
    wide = told(framework="torchtitan")
    assert any(line == "gradients are held and reduced in 32 bits" for line in wide.notes)
    assert held("gradients")(wide) > held("gradients")(told())
    assert any("no units for bf16: products are priced as in fp16" in line for line in told(device="V100").notes)
    assert not any("no units" in line for line in told().notes)


def test_a_stand_in_for_a_constant_says_what_it_cannot_compare() -> None:
    assert told().scale_basis == "measured"
    assert not any("its kin's" in line for line in told().notes)
    kin = told(framework="plain")
    assert kin.scale_basis == "analytic"
    assert any("the constant of PyTorch on H100 SXM 80GB is its kin's" in line for line in kin.notes)


def test_a_model_that_no_family_here_has_is_written_down_from_its_numbers() -> None:
    hybrid = {"tp": 2, "ep": 4, "dp": 8, "pp": 1, "seq": 2048, "global_batch": 64}
    with pytest.raises(ConfigError, match=r"state-space layers, which no family here has; .* or --no-capture"):
        setting_of(job_from("nemotron-3-super", hybrid))
    job = job_from("nemotron-3-super", {**hybrid, "capture": False})
    found, shape = predict(job), setting_of(job).source.shape
    assert shape is not None
    closed = predict_step(shape, job.plan, "H100", job.framework)
    assert found.step_s == pytest.approx(closed.total_s, rel=BAND)
    assert found.model_flops == pytest.approx(closed.model_flops)
    assert "built from the numbers of the shape; no model was run" in found.notes


def test_what_no_profile_measured_errs_by_the_tracer_too() -> None:
    found = told()
    law = step_log_std(found.scale_basis == "measured")
    assert found.provenance["analytic"] > 0.9
    assert 0.9 * math.hypot(law, TRACED_LOG_STD) < found.log_std < 1.1 * math.hypot(law, TRACED_LOG_STD)


# ---- what is written


def test_a_timeline_opens_as_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    job = job_from(GPT, {**BASE, "global_batch": 16})
    found = run(job, timeline=path, capture=by_numbers)
    composed_s = found.step_s - found.jitter_s - setting_of(job).pricer(found.plan).step_host_s
    trace = json.loads(path.read_text())
    assert trace["otherData"]["figures"] == "estimated"
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"stage 0 (8 ranks)", "stage 1 (8 ranks)"}
    rows: dict[tuple[int, int], float] = {}
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    for event in spans:
        key = (event["pid"], event["tid"])
        assert event["ts"] >= rows.get(key, 0.0) - 0.01  # microseconds are rounded
        rows[key] = event["ts"] + event["dur"]
    assert max(rows.values()) == pytest.approx(found.step_s * 1e6, rel=1e-6)
    assert trace["otherData"]["composed_s"] == pytest.approx(composed_s)
    beside = {event["name"]: event["dur"] for event in spans if event["ts"] > composed_s * 1e6 - 0.01}
    assert set(beside) == {"host outside layers", "slowest of many nodes"}
    assert beside["slowest of many nodes"] == pytest.approx(found.jitter_s * 1e6, rel=1e-3)
    assert {event["args"]["provenance"] for event in spans} <= {"measured", "interpolated", "analytic", ""}


def test_a_table_says_what_the_predictions_say(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    job = job_from(GPT, dict(BASE))
    run(job, table=path, lengths=(1024, 4096), capture=by_numbers)
    with pytest.raises(ConfigError, match=r"table length 1001: 2 ranks \(cp x tp\) share its tokens; use 1000"):
        run(job, table=path, lengths=(4096, 1001), capture=by_numbers)
    table = read_step_table(path)
    assert (table.device, table.framework, table.longest) == ("H100 SXM 80GB", job.framework, 4096)
    assert sum(table.provenance.values()) == pytest.approx(1.0)
    for length, batch in ((1024, 64), (4096, 128)):
        own = told(GPT, seq=length, global_batch=batch)
        assert table.seconds(length, own.plan.micro_batches) == pytest.approx(own.step_s, rel=0.02)
