"""Recipes and presets: what must stay true of them while their numbers are tuned."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest

from rollart.config.explain import advisories
from rollart.core.errors import ConfigError
from rollart.recipes.presets import FAMILIES, PRESETS, SCHEDULES
from rollart.recipes.registry import RECIPES, resolve


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_like_its_run_and_surprises_nobody(name: str) -> None:
    config = resolve(name).config
    assert config.name == name
    assert RECIPES[name].__doc__
    assert [line for line in advisories(config) if "sessions" in line or "share" in line] == []


OFF = {"affinity": {"kind": "off"}}
WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "sync": {**OFF, "rewards": {"kind": "unlimited"}}, "sync_plus": OFF, "one_off": OFF, "areal": OFF,
}  # fmt: skip
"""What a baseline of the papers switches off beside its schedule."""


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RECIPES)
def test_any_preset_lies_over_any_recipe(name: str, preset: str) -> None:
    resolved = resolve(name, [preset])
    for part, values in PRESETS[preset].items():
        assert getattr(resolved.config, part).model_dump(include=set(values)) == values
        origins = {key: str(origin) for key, origin in resolved.origins.items() if key.startswith(f"{part}.")}
        mine = {key: origin for key, origin in origins.items() if key.split(".")[1] in values}
        assert set(mine.values()) == {f"preset {preset}"}, "every key of what it sets, none is left to a default"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_preset_replaces_an_earlier_one_of_its_family_whole(family: Mapping[str, Any]) -> None:
    part = next(iter(next(iter(family.values()))))
    assert len({frozenset(values[part]) for values in family.values()}) == 1
    assert all({**values, part: None} == {part: None, **WITHOUT.get(name, {})} for name, values in family.items())
    for first, last in permutations(family, 2):
        assert resolve("smoke", [first, last]).config == resolve("smoke", [last]).config


def test_a_baseline_of_the_papers_runs_without_what_it_is_compared_with() -> None:
    recipe = resolve("sim_small").config
    assert (recipe.affinity.kind, recipe.rewards.kind) == ("table", "serverless")
    for name in SCHEDULES:
        config = resolve("sim_small", [name]).config
        assert config.affinity.kind == ("off" if name in WITHOUT else "table"), name
        assert config.rewards.kind == ("unlimited" if name == "sync" else "serverless"), name
    assert resolve("sim_small", ["one_off", "affinity"]).config.affinity.kind == "auto", "asked for after it"


def test_a_schedule_and_an_algorithm_go_together() -> None:
    both = resolve("first_run", ["sync", "dapo"]).config
    assert both.schedule == resolve("first_run", ["sync"]).config.schedule
    assert both.algorithm == resolve("first_run", ["dapo"]).config.algorithm


def test_the_control_experiment_differs_in_the_shuffle_only() -> None:
    run, control = resolve("first_run").config, resolve("first_run_shuffled").config
    assert control.algorithm.shuffle_rewards
    same = resolve("first_run_shuffled", ["algorithm.shuffle_rewards=false", f"name={run.name}"]).config
    assert same == run


def test_the_main_job_trains_two_tasks_of_unlike_shape_asynchronously() -> None:
    config = resolve("first_run").config
    lake, digits = config.tasks["frozen_lake"], config.tasks["max_digit"]
    assert (lake.env.kind, digits.env.kind) == ("frozen_lake", "max_digit")
    assert lake.max_turns > 1
    assert digits.max_turns == 1
    assert digits.size >= 1000
    assert digits.held_out == 0.2
    assert config.schedule.max_staleness >= 1
    assert config.baselines.episodes >= 200
    assert config.eval.episodes >= 200


def test_the_second_rung_is_scored_on_maps_that_it_has_not_seen() -> None:
    lake = resolve("generalise").config.tasks["frozen_lake"]
    assert lake.env.model_dump()["map"] == "random"
    assert lake.held_out > 0


def test_a_name_that_is_no_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean first_run"):
        resolve("first_rn")
