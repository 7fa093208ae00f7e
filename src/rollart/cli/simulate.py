"""`rollart simulate RECIPE_OR_FILE [key=value ..]`: what a run would give, on virtual time; `--replay RUN`: against a real one.

The run's folder holds what a real run leaves: configuration, event log, metrics, summary, report and timeline. A recipe of this
machine needs the calibration of a run on it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rollart.cli import configured, folders, outlook_text, outputs
from rollart.cli.work import Work
from rollart.config.load import Resolved
from rollart.config.schema import VirtualWorld
from rollart.core.errors import ConfigError
from rollart.recipes.registry import resolve

SUMMARY = "predict a run: step time, throughput, use of devices, cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configured.add_arguments(parser, virtual=True)
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="what `rollart calibrate` wrote, for real parts"
    )
    parser.add_argument("--replay", metavar="RUN", help="predict a recorded run and compare it with what was measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run of the same name")


def run(arguments: argparse.Namespace, work: Work) -> int:
    if arguments.replay is not None:
        return _replay(arguments, work)
    if arguments.recipe is None:
        raise ConfigError("name a recipe or a .yaml file to simulate, or a recorded run with --replay RUN")
    resolved = resolve(arguments.recipe, arguments.words, profile=arguments.profile)
    if arguments.json is not None:
        outputs.require_writable(arguments.json)
    folder = folder_of(resolved)
    folders.claim(folder, overwrite=arguments.overwrite, end_earlier=work.end_earlier)
    found = work.simulate(resolved, folder=folder, calibration=arguments.calibration)
    _say(outlook_text.described(resolved.config.name, found))
    _say(f"report: {folder / 'report.html'}")
    _keep(arguments.json, {"run": resolved.config.name, **found.as_json()})
    return 0


def folder_of(resolved: Resolved) -> Path:
    """Beside the folder of the real run that has the same name."""
    folder = folders.folder_of(resolved)
    virtual = isinstance(resolved.config.world, VirtualWorld)
    return folder if virtual else folder.with_name(f"{folder.name}-simulated")


def _replay(arguments: argparse.Namespace, work: Work) -> int:
    given = [word for word in (arguments.recipe, *arguments.words) if word is not None]
    if given or arguments.profile or arguments.overwrite:
        what = given[0] if given else "--profile" if arguments.profile else "--overwrite"
        raise ConfigError(f"{what} means nothing to --replay, which takes the run as it was; leave it out")
    if arguments.json is not None:
        outputs.require_writable(arguments.json)
    folder = folders.existing(arguments.replay)
    predicted, measured = work.replay(folder, calibration=arguments.calibration)
    _say(outlook_text.against(predicted, measured))
    _say("\n".join(["simulated; rests on:", *(f"  {line}" for line in predicted.basis)]))
    _keep(arguments.json, {"run": folder.name, "predicted": predicted.as_json(), "measured": measured.as_json()})
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _keep(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        outputs.write_json(path, value)
