"""`rollart doctor [RECIPE_OR_FILE] [key=value ..]`: what this machine has, and whether it will do for a run.

Exit code 2: something that the run needs is missing or too small (without a recipe: something that every run needs).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollart import __version__
from rollart.cli import configured, extras
from rollart.cli.tables import table
from rollart.cli.work import Work
from rollart.config.load import Resolved
from rollart.config.schema import LocalWorld, RunConfig
from rollart.recipes.registry import KNOWN, resolve

if TYPE_CHECKING:
    from rollart.runtime.doctor import Device, Finding
    from rollart.runtime.memory_plan import Part

SUMMARY = "look at this machine, and at whether it will do for a run"
DISTRIBUTIONS = {"reasoning_gym": "reasoning-gym"}
"""Modules whose package is called otherwise."""
DONE, REFUSED = 0, 2
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE_OR_FILE",
        nargs="?",
        help=f"what is to be run: {', '.join(KNOWN.recipes)}, or a .yaml file",
    )
    parser.add_argument("words", metavar="key=value", nargs="*", help="values laid over it, as for train")
    parser.add_argument("--profile", metavar="FILE", help="values of this machine, as for train")
    parser.add_argument("--ray", action="store_true", help="start a Ray and end it again (some seconds)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, work: Work) -> int:
    resolved = None
    if arguments.recipe is not None:
        resolved = resolve(arguments.recipe, arguments.words, profile=configured.profile_path(arguments.profile))
    findings, parts = examine(resolved, start_ray=arguments.ray)
    good = all(finding.will_do for finding in findings)
    if arguments.json:
        data: dict[str, Any] = {
            "good": good,
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "memory": [dataclasses.asdict(part) for part in parts],
        }
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        sys.stdout.write(told(findings, parts, resolved))
    return DONE if good else REFUSED


def examine(
    resolved: Resolved | None, *, start_ray: bool, look: Callable[[], Sequence[Device] | None] | None = None
) -> tuple[list[Finding], list[Part]]:
    """Everything that was found, and where the memory of the run would go. `look`: who says which devices there are; torch."""
    from rollart.runtime import doctor, room

    config = None if resolved is None else resolved.config
    machine = room.this_machine()
    devices = (look or doctor.devices_of_torch)()
    findings = [_python(), *_packages(config), *doctor.machine_findings(machine), *doctor.device_findings(devices)]
    findings.append(doctor.output_finding("runs" if config is None else config.output_dir))
    findings += _there(doctor.compiler_finding(config))
    parts: list[Part] = []
    if config is not None:
        needed = list(doctor.needs_findings(config))
        findings += [*needed, *_there(doctor.engine_device_finding(config, devices))]
        # without the model its sizes are not known, nor what they ask for
        if all(finding.will_do for finding in needed):
            findings += doctor.room_findings(config, machine)
            parts, whole = doctor.plan_findings(config, machine)
            findings += [whole, *_there(doctor.device_memory_finding(config, devices))]
    wants_ray = config is None or isinstance(config.world, LocalWorld)
    if start_ray and extras.installed("ray"):
        findings.append(doctor.ray_finding())
    elif wants_ray:
        found = "not tried; --ray starts one" if extras.installed("ray") else "not installed"
        findings.append(doctor.Finding(area="Ray", what="a start", found=found))
    return findings, parts


def _there(finding: Finding | None) -> Iterator[Finding]:
    if finding is not None:
        yield finding


def _python() -> Finding:
    from rollart.runtime.doctor import Finding

    good = sys.version_info >= (3, 11)
    return Finding(
        area="python", what=f"rollart {__version__}",
        found=f"Python {platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})",
        will_do=good, fix="" if good else "use Python 3.11 or newer",
    )  # fmt: skip


def _packages(config: RunConfig | None) -> Iterator[Finding]:
    """A line per extra. What the run does not need may be missing."""
    from rollart.runtime.doctor import Finding

    needed = () if config is None else extras.extras_of(config)
    for extra, modules in extras.EXTRAS.items():
        missing = extras.missing_of(extra, extras.installed)
        there = ", ".join(_version(module) for module in modules if module not in missing)
        said = [there] * bool(there) + [f"missing: {', '.join(missing)}"] * bool(missing)
        if extra in needed:
            said.append("needed by this run")
        fix = extras.install_line([extra]) if missing else ""
        yield Finding(
            area="packages",
            what=f"rollart[{extra}]",
            found="; ".join(said),
            will_do=not (missing and extra in needed),
            fix=fix,
        )


def _version(module: str) -> str:
    try:
        return f"{module} {importlib.metadata.version(DISTRIBUTIONS.get(module, module))}"
    except importlib.metadata.PackageNotFoundError:
        return module


def told(findings: Sequence[Finding], parts: Sequence[Part], resolved: Resolved | None) -> str:
    """The findings by area, the memory plan, and what to do."""
    blocks = []
    for area in dict.fromkeys(finding.area for finding in findings):
        rows = [
            (
                "ok" if finding.will_do and not finding.fix else "--" if finding.will_do else "NO",
                finding.what,
                finding.found,
            )
            for finding in findings
            if finding.area == area
        ]
        blocks.append(f"{area}\n{table(rows, indent='  ')}")
    if parts:
        lines = [(part.what, f"{part.n_bytes / MIB:.1f} MiB", part.how, part.keys) for part in parts]
        blocks.append(f"memory plan, with what to change for less\n{table(lines, right=(1,), indent='  ')}")
    lacking = [finding for finding in findings if not finding.will_do]
    optional = [finding for finding in findings if finding.will_do and finding.fix]
    if optional:
        blocks.append("\n".join(["for more, where you want it:", *(f"  {one.what}: {one.fix}" for one in optional)]))
    what = "every run" if resolved is None else resolved.source
    blocks.append(
        "\n".join([f"missing or too small for {what}:", *(f"  {one.what}: {one.fix}" for one in lacking)])
        if lacking
        else f"what {what} needs is there"
    )
    return "\n\n".join(blocks) + "\n"
