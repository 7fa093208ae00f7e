"""A device's profile: what is read back, what is refused, what is doubted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.perf.device_profile import (
    ABOVE_PEAK,
    CollectiveTime,
    DeviceProfile,
    HostTimes,
    OpTime,
    Origin,
    OverlapTime,
    base_name,
    merged,
    overlap_model,
    read_profile,
    suspects,
)
from rollart.perf.devices import device

H100 = device("H100 SXM")


def gemm(rows: int, columns: int, inner: int, tflops: float, dtype: str = "bf16") -> OpTime:
    flops = 2.0 * rows * columns * inner
    return OpTime(
        kind="gemm", name="aten.mm", dtype=dtype, shape=(rows, columns, inner, 1), flops=flops,
        moved_bytes=2.0 * (rows * inner + inner * columns + rows * columns), seconds=flops / (tflops * 1e12), log_std=0.01,
    )  # fmt: skip


def added(mega_bytes: int, gb_per_s: float) -> OpTime:
    moved = mega_bytes * 2.0**20
    return OpTime(
        kind="pass", name="aten.add.Tensor", dtype="bf16", shape=(mega_bytes, 1 << 19), flops=0.0, moved_bytes=moved,
        seconds=moved / (gb_per_s * 1e9), log_std=0.01,
    )  # fmt: skip


def profile(*ops: OpTime, **changes: Any) -> DeviceProfile:
    origin = Origin(kind="cuda", versions={"torch": "2.13.0", "cuda": "13.0"}, cache_bytes=50 * 2.0**20)
    given: dict[str, Any] = {"device": H100, "origin": origin, "ops": ops}
    return DeviceProfile(**(given | changes))


def full() -> DeviceProfile:
    return profile(
        gemm(4096, 4096, 4096, 600.0), gemm(4096, 8192, 4096, 640.0), added(1024, 2500.0),
        collectives=(CollectiveTime(
            op="all_reduce", library="nccl", ranks=8, domains=1, payload_bytes=1e6, seconds=5e-5, log_std=0.02),),
        overlaps=(OverlapTime(
            kernel="gemm", solo_s=1e-3, seconds=1.2e-3, overlap_ratio=1.0, collective="all_reduce", payload_bytes=2.6e7,
            ranks=8),),
        host=HostTimes(op_s=4e-6, recorded_op_s=7e-6, backward_op_s=6e-6), notes=("cut short",),
    )  # fmt: skip


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    full().save(path)
    assert read_profile(path) == full()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["ops"][0].update(seconds=0.0), "seconds"),
        (lambda d: d["ops"][0].update(seconds=float("nan")), "seconds"),
        (lambda d: d["ops"][0].update(second=1.0), r"ops\[0\].second is not known"),
        (lambda d: d["ops"][0].update(flops="many"), r"ops\[0\].flops"),
        (lambda d: d["ops"].append(d["ops"][0]), "twice"),
        (lambda d: d["origin"].update(versions={}), "version of torch"),
        (lambda d: d.update(format="other/1"), "format other/1"),
        (lambda d: d.pop("ops"), "ops"),
    ],
)
def test_a_file_that_is_no_profile_names_what_is_wrong(tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "h100.json"
    full().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_profile(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollart profile-device"):
        read_profile(tmp_path / "none.json")


def test_a_rate_above_the_peak_is_refused() -> None:
    peak = H100.peak_flops("bf16") / 1e12
    profile(gemm(8192, 8192, 8192, peak * (ABOVE_PEAK - 0.01)))
    with pytest.raises(ConfigError, match="TFLOP/s"):
        profile(gemm(8192, 8192, 8192, peak * (ABOVE_PEAK + 0.01)))


def test_bandwidth_above_the_peak_is_refused_beyond_the_cache_only() -> None:
    above = 1.2 * H100.memory_bytes_per_s / 1e9
    profile(added(16, above))
    with pytest.raises(ConfigError, match="GB/s"):
        profile(added(1024, above))


def test_an_operator_slower_than_a_larger_one_is_doubted() -> None:
    slow = gemm(2048, 4096, 4096, 100.0)
    found = suspects(profile(slow, gemm(4096, 4096, 4096, 600.0), gemm(4096, 4096, 8192, 600.0)))
    assert list(found) == [slow.signature]
    assert suspects(full()) == {}


def test_profiles_of_other_versions_or_devices_are_not_mixed() -> None:
    first = full()
    newer = replace(first, origin=replace(first.origin, versions={"torch": "2.14.0", "cuda": "13.0"}))
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0 and 2\.14\.0"):
        merged([first, newer])
    with pytest.raises(ConfigError, match="device"):
        merged([first, replace(first, device=device("A100"), ops=())])
    more = replace(first, ops=(gemm(64, 4096, 4096, 50.0), replace(first.ops[0], seconds=1.0)))
    together = merged([first, more])
    assert {row.signature for row in together.ops} == {row.signature for row in (*first.ops, *more.ops)}
    assert next(row for row in together.ops if row.shape == (4096, 4096, 4096, 1)).seconds == first.ops[0].seconds


def test_kernels_beside_a_collective_make_an_overlap_model() -> None:
    model = overlap_model(full())
    assert model is not None
    assert 0.0 < model.names["gemm"].at(1e-3) <= 0.2
    assert overlap_model(profile(gemm(64, 64, 64, 1.0))) is None


def test_names_of_kernels_lose_their_overload() -> None:
    assert [base_name(name) for name in ("aten.mul.Tensor", "aten.mm", "silu", "derived.cast")] == [
        "mul", "mm", "silu", "cast",
    ]  # fmt: skip
