"""The real thing of `echo_gloo.py`: a training step of a transformers Llama on two gloo processes, three ways.

Data parallel: torch's DDP, gradients reduced in buckets beside the last micro-batch's backward. Tensor parallel: DTensor, by
the plan that a capture applies. Pipeline parallel: 1F1B over point-to-point transfers, sends left under way. All accumulate
gradients over micro-batches and end with a fused AdamW; nothing here knows of a prediction.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from echo_gloo_job import WORLD, Size, Way, as_size, llama_config
from rollart.core.seeds import seed_of
from rollart.optrace.live_model import loss_of
from rollart.optrace.live_parallel import apply_tensor_parallel
from rollart.perf.pipeline import balanced_layers

MEBIBYTE = 1 << 20
REFERENCE_SIDE = 384
REFERENCE_CALLS = 20
Step = Callable[[], Tensor | None]
"""A whole optimiser step; the sum of its micro-batches' losses on this rank, None where a stage sees none."""


def measured(spec: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of each step on this rank: `{ways: {way: [[seconds of a repeat's steps], ..]}, reference_s: [..], losses: ..}`.

    `spec`: `size`, `ways`, `seed`, `warm_up` and `steps` per repeat, `repeats`; ways are taken in turn and every step starts
    at a barrier. `reference_s`: of one product before each repeat, which says whether the machine's speed moved. `losses`: of
    the first and the last step of each way; all ways train the same batch from the same weights.
    """
    size = as_size(spec["size"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps: dict[Way, Step] = {way: step_of(way, size, rank, mesh, spec["seed"]) for way in spec["ways"]}
    losses: dict[str, list[float | None]] = {}
    for way, step in steps.items():
        losses[way] = [_value(step()) for _ in range(spec["warm_up"])][:1]
    found: dict[str, list[list[float]]] = {way: [] for way in steps}
    reference = []
    for _ in range(spec["repeats"]):
        reference.append(reference_s())
        for way, step in steps.items():
            found[way].append([_timed(step) for _ in range(spec["steps"])])
    for way, step in steps.items():
        losses[way].append(_value(step()))
    return {"ways": found, "reference_s": reference, "losses": losses}


def _value(loss: Tensor | None) -> float | None:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    return None if loss is None else float(loss)


def reference_s() -> float:
    """Median seconds of one product."""
    square = torch.ones(REFERENCE_SIDE, REFERENCE_SIDE)
    taken = []
    for _ in range(REFERENCE_CALLS):
        start_s = time.perf_counter()
        torch.mm(square, square)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def _timed(step: Step) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def step_of(way: Way, size: Size, rank: int, mesh: DeviceMesh, seed: int) -> Step:
    """One whole optimiser step, ready to be called; each call trains the same batch."""
    torch.manual_seed(seed_of(seed, "weights"))
    model = llama(size)
    if way == "pipeline":
        return _pipeline(model, batches(size, 1, seed), size, rank, mesh.size())
    job = trained(way, model, size, mesh)
    batch = batches(size, 1, seed)[rank if job.shares > 1 else 0 :: job.shares]
    return lambda: job.step(batch)


def llama(size: Size) -> LlamaForCausalLM:
    """fp32, attention as one fused operator."""
    config = LlamaConfig(**{key: value for key, value in llama_config(size).items() if key != "model_type"})
    config._attn_implementation = "sdpa"
    model: LlamaForCausalLM = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.train()
    return model


def batches(size: Size, shares: int, seed: int) -> list[Tensor]:
    """Token ids of each micro-batch of one rank, [sequences, tokens] each."""
    count = size.global_batch // (shares * size.micro_batch)
    source = torch.Generator().manual_seed(seed_of(seed, "tokens"))
    shape = (size.micro_batch, size.sequence)
    return [torch.randint(size.vocab, shape, generator=source) for _ in range(count)]


class Update:
    """Fused AdamW on this rank's own part of every weight: one call for each layer, for what stands before them and behind."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[str, list[nn.Parameter]] = {}
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            words = name.split(".")
            part = words[words.index("layers") + 1] if "layers" in words else words[-2]
            own = nn.Parameter(weight.to_local()) if isinstance(weight, DTensor) else weight
            groups.setdefault("head" if part in ("norm", "lm_head") else part, []).append(own)
            self.pairs.append((weight, own))
        self.optimizer = torch.optim.AdamW([{"params": held} for held in groups.values()], lr=1e-4, fused=True)

    def step(self) -> None:
        for weight, own in self.pairs:
            if own is not weight:
                own.grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        self.optimizer.step()
        for weight, own in self.pairs:
            weight.grad = own.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A whole model in training on one rank; `shares`: data-parallel ranks that share the batch."""

    model: nn.Module
    update: Update
    shares: int = 1
    split: bool = False
    """Whether logits are split over the vocabulary."""

    def loss(self, tokens: Tensor) -> Tensor:
        """Of one micro-batch, as a capture takes it."""
        return loss_of(self.model(input_ids=tokens, use_cache=False), tokens)

    @contextmanager
    def around(self, *, last: bool) -> Iterator[None]:
        """What stands around a micro-batch: DDP reduces with the last one."""
        with ExitStack() as stack:
            if isinstance(self.model, DistributedDataParallel) and not last:
                stack.enter_context(self.model.no_sync())
            if self.split:
                stack.enter_context(loss_parallel())
            yield

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        losses = []
        for index, tokens in enumerate(batch):
            with self.around(last=index == len(batch) - 1):
                loss = self.loss(tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        self.update.step()
        return sum(losses[1:], losses[0])


def trained(way: Way, model: LlamaForCausalLM, size: Size, mesh: DeviceMesh | None) -> Trained:
    """The model under DDP, under DTensor, or as it is (without a mesh)."""
    if mesh is None:
        return Trained(model=model, update=Update(model))
    if way == "tensor":
        apply_tensor_parallel(model, mesh)
        return Trained(model=model, update=Update(model), split=True)
    bucket = size.layer_bytes / MEBIBYTE
    held = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
    return Trained(model=held, update=Update(model), shares=WORLD)


# ---- pipeline


def stage_of(model: LlamaForCausalLM, rank: int, stages: int) -> LlamaForCausalLM:
    """The layers of one stage; the first has the embedding, the last the norm, the head and the loss."""
    counts = balanced_layers(len(model.model.layers), stages, first_extra=0.0, last_extra=0.0)
    first = sum(counts[:rank])
    model.model.layers = model.model.layers[first : first + counts[rank]]
    model.model.config.num_hidden_layers = counts[rank]
    if rank < stages - 1:
        model.model.norm = nn.Identity()
        model.lm_head = nn.Identity()
    if rank > 0:
        model.model.embed_tokens = nn.Identity()
    return model


def _pipeline(model: LlamaForCausalLM, batch: list[Tensor], size: Size, rank: int, stages: int) -> Step:
    """1F1B: as many forwards ahead as stages follow, then one forward and one backward in turn, then what is left."""
    stage = stage_of(model, rank, stages)
    update = Update(stage)
    ahead = min(stages - rank - 1, len(batch))

    def step() -> Tensor | None:
        pipe = _Pipe(stage=stage, batch=batch, size=size, rank=rank, stages=stages)
        for index in range(len(batch) + ahead):
            if index < len(batch):
                pipe.forward(index)
            if index >= ahead:
                pipe.backward(index - ahead)
        pipe.drained()
        update.step()
        return sum(pipe.losses[1:], pipe.losses[0]) if pipe.losses else None

    return step


class _Pipe:
    """One step's micro-batches on one stage: what waits for its backward, and the sends under way."""

    def __init__(self, *, stage: LlamaForCausalLM, batch: list[Tensor], size: Size, rank: int, stages: int) -> None:
        self.stage, self.batch, self.rank, self.stages = stage, batch, rank, stages
        self.shape = (size.micro_batch, size.sequence, size.hidden)
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.under_way: list[tuple[Any, Tensor]] = []
        self.losses: list[Tensor] = []

    def forward(self, index: int) -> None:
        if self.rank == 0:
            hidden = self.stage.model(input_ids=self.batch[index], use_cache=False).last_hidden_state
        else:
            entered = torch.empty(self.shape)
            dist.recv(entered, src=self.rank - 1, tag=2 * index)
            self.inputs[index] = entered.requires_grad_()
            if self.rank == self.stages - 1:
                loss = loss_of(self.stage(inputs_embeds=entered, use_cache=False), self.batch[index])
                self.outputs[index] = loss
                self.losses.append(loss.detach())
                return
            hidden = self.stage.model(inputs_embeds=entered, use_cache=False).last_hidden_state
        self.outputs[index] = hidden
        self._send(hidden.detach(), self.rank + 1, 2 * index)

    def backward(self, index: int) -> None:
        left = self.outputs.pop(index)
        gradient = None
        if self.rank < self.stages - 1:
            gradient = torch.empty(self.shape)
            dist.recv(gradient, src=self.rank + 1, tag=2 * index + 1)
        torch.autograd.backward(left, gradient)
        if self.rank > 0:
            entered = self.inputs.pop(index)
            assert entered.grad is not None
            self._send(entered.grad, self.rank - 1, 2 * index + 1)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self.under_way.append((dist.isend(tensor, dst=to, tag=tag), tensor))

    def drained(self) -> None:
        """Until all sends have been received."""
        for work, _ in self.under_way:
            if work is not None:
                work.wait()
