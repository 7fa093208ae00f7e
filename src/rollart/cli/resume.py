"""`rollart resume RUN [key=value ..]`: go on with a run that ended or was killed, from its newest whole checkpoint.

What the kept state depends on stays as it was; anything else may be changed, for example schedule.steps to train more.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollart.cli import extras, folders
from rollart.cli.work import Work
from rollart.config.load import Resolved, load_file
from rollart.config.schema import RunConfig
from rollart.config.text import scalar_text
from rollart.core.errors import ConfigError
from rollart.recipes.registry import KNOWN, resolve

SUMMARY = "go on with a run that was interrupted, or train a finished one further"

FIXED = {
    "name": "the run's events carry it",
    "seed": "every draw is derived from it, so draws of the past could not be told from new ones",
    "output_dir": "a run is where its folder is; move the folder instead",
    "model": "the checkpoint holds weights of that model",
    "tokenizer": "the model's token ids and the trajectories that wait to be trained are of that tokenizer",
    "schedule.batch": "versions and the staleness of what waits to be trained are counted in batches of that size",
    "schedule.group_size": "groups that are open or wait to be trained have that size",
}
"""What a checkpoint depends on, and why. A key stands for all keys below it."""
TASKS = "the cursors, and the mix of what waits to be trained, are of those tasks in those shares"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder, e.g. runs/first_run")
    parser.add_argument(
        "words", metavar="key=value", nargs="*", help="change a value by its dotted key, e.g. schedule.steps=200"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live display")


def run(arguments: argparse.Namespace, work: Work) -> int:
    folder = folders.existing(arguments.run_folder)
    resolved = resolved_for(folder, arguments.words)
    if folders.in_use(folder):
        raise ConfigError(
            f"{folder} belongs to a run that is alive; wait for it, or end it (Ctrl-C ends it so that it can go on)"
        )
    extras.require(resolved.config)
    with folders.told_how_to_resume(folder, work.can_go_on):
        return work.resume(folder, resolved, plain=arguments.plain)


def resolved_for(folder: Path, words: Sequence[str]) -> Resolved:
    """The run's configuration with `words` laid over it. Raises ConfigError for a change that its state does not allow."""
    path = folder / folders.MARK
    before = load_file(path, KNOWN)
    if not words:
        return before
    after = resolve(str(path), words)
    problems = list(refusals(before.config, after.config))
    if problems:
        raise ConfigError(
            "\n".join(
                (
                    f"{folder} cannot go on with another value of what its state depends on:",
                    *(f"  {line}" for line in problems),
                    f"leave it as it was, or start another run: {_another(path, words)}",
                )
            )
        )
    return after


def _another(path: Path, words: Sequence[str]) -> str:
    """The command that starts a run of its own with the same changes."""
    name = [] if any(word.partition("=")[0] == "name" for word in words) else ["name=NAME"]
    return shlex.join(["rollart", "train", str(path), *name, *words])


def refusals(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """A line for each change that a resumed run cannot make."""
    old, new = dict(_flat(before.model_dump())), dict(_flat(after.model_dump()))
    for key, why in FIXED.items():
        changed = [name for name in {**old, **new} if name == key or name.startswith(f"{key}.")]
        for name in changed:
            if old.get(name) != new.get(name):
                yield f"{name}={_shown(new, name)} (it was {_shown(old, name)}): {why}"
    for task in {**before.tasks, **after.tasks}:
        if task not in after.tasks:
            yield f"tasks.{task} is gone: {TASKS}"
        elif task not in before.tasks:
            yield f"tasks.{task} is new: {TASKS}"
        elif before.tasks[task].ratio != after.tasks[task].ratio:
            yield f"tasks.{task}.ratio={after.tasks[task].ratio:g} (it was {before.tasks[task].ratio:g}): {TASKS}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: dict[str, Any], name: str) -> str:
    return scalar_text(values[name]) if name in values else "not there"
