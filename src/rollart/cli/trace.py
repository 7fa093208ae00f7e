"""`rollart trace MODEL [options]`: step time, memory and timeline of a distributed training job, from one device or none.

MODEL is a public name (llama3-70b), a config.json of transformers, gpt:layers=..,hidden=..,heads=..,vocab=.. or the
module:function that returns your own torch.nn.Module. The real model runs its forward, backward and optimizer step for one rank
under fake tensors, on a CPU and without memory for its weights; the other ranks follow from rules. A plan file (--plan) holds
the same options by the same names; the command line goes before it. Nothing is written but --json, --timeline and --table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollart.cli import outputs, trace_text
from rollart.cli.work import Work
from rollart.core.errors import ConfigError
from rollart.optrace.job import OPTIONS, Job, Option, is_module, job_from

SUMMARY = "predict a distributed training step: time, memory, timeline; no GPU needed"
MODEL = "model"
"""Key of a plan file that says what MODEL says on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a public model, config.json, gpt:.. or module:function"
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a .yaml file with these options by their names")
    for option in OPTIONS:
        _add(parser, option)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write step times by length, for trainer.plan.table of a simulation"
    )
    parser.add_argument(
        "--table-lengths", metavar="N,N,..", help="lengths in the table (default: --seq and four halvings of it)"
    )


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    """Without defaults, so that what was given is told from what was not."""
    flag, says = f"--{option.name.replace('_', '-')}", option.says
    if option.default not in ("", None, {}, -1) and option.takes != "flag":
        says = f"{says} (default {option.default})"
    if option.takes == "flag":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=says)
    elif option.takes in ("pairs", "late"):
        what = "NAME=VALUE" if option.takes == "pairs" else "WHO=HOW"
        parser.add_argument(flag, action="append", metavar=what, default=None, help=says)
    elif option.takes == "choice":
        parser.add_argument(flag, metavar="|".join(option.choices), default=None, help=says)
    else:
        parser.add_argument(
            flag, metavar="N" if option.takes in ("whole", "number") else "TEXT", default=None, help=says
        )


def run(arguments: argparse.Namespace, work: Work) -> int:
    job = job_of(arguments)
    lengths = _lengths(arguments)
    for path in (arguments.json, arguments.timeline, arguments.table):
        if path is not None:
            outputs.require_writable(path)
    found = work.trace(job, timeline=arguments.timeline, table=arguments.table, lengths=lengths)
    sys.stdout.write(f"{trace_text.described(found)}\n")
    for what, path in (("timeline", arguments.timeline), ("table", arguments.table)):
        if path is not None:
            sys.stdout.write(f"{what}: {path}\n")
    if arguments.json is not None:
        outputs.write_json(arguments.json, found.as_json())
    return 0


def job_of(arguments: argparse.Namespace) -> Job:
    """The job of a plan file, with what the command line says laid over it. Raises ConfigError."""
    given = {option.name: getattr(arguments, option.name) for option in OPTIONS}
    return _job(plan_file(arguments.plan) if arguments.plan is not None else {}, {**given, MODEL: arguments.model})


def job_in(path: Path) -> Job:
    """The job of a plan file that names its model. Raises ConfigError."""
    return _job(plan_file(path), {})


def _job(said: Mapping[str, Any], over: Mapping[str, Any]) -> Job:
    values = {**said, **{name: value for name, value in over.items() if value is not None}}
    model = values.pop(MODEL, None)
    if model is None:
        raise ConfigError("name a model to trace, e.g. llama3-70b, or give `model:` in a plan file")
    if is_module(str(model)) and "" not in sys.path:
        sys.path.insert(0, "")  # a module of the folder one stands in, as `python -m` would find it
    return job_from(str(model), values)


def plan_file(path: Path) -> dict[str, Any]:
    """Options by name, as `job_from` takes them. Raises ConfigError."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--plan {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: is no YAML ({error})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"--plan {path}: holds {type(loaded).__name__}, need a map of options, e.g. `tp: 8`")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def _lengths(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.table_lengths is None:
        return ()
    if arguments.table is None:
        raise ConfigError("--table-lengths means nothing without --table FILE; add it, or leave the lengths out")
    try:
        found = tuple(int(word) for word in arguments.table_lengths.split(","))
    except ValueError:
        raise ConfigError(f"--table-lengths {arguments.table_lengths}: give whole numbers, as 1024,4096,8192") from None
    if min(found) < 1:
        raise ConfigError(f"--table-lengths {arguments.table_lengths}: lengths are 1 or more")
    return found
