"""How a row of a measurement becomes a workload on an engine, and what the validation scores, on rows written by hand."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import loaded
from rollart.core.resources import Degrees
from rollart.perf.calibrated import inference_calibration

inference_rows, validate_inference = loaded("inference_rows"), loaded("validate_inference")

ROW = {
    "row_id": "X1", "suite": "by hand", "engine": "vLLM", "engine_version": "0.9", "model": "Llama-3.1-8B-Instruct",
    "gpu": "H100 SXM", "num_gpus": "1", "tp": "1", "pp": "1", "ep": "", "dp": "", "precision": "bf16", "kv_cache_dtype": "",
    "workload": "fixed ISL/OSL", "isl": "500", "osl": "500", "num_requests": "", "request_rate": "inf",
    "concurrency_or_max_num_seqs": "", "scenario": "offline", "metric": "output throughput", "value": "5000",
    "unit": "tokens/s", "scope": "system", "notes": "",
}  # fmt: skip


def case(**changes: str) -> Any:
    return inference_rows.case_of({**ROW, **changes})


@pytest.mark.parametrize(
    ("changes", "degrees", "replicas"),
    [
        ({}, Degrees(), 1.0),
        ({"num_gpus": "8"}, Degrees(), 8.0),
        ({"num_gpus": "8", "tp": "", "model": "Llama-2-70B"}, Degrees(tp=4), 2.0),
        ({"num_gpus": "8", "tp": "", "model": "Llama-2-70B", "precision": "FP8"}, Degrees(tp=2), 4.0),
        (
            {"model": "DeepSeek-R1", "gpu": "H200", "num_gpus": "8", "tp": "", "ep": "8", "dp": "8"},
            Degrees(dp=8, ep=8),
            1.0,
        ),
        ({"model": "Qwen3-30B-A3B", "num_gpus": "4", "tp": "4", "notes": "attention-DP"}, Degrees(dp=4, ep=4), 1.0),
        ({"model": "Qwen3-30B-A3B", "num_gpus": "4", "tp": "4"}, Degrees(tp=4), 1.0),
    ],
)
def test_degrees_are_those_of_the_row_or_the_fewest_that_fit(
    changes: dict[str, str], degrees: Degrees, replicas: float
) -> None:
    found = case(**changes)
    assert (found.degrees, found.replicas) == (degrees, replicas)


def test_a_precision_may_depend_on_the_chip_and_decides_the_cache_by_the_habit_of_the_engine() -> None:
    assert case(precision="FP8 (B200: FP4) - inference", gpu="H200").precision == "fp8"
    assert case(precision="FP8 (B200: FP4) - inference", gpu="B200 SXM 180GB").precision == "fp4"
    assert case(precision="FP8").kv_dtype == "bf16"
    assert case(precision="FP8", engine="TensorRT-LLM").kv_dtype == "fp8"
    assert case(precision="bf16", kv_cache_dtype="fp8_e4m3").kv_dtype == "fp8"


def test_lengths_rates_and_limits_are_read_as_written() -> None:
    fixed = case().workload
    assert (fixed.prompt, fixed.answer, fixed.lengths, fixed.requests) == (500.0, 500.0, "fixed", math.inf)
    chat = case(
        workload="ShareGPT", isl="", osl="194.3 mean", request_rate="Poisson target 75.0/s", num_requests="1,200"
    )
    assert (chat.workload.prompt, chat.workload.answer, chat.workload.lengths) == (220.0, 194.3, "varied")
    assert (chat.workload.rate_per_s, chat.workload.requests) == (75.0, 1200.0)
    long = case(workload="ShareGPT replay", isl="857.5 mean", osl="652.5 mean").workload
    assert (long.answer, long.shortest) == (652.5, 457.5)  # ShareGPT's own mean is 195
    assert chat.workload.shortest == 0.0
    assert case(concurrency_or_max_num_seqs="max-num-seqs 256, max-seq-len 2048").max_sequences == 256
    assert case(isl="8K").workload.prompt == 8192
    assert case(concurrency_or_max_num_seqs="concurrency 64").workload.concurrency == 64
    assert case(concurrency_or_max_num_seqs="64 concurrent").workload.concurrency == 64
    assert case(scenario="online, max_num_batched_tokens 2048").max_step_tokens == 2048


def test_replicas_share_what_comes() -> None:
    found = case(
        num_gpus="8", tp="2", num_requests="1000", request_rate="20", concurrency_or_max_num_seqs="concurrency 64"
    )
    assert (found.replicas, found.workload.requests, found.workload.rate_per_s) == (4.0, 250.0, 5.0)
    assert found.workload.concurrency == 16.0


def test_the_rate_of_a_search_for_the_highest_rate_is_no_input() -> None:
    server = {"suite": "MLPerf Inference v4.1", "scenario": "Server", "request_rate": "Poisson target 75.0/s"}
    assert case(**server).workload.rate_per_s == math.inf
    assert case(**{**server, "suite": "by hand"}).workload.rate_per_s == 75.0


@pytest.mark.parametrize(
    ("metric", "statistic"),
    [
        ("inter-token latency", "median"),
        ("ITL", "median"),
        ("mean ITL", "mean"),
        ("TPOT", "mean"),
        ("median TPOT", "median"),
    ],
)
def test_a_statistic_that_is_not_named_has_one_rule(metric: str, statistic: str) -> None:
    assert case(metric=metric, unit="ms").statistic == statistic


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metric": "median TTFT", "unit": "ms"}, "TTFT without a rate"),
        ({"metric": "median TTFT", "unit": "ms", "request_rate": "4"}, "TTFT without a rate or scheduler settings"),
        ({"gpu": "Abacus 3"}, "unknown device 'Abacus 3'"),
        ({"model": "ResNet152"}, "unknown model"),
        ({"value": ""}, "no measured value"),
        ({"metric": "power"}, "not modelled"),
    ],
)
def test_what_cannot_be_scored_says_why(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(inference_rows.Unscored, match=reason):
        case(**changes)


def predicted(**changes: str) -> float:
    found: float = case(**changes).predict(inference_calibration())
    return found


def test_units_and_scopes_are_brought_to_one() -> None:
    each = case(num_gpus="8", unit="tokens/s/GPU", scope="per GPU")
    assert each.target == 8 * case(num_gpus="8").target
    assert predicted(num_gpus="8") == pytest.approx(8 * predicted())
    assert case(metric="mean TPOT", unit="ms", value="25").target == 0.025
    assert predicted(metric="request throughput", unit="req/s") == pytest.approx(predicted() / 500)
    assert predicted(metric="total token throughput") == pytest.approx(2 * predicted())


def write(folder: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    with (folder / "inference.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def document(**changes: Any) -> dict[str, Any]:
    packaged = {"efficiency": {}, "constants": {"vLLM | H100 SXM 80GB": 1.0}}
    return {**packaged, "without_fold": {"0": packaged}, "without_suite": {}, "fitted": {}, **changes}


def test_a_model_that_is_right_has_no_error_and_one_that_is_half_too_fast_has_half(tmp_path: Path) -> None:
    exact = case().predict(validate_inference.read_calibration(document()))
    rows = [{**ROW, "value": str(exact)}, {**ROW, "row_id": "X2", "value": str(exact / 1.5)}, {**ROW, "gpu": "Abacus"}]
    found, scored = validate_inference.report(write(tmp_path, rows), document())
    assert [round(row.error, 9) for row in scored] == [0.0, 0.5]
    assert found["median_abs_err"] == 0.25
    assert found["by_class"]["throughput"]["rows"] == 2
    assert (found["scored"], found["unscored"]) == (2, 1)


def test_a_row_that_was_fitted_on_is_scored_by_a_fit_that_did_not_see_it(tmp_path: Path) -> None:
    other = {"efficiency": {"memory": 0.4, "kv": 0.4, "matmul_bf16": 0.3}, "constants": {}}
    seen, new = {**ROW}, {**ROW, "osl": "501"}
    digest = inference_rows.case_of(seen).digest
    found, scored = validate_inference.report(
        write(tmp_path, [seen, new]), document(without_fold={"0": other}, fitted={digest: 0})
    )
    assert found["cross_validated"] == found["not_seen_in_fitting"] == 1
    assert scored[0].predicted < 0.8 * scored[1].predicted
    assert found["as_fitted"]["by_class"]["throughput"]["median_ratio"] > 1 + scored[0].error


def test_the_packaged_document_can_be_scored_with(tmp_path: Path) -> None:
    import json
    from importlib.resources import files

    text = files("rollart.perf").joinpath("tables/inference_calibration.json").read_text(encoding="utf-8")
    found, _ = validate_inference.report(write(tmp_path, [ROW]), json.loads(text))
    assert found["by_suite"]["by hand"]["rows"] == 1
    assert found["leave_one_suite_out"]["throughput_rows"] == 1
    assert found["uncalibrated"]["throughput_rows"] == 1
