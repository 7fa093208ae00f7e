"""`rollart calibrate RUN [--out FILE]`: cost and workload models from a recorded run, for `rollart simulate --calibration`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollart.cli import folders, outputs
from rollart.cli.work import Work

SUMMARY = "make cost and workload models from a recorded run"
FILE = "calibration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder, e.g. runs/first_run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the file to write (default: {FILE} in the run's folder)"
    )


def run(arguments: argparse.Namespace, work: Work) -> int:
    folder = folders.existing(arguments.run_folder)
    out = arguments.out or folder / FILE
    outputs.require_writable(out)
    for line in work.calibrate(folder, out):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{out}\n")
    return 0
