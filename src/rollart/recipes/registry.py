"""The names of all recipes and presets, and `resolve` with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.config import load
from rollart.config.load import Known, Resolved
from rollart.config.schema import RunConfig
from rollart.recipes.clusters import production_3000gpu, rollart_128gpu, sim_small
from rollart.recipes.first_run import first_run, first_run_shuffled, smoke
from rollart.recipes.generalise import generalise
from rollart.recipes.presets import PRESETS
from rollart.recipes.smollm2_textworld import smollm2_textworld

RECIPES: Mapping[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        first_run, first_run_shuffled, generalise, smoke, smollm2_textworld, rollart_128gpu, production_3000gpu, sim_small,
    )
}  # fmt: skip
KNOWN = Known(recipes=RECIPES, presets=PRESETS)


def resolve(
    recipe_or_file: str, overrides: Sequence[str] = (), *, profile: str | Mapping[str, Any] | None = None
) -> Resolved:
    """`rollart.config.load.resolve` with the built-in recipes and presets. Raises ConfigError with a line per problem."""
    return load.resolve(recipe_or_file, overrides, profile=profile, known=KNOWN)
