"""CPU time of one training step with the compiled passes between matrix products, beside torch alone.

    python benchmarks/trainer_step.py --json FILE

The batch is that of `vs_trl`'s four turns: 64 trajectories of groups of 8 that share their prompt, turns of 16 sampled tokens,
maps of 21, a Llama of 0.92 M parameters in fp32. Both sides do the same steps in turn, in one process and one thread; a pair is
the least of `--steps` steps of each, as CPU time, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from peers_figures import case, versions
from peers_run import BATCH, GROUP, MODEL
from peers_tasks import LAKE_TURN_TOKENS, LAKE_TURNS
from rollart.config.schema import Algorithm, Optimizer, SamplingConfig, ScratchModel, TrainerConfig
from rollart.core.types import Sample, Segment, Span, Tokens, TrajId
from rollart.runtime.heap import keep_freed_memory
from rollart.runtime.payload import TokenPayload
from rollart.runtime.trainer.packing import micro_batches
from rollart.runtime.trainer.rank import TrainerRank, TrainerSpec
from rollart.runtime.trainer.rows import loss_rows

VOCAB, MAP_TOKENS = 512, 21
LOGPROB = -6.2
"""Of each sampled token: about that of one of 512."""
WARM = 2
TARGET = 1.0
Native = Literal["required", "off"]


def samples() -> list[Sample]:
    """One batch; what stands in it is drawn, as only lengths cost time."""
    chance = np.random.default_rng(0)

    def ids(n_tokens: int) -> np.ndarray[Any, Any]:
        return chance.integers(0, VOCAB, n_tokens).astype(np.int32)

    def written(given: np.ndarray[Any, Any]) -> Tokens:
        return Tokens(n_tokens=len(given), payload=TokenPayload(ids=given))

    def sampled() -> Tokens:
        n_tokens = LAKE_TURN_TOKENS
        logprobs = np.full(n_tokens, LOGPROB, np.float32)
        return Tokens(
            n_tokens=n_tokens, spans=(Span(version=0, n_tokens=n_tokens),),
            payload=TokenPayload(ids=ids(n_tokens), logprobs=logprobs),
        )  # fmt: skip

    found = []
    for group in range(BATCH // GROUP):
        first = ids(MAP_TOKENS)
        for member in range(GROUP):
            pieces = [written(first), sampled()]
            for _ in range(LAKE_TURNS - 1):
                pieces += [written(ids(MAP_TOKENS)), sampled()]
            found.append(
                Sample(
                    traj=TrajId(f"train/lake/{group}/{member}/0"),
                    index=0,
                    task="lake",
                    segment=Segment(pieces=tuple(pieces)),
                    advantage=float(chance.normal()),
                    weight=1.0,
                )
            )
    return found


def least_s(batch: Sequence[Sample], native: Native, steps: int) -> float:
    """CPU seconds of the quickest of some steps of a new trainer."""
    spec = TrainerSpec(
        model=ScratchModel(**MODEL), vocab_size=VOCAB, seed=0, algorithm=Algorithm(), optimizer=Optimizer(),
        sampling=SamplingConfig(), trainer=TrainerConfig(native=native), total_steps=WARM + steps, timeout_s=60.0,
    )  # fmt: skip
    rank = TrainerRank(spec)
    times = []
    try:
        for step in range(WARM + steps):
            began_s = time.process_time()
            rows = loss_rows(batch, spec.algorithm, spec.sampling)
            rank.begin(step, total_weight=None)
            rank.accumulate(micro_batches(rows, ranks=1, micro_batch_tokens=spec.trainer.micro_batch_tokens)[0])
            rank.finish()
            rank.publish(step)
            times.append(time.process_time() - began_s)
    finally:
        rank.close()
    return min(times[WARM:])


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of each side of a pair (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    batch, ours, theirs = samples(), list[float](), list[float]()
    for _ in range(options.pairs):
        ours.append(least_s(batch, "required", options.steps))
        theirs.append(least_s(batch, "off", options.steps))
    one = case(
        "step_0.92M", [plain / fused for fused, plain in zip(ours, theirs, strict=True)], target=TARGET,
        ours={"cpu_s": [round(one, 4) for one in ours]}, theirs={"cpu_s": [round(one, 4) for one in theirs]},
        versions=versions(),
    )  # fmt: skip
    tokens = sum(one.segment.n_tokens for one in batch)
    print(  # noqa: T201
        f"a step of {tokens} tokens: {min(ours):.3f} s with the compiled passes, {min(theirs):.3f} s with torch alone; ratio "
        f"{one['ratio_median']:.2f} ({one['ratio_min']:.2f} .. {one['ratio_max']:.2f})"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"name": "trainer_step", "cases": [one]}, indent=1) + "\n", encoding="utf-8")
    return 0 if one["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
