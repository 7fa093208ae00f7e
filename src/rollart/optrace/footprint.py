"""Device memory of a training step from a trace's own counts, by what holds it.

Owns the walk over the parts that a pipeline stage holds. Invariant: weights, gradients and optimizer state follow from the
parameters of the parts, activations from what their forward operators leave; the bytes per parameter and the micro-batches
in flight are those of `perf.memory`, so closed form and trace differ only where the model itself was captured differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rollart.core.errors import ConfigError
from rollart.optrace.data_parallel import gradient_bytes, weight_bytes
from rollart.optrace.ops import Part, Trace
from rollart.optrace.parallel_groups import expert_replicas
from rollart.optrace.rewriting import kept_bytes, result_bytes
from rollart.perf.memory import (
    FRAMEWORK_BYTES,
    OPTIMIZER_BYTES,
    StageMemory,
    deferred_gradients,
    layers_in_flight,
)
from rollart.perf.pipeline import balanced_layers
from rollart.perf.train_plan import Framework, TrainingPlan

MOMENT_BYTES = 8
"""Adam's two moments in fp32: all of the optimizer state where the weights themselves are in 32 bits."""
TIED_SHARE = 0.5
"""An embedding with fewer parameters than this share of the head's has the head's weights (tied)."""


def memory(
    trace: Trace, plan: TrainingPlan, framework: Framework, stage: int, *, layers: Sequence[str] | None = None
) -> StageMemory:
    """Bytes on a device of pipeline stage `stage` under the derived `trace`.

    `layers`: names of the parts that stand on the stage, embedding and head left out (None: layers split evenly). Raises
    `ConfigError` for a stage that the plan does not have or a trace that is not the plan's.
    """
    if not 0 <= stage < plan.pp:
        raise ConfigError(f"stage {stage} of a plan with pp {plan.pp}; give 0 to {plan.pp - 1}")
    if trace.plan != plan:
        raise ConfigError(
            f"trace of {trace.model} is not of this plan: derive it (transforms.derived) before its memory"
        )
    if layers is None:
        counts = balanced_layers(len(trace.layers), plan.pp, first_extra=0.0, last_extra=0.0)
        start = sum(counts[:stage])
        layers = trace.layers[start : start + counts[stage]]
    parts = [trace.parts[name] for name in layers]
    ends = _ends(trace, plan, stage)
    dense = sum(part.parameters for part in parts) + sum(ends)
    expert = sum(part.expert_parameters for part in parts)
    replicas, copies = plan.dp * plan.cp, expert_replicas(plan)

    def held(per_parameter: float, stage_of_sharding: int) -> float:
        if plan.shards < stage_of_sharding:
            return per_parameter * (dense + expert)
        return per_parameter * (dense / replicas + expert / copies)

    width = weight_bytes(plan)
    trained = 0.0 if plan.lora else 1.0
    state = OPTIMIZER_BYTES if width < 4 else MOMENT_BYTES
    gathered = width * _whole_at_once(parts, ends, stage) if plan.shards == 3 else 0.0
    return StageMemory(
        weights=held(width, 3),
        gradients=trained * held(gradient_bytes(plan, framework), 2),
        optimizer=trained * held(state, 1),
        activations=_activations(trace, plan, parts, stage),
        buffers=FRAMEWORK_BYTES + gathered,
    )


def _ends(trace: Trace, plan: TrainingPlan, stage: int) -> tuple[float, ...]:
    """Parameters of the embedding and of the head that stage holds; tied ones are on both ends of a pipeline."""
    embedding, head = trace.parts[trace.embedding].parameters, trace.parts[trace.head].parameters
    first = embedding + (head if plan.pp > 1 and embedding < TIED_SHARE * head else 0.0)
    return (*((first,) if stage == 0 else ()), *((head,) if stage == plan.pp - 1 else ()))


def _whole_at_once(parts: Sequence[Part], ends: Sequence[float], stage: int) -> float:
    """Parameters that are gathered at once under sharding stage 3: of the unit that runs and of the one fetched after it.

    A layer is a unit, and so are the embedding and the norm with the head.
    """
    units = [part.parameters + part.expert_parameters for part in parts]
    first = 1 if stage == 0 else 0
    units = [*ends[:first], *units, *ends[first:]]
    return max((one + other for one, other in pairwise(units)), default=sum(units))


def _activations(trace: Trace, plan: TrainingPlan, parts: Sequence[Part], stage: int) -> float:
    """What the micro-batches in flight keep, and the largest working set of a backward pass on top of it."""
    in_flight = layers_in_flight(plan, plan.pp, stage)
    kept = in_flight * sum(part.saved_bytes for part in parts)
    if stage == 0:
        kept += in_flight * trace.parts[trace.embedding].saved_bytes
    again = max((kept_bytes(op for op in part.backward if op.recomputed) for part in parts), default=0.0)
    if stage < plan.pp - 1:
        return kept + again
    head = trace.parts[trace.head]
    # the gradient of the logits stands beside what the loss kept
    widest = max(
        (result_bytes(op) for op in head.backward if op.stream == "compute" and not op.weight_gradient), default=0.0
    )
    # what zero bubble puts off: the head's own gradient still needs that of the logits, as its product made them
    logits = max((result_bytes(op) for op in head.forward if op.kind == "gemm"), default=0.0)
    return kept + again + head.saved_bytes + widest + deferred_gradients(plan, stage) * logits
