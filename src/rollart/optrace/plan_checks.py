"""What a plan cannot be: degrees that do not divide what they split, schedules that do not exist, models without a pipeline.

Owns these refusals, each with the nearest value that can be. Invariant: all problems of a plan are told at once, and a plan
that passes divides every width, layer, batch and sequence that it shares out. Why: what is found out after a capture, or inside
torch, is found out too late.
"""

from __future__ import annotations

from rollart.core.errors import ConfigError
from rollart.perf.shapes import ModelShape
from rollart.perf.train_plan import TrainingPlan


def check(plan: TrainingPlan, shape: ModelShape | None) -> None:
    """Raise ConfigError for all that does not divide, with the nearest values that do. `shape` None: a module of one's own."""
    problems = [*_batch_problems(plan), *_schedule_problems(plan)]
    if plan.recompute_share < 1 and plan.recompute != "full":
        problems.append(
            f"recompute_share={plan.recompute_share} with recompute={plan.recompute}: a share is of full recomputation; use "
            "recompute=full, or recompute_share=1"
        )
    problems += _shape_problems(plan, shape) if shape is not None else _module_problems(plan)
    if plan.sequence % plan.cp:
        problems.append(f"cp={plan.cp} does not divide seq={plan.sequence}; use cp={divisor(plan.sequence, plan.cp)}")
    if plan.sequence_parallel and (plan.sequence // plan.cp) % plan.tp:
        problems.append(
            f"sequence_parallel splits {plan.sequence // plan.cp} tokens over tp={plan.tp}; use seq="
            f"{max(1, round(plan.sequence / (plan.tp * plan.cp))) * plan.tp * plan.cp}, or --no-sequence-parallel"
        )
    if (plan.dp * plan.cp * plan.tp) % plan.ep:
        whole = plan.dp * plan.cp * plan.tp
        problems.append(
            f"ep={plan.ep} does not divide the {whole} ranks of a stage (dp x cp x tp); use ep={divisor(whole, plan.ep)}"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def divisor(of: int, near: int) -> int:
    """The divisor of `of` that is nearest to `near`."""
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: abs(n - near))


def _batch_problems(plan: TrainingPlan) -> list[str]:
    each = plan.dp * plan.micro_batch
    if plan.global_batch % each == 0:
        return []
    near = max(1, round(plan.global_batch / each)) * each
    return [f"global_batch={plan.global_batch} is no multiple of dp x micro_batch = {each}; use global_batch={near}"]


def _schedule_problems(plan: TrainingPlan) -> list[str]:
    found = []
    if plan.schedule == "dualpipe":
        found.append(
            "schedule=dualpipe runs two copies of the model against each other, and no order of their tasks is composed; use "
            "zero_bubble"
        )
    if plan.schedule == "interleaved" and (plan.chunks == 1 or plan.pp == 1):
        found.append(f"schedule=interleaved with pp={plan.pp}, chunks={plan.chunks}: both must be 2 or more; use 1f1b")
    if plan.chunks > 1 and plan.schedule != "interleaved":
        found.append(
            f"chunks={plan.chunks} with schedule={plan.schedule}: chunks are of schedule interleaved; use chunks=1"
        )
    if plan.schedule == "interleaved" and plan.micro_batches % plan.pp:
        near = max(1, round(plan.micro_batches / plan.pp)) * plan.pp * plan.dp * plan.micro_batch
        found.append(
            f"schedule=interleaved needs micro-batches in multiples of pp={plan.pp}, has {plan.micro_batches}; use "
            f"global_batch={near}"
        )
    return found


def _module_problems(plan: TrainingPlan) -> list[str]:
    """Of a module of one's own, which nobody knows how to cut into stages."""
    if plan.pp * plan.chunks == 1:
        return []
    return [
        f"pp={plan.pp}, chunks={plan.chunks}: a module of your own is one stage; use pp=1, chunks=1 and, for as many devices, "
        f"dp={plan.dp * plan.pp}"
    ]


def _shape_problems(plan: TrainingPlan, shape: ModelShape) -> list[str]:
    found = _tensor_problems(plan, shape)
    if plan.pp * plan.chunks > shape.layers:
        found.append(
            f"pp={plan.pp} x chunks={plan.chunks} is more than the {shape.layers} layers of {shape.name}; use pp="
            f"{max(1, shape.layers // plan.chunks)}"
        )
    elif plan.schedule == "interleaved" and shape.layers % (plan.pp * plan.chunks):
        near = divisor(shape.layers, plan.pp * plan.chunks)
        found.append(
            f"pp={plan.pp} x chunks={plan.chunks} does not divide the {shape.layers} layers of {shape.name}; use a product of "
            f"{near}"
        )
    if plan.ep > 1 and not shape.experts:
        found.append(f"ep={plan.ep} but {shape.name} has no experts; use ep=1")
    elif shape.experts and shape.experts % plan.ep:
        found.append(
            f"ep={plan.ep} does not divide the {shape.experts} experts of {shape.name}; use ep="
            f"{divisor(shape.experts, plan.ep)}"
        )
    return found


def _tensor_problems(plan: TrainingPlan, shape: ModelShape) -> list[str]:
    """What tensor parallelism cannot split evenly; a vocabulary is padded, experts stay whole and share tokens."""
    found = []
    unsplit = _unsplit(shape, plan.tp)
    if unsplit:
        fits = [tp for tp in range(1, shape.heads + 1) if not _unsplit(shape, tp)]
        near = min(fits, key=lambda tp: abs(tp - plan.tp))
        found.append(f"tp={plan.tp} does not divide the {unsplit} of {shape.name}; use tp={near}")
    if shape.moe_layers and not plan.sequence_parallel and plan.sequence % plan.tp:
        near = max(1, round(plan.sequence / (plan.tp * plan.cp))) * plan.tp * plan.cp
        found.append(f"tp={plan.tp} shares the {plan.sequence} tokens of a layer of experts; use seq={near}")
    return found


def _unsplit(shape: ModelShape, tp: int) -> str:
    """The first of a layer's widths that `tp` ranks cannot share; empty: none."""
    keys = shape.heads if shape.kv_rank else shape.kv_heads
    widths = {f"{shape.heads} heads": shape.heads}
    if keys % tp and tp % keys:  # fewer key heads than ranks are held by several each
        widths[f"{keys} key heads"] = keys
    if shape.dense_layers:
        widths[f"{shape.ffn} columns of the feed-forward block"] = shape.ffn
    if shape.mamba_layers:
        widths[f"{shape.mamba_heads} state-space heads"] = shape.mamba_heads
    return next((name for name, width in widths.items() if width % tp), "")
