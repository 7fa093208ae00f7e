"""Tensor parallelism and full sharding of real models, and the fake world of processes in which one rank acts alone.

Owns the DTensor plans of the families that are captured. Invariant: a layer communicates as Megatron-LM's do: one reduction
after attention and one after the feed-forward block, forward and backward (with sequence parallelism a scatter and a gather
each); the fake process group is gone when the world is left, whatever happened inside. Why: the same plan is run on real
processes to check what is predicted. Imports torch: import this module inside functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from rollart.core.errors import ConfigError

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "c_attn", "c_fc", "fc1")
ROWS = ("o_proj", "down_proj", "c_proj", "fc2")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
BLOCKS = ("self_attn", "attn", "mlp")
NORMS = ("input_layernorm", "post_attention_layernorm", "ln_1", "ln_2")
LAYER_LISTS = ("layers", "h")
EMBEDDINGS = ("embed_tokens", "wte")
FINAL_NORMS = ("norm", "ln_f")


@contextmanager
def fake_world(rank: int, degrees: Mapping[str, int]) -> Iterator[dict[str, DeviceMesh]]:
    """A mesh for each axis of more than one rank, outermost axis first, of processes of which only `rank` exists."""
    ranks = math.prod(degrees.values())
    if ranks == 1:
        yield {}
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("a process group exists in this process; capture before torch.distributed is initialised")
    told = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    sys.excepthook = told  # torch puts `[rank0]:` before every later traceback of the process
    try:
        mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        yield {axis: mesh[axis] for axis, degree in degrees.items() if degree > 1}
    finally:
        dist.destroy_process_group()
        _forget_plans()


def _forget_plans() -> None:
    """What DTensor remembers of operators names the groups of a mesh that is gone."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, type(propagator)._propagate_tensor_meta_cached):
        cached.cache_clear()


class VocabularyEmbedding(ParallelStyle):
    """An embedding of which each rank has a range of tokens: others give zeros, and the sum (or its scatter) is the row."""

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        module.register_parameter("weight", nn.Parameter(_spread(weight, device_mesh, Shard(0))))
        width = weight.shape[0] // device_mesh.size()
        first = width * device_mesh.get_local_rank()

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            held = module.get_parameter("weight")
            own = held.to_local() if isinstance(held, DTensor) else held
            other = (tokens < first) | (tokens >= first + width)
            rows = functional.embedding((tokens - first).masked_fill(other, 0), own)
            rows = rows.masked_fill(other.unsqueeze(-1), 0.0)
            summed = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False)
            return summed.redistribute(placements=[self.output]).to_local()

        module.forward = forward
        return module


class TransposedColumns(ParallelStyle):
    """GPT-2's `Conv1D`, a linear layer whose weight is [inputs, outputs]: each rank has some outputs."""

    weight_shard: Placement = Shard(1)
    bias_shard: Placement = Shard(0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in (("weight", self.weight_shard), ("bias", self.bias_shard)):
            module.register_parameter(name, nn.Parameter(_spread(module.get_parameter(name), device_mesh, placement)))
        module.register_forward_pre_hook(lambda _, given: (self._enter(given[0], device_mesh),))
        module.register_forward_hook(lambda _, given, made: self._leave(made))
        return module

    def _enter(self, given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [Replicate()], run_check=False)

    def _leave(self, made: DTensor) -> torch.Tensor:
        return made.to_local()


class TransposedRows(TransposedColumns):
    """The same with some inputs on each rank; results are summed, or scattered over the tokens."""

    weight_shard = Shard(0)
    bias_shard = Replicate()

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _enter(self, given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(given, mesh, [Shard(-1)], run_check=False)

    def _leave(self, made: DTensor) -> torch.Tensor:
        return made.redistribute(placements=[self.output]).to_local()


class SplitTokens(ParallelStyle):
    """A block of experts: each rank takes its share of the tokens to whole experts, and gives its share back."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.spread = spread  # the tokens are shared among the ranks already

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[torch.Tensor]:
            tokens = given[0]
            if not isinstance(tokens, DTensor):
                tokens = DTensor.from_local(tokens, device_mesh, [Replicate()], run_check=False)
            return (tokens.redistribute(placements=[Shard(1)]).to_local(),)

        def leave(_: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            if self.spread:
                return made
            shared = DTensor.from_local(made, device_mesh, [Shard(1)], run_check=False)
            return shared.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _spread(weight: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return distribute_tensor(weight, mesh, [placement], src_data_rank=None)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> nn.Module:
    """Split a causal language model of transformers over the ranks of a mesh of one dimension; changes it in place.

    Its logits are then a DTensor split over the vocabulary: take the loss, and its backward, under
    `torch.distributed.tensor.parallel.loss_parallel()`. `sequence_parallel`: norms and residuals work on the rank's share of
    the tokens; give positions for all of them, but where positions are embedded (GPT-2) for that share only.
    Left to the caller: summing over the ranks the gradients of weights that each rank used for its own heads or tokens only
    (norms of queries and keys, router, experts), and for GPT-2 the order of the columns of its fused projection, which are
    dealt out as they stand. Raises `ConfigError` for a model without a plan.
    """
    body, layers = _body(model)
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    plan: dict[str, ParallelStyle] = {name: VocabularyEmbedding(between) for name in _has(body, EMBEDDINGS)}
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in _has(body, FINAL_NORMS)}
    parallelize_module(body, mesh, plan, src_data_rank=None)
    for layer in layers:
        _split_layer(layer, mesh, between)
    output = model.get_output_embeddings()  # type: ignore[operator]
    name = next(name for name, module in model.named_children() if module is output)
    parallelize_module(model, mesh, {name: head}, src_data_rank=None)
    if tied:
        model.get_submodule(name).register_parameter("weight", model.get_input_embeddings().weight)  # type: ignore[operator]
    return model


def _body(model: nn.Module) -> tuple[nn.Module, Sequence[nn.Module]]:
    for module in model.modules():
        for name in _has(module, LAYER_LISTS):
            found = getattr(module, name)
            if isinstance(found, nn.ModuleList) and _has(module, EMBEDDINGS) and _has(module, FINAL_NORMS):
                return module, list(found)
    raise ConfigError(
        f"no tensor-parallel plan fits {type(model).__name__}; the families known are those of Llama, Mistral, Qwen, Mixtral, "
        "DeepSeek and GPT-2: take tp 1"
    )


def _has(module: nn.Module, names: Sequence[str]) -> list[str]:
    return [name for name in names if hasattr(module, name)]


def _split_layer(layer: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    spread = isinstance(between, Shard)
    plan: dict[str, ParallelStyle] = {}
    if spread:
        plan |= {name: SequenceParallel() for name in _has(layer, NORMS)}
    for name in _has(layer, BLOCKS):
        block = layer.get_submodule(name)
        if hasattr(block, "experts"):
            plan[name] = SplitTokens(spread)
            continue
        linear = _linears(name, block, between)
        if not linear:
            raise ConfigError(
                f"no tensor-parallel plan fits {type(block).__name__} of {type(layer).__name__}; take tp 1"
            )
        plan |= linear
        # one conversion for all the projections of a block, so that their gradients are summed before they are reduced;
        # latent attention begins with projections that every rank does in full
        whole = any(part in LATENT for part, _ in block.named_children())
        plan[name] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=whole,
        ) if name == "self_attn" else _FirstInput(between)  # fmt: skip
        _localise(block, mesh.size())
    parallelize_module(layer, mesh, plan, src_data_rank=None)


class _FirstInput(ParallelStyle):
    """The first input of a block, as all its projections need it."""

    def __init__(self, given: Placement) -> None:
        super().__init__()
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            first = given[0]
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, [self.given], run_check=False)
            return (first.redistribute(placements=[Replicate()]), *given[1:])

        module.register_forward_pre_hook(enter)
        return module


def _linears(prefix: str, block: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    found: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        short = name.rsplit(".", 1)[-1]
        plain = isinstance(module, nn.Linear)
        if short in COLUMNS:
            found[f"{prefix}.{name}"] = ColwiseParallel() if plain else TransposedColumns()
        elif short in ROWS:
            found[f"{prefix}.{name}"] = RowwiseParallel(output_layouts=between) if plain else TransposedRows(between)
    return found


def _localise(block: nn.Module, ranks: int) -> None:
    """Attention that splits one fused projection by a size must know the rank's own size."""
    if hasattr(block, "split_size"):
        block.split_size //= ranks  # type: ignore[assignment, operator]


def shard_fully(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, *, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """FSDP2 over a mesh of one dimension: embedding, each layer, and norm with head are gathered on their own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)

    def shard(*modules: nn.Module) -> None:
        fully_shard(modules[0] if len(modules) == 1 else list(modules), mesh=mesh, mp_policy=policy)
        # its own gather is the only one that it starts in the backward pass, so that each is recorded where it belongs
        modules[0].set_modules_to_backward_prefetch([modules[0]])  # type: ignore[operator]

    for layer in layers:
        shard(layer)
    body, _ = _body(model)
    embedding = body.get_submodule(_has(body, EMBEDDINGS)[0])
    output = model.get_output_embeddings()  # type: ignore[operator]
    if output.weight is not embedding.get_parameter("weight"):
        shard(embedding)
        shard(body.get_submodule(_has(body, FINAL_NORMS)[0]), output)
    shard(model)
