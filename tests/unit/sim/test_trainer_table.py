"""A simulated trainer whose seconds come from a table of step times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError
from rollart.perf.shapes import model_shape
from rollart.perf.step_table import StepRow, StepTable, write_step_table
from rollart.perf.train_plan import TrainingPlan
from rollart.sim.training import TrainerHardware, trainer_hardware
from rollart.sim.virtual import build
from virtual_configs import a_virtual

SHAPE = model_shape("qwen3-8b")
PLAN = TrainingPlan(
    devices=8, tp=4, pp=2, micro_batch=2, global_batch=64, sequence=32768, recompute="full", sequence_parallel=True
)  # fmt: skip
POOLS = {"train": {"device": "H800", "roles": ["train"]}, "roll": {"device": "H20"}}


def seconds(length: int, count: int) -> float:
    return 2.0 + count * (1e-4 * length + 1e-9 * length**2)


TABLE = StepTable(
    model="qwen3-8b", parameters=SHAPE.parameters, device="H800 SXM 80GB", interconnect="", framework="torchtitan", plan=PLAN,
    memory_bytes=5e10, provenance={"measured": 1.0},
    rows=tuple(
        StepRow(sequence=length, micro_batches=count, seconds=seconds(length, count))
        for length in (2048, 8192, 32768)
        for count in (8, 16)
    ),
)  # fmt: skip


def configured(path: Path, table: StepTable = TABLE, **plan: Any) -> RunConfig:
    write_step_table(path, table)
    return a_virtual(pools=POOLS, trainer={"plan": {"table": str(path), **plan}})


def a_trainer(path: Path, table: StepTable = TABLE, *, longest: int = 32768, **plan: Any) -> TrainerHardware:
    return trainer_hardware(configured(path, table, **plan), SHAPE, longest=longest, usual=8192.0)


def test_equal_lengths_take_what_the_table_says(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "t.json")
    assert trainer.plan == replace(PLAN, sequence=8192, global_batch=32)
    for length, count in ((2048, 4), (8192, 16), (32768, 8)):
        lengths = [length] * (PLAN.dp * PLAN.micro_batch * count)
        assert trainer.step_s(lengths) == pytest.approx(seconds(length, count), rel=0.02)
    assert trainer.usual_s() == pytest.approx(seconds(8192, trainer.plan.micro_batches))


def test_the_table_is_named_in_what_figures_rest_on(tmp_path: Path) -> None:
    virtual = build(configured(tmp_path / "t.json"))
    (line,) = [line for line in virtual.basis if line.startswith("trainer: ")]
    assert "torchtitan on 8 H800" in line
    assert "a table of step times (100% measured)" in line
    assert any("recompute=full" in note for note in virtual.notes)


def test_twice_the_seconds_make_the_trainer_twice_as_slow(tmp_path: Path) -> None:
    slow = replace(TABLE, rows=tuple(replace(row, seconds=2 * row.seconds) for row in TABLE.rows))
    lengths = [700, 5000, 20000] * 8
    first, second = a_trainer(tmp_path / "a"), a_trainer(tmp_path / "b", slow)
    assert second.step_s(lengths) == pytest.approx(2 * first.step_s(lengths))


@pytest.mark.parametrize(
    ("table", "plan", "says"),
    [
        ({"parameters": 9e9}, {}, "is of qwen3-8b with 9e\\+09 parameters; the model is "),
        ({"device": "H100 SXM 80GB"}, {}, "is of H100 SXM 80GB; the train pools have H800"),
        ({"plan": replace(PLAN, devices=16, dp=2)}, {}, "is of 16 devices; the train pools have 8; use 16"),
        ({"memory_bytes": 1e11}, {}, "needs 93.1 GiB on a H800"),
        ({}, {"tp": 8}, "has tp 4; trainer.plan.tp=8; use 4, or another table"),
        ({}, {"recompute": "none"}, "has recompute full; trainer.plan.recompute=none"),
        ({}, {"framework": "NeMo"}, "has framework torchtitan; trainer.plan.framework=NeMo"),
        ({"rows": TABLE.rows[:4]}, {}, "ends at 8192 tokens; .* use model.max_context=8192"),
    ],
)
def test_a_table_of_another_job_is_refused(
    tmp_path: Path, table: dict[str, Any], plan: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        a_trainer(tmp_path / "t.json", replace(TABLE, **table), **plan)


def test_values_that_agree_with_the_table_are_taken(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "t.json", tp=4, pp=2, micro_batch=2, recompute="full", framework="torchtitan")
    assert trainer.table == TABLE
    assert trainer.law.framework == "torchtitan"
