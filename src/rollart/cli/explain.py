"""`rollart explain RECIPE_OR_FILE [key=value ..]`: what it comes to, and where each value comes from."""

from __future__ import annotations

import argparse
import sys

from rollart.cli import configured
from rollart.cli.work import Work
from rollart.config.explain import explain

SUMMARY = "print what a configuration comes to, and every value with its origin"
add_arguments = configured.add_arguments


def run(arguments: argparse.Namespace, work: Work) -> int:
    sys.stdout.write(explain(configured.resolved_from(arguments)))
    return 0
