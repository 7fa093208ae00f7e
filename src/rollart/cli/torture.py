"""`rollart torture`: random faults against the control code on virtual time, every promise checked after each.

--seeds N runs N scenarios and writes what they came to; --seed S runs one again and, when it breaks a promise, looks for
a small scenario that breaks the same; --scenario FILE runs one that was written down; --mutants DIR applies each *.patch
of a folder to a copy of the checkout and says which are found by the tests or by 300 seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.cli import outputs
from rollart.cli.work import Work
from rollart.core.errors import ConfigError

if TYPE_CHECKING:
    from rollart.sim.torture.campaign import Tally
    from rollart.sim.torture.drive import Outcome
    from rollart.sim.torture.scenario import Scenario

SUMMARY = "run the control code on virtual time under random faults"
SHOWN = 5
"""Broken seeds that are printed; all of them are in the JSON."""
WHAT = ("seeds", "seed", "scenario", "mutants")
"""One of them says what is run."""
GOES_WITH: Mapping[str, tuple[str, ...]] = {
    "first": ("seeds",), "stop": ("seeds",), "workers": ("seeds", "mutants"), "json": ("seeds", "mutants"),
    "log": ("seed", "scenario"),
}  # fmt: skip
"""What each other option has a meaning for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=int, metavar="N", help="run N scenarios")
    what.add_argument("--seed", type=int, metavar="S", help="run the scenario of one seed, and shrink it if it breaks")
    what.add_argument("--scenario", type=Path, metavar="FILE", help="run a scenario from a JSON file")
    what.add_argument("--mutants", type=Path, metavar="DIR", help="which of the patches in DIR tests or 300 seeds find")
    parser.add_argument("--first", type=int, metavar="K", help="the first seed of --seeds (default 0)")
    parser.add_argument("--workers", type=int, metavar="W", help="processes of --seeds or --mutants (default: cores)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what --seeds or --mutants came to, with coverage tables, to FILE",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the event log of --seed or --scenario to FILE")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that breaks a promise")


def run(arguments: argparse.Namespace, work: Work) -> int:
    _refuse(arguments)
    if arguments.seeds is not None:
        return _many(arguments)
    if arguments.mutants is not None:
        from rollart.sim import mutants

        return mutants.run(arguments.mutants, arguments.json, _workers(arguments))
    from rollart.sim.torture.scenario import scenario

    return _one(scenario(arguments.seed) if arguments.seed is not None else _read(arguments.scenario), arguments)


def _refuse(arguments: argparse.Namespace) -> None:
    """Before anything is run. Raises ConfigError for what has no meaning, StoreError for a file that cannot be written."""
    what = next(name for name in WHAT if getattr(arguments, name) is not None)
    for name, of in GOES_WITH.items():
        if getattr(arguments, name) not in (None, False) and what not in of:
            raise ConfigError(
                f"--{name} means nothing to --{what}; it goes with {' or '.join(f'--{one}' for one in of)}; leave it out"
            )
    for name, least in (("seeds", 1), ("workers", 1), ("seed", 0), ("first", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: it is {least} or more")
    for path in (arguments.json, arguments.log):
        if path is not None:
            outputs.require_writable(path)


def _workers(arguments: argparse.Namespace) -> int:
    return int(arguments.workers or os.cpu_count() or 1)


def _many(arguments: argparse.Namespace) -> int:
    from rollart.sim.torture.campaign import as_json, campaign

    first, started = arguments.first or 0, time.monotonic()

    def progress(tally: Tally) -> None:
        seconds = time.monotonic() - started
        sys.stderr.write(
            f"\r{tally.seeds} of {arguments.seeds} seeds, {len(tally.broken)} broken, {seconds:.0f} s, "
            f"{1e3 * seconds / tally.seeds:.0f} ms each "
        )
        sys.stderr.flush()

    tally = campaign(first, arguments.seeds, workers=_workers(arguments), stop=arguments.stop, progress=progress)
    sys.stderr.write("\n")
    report = as_json(tally, first=first, seconds=time.monotonic() - started)
    _print(report)
    if arguments.json is not None:
        outputs.write_json(arguments.json, report)
    return 1 if tally.broken or tally.short else 0


def _print(report: dict[str, Any]) -> None:
    for entry in [*report["broken"], *report["below_the_minimum"]][:SHOWN]:
        lines = entry.get("promises") or entry["lacks"]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        sys.stdout.write(f"seed {entry['seed']}: {lines[0]}{more}\n")
    never = report["never_hit"]
    sys.stdout.write(
        f"{report['seeds']} seeds, {report['events']} events, {report['incarnations']} incarnations, "
        f"{report['faults_fired']} faults: {len(report['broken'])} seeds broke a promise, "
        f"{len(report['below_the_minimum'])} held too little; never hit: {len(never['fault_by_state'])} cells of fault x "
        f"state, {len(never['cancellation_by_await'])} of cancellation x await\n"
    )


def _one(chosen: Scenario, arguments: argparse.Namespace) -> int:
    from rollart.sim.torture import drive, shrink

    outcome = drive.run(chosen)
    _tell(outcome)
    if arguments.log is not None:
        outputs.write(arguments.log, outcome.log_bytes)
    if not outcome.broken:
        return 0
    sys.stderr.write("looking for a small scenario that breaks the same promise ..\n")
    small = shrink.shrink(chosen, lambda one: drive.run(one).broken)
    sys.stdout.write(json.dumps(small.as_json()) + "\n")
    return 1


def _tell(outcome: Outcome) -> None:
    sys.stderr.write(f"incarnations: {', '.join(outcome.ends)}; {len(outcome.log)} events\n")
    for kind, states in outcome.fired:
        sys.stderr.write(f"fault {kind} hit {', '.join(states) or 'nothing that lives'}\n")
    for line in outcome.broken:
        sys.stderr.write(f"BROKEN {line}\n")


def _read(path: Path) -> Scenario:
    from rollart.sim.torture.scenario import from_json

    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no scenario: {error}; it is the JSON that --seed prints") from error
