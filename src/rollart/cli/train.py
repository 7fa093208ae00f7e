"""`rollart train RECIPE_OR_FILE [key=value ..]`: run it."""

from __future__ import annotations

import argparse

from rollart.cli import configured, extras, folders
from rollart.cli.work import Work
from rollart.config.real import require_real

SUMMARY = "train a recipe or a configuration file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configured.add_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live display")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run of the same name")


def run(arguments: argparse.Namespace, work: Work) -> int:
    resolved = configured.resolved_from(arguments)
    require_real(resolved.config)
    extras.require(resolved.config)
    folder = folders.folder_of(resolved)
    folders.claim(folder, overwrite=arguments.overwrite, end_earlier=work.end_earlier)
    with folders.told_how_to_resume(folder, work.can_go_on):
        return work.train(resolved, plain=arguments.plain)
