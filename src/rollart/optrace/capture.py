"""A training step's trace from the real model, on a CPU, for one rank of a job of any size.

Owns `capture`. Invariant: no weight takes memory, no process group is left behind, and what the trace does not say for
certain is in its reads and notes. Why: the operators of a step are decided by torch, the model's code and the parallel
library together, and reading them off the real thing is the only description that stays true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollart.core.errors import ConfigError
from rollart.optrace.context_parallel import kv_bytes
from rollart.optrace.ops import Part, Trace
from rollart.optrace.sources import Source
from rollart.perf.train_plan import DEFAULT_FRAMEWORK, Framework, TrainingPlan


def captured_plan(plan: TrainingPlan) -> TrainingPlan:
    """The plan whose degrees the operators of a capture have: tensor parallelism and full sharding."""
    data = plan.dp * plan.cp if plan.shards == 3 else 1
    return replace(
        plan, devices=plan.tp * data, dp=data, pp=1, cp=1, ep=1, chunks=1, shards=3 if data > 1 else 0,
        recompute="none", recompute_share=1.0, schedule="1f1b", sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        global_batch=plan.micro_batches * plan.micro_batch * data,
        dtype=plan.dtype if plan.dtype in ("fp32", "tf32", "fp16", "bf16") else "bf16",
    )  # fmt: skip


def capture(
    source: Source, plan: TrainingPlan, *, rank: int = 0, assume: Mapping[str, str] | None = None, clip: bool = True,
    framework: Framework = DEFAULT_FRAMEWORK,
) -> Trace:  # fmt: skip
    """Trace one rank's forward, backward and optimizer step of one micro-batch.

    `rank` counts tensor-parallel ranks innermost, then context, data, pipeline. `assume`: `file.py:line` (or `file.py`) of host
    code that reads a tensor -> the value to take. `clip`: gradients are brought below a norm. `framework`: whether attention
    keeps its scores, dropout is on, the optimizer is one fused kernel. Raises `ConfigError`: a plan that does not divide the
    model, a read without an assumption, a package that is missing.
    """
    if not 0 <= rank < plan.devices:
        raise ConfigError(f"rank {rank} is not one of {plan.devices} devices; give 0 to {plan.devices - 1}")
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as problem:
        raise ConfigError(
            f"capture needs torch and transformers: pip install 'rollart[local]' ({problem})"
        ) from problem
    from rollart.optrace.live_step import EMBEDDING, HEAD, record_step, sharded_ranks
    from rollart.optrace.parts import operators, part_of, shared, thinner
    from rollart.optrace.recorder import STEP, layer_name

    more = captured_plan(plan).dp / sharded_ranks(plan)
    found = record_step(source, plan, framework, rank=rank, assume=assume or {}, clip=clip)
    plan = replace(plan, dtype=found.dtype) if source.own_dtype else plan

    def part(recorded: str) -> Part:
        plain, experts = found.parameters.get(recorded, (0.0, 0.0))
        made = part_of(found.recording, recorded, found.axes, parameters=plain, expert_parameters=experts)
        return thinner(made, more)

    built = [part(layer_name(index)) for index in range(len(found.built_at))]
    layers, order = shared(built, found.built_at, found.kinds)
    step = (one for one in found.recording.seen if one.part == STEP)
    parts = {EMBEDDING: part(EMBEDDING), **layers, HEAD: part(HEAD)}
    if source.kind == "module":
        _check_cut(source, plan, parts, framework)
    return Trace(
        model=source.name, plan=captured_plan(plan), parts=parts,
        layers=order, step=operators(step, found.axes), reads=found.reads,
        notes=(*source.notes, *found.notes, *_notes(source, plan, found.kinds, more)),
    )  # fmt: skip


def _check_cut(source: Source, plan: TrainingPlan, parts: Mapping[str, Part], framework: Framework) -> None:
    """Raise ConfigError where sequences are to be cut and nothing says which operators need all of them."""
    base = captured_plan(plan)
    if plan.cp > 1 and not any(kv_bytes(part, base, framework) for part in parts.values()):
        raise ConfigError(
            f"{source.target}: cp={plan.cp} cuts sequences, and no attention was seen in it that would exchange keys and "
            "values; use cp=1, or torch's scaled_dot_product_attention"
        )


def _notes(source: Source, plan: TrainingPlan, kinds: tuple[str, ...], more: float) -> tuple[str, ...]:
    notes: list[str] = []
    if more > 1:
        notes.append(f"recorded with 1/{more:g} of the shards; the work on each shard is scaled")
    if plan.dtype not in ("fp32", "tf32", "fp16", "bf16"):
        notes.append(f"captured in bf16; what {plan.dtype} changes is derived")
    if any("moe" in kind for kind in kinds) and plan.tp > 1:
        notes.append("in layers of experts each tensor-parallel rank takes its share of the tokens to whole experts")
    if source.shape is not None and source.shape.tied:
        notes.append("the head's weight is the embedding's and counted there")
    return tuple(notes)
