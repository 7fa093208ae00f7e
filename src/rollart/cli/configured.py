"""The arguments that `train` and `explain` share: what to run, and the values laid over it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollart.config.load import Resolved
from rollart.recipes.registry import KNOWN, resolve

MACHINE_PROFILE = Path("~/.config/rollart/machine.yaml")
"""Laid over every recipe where it exists."""
NO_PROFILE = "none"


def add_arguments(parser: argparse.ArgumentParser, *, virtual: bool = False) -> None:
    """`virtual`: for machines that are not this one; its profile says nothing of them, and the recipe may be left out."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE_OR_FILE",
        nargs="?" if virtual else None,
        help=f"one of {', '.join(KNOWN.recipes)}, or a .yaml file",
    )
    parser.add_argument(
        "words",
        metavar="key=value",
        nargs="*",
        default=[],  # else argparse calls it required where the recipe is missing
        help=f"set a value by its dotted key, or lay a preset over it: {', '.join(KNOWN.presets)}",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="values of a machine that are laid over the recipe"
        if virtual
        else f"values of this machine (default: {MACHINE_PROFILE} where it exists; {NO_PROFILE}: no profile)",
    )


def resolved_from(arguments: argparse.Namespace) -> Resolved:
    """The configuration that the arguments ask for. Raises ConfigError."""
    return resolve(arguments.recipe, arguments.words, profile=profile_path(arguments.profile))


def profile_path(given: str | None, machine: Path = MACHINE_PROFILE) -> str | None:
    """The profile to read: the one given, else the machine's where there is one."""
    if given is not None:
        return None if given == NO_PROFILE else given
    return str(machine) if machine.expanduser().is_file() else None
