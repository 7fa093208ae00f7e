"""Deadlines that end what is only slow are told before a run."""

from __future__ import annotations

import pytest

from rollart.recipes.registry import RECIPES, resolve
from rollart.sim.deadlines import deadline_notes, share_above
from rollart.sim.laws import Constant, Uniform
from rollart.sim.loads import draws_of
from rollart.sim.virtual import build

CLUSTERS = [name for name in RECIPES if "gpu" in name or name == "sim_small"]


def notes(*words: str) -> list[str]:
    config = resolve("rollart_128gpu", words).config
    return deadline_notes(config, draws_of(config))


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_clusters_of_the_package_end_nothing_that_is_only_slow(name: str) -> None:
    config = resolve(name).config
    assert deadline_notes(config, draws_of(config)) == []


def test_each_kind_of_call_is_held_against_its_own_limit() -> None:
    (scores,) = [line for line in notes("deadlines.score_s=30") if "swe_bench" in line]
    assert scores.startswith(
        "tasks.swe_bench: 25 % of its scores take longer than deadlines.score_s=30 and end as failures; use"
    )
    more = int(scores.split("deadlines.score_s=")[2].split()[0])
    assert not [line for line in notes(f"deadlines.score_s={more}") if "swe_bench" in line], (
        "the limit that is named is enough"
    )
    assert any("set-ups in a storm" in line for line in notes("deadlines.env_open_s=30"))
    assert any(
        "of its steps take longer than deadlines.env_step_s=1 " in line for line in notes("deadlines.env_step_s=1")
    )


def test_the_notes_of_a_world_have_them() -> None:
    assert any(
        "deadlines.score_s=1 " in line for line in build(resolve("sim_small", ["deadlines.score_s=1"]).config).notes
    )


def test_the_share_above_a_limit_is_that_of_the_law() -> None:
    assert share_above(Constant(value=2.0), 1.0) == 1.0
    assert share_above(Constant(value=2.0), 2.0) == 0.0
    assert share_above(Uniform(law="uniform", low=0.0, high=10.0), 7.5) == pytest.approx(0.25)
