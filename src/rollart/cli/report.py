"""`rollart report RUN`: write the run's report again, from its records."""

from __future__ import annotations

import argparse
import sys

from rollart.cli import folders
from rollart.cli.work import Work

SUMMARY = "write report.html of a run from its records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder, e.g. runs/first_run")


def run(arguments: argparse.Namespace, work: Work) -> int:
    sys.stdout.write(f"{work.report(folders.existing(arguments.run_folder))}\n")
    return 0
