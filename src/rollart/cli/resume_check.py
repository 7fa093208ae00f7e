"""`rollart resume-check RECIPE_OR_FILE [key=value ..] [--steps K]`: does a resumed run consume what an uninterrupted one does?

Trains 2K steps, then K and some more that a hard kill takes away, resumes to 2K, and compares both event logs.
"""

from __future__ import annotations

import argparse
import sys

from rollart.cli import configured, extras
from rollart.cli.work import Work

SUMMARY = "prove that a killed and resumed run trains what an uninterrupted one does"
STEPS = 6
"""Enough for a kill between two checkpoints of a run whose steps take a tenth of a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configured.add_arguments(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        metavar="K",
        help=f"steps before the checkpoint, and after (default: {STEPS})",
    )


def run(arguments: argparse.Namespace, work: Work) -> int:
    resolved = configured.resolved_from(arguments)
    extras.require(resolved.config)
    return 0 if work.resume_check(resolved, steps=arguments.steps, say=_say) else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
