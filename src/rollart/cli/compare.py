"""`rollart compare A B .. --on RECIPE_OR_FILE [key=value ..]`: schedules side by side on one cluster, simulated.

A schedule is a preset, or several joined by + (rollart+affinity). All are of the same seed, hence of the same trajectories;
--repeats N runs each on N seeds. Nothing is written but --json FILE.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.cli import outlook_text, outputs
from rollart.cli.work import Work
from rollart.config.load import Resolved
from rollart.core.errors import ConfigError
from rollart.recipes.registry import KNOWN, resolve

if TYPE_CHECKING:
    from rollart.observe.outlook import Outlook

SUMMARY = "schedules side by side on one recipe, simulated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="PRESET",
        nargs="*",
        help=f"schedules to compare: {', '.join(KNOWN.presets)}, or several joined by +; and key=value for all of them",
    )
    parser.add_argument("--on", required=True, metavar="RECIPE_OR_FILE", help="what runs under each of them")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="seeds for each (default 1)")
    parser.add_argument("--profile", metavar="FILE", help="values of a machine that are laid over the recipe")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE too")


def run(arguments: argparse.Namespace, work: Work) -> int:
    schedules = [word for word in arguments.words if "=" not in word]
    values = [word for word in arguments.words if "=" in word]
    _refuse(schedules, arguments.repeats)
    runs = {name: _resolved(name, values, arguments) for name in schedules}
    if arguments.json is not None:
        outputs.require_writable(arguments.json)
    found = _run(runs, work)
    sys.stdout.write(f"{outlook_text.compared(found)}\n")
    for line in _notes(found, next(iter(runs.values()))[0]):
        sys.stdout.write(f"{line}\n")
    if arguments.json is not None:
        made = {name: [one.as_json() for one in ones] for name, ones in found.items()}
        outputs.write_json(arguments.json, {"on": arguments.on, "figures": "simulated", "schedules": made})
    return 0


def _refuse(schedules: list[str], repeats: int) -> None:
    if not schedules:
        raise ConfigError(f"name the schedules to compare: {', '.join(KNOWN.presets)}, or several joined by +")
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: it is 1 or more")
    twice = {name for name in schedules if schedules.count(name) > 1}
    if twice:
        raise ConfigError(f"{min(twice)} is named twice; leave one out, or use --repeats for more seeds")
    for word in schedules:
        for name in word.split("+"):
            if name not in KNOWN.presets:
                near = difflib.get_close_matches(name, KNOWN.presets, n=1, cutoff=0.0)
                raise ConfigError(f"{word}: {name!r} is no preset; did you mean {near[0]}?")


def _resolved(schedule: str, values: list[str], arguments: argparse.Namespace) -> list[Resolved]:
    """The recipe under a schedule, once for each seed. Raises ConfigError naming the schedule."""
    presets = schedule.split("+")
    try:
        first = resolve(arguments.on, [*presets, *values], profile=arguments.profile)
        seed = first.config.seed
        rest = [value for value in values if not value.startswith("seed=")]
        more = [[*presets, *rest, f"seed={seed + nth}"] for nth in range(1, arguments.repeats)]
        return [first, *(resolve(arguments.on, words, profile=arguments.profile) for words in more)]
    except ConfigError as error:
        raise ConfigError(f"{schedule} on {arguments.on}: {error}") from error


def _run(runs: dict[str, list[Resolved]], work: Work) -> dict[str, list[Outlook]]:
    """All of them, in order; on a terminal it is said how far it is."""
    made: list[Outlook] = []
    total = sum(map(len, runs.values()))

    def done(found: Outlook) -> None:
        made.append(found)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{len(made)} of {total} simulated{' ' if len(made) < total else chr(10)}")
            sys.stderr.flush()

    work.predict([one for ones in runs.values() for one in ones], done)
    rest = iter(made)
    return {name: [next(rest) for _ in ones] for name, ones in runs.items()}


def _notes(found: dict[str, list[Outlook]], first: Resolved) -> list[str]:
    """What a reader must know of each column, and what they rest on."""
    lines = [
        f"{name}: staleness {outlook_text.staleness(one)}" for name, (one, *_) in found.items() if not one.bound_holds
    ]
    lines += _said_by({name: one.notes for name, (one, *_) in found.items()})
    one = next(iter(found.values()))[0]
    steps = f"{one.steps} steps of {first.config.schedule.batch} trajectories"
    basis = _said_by({name: one.basis for name, (one, *_) in found.items()})
    return [*lines, f"simulated, {steps}; rests on:", *(f"  {line}" for line in basis)]


def _said_by(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Each line once: those of all schedules as they are, then the others after the names of theirs."""
    of: dict[str, list[str]] = {}
    for name, said in lines.items():
        for line in said:
            of.setdefault(line, []).append(name)
    everywhere = [line for line, names in of.items() if len(names) == len(lines)]
    return everywhere + [f"{', '.join(names)}: {line}" for line, names in of.items() if len(names) < len(lines)]
