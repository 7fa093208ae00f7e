"""benchmarks/echo_gloo.py: the three ways train alike on two processes, and a prediction is what its profile says."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import loaded

job = loaded("echo_gloo_job")
launcher = loaded("echo_gloo_ranks")
collectives = loaded("echo_gloo_collectives")
predicting = loaded("echo_gloo_predict")
bench = loaded("echo_gloo")

OPERATOR_S = 1e-3
HOST_OP_S = 1e-4
GLOO_S = 1e-6


def two_cores() -> list[int]:
    """The first two there are; one twice on a machine of one."""
    here = sorted(os.sched_getaffinity(0))
    return [here[0], here[1 % len(here)]]


def a_profile(tmp_path: Path, way: str) -> Any:
    """Every operator takes a millisecond, the host a tenth of it for each, a collective next to nothing."""
    trace = predicting.traced(way, job.TINY, tmp_path)
    passes = {name: predicting._ops(trace, name) for name in predicting.PASSES}
    computed = [op for ops in passes.values() for op in ops if op.stream == "compute"]
    rows = [
        {"kind": op.kind, "name": op.name, "dtype": op.dtype, "shape": list(op.shape), "flops": op.flops,
         "moved_bytes": op.moved_bytes, "seconds": [OPERATOR_S] * 3}
        for op in computed
    ]  # fmt: skip
    whole = {
        name: [sum(OPERATOR_S + HOST_OP_S for op in ops if op.stream == "compute")] * 3 for name, ops in passes.items()
    }
    sizes = predicting.sizes(trace)
    alone = {op: {str(size): [GLOO_S] * 3 for size in payloads} for op, payloads in sizes.items()}
    gloo = {"alone": alone, "beside": {}, "product_s": 1.0}
    return predicting.Profile(
        size=job.TINY, traces={way: trace}, processes=[{way: {"rows": rows, "reference_s": [1.0], **whole}}], gloo=[gloo, gloo],
        versions={"torch": "0"},
    )  # fmt: skip


@pytest.mark.parametrize("way", ["data", "pipeline"])
def test_a_step_is_the_schedule_of_what_one_process_takes(tmp_path: Path, way: str) -> None:
    profile = a_profile(tmp_path, way)
    told = predicting.prediction(profile)["ways"][way]
    alone = told["one_process_s"]
    micro_batches = job.plan(way, job.TINY).micro_batches
    if way == "data":
        expected = micro_batches * (alone["forward_s"] + alone["backward_s"]) + alone["update_s"]
        assert told["seconds"] == pytest.approx(expected, rel=0.01)
    else:
        # both stages together are one process; the bubble is one stage's forward and backward
        assert told["seconds"] < micro_batches * (alone["forward_s"] + alone["backward_s"])
        busiest = max(one["busy_s"] + one["host_s"] for one in told["classes"].values())
        assert told["seconds"] >= busiest * (1 + 0.5 / micro_batches)
    assert all(one["provenance_s"]["analytic"] == 0 for one in told["classes"].values())
    low, high = told["interval_s"]
    assert low < told["seconds"] < high


def test_the_slower_rank_of_each_call_counts() -> None:
    ranks = [{"alone": {"all_reduce": {"64.0": [1.0, 4.0]}}}, {"alone": {"all_reduce": {"64.0": [2.0, 3.0]}}}]
    assert collectives.slowest(ranks) == {"all_reduce": {64.0: [2.0, 4.0]}}


def test_factors_compare_with_what_is_alone() -> None:
    rank = {
        "alone": {"all_reduce": {"64.0": [1.0]}}, "product_s": 0.1,
        "beside": {"all_reduce": {"64.0": [[2.0, 10], [2.0, 10]]}},
    }  # fmt: skip
    assert collectives.factors([rank, rank]) == {"communication": 2.0, "computation": 2.0}


def test_a_comparison_allows_ten_percent_or_half_the_interval(tmp_path: Path) -> None:
    even = bench.case("data", {"seconds": 1.09}, [[1.0]] * 5)
    assert (even["error"], even["allowed"], even["met"]) == (0.09, 0.1, True)
    assert not bench.case("data", {"seconds": 1.11}, [[1.0]] * 5)["met"]
    spread = bench.case("data", {"seconds": 1.2}, [[0.6], [0.8], [1.0], [1.2], [1.4]])
    assert spread["allowed"] == pytest.approx(2.776 * math.sqrt(0.1) / math.sqrt(5), abs=1e-4)
    assert spread["met"]
    assert (even["quiet"], spread["quiet"]) == (True, False)
    digest = bench.write_hashed({"ways": {}}, tmp_path / "prediction.json")
    assert digest == hashlib.sha256((tmp_path / "prediction.json").read_bytes()).hexdigest()


def test_three_ways_train_the_same_model(tmp_path: Path) -> None:
    spec = {
        "size": job.numbers(job.TINY), "ways": list(job.WAYS), "seed": 3, "warm_up": 1, "steps": 1, "repeats": 1,
    }  # fmt: skip
    first, second = launcher.ranks("steps", spec, tmp_path, cores=two_cores())
    assert all(len(first["ways"][way][0]) == 1 for way in job.WAYS)
    for at in range(2):
        data = first["losses"]["data"][at] + second["losses"]["data"][at]
        assert data == pytest.approx(first["losses"]["tensor"][at], rel=1e-3)
        assert data == pytest.approx(second["losses"]["pipeline"][at], rel=1e-3)
    assert first["losses"]["pipeline"] == [None, None]
    assert second["losses"]["pipeline"][1] < second["losses"]["pipeline"][0]


def test_a_failed_rank_ends_the_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\nif sys.argv[3] == '0':\n    sys.exit('no luck')\ntime.sleep(60)\n", encoding="utf-8"
    )
    with pytest.raises(launcher.RanksFailed, match=r"steps: rank 0 ended with 1\nno luck"):
        launcher.ranks("steps", {}, tmp_path, cores=two_cores(), program=program)
