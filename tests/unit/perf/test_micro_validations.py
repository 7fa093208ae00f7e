"""What the validations of collectives and overlap score, on rows written by hand: nothing of a new file is fitted on."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmark_modules import loaded
from rollart.perf.collective_table import collective_estimate
from rollart.perf.collectives import Request
from rollart.perf.links import fabric

micro_rows, collective_folds, validate_collectives, overlap_folds, validate_overlap = (
    loaded(name)
    for name in ("micro_rows", "collective_folds", "validate_collectives", "overlap_folds", "validate_overlap")
)


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.parent


def collective(gpu: str, ranks: object, size: float, time_us: object, op: str = "all_gather") -> dict[str, object]:
    return {
        "op": op, "gpu": gpu, "num_gpus": ranks, "num_nodes": "", "msg_bytes": size, "time_us": time_us,
        "library": "NCCL 2.27.3", "interconnect": "NVLink", "source": "made",
    }  # fmt: skip


def frozen_us(gpu: str, ranks: int, size: float, op: str = "all_gather") -> float:
    request = Request(op=op, ranks=ranks, payload_bytes=size, fabric=fabric(gpu, "NVLink"))
    return collective_estimate(request, gpu).seconds * 1e6


def test_rows_of_a_new_file_are_scored_by_the_frozen_table_and_never_fitted(tmp_path: Path) -> None:
    """Times that are twice what the table says are off by half, whatever regularity a fit would find in them."""
    twice = [collective("H100 SXM", 8, 2.0**power, 2 * frozen_us("H100 SXM", 8, 2.0**power)) for power in range(10, 30)]
    rows, unscored = micro_rows.collective_rows(write(tmp_path / "collectives.csv", twice))
    assert not unscored
    report = validate_collectives.figures([], rows)
    assert report["mean_abs_err"] == pytest.approx(0.5, abs=1e-6)
    assert report["by_split"] == {"sizes": pytest.approx(0.5, abs=1e-6), "ranks": None, "device": None}
    assert report["sizes_within_unseen"] < 0.1


def test_unseen_rows_fall_under_the_split_that_says_what_is_known(tmp_path: Path) -> None:
    rows, _ = micro_rows.collective_rows(
        write(
            tmp_path / "collectives.csv",
            [collective("H100 SXM", ranks, 1e6, 20) for ranks in (8, 5)] + [collective("H800 SXM", 8, 1e6, 20)],
        )
    )
    model = validate_collectives.packaged()
    assert [validate_collectives.known_split(model, row) for row in rows] == ["sizes", "ranks", "device"]
    without_sizes = validate_collectives.figures([], rows[1:])
    assert without_sizes["by_split"]["sizes"] is None
    assert without_sizes["mean_abs_err_of"] == validate_collectives.ALL_UNSEEN
    assert all(without_sizes["law"][split] is not None for split in ("ranks", "device"))


def test_rows_that_cannot_be_scored_are_counted_with_the_reason(tmp_path: Path) -> None:
    good = collective("H100 SXM", 8, 1e6, 20)
    bad = [
        good | {"op": "gossip"}, good | {"time_us": ""}, good | {"time_us": "nan"}, good | {"num_gpus": 1},
        good | {"msg_bytes": 0},
    ]  # fmt: skip
    rows, unscored = micro_rows.collective_rows(write(tmp_path / "collectives.csv", [good, *bad]))
    assert len(rows) == 1
    assert sum(unscored.values()) == len(bad)
    assert unscored["one rank"] == 1
    assert unscored["operation 'gossip' is none of ours"] == 1


def test_a_row_is_known_again_only_if_nothing_of_it_changed(tmp_path: Path) -> None:
    good = collective("H100 SXM", 8, 1e6, 20)
    rows, _ = micro_rows.collective_rows(
        write(tmp_path / "collectives.csv", [good, good | {"time_us": 20.1}, good | {"num_gpus": 4}])
    )
    seen, unseen = micro_rows.split_seen(rows, [rows[0].digest])
    assert (len(seen), len(unseen)) == (1, 2)


def test_equal_cells_stay_on_one_side_of_every_split(tmp_path: Path) -> None:
    made = [
        collective(gpu, ranks, 2.0**power, time, op)
        for gpu in ("H100 SXM", "A100 SXM")
        for ranks in (2, 8, 16)
        for power in (10, 11, 20)
        for op in ("all_gather", "all_reduce")
        for time in (10, 11)
    ]
    rows, _ = micro_rows.collective_rows(write(tmp_path / "collectives.csv", made))
    for split, fold_of in collective_folds.FOLD_OF.items():
        folds: dict[object, set[object]] = {}
        for row in rows:
            folds.setdefault(row.cell, set()).add(fold_of(row))
        assert all(len(found) == 1 for found in folds.values()), split
        assert len({fold_of(row) for row in rows}) > 1, split


def test_held_back_rows_do_not_teach_what_they_are_scored_by(tmp_path: Path) -> None:
    """One octave takes ten times as long: told by the others, its error is about 0.9, not 0."""
    made = [
        collective("H100 SXM", 8, 2.0**power, frozen_us("H100 SXM", 8, 2.0**power) * (10 if power == 20 else 1))
        for power in range(15, 26)
    ]
    rows, _ = micro_rows.collective_rows(write(tmp_path / "collectives.csv", made))
    errors = collective_folds.held_back(rows, "sizes")["model"]
    assert errors[5] == pytest.approx(0.9, abs=0.1)


def overlap(name: str, solo_us: float, factor: float, ratio: float = 1.0) -> dict[str, object]:
    return {
        "Kernel Name": name, "kDemangledName": f"{name}<float>", "ground_truth": solo_us * 1e3,
        "duration": solo_us * 1e3 * factor, "overlap_ratio": ratio, "SM": 108,
    }  # fmt: skip


def test_overlap_rows_of_a_new_file_are_never_fitted(tmp_path: Path) -> None:
    """A kernel that nobody measured takes three times as long, every time: the frozen level 1 stays wrong about it."""
    rows, unscored = micro_rows.overlap_rows(
        write(
            tmp_path / "overlap_slowdown.csv",
            [
                *(overlap("new", 50 + index, 3.0) for index in range(20)),
                overlap("short", 4.9, 2.0),
                overlap("bad", 50, 2.0, 1.5),
            ],
        )
    )
    assert (len(rows), unscored["under 5 us alone"], sum(unscored.values())) == (20, 1, 2)
    report = validate_overlap.figures([], rows)
    assert 0.6 < report["mean_abs_err"] < 2 / 3
    assert report["leave_one_kernel_name_out"]["level 2"] == report["leave_one_kernel_name_out"]["level 1"]
    assert report["frozen"]["kernel name in the table"] is None


def test_overlap_rows_that_were_fitted_on_are_cross_validated(tmp_path: Path) -> None:
    generator = random.Random(0)
    made = [
        overlap(name, generator.uniform(40, 60), factor * generator.uniform(0.99, 1.01))
        for name, factor in (("a", 1.0), ("b", 2.0), ("c", 1.1))
        for _ in range(20)
    ]
    rows, _ = micro_rows.overlap_rows(write(tmp_path / "overlap_slowdown.csv", made))
    report = validate_overlap.figures(rows, [])
    assert report["mean_abs_err"] < 0.03
    assert report["held_back"]["level 0"] > 0.2
    # nothing tells that a kernel never seen takes twice as long
    assert report["leave_one_kernel_name_out"]["level 2"] > 0.2
    assert report["rows"] == {"scored": 60, "seen": 60, "unseen": 0}


def test_folds_of_kernels_are_even_within_a_name(tmp_path: Path) -> None:
    rows, _ = micro_rows.overlap_rows(
        write(tmp_path / "overlap_slowdown.csv", [overlap(name, 50, 1.0) for name in "aab" for _ in range(10)])
    )
    measured = [row.measured for row in rows]
    folds = overlap_folds.stratified(measured, 3)
    for name, each in (("a", 4), ("b", 2)):
        counts = [
            sum(place == fold for place, row in zip(folds, measured, strict=True) if row.kernel.name == name)
            for fold in range(overlap_folds.FOLDS)
        ]
        assert counts == [each] * overlap_folds.FOLDS
