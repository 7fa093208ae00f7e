"""A training step of two gloo processes, predicted from the profile of one process before it is measured.

    python benchmarks/echo_gloo.py --json FILE [--prediction FILE] [--repeats 5] [--ways data tensor pipeline]

A small transformers Llama in fp32, two ranks with one core and one torch thread each, three ways in turn: data parallel
(DDP), tensor parallel (DTensor), pipeline parallel (1F1B). What the prediction knows: `optrace`'s capture, transformations,
pricing and composer; the seconds of a rank's operators and passes, measured in one process that talks to no other (two
copies of it at once, as two busy cores share caches and memory); gloo's seconds at the sizes that the traces ask for, between
two processes without a model, alone and beside matrix products. The prediction is written and hashed before the first step
of two processes runs. Error = predicted / measured - 1 of medians; allowed: the larger of 10 % and half of the 95 % interval
of the measured median.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_gloo_job import FULL, TINY, WAYS, WORLD, Size, Way, numbers
from echo_gloo_predict import Profile, prediction, profiled
from echo_gloo_ranks import RanksFailed, ranks

TARGET = 0.10
QUIET = 0.10
"""Half of the 95 % interval beyond which something else ran on the machine, and the comparison says little."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's two-sided 95 % by number of repeats."""
SEED = 20
Measured = tuple[dict[str, list[list[float]]], list[float]]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def write_hashed(found: Mapping[str, Any], path: Path) -> str:
    """Write the prediction; its SHA-256, by which a reader knows that it is the one that was compared."""
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def measured(size: Size, options: argparse.Namespace, scratch: Path, cores: Sequence[int]) -> Measured:
    """Seconds of every step by way and repeat, each as long as on its last rank, and of a product before each repeat."""
    spec = {
        "size": numbers(size), "ways": options.ways, "seed": SEED, "warm_up": options.warm_up, "steps": options.steps,
        "repeats": options.repeats,
    }  # fmt: skip
    found = ranks("steps", spec, scratch, cores=cores)
    steps = {
        way: [
            [max(one) for one in zip(*(rank["ways"][way][repeat] for rank in found), strict=True)]
            for repeat in range(options.repeats)
        ]
        for way in options.ways
    }
    return steps, [max(one) for one in zip(*(rank["reference_s"] for rank in found), strict=True)]


def half_interval(medians: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean; 0 for fewer than two."""
    if len(medians) < 2:
        return 0.0
    return T_95.get(len(medians), 2.0) * statistics.stdev(medians) / math.sqrt(len(medians))


def case(way: Way, predicted: Mapping[str, Any], repeats: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The comparison of one way."""
    medians = [statistics.median(one) for one in repeats]
    middle = statistics.median(medians)
    error = predicted["seconds"] / middle - 1
    allowed = max(TARGET, half_interval(medians) / middle)
    return {
        "case": f"echo_gloo_{way}", "predicted_s": predicted["seconds"], "measured_s": round(middle, 5),
        "repeats_s": [round(value, 5) for value in medians], "half_interval": round(half_interval(medians) / middle, 4),
        "error": round(error, 4), "allowed": round(allowed, 4), "met": abs(error) <= allowed,
        "quiet": half_interval(medians) <= QUIET * middle, "predicted": predicted,
    }  # fmt: skip


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of steps of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each microbenchmark (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see the machinery run")
    parser.add_argument("--cores", type=int, nargs=WORLD, help="of the ranks (default: the first two there are)")
    parser.add_argument("--prediction", type=Path, default=Path("build/echo_gloo_prediction.json"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(words)


def report(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    size = TINY if options.tiny else FULL
    cores = options.cores or sorted(os.sched_getaffinity(0))[:WORLD]
    if len(cores) < WORLD:
        raise RanksFailed(f"two ranks need two cores, this process may run on {len(cores)}")
    start_s = time.monotonic()
    profile: Profile = profiled(size, options.ways, scratch, cores=cores, seconds=options.seconds)
    say(f"profiled one process and gloo in {time.monotonic() - start_s:.0f} s")
    predicted = prediction(profile)
    digest = write_hashed(predicted, options.prediction)
    say(f"prediction in {options.prediction}, sha256 {digest}")
    for way in options.ways:
        say(f"{way:10} predicted {predicted['ways'][way]['seconds'] * 1e3:7.1f} ms")
    found, reference_s = measured(size, options, scratch, cores)
    cases = [case(way, predicted["ways"][way], found[way]) for way in options.ways]
    for one in cases:
        say(
            f"{one['case']:20} predicted {one['predicted_s'] * 1e3:7.1f} ms, measured {one['measured_s'] * 1e3:7.1f} ms"
            f" ± {one['half_interval']:.1%}: {one['error']:+.1%} (allowed {one['allowed']:.1%})"
            f"{'' if one['quiet'] else '  the machine was not quiet'}"
        )
    return {
        "name": "echo_gloo", "cases": cases, "met": all(one["met"] for one in cases),
        "quiet": all(one["quiet"] for one in cases),
        "prediction_sha256": digest, "reference_s": reference_s, "seconds": round(time.monotonic() - start_s, 1),
        "provenance": {
            "command": ["python", "benchmarks/echo_gloo.py", *sys.argv[1:]], "cores": list(cores),
            "size": numbers(size), "machine": platform.machine(), "versions": profile.versions,
        },
    }  # fmt: skip


def main() -> int:
    options = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="rollart-echo-gloo-"))
    try:
        found = report(options, scratch)
    except RanksFailed as error:
        say(f"FAILED {error}")
        return 1
    finally:
        shutil.rmtree(scratch)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
