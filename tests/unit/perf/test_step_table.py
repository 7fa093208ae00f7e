"""The table of step times: its law between rows, its file, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.step_table import (
    StepRow,
    StepTable,
    as_json,
    from_json,
    lengths_for,
    read_step_table,
    write_step_table,
)
from rollart.perf.train_plan import TrainingPlan

PLAN = TrainingPlan(devices=4, dp=2, pp=2, micro_batch=2, global_batch=64, sequence=4096)
LINEAR, SQUARE, FIXED = 2e-5, 3e-9, 0.7


def law(sequence: float, micro_batches: float) -> float:
    return FIXED + micro_batches * (LINEAR * sequence + SQUARE * sequence**2)


def a_table(**changes: Any) -> StepTable:
    rows = tuple(
        StepRow(sequence=length, micro_batches=count, seconds=law(length, count), log_std=0.1)
        for length in (512, 2048, 4096)
        for count in (8, 16)
    )
    made = StepTable(
        model="m", parameters=1e9, device="H100 SXM 80GB", interconnect="", framework="Megatron-Core", plan=PLAN,
        memory_bytes=1e10, rows=rows, provenance={"measured": 0.25, "analytic": 0.75}, sources=("a",), notes=("b",),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.parametrize("length", [256, 512, 700, 1500, 2048, 3000, 4096])
@pytest.mark.parametrize("count", [8, 11, 16, 64])
def test_a_law_of_tokens_and_their_square_is_given_back(length: int, count: int) -> None:
    within = length >= 512
    assert a_table().seconds(length, count) == pytest.approx(law(length, count), rel=1e-9 if within else 0.05)


@settings(deadline=None, max_examples=30)
@given(
    each=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=5),
    beside=st.floats(0.0, 5.0),
    asked=st.tuples(st.floats(1.0, 1.0), st.floats(0.0, 1.0)),
)
def test_a_longer_sequence_never_takes_less(each: list[float], beside: float, asked: tuple[float, float]) -> None:
    """Whatever the rows say: a law that falls is read as one that stays."""
    rows = tuple(
        StepRow(sequence=100 * 2**at, micro_batches=count, seconds=beside + count * one)
        for at, one in enumerate(each)
        for count in (1, 4)
    )
    table = a_table(rows=rows)
    longest = float(table.longest)
    lengths = [longest * share for share in (0.01, 0.2, 0.37, 0.5, 0.61, 0.8, 0.99, asked[1] or 0.5)]
    seconds = [table.micro_batch_s(length) for length in sorted(lengths)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
    assert min(seconds) >= 0


def test_the_file_holds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_step_table(path, a_table())
    assert read_step_table(path) == a_table()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"rows": []}, "it has no rows"),
        ({"rows": [{"sequence": 8, "micro_batches": 1, "seconds": 1.0}]}, "need two or more"),
        (
            {"rows": [{"sequence": 8, "micro_batches": n, "seconds": s} for n, s in ((1, 2.0), (2, 1.0))]},
            "take less time",
        ),
        ({"rows": [{"sequence": 8, "micro_batches": n, "seconds": 0.0} for n in (1, 2)]}, "need a finite time above 0"),
        ({"rows": [{"sequence": 8, "micro_batches": n, "seconds": "x"} for n in (1, 2)]}, "wrong kind"),
        ({"rows": [{"sequence": 8, "mb": 1, "seconds": 1.0}]}, "unknown mb; known: "),
        ({"plan": {"devices": 3}}, "wrong kind"),
        ({"plan": 4}, "is no map"),
        ({"provenance": {"measured": 0.5}}, "sums to 0.5"),
        ({"parameters": 0}, "parameters above 0"),
        ({"provenance": "ab"}, "wrong kind"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_json({**json.loads(json.dumps(as_json(a_table()))), **change}, "step table t.json")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    whole = as_json(a_table())
    del whole["device"]
    with pytest.raises(ConfigError, match="device is missing"):
        from_json(whole)
    for content, says in (("[]", "is no map"), ("{", "is no JSON")):
        (tmp_path / "t").write_text(content)
        with pytest.raises(ConfigError, match=says):
            read_step_table(tmp_path / "t")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_step_table(tmp_path / "absent")


def test_it_does_not_speak_of_longer_sequences() -> None:
    with pytest.raises(ConfigError, match="more than its longest sequence of 4096; use at most 4096"):
        a_table().micro_batch_s(4097)


def test_lengths_are_halvings_unless_given() -> None:
    assert lengths_for(8192) == (512, 1024, 2048, 4096, 8192)
    assert lengths_for(8192, (3000, 1000), multiple=16) == (992, 2992)
    assert lengths_for(16, multiple=8) == (8, 16)
