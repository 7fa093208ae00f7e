"""`rollart profile-device --out FILE`: measure this device, for `rollart trace --profile FILE`.

Operators (with --plan those of a job before all others), attention, collectives between the local devices and kernels beside
them, and the host that launches them. The file holds the versions of the software that it was measured with and is refused
together with one of others.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rollart.cli import outputs, trace
from rollart.cli.tables import amount, table
from rollart.cli.work import Work
from rollart.optrace.ops import Op
from rollart.perf.device_profile import DeviceProfile, merged, read_profile, suspects

SUMMARY = "measure this device's operators and collectives, for trace --profile"
MINUTES = 5.0
DEVICES = ("cuda", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write, e.g. h200.json")
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda (default), cuda:1 or cpu")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"about how long it may take (default: {MINUTES:g})"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator on a CPU (default: 1)")
    parser.add_argument(
        "--ranks", type=int, help="devices or processes in the largest group (default: all GPUs, 2 on a CPU; 1: none)"
    )
    parser.add_argument(
        "--grid", default="", help="large (default on a GPU), small (default on a CPU) or tiny (a trial)"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="a plan file of trace: the operators of its job are measured first"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what FILE has of this device and these versions already"
    )


def run(arguments: argparse.Namespace, work: Work) -> int:
    from rollart.optrace.profiling import device

    earlier = read_profile(arguments.out) if arguments.add and arguments.out.exists() else None
    outputs.require_writable(arguments.out)
    first = job_operators(arguments.plan) if arguments.plan is not None else []
    scratch = arguments.out.with_name(f"{arguments.out.name}.new")
    found = device.profile_device(
        scratch, device=arguments.device, minutes=arguments.minutes, threads=arguments.threads, grid=arguments.grid,
        ranks=arguments.ranks, first=first,
    )  # fmt: skip
    if earlier is not None:
        found = merged([found, earlier])
        found.save(scratch)
    scratch.replace(arguments.out)
    sys.stdout.write(f"{described(found)}\n{arguments.out}\n")
    return 0


def job_operators(plan_file: Path) -> list[Op]:
    """The operators of the job in a plan file of `rollart trace`, each once. Raises ConfigError."""
    from rollart.optrace.measured_ops import measurable
    from rollart.optrace.predict import rank_trace

    job = replace(trace.job_in(plan_file), profile=None)  # the one that is about to be written
    return measurable(rank_trace(job))


def described(profile: DeviceProfile) -> str:
    """What was measured, in a few lines."""
    device, host = profile.device, profile.host
    best: dict[str, float] = {}
    for row in profile.ops:
        if row.flops > 0:
            best[row.dtype] = max(best.get(row.dtype, 0.0), row.flops / row.seconds)
    counts = Counter(row.kind for row in profile.ops)
    rows = [
        ("device", f"{device.name} ({device.source})"),
        ("versions", ", ".join(f"{name} {value}" for name, value in profile.origin.versions.items())),
        *[(f"best {dtype}", f"{amount(rate / 1e12)} of {amount(device.peak_flops(dtype) / 1e12)} TFLOP/s")
          for dtype, rate in sorted(best.items())],
        ("memory", f"{amount(device.memory_bytes_per_s / 1e9)} GB/s"),
        ("operators", ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))),
        ("collectives", f"{len(profile.collectives)} points; {len(profile.overlaps)} kernels beside one"),
    ]  # fmt: skip
    if host is not None:
        rows.append(("host", f"{host.op_s * 1e6:.3g} us an operator, {host.recorded_op_s * 1e6:.3g} recorded, "
                             f"{host.backward_op_s * 1e6:.3g} backward"))  # fmt: skip
    said = [*profile.notes, *suspects(profile).values()]
    return "\n".join([table(rows), *(f"note: {note}" for note in said)])
