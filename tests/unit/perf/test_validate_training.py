"""What the validation of training steps scores, on rows written by hand: nothing of a new file is fitted on."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmark_modules import loaded

training_rows, validate_training, fit_training = (
    loaded(name) for name in ("training_rows", "validate_training", "fit_training")
)
FIELDS = (
    "row_id", "system_or_paper", "model", "hidden", "layers", "heads", "vocab", "seq_len", "gpu", "num_gpus", "gpus_per_node",
    "tp", "pp", "vpp", "cp", "ep", "sharding", "global_batch", "micro_batch", "precision", "recompute", "seq_parallel",
    "pipeline_schedule", "framework", "inter_node_bw", "iter_time_s", "derived_iter_time_s",
)  # fmt: skip
PLAIN = {
    "system_or_paper": "A table", "model": "GPT 8B", "hidden": 4096, "layers": 32, "seq_len": 2048, "gpu": "A100-80GB SXM",
    "num_gpus": 64, "gpus_per_node": 8, "tp": 4, "pp": 2, "global_batch": 512, "micro_batch": 2, "precision": "bf16",
    "recompute": "full", "pipeline_schedule": "1f1b", "framework": "Megatron-LM", "iter_time_s": 10.0,
}  # fmt: skip


def folder(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    with (path / "training.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_without_a_time_or_a_shape_are_counted_with_the_reason(tmp_path: Path) -> None:
    rows = [PLAIN, {**PLAIN, "iter_time_s": ""}, {**PLAIN, "hidden": "", "model": "An unpublished model"}]
    report = validate_training.validate(folder(tmp_path, rows))
    assert report["rows"] == 1
    assert report["unscored"] == {"no step time": 1, "no model shape in the row or a public configuration": 1}
    assert report["mean_abs_err"] is None
    assert not report["cross_validated"]
    assert report["by_suite"]["A table"]["counted"] is False


def test_the_figure_is_the_mean_over_suites_of_ten_rows(tmp_path: Path) -> None:
    seconds = validate_training.validate(folder(tmp_path, [PLAIN]))["by_suite"]["A table"]["mean_err"] * 10.0 + 10.0
    rows = [
        *[{**PLAIN, "iter_time_s": "", "derived_iter_time_s": seconds / 1.1}] * 10,
        *[{**PLAIN, "system_or_paper": "Another 25.09", "iter_time_s": seconds / 0.7}] * 5,
        *[{**PLAIN, "system_or_paper": "Another 26.04.01", "iter_time_s": seconds / 0.7}] * 5,
        *[{**PLAIN, "system_or_paper": "Small", "iter_time_s": seconds / 3}] * 9,
    ]
    report = validate_training.validate(folder(tmp_path, rows))
    assert report["by_suite"]["A table"]["mean_err"] == pytest.approx(0.1)
    assert report["by_suite"]["Another"]["mean_err"] == pytest.approx(-0.3)
    assert report["mean_abs_err"] == pytest.approx(0.2)
    scale, _ = validate_training.calibration()[0].scale("Megatron-LM", "A100")
    assert report["uncalibrated"] == pytest.approx((abs(1.1 / scale - 1) + abs(0.7 / scale - 1)) / 2)


def test_a_missing_suite_column_takes_the_name_of_the_file() -> None:
    assert training_rows.suite_name({}, "training_single_node.csv") == "training_single_node"
    assert training_rows.suite_name({"system_or_paper": "Some summary 26.06.01"}, "x.csv") == "Some summary"
    assert training_rows.suite_name({"system_or_paper": "GPT-3 paper Table 2"}, "x.csv") == "GPT-3 paper Table 2"


@pytest.mark.parametrize(
    ("text", "per_node", "expected"),
    [
        ("8x200Gb/s HDR IB per node", "8", 25e9),
        ("800 Gb/s per node (a config)", "8", 12.5e9),
        ("1600 Gb/s RoCE per node", "8", 25e9),
        ("400Gb/s RoCE or IB per GPU", "8", 50e9),
        ("1.6Tb/s per server", "8", 25e9),
        ("not stated in table", "8", 25e9),
    ],
)
def test_networks_are_read_per_device(text: str, per_node: str, expected: float) -> None:
    links = training_rows.fabric_of({"inter_node_bw": text, "gpus_per_node": per_node}, "A100")
    assert links.inter_bytes_per_s == pytest.approx(expected)


def test_an_nvlink_domain_may_be_wider_than_a_host() -> None:
    assert training_rows.fabric_of({"gpus_per_node": "4"}, "GB200").domain == 72
    assert training_rows.fabric_of({"gpus_per_node": "4"}, "H100").domain == 4


def test_unknown_devices_and_frameworks_are_priced_by_stand_ins(tmp_path: Path) -> None:
    rows = [{**PLAIN, "gpu": "Quantum X1 (a note)", "framework": "a new trainer"}]
    (case,), _ = training_rows.cases(folder(tmp_path, rows))
    assert (case.device.name, case.chip) == (training_rows.FALLBACK_DEVICE, "Quantum X1")
    assert case.predict(validate_training.calibration()[0].law).total_s > 0


def test_what_a_row_does_not_state_is_open_and_what_it_states_is_kept(tmp_path: Path) -> None:
    open_row = {**PLAIN, "recompute": "", "micro_batch": "", "pipeline_schedule": "interleaved 1F1B"}
    (stated, unstated), _ = training_rows.cases(folder(tmp_path, [PLAIN, open_row]))
    assert {(plan.micro_batch, plan.recompute, plan.schedule) for plan in stated.plans} == {(2, "full", "1f1b")}
    assert {plan.micro_batch for plan in unstated.plans} == {1, 2, 4, 8, 16}
    assert {plan.chunks for plan in unstated.plans} == {1, 2, 4, 8, 16}
    assert len(unstated.plans) == 25, "one recomputation for each: the least that fits"
    assert {plan.recompute for plan in unstated.plans if plan.micro_batch == 1} == {"none"}


def test_public_shapes_fill_what_the_row_leaves_out_and_yield_to_its_numbers() -> None:
    assert training_rows.shape_of({"model": "Llama-3 70B"}).ffn == 28672
    assert training_rows.shape_of({"model": "Llama-3 70B", "hidden": "1024", "layers": "4"}).ffn == 4096
    assert training_rows.shape_of({"model": "GPT 8B", "hidden": "4096", "layers": "32"}).heads == 32


def test_a_constant_is_the_weighted_median_that_minimises_the_error(tmp_path: Path) -> None:
    found, _ = training_rows.cases(folder(tmp_path, [{**PLAIN, "iter_time_s": t} for t in (1.0, 2.0, 30.0)]))
    scales = fit_training.fitted_scales(found, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])

    def error(scale: float) -> float:
        return float(sum(abs(scale / case.measured_s - 1) for case in found))

    best = scales["megatron-lm|a100"]
    assert error(best) <= min(error(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_releases_of_one_setting_stay_in_one_fold(tmp_path: Path) -> None:
    rows = [{**PLAIN, "system_or_paper": f"Summary 26.0{i}", "iter_time_s": i + 1} for i in range(3)]
    found, _ = training_rows.cases(folder(tmp_path, rows))
    assert len({training_rows.fold_of(case) for case in found}) == 1
