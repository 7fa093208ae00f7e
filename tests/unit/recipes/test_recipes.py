"""Recipes and presets: what must stay true of them while their numbers are tuned."""

from __future__ import annotations

import pytest

from rollart.config.explain import advisories
from rollart.core.errors import ConfigError
from rollart.recipes.presets import PRESETS
from rollart.recipes.registry import RECIPES, resolve


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_like_its_run_and_surprises_nobody(name: str) -> None:
    config = resolve(name).config
    assert config.name == name
    assert RECIPES[name].__doc__
    assert [line for line in advisories(config) if "sessions" in line or "share" in line] == []


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RECIPES)
def test_any_preset_lies_over_any_recipe(name: str, preset: str) -> None:
    resolved = resolve(name, [preset])
    values = PRESETS[preset]["schedule"]
    assert resolved.config.schedule.model_dump(include=set(values)) == values
    assert {str(resolved.origins[f"schedule.{key}"]) for key in values} == {f"preset {preset}"}


def test_a_later_preset_replaces_an_earlier_one_whole() -> None:
    keys = {frozenset(values["schedule"]) for values in PRESETS.values()}
    assert len(keys) == 1
    assert all(set(values) == {"schedule"} for values in PRESETS.values())


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
