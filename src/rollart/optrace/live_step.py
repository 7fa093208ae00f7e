"""One training step of a fake model: forward, backward, and the optimizer, watched operator by operator.

Owns the order of a step and where its operators belong. Invariant: what is recorded is a step in the middle of training: the
optimizer has its state, sharded weights have been gathered before, and with several micro-batches the gradients of earlier
ones are there. Why: the first step of a run does things that no later one does. Imports torch: import this module inside
functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from rollart.core.errors import ConfigError, RollartError
from rollart.optrace.live_attention import GpuKernels
from rollart.optrace.live_model import Live, build, compute_dtype, loss_of
from rollart.optrace.live_parallel import apply_tensor_parallel, fake_world, shard_fully
from rollart.optrace.ops import HostRead
from rollart.optrace.reads import Reads, line_of
from rollart.optrace.recorder import STEP, Recorder, Recording, layer_name, local, mark_parts
from rollart.optrace.sources import Source
from rollart.perf.train_plan import FUSED_ADAM_BYTES, Framework, TrainingPlan

EMBEDDING, HEAD = "embedding", "head"
MOST_SHARDS = 128
"""FSDP2 works on a list of all shards of every weight, so that time grows with them; more are scaled from as many."""
LIMIT = 1.0
"""Of the gradients' norm; its value changes no operator."""
EVEN = "tokens are spread evenly over the experts"
FINITE = "the norm of the gradients is finite, so the step is taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recording with what is needed to make a trace of it."""

    recording: Recording
    axes: Mapping[str, str]
    """Axis of each process group by its name."""
    parameters: Mapping[str, tuple[float, float]]
    """(elements, elements of experts) of each recorded part on this rank, before data parallelism shards them."""
    built_at: tuple[int, ...]
    kinds: tuple[str, ...]
    reads: tuple[HostRead, ...]
    notes: tuple[str, ...]
    dtype: str
    """Of a user's module, in a plan's words; empty: the plan's."""


def sharded_ranks(plan: TrainingPlan) -> int:
    """Ranks over which the weights themselves are sharded in the recording."""
    return min(MOST_SHARDS, plan.dp * plan.cp) if plan.shards == 3 else 1


def record_step(
    source: Source, plan: TrainingPlan, framework: Framework, *, rank: int, assume: Mapping[str, str], clip: bool
) -> Recorded:
    """Record a step of `rank`. Raises `ConfigError` for a host read without an assumption, and the other way round."""
    data = plan.devices if source.kind == "module" else sharded_ranks(plan)
    here = rank if source.kind == "module" else rank // plan.tp % data * plan.tp + rank % plan.tp
    reads = Reads(assume)
    recorder = Recorder(reads)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(here, {"dp": data, "tp": plan.tp}) as meshes:
        live = build(source, plan, framework, fake)
        keywords = _parallel(live, plan, framework, meshes, fake)
        groups = _groups(live)
        with fake, recorder, _shapes_unseen(recorder):
            _passes(live, keywords, plan, recorder)
            fused = framework.optimizer_bytes <= FUSED_ADAM_BYTES
            _optimize(groups, recorder, reads, meshes=meshes, fused=fused, clip=clip)
        axes = _axes(meshes, plan)
    if unused := reads.unused():
        known = ", ".join(reads.noted) or "none"
        raise ConfigError(f"assumption {unused[0]!r} answers no read of {source.name}; reads on the host: {known}")
    if any("_grouped_mm" in one.name for one in recorder.recording.seen):
        reads.note("the router of every layer of experts", EVEN)
    return Recorded(
        recording=recorder.recording, axes=axes, parameters=_parameters(groups, live), built_at=live.built_at or (0,),
        kinds=live.kinds or ("whole",), reads=tuple(reads.noted.values()), notes=live.notes,
        dtype=live.dtype,
    )  # fmt: skip


def _parallel(
    live: Live, plan: TrainingPlan, framework: Framework, meshes: Mapping[str, DeviceMesh], fake: FakeTensorMode
) -> dict[str, object]:
    """Split the model as the plan says; returns the keyword inputs for it. Meshes are real tensors: not in the fake mode."""
    keywords = dict(live.keywords)
    if live.targets is None or "input_ids" not in keywords:
        return keywords
    if plan.tp > 1:
        if plan.sequence_parallel and plan.sequence % plan.tp:
            raise ConfigError(
                f"sequence parallelism: tp {plan.tp} does not divide the sequence of {plan.sequence} tokens"
            )
        apply_tensor_parallel(live.model, meshes["tp"], sequence_parallel=plan.sequence_parallel)
        embedded = any(hasattr(module, "wpe") for module in live.model.modules())
        if plan.sequence_parallel and embedded:
            with fake:
                keywords["position_ids"] = torch.empty((1, plan.sequence // plan.tp), dtype=torch.int64)
    if sharded_ranks(plan) > 1:
        reduce = torch.float32 if framework.grad_bytes == 4 else compute_dtype(plan)
        shard_fully(live.model, live.layers, meshes["dp"], compute=compute_dtype(plan), reduce=reduce)
    return keywords


@contextmanager
def _shapes_unseen(recorder: Recorder) -> Iterator[None]:
    """DTensor runs operators on fake global shapes to plan; the lock that it takes for that tells when."""
    before = ShardingPropagator._fake_mode_lock

    class Unseen:
        def __enter__(self) -> None:
            recorder._muted += 1

        def __exit__(self, *_: object) -> None:
            recorder._muted -= 1

    ShardingPropagator._fake_mode_lock = Unseen()  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


@contextmanager
def _split_loss() -> Iterator[None]:
    """The cross entropy of logits that are split over the vocabulary; torch leaves its handlers behind after an error."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    try:
        with loss_parallel():
            yield
    finally:
        handlers.clear()
        handlers.update(before)


def _passes(live: Live, keywords: Mapping[str, object], plan: TrainingPlan, recorder: Recorder) -> None:
    """Forward and backward, watched, after as many unwatched ones as it takes to be in the middle of a run."""
    sharded = sharded_ranks(plan) > 1
    warm = 1 if sharded or plan.micro_batches > 1 else 0
    before = EMBEDDING if live.layers else layer_name(0)
    for lap in range(warm + 1):
        watched = lap == warm
        recorder.part, recorder.during = before, "forward"
        recorder.recording = Recording()
        if watched and plan.micro_batches == 1:
            live.model.zero_grad(set_to_none=True)
        recorder.never_kept([*live.model.parameters(), *live.model.buffers(), *_gathered(live.model)])
        unmark = mark_parts(recorder, live.layers, HEAD)
        with ExitStack() as stack:
            if watched:
                stack.enter_context(recorder.watch())
            stack.enter_context(_split_loss() if plan.tp > 1 else nullcontext())
            # the residual stream is not changed in place, which is what this warning is about
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            with saved_tensors_hooks(recorder.keep, lambda kept: kept), GpuKernels():
                loss = _loss(live, keywords)
            recorder.during = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
        unmark()


def _loss(live: Live, keywords: Mapping[str, object]) -> torch.Tensor:
    """The loss of a forward pass. Raises ConfigError where a user's module cannot run so, or nothing of it trains."""
    try:
        loss = loss_of(live.model(*live.inputs, **keywords), live.targets)
    except RollartError:
        raise
    # boundary: the user's code, which may raise anything
    except Exception as problem:
        if not live.dtype:
            raise
        raise ConfigError(
            f"the forward pass fails in {live.dtype} ({line_of(problem)}): {type(problem).__name__}: {problem}; mend it, or "
            "give the dtype that it needs"
        ) from problem
    if not loss.requires_grad:
        raise ConfigError("the loss depends on no parameter that requires a gradient; let some of them train")
    return loss


def _gathered(model: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers into which sharded weights are gathered."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = state()._fsdp_param_group if state is not None else None
        for held in group.fsdp_params if group is not None else ():
            yield from held.all_gather_outputs


def _groups(live: Live) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Parameters of each recorded part: those that stand before the first layer are the embedding's, the rest the head's."""
    of_layer = {id(p): layer_name(i) for i, layer in enumerate(live.layers) for p in layer.parameters()}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    part = EMBEDDING if live.layers else layer_name(0)
    for name, parameter in live.model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = of_layer.get(id(parameter))
        if owner is not None:
            part = HEAD
        groups.setdefault(owner or part, []).append((name, parameter))
    return groups


def _parameters(groups: Mapping[str, Sequence[tuple[str, nn.Parameter]]], live: Live) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for part, named in groups.items():
        counts = {True: 0.0, False: 0.0}
        for name, parameter in named:
            counts[".experts." in f".{name}."] += _held(parameter)
        found[part] = counts[False], counts[True]
    return found


def _held(parameter: torch.Tensor) -> float:
    """Elements of a weight on this rank when no data-parallel rank takes a share."""
    if not isinstance(parameter, DTensor):
        return float(parameter.numel())
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    count = float(parameter.numel())
    for size, name, placement in zip(mesh.shape, names, parameter.placements, strict=True):
        if name == "tp" and not placement.is_replicate():
            count /= size
    return count


def _own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The rank's part of a gradient, summed over ranks that each saw some tokens of it."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


@dataclass(slots=True, kw_only=True)
class _Update:
    """The weights of one part, their fp32 masters (the weights themselves if they are fp32), and the optimizer."""

    weights: list[nn.Parameter]
    masters: list[nn.Parameter]
    optimizer: AdamW


@torch.no_grad()
def _optimize(
    groups: Mapping[str, Sequence[tuple[str, nn.Parameter]]], recorder: Recorder, reads: Reads, *,
    meshes: Mapping[str, DeviceMesh], fused: bool, clip: bool,
) -> None:  # fmt: skip
    """Norm, clip and AdamW part by part, once unwatched so that the optimizer has its state."""
    updates: dict[str, _Update] = {}
    for part, named in groups.items():
        weights = [parameter for _, parameter in named if parameter.grad is not None]
        if not weights:
            continue
        masters = [nn.Parameter(local(w).detach().float()) for w in weights]
        updates[part] = _Update(
            weights=weights, masters=masters, optimizer=AdamW(masters, lr=1e-4, fused=fused, foreach=not fused)
        )
    for watched in (False, True):
        with recorder.watch() if watched else nullcontext():
            _update(updates, recorder, reads, meshes=meshes, clip=clip)


def _update(
    updates: Mapping[str, _Update], recorder: Recorder, reads: Reads, *, meshes: Mapping[str, DeviceMesh], clip: bool
) -> None:
    squares: torch.Tensor | None = None
    if clip:
        with recorder.at(STEP, "optimizer"):
            squares = torch.zeros(())
    for part, update in updates.items():
        with recorder.at(part, "optimizer"):
            for weight, master in zip(update.weights, update.masters, strict=True):
                gradient = _own_gradient(weight)
                master.grad = None if gradient is None else gradient.to(master.dtype)
            if squares is not None:
                squares.add_(get_total_norm(_gradients(update), foreach=True).square())
    factor = None
    if squares is not None:
        with recorder.at(STEP, "optimizer"):
            factor = _clip_factor(squares, reads, meshes)
    for part, update in updates.items():
        with recorder.at(part, "optimizer"), reads.given(2.0):  # the optimizer's own count of steps
            if factor is not None:
                torch._foreach_mul_(_gradients(update), factor)
            update.optimizer.step()
            for weight, master in zip(update.weights, update.masters, strict=True):
                if local(weight).untyped_storage()._cdata != master.untyped_storage()._cdata:
                    local(weight).copy_(master)


def _gradients(update: _Update) -> list[torch.Tensor]:
    return [master.grad for master in update.masters if master.grad is not None]


def _clip_factor(squares: torch.Tensor, reads: Reads, meshes: Mapping[str, DeviceMesh]) -> torch.Tensor:
    """By what all gradients are multiplied: their norm over all parts and ranks, brought below the limit."""
    for mesh in meshes.values():
        squares = all_reduce(squares, "sum", mesh.get_group())
    total = squares.sqrt()
    with reads.given(True, where="the norm of all gradients, before the step", assumption=FINITE):
        bool(torch.isfinite(total))
    return torch.clamp(LIMIT / (total + 1e-6), max=1.0)


def _axes(meshes: Mapping[str, DeviceMesh], plan: TrainingPlan) -> dict[str, str]:
    if not meshes:
        return {}
    degrees = {"dp": plan.dp, "tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
    world = next((axis for axis, degree in degrees.items() if degree > 1), "dp")
    found = {str(dist.group.WORLD.group_name): world} if dist.group.WORLD is not None else {}
    return found | {str(mesh.get_group().group_name): axis for axis, mesh in meshes.items()}
