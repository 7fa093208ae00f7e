"""`rollart eval RUN --instance-seed N --count K [--greedy]`: score a run's model on instances that the reader chooses."""

from __future__ import annotations

import argparse

from rollart.cli import folders
from rollart.cli.work import Work
from rollart.core.errors import ConfigError

SUMMARY = "score the trained model of a run on instances of your choice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder, e.g. runs/first_run")
    parser.add_argument("--instance-seed", type=int, default=0, metavar="N", help="which instances (default: 0)")
    parser.add_argument("--count", type=int, default=200, metavar="K", help="how many per task (default: 200)")
    parser.add_argument("--greedy", action="store_true", help="the most likely token each time, instead of sampling")


def run(arguments: argparse.Namespace, work: Work) -> int:
    if arguments.count < 1:
        raise ConfigError(f"--count={arguments.count}: too small; score 1 instance or more")
    if arguments.instance_seed < 0:
        raise ConfigError(f"--instance-seed={arguments.instance_seed}: too small; write 0 or more")
    return work.evaluate(
        folders.existing(arguments.run_folder),
        instance_seed=arguments.instance_seed,
        count=arguments.count,
        greedy=arguments.greedy,
    )
