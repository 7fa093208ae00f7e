"""`rollart explain RECIPE_OR_FILE [key=value ..]`: what it comes to, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import sys

from rollart.cli import configured
from rollart.cli.work import Work
from rollart.config.explain import as_data, explain

SUMMARY = "print what a configuration comes to, and every value with its origin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    configured.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, work: Work) -> int:
    resolved = configured.resolved_from(arguments)
    sys.stdout.write(json.dumps(as_data(resolved), indent=1) + "\n" if arguments.json else explain(resolved))
    return 0
