"""One training rank: sharded weights, gradients of a step, the optimiser, and what leaves the trainer.

Owns the fp32 master weights. Invariants: gradients are sums over tokens until `finish` divides them by the step's total
weight, so neither micro-batches nor ranks change them; every method is a collective and must be called on all ranks with
equally many micro-batches; `begin` forgets an unfinished step; a version number is published once.

    begin -> accumulate* -> finish        one optimiser step; `logprobs` before it keeps the old log-probabilities
    publish                               whole weights in buckets, from rank 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rollart.config.real import model_of
from rollart.config.schema import (
    Algorithm,
    InlineWorld,
    Optimizer,
    PretrainedModel,
    RunConfig,
    SamplingConfig,
    ScratchModel,
    TrainerConfig,
    VllmEngine,
)
from rollart.core.errors import TrainerError
from rollart.core.seeds import seed_of
from rollart.core.types import Version
from rollart.learn.credit import longest_response
from rollart.learn.rates import learning_rate
from rollart.runtime.models import build_model, hf_config, weights_folder
from rollart.runtime.trainer import checkpoint, metrics, ranks, sequences
from rollart.runtime.trainer.loss import policy_loss
from rollart.runtime.trainer.policy import Policy
from rollart.runtime.trainer.reference import Frozen, frozen, in_place
from rollart.runtime.trainer.rows import LossRow, Rows, SampleKey, loss_terms, pad
from rollart.runtime.weights import Bucket, WeightIndex, fingerprint, pack

WEIGHT_TOLERANCE = 1e-6
"""Relative: weights are sums of fractions that add up to whole trajectories."""
NORM_FLOOR = 1e-6
"""Keeps the clipping factor finite at a gradient of 0, as torch's `clip_grad_norm_` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What all ranks of a trainer are told."""

    model: ScratchModel | PretrainedModel
    vocab_size: int
    seed: int
    """Of new weights."""
    algorithm: Algorithm
    optimizer: Optimizer
    sampling: SamplingConfig
    trainer: TrainerConfig
    total_steps: int
    """Optimiser steps of the run, over which the learning rate decays."""
    timeout_s: float
    """Longest wait of a rank for the others."""
    longest_response: int = 1
    """Tokens; what `normalize=constant` divides by."""
    probe: bool = False
    """Score the fixed prompts of `runtime.probe` at every publish: for engines whose weights cannot be compared bit by bit."""
    alone: bool = False
    """Each rank has a process to itself, so what it sets there concerns nobody else."""


def spec_of(config: RunConfig, vocab_size: int) -> TrainerSpec:
    return TrainerSpec(
        model=model_of(config),
        vocab_size=vocab_size,
        seed=seed_of(config.seed, "model"),
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        sampling=config.sampling,
        trainer=config.trainer,
        total_steps=config.schedule.steps * config.schedule.steps_per_batch,
        timeout_s=config.deadlines.train_s,
        longest_response=longest_response(config),
        probe=isinstance(config.engine, VllmEngine),
        alone=not isinstance(config.world, InlineWorld),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One version as rank 0 offers it."""

    version: Version
    index: WeightIndex
    buckets: list[Bucket]
    digest: str
    """Of the live parameters."""


@dataclass(slots=True, kw_only=True)
class _Step:
    number: int
    expected_weight: float | None
    parts: list[Mapping[str, float]]


class TrainerRank:
    """Rank `rank` of `spec.trainer.ranks`; alone in its process when there are several, which then meet at `store`."""

    def __init__(self, spec: TrainerSpec, *, rank: int = 0, store: Store | None = None) -> None:
        self.spec = spec
        self.rank = rank
        mesh = ranks.join(rank, spec.trainer.ranks, store, spec.timeout_s)
        model = build_model(hf_config(spec.model, spec.vocab_size), seed=spec.seed, weights=weights_folder(spec.model))
        self.policy = Policy(model, spec.trainer.native)
        apart: set[nn.Parameter] = set()
        for layer in self.policy.sharded_layers:
            # one rank has all of a layer anyway: gathering it again for the backward pass would only copy it
            fully_shard(layer, mesh=mesh, reshard_after_forward=spec.trainer.ranks > 1)
            apart.update(layer.parameters())
        # a layer is also a part of the transformers model, through which they would be found again
        fully_shard(self.policy, mesh=mesh, ignored_params=apart)
        self.weights: dict[str, DTensor] = {
            name.removeprefix("hf."): cast(DTensor, weight) for name, weight in self.policy.named_parameters()
        }
        """The master weights by `state_dict` name, sharded; tied embeddings once."""
        self._optimizer = self.new_optimizer(spec.optimizer.lr)
        self._old: dict[SampleKey, NDArray[np.float32]] = {}
        self._old_at = -1
        """Optimiser steps taken when the old log-probabilities were computed."""
        self._reference: Frozen | None = None
        """Weights that the KL term refers to; None before the first step or publish, and always without such a term."""
        self._step: _Step | None = None
        self.steps = 0
        """Optimiser steps taken."""
        self.version: Version = -1
        """The highest that was published; -1: none."""

    def close(self) -> None:
        """Give weights and group up; the rank cannot be used any more. Idempotent."""
        for name in ("policy", "weights", "_optimizer", "_reference"):
            if hasattr(self, name):
                delattr(self, name)
        ranks.leave()

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, total_weight: float | None) -> None:
        """Start a step. `total_weight`: its number of trajectories (`learn.credit.total_weight`), checked by `finish`."""
        self._keep_reference()
        self._step = _Step(number=step, expected_weight=total_weight, parts=[])
        self._optimizer.zero_grad()

    def accumulate(self, micro_batches: Sequence[Sequence[LossRow]]) -> dict[str, float]:
        """Add the gradients of this rank's rows; an empty micro-batch adds nothing. Returns the rank's tokens and
        trajectories. Raises TrainerError outside a step, and for a part of a trajectory where the loss needs all of it."""
        if self._step is None:
            raise TrainerError("accumulate outside a step; call begin first")
        whole = self._whole_trajectories(micro_batches)
        reference = self._reference_logprobs(micro_batches)
        parts = [self._accumulate_one(rows, whole, under) for rows, under in zip(micro_batches, reference, strict=True)]
        self._step.parts += parts
        merged = metrics.merge(parts)
        return {"tokens": merged["tokens"], "trajectories": merged["trajectories"]}

    def finish(self) -> dict[str, float]:
        """Divide by the total weight, clip, step. Returns the metrics of `metrics`, `grad_norm`, `lr`, `weights_changed`.

        Raises TrainerError, with the weights untouched, when nothing was accumulated, samples were lost or came twice, or
        the gradient is not finite.
        """
        step = self._step
        if step is None:
            raise TrainerError("finish outside a step; call begin first")
        sums = metrics.merge(ranks.gather(metrics.merge(step.parts)))
        self._check_weight(step, sums)
        # Sharded training averages over ranks what is a sum here.
        norm, clipped = self.clip_gradients(
            self.spec.trainer.ranks / sums["loss_weight"], self.spec.optimizer.grad_clip
        )
        lr = self._set_lr()
        before = {name: weight.to_local().clone() for name, weight in self.weights.items()}
        self._optimizer.step()
        changed = any(not torch.equal(before[name], weight.to_local()) for name, weight in self.weights.items())
        self._optimizer.zero_grad()
        self._step = None
        self.steps += 1
        return metrics.summary(sums, with_entropy=self.spec.trainer.log_entropy) | {
            "grad_norm": norm,
            "grad_clipped": float(clipped),
            "lr": lr,
            "weights_changed": float(ranks.total(changed) > 0),
        }

    def logprobs(self, micro_batches: Sequence[Sequence[LossRow]]) -> dict[SampleKey, NDArray[np.float32]]:
        """Log-probabilities of the trained tokens under the present weights, from all ranks.

        They are kept on every rank as the old ones of these samples until the next `publish`, however they are split later.
        """
        found: dict[SampleKey, NDArray[np.float32]] = {}
        for rows, now in zip(micro_batches, self._scored(micro_batches), strict=True):
            found |= zip((one.key for one in rows), _by_row(rows, now), strict=True)
        everyone = ranks.union(found)
        self._old |= everyone
        self._old_at = self.steps
        return everyone

    # --- weights -----------------------------------------------------------------------------------------------------

    def publish(self, version: Version) -> Publication | None:
        """Whole weights in buckets, on rank 0; None on the others. Old log-probabilities are forgotten.

        Raises TrainerError for a version that is not above the last one.
        """
        if version <= self.version:
            raise TrainerError(f"version {version} is not above {self.version}, the last one; numbers are never reused")
        self._keep_reference()
        weights = checkpoint.full_weights(self.weights)
        self._old.clear()
        self.version = version
        if self.rank:
            return None
        index, buckets = pack(weights, self.spec.trainer.bucket_bytes)
        return Publication(version=version, index=index, buckets=buckets, digest=fingerprint(weights))

    def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        """Save to or load from one file (see `checkpoint`). Loading forgets an unfinished step; the highest published
        version never falls. Raises StoreError."""
        if mode == "save":
            counters = {"steps": self.steps, "version": self.version}
            checkpoint.save(path, self.weights, self._optimizer, counters, self._reference)
            return
        counters, reference = checkpoint.load(path, self.weights, self._optimizer)
        # a file from before there was a KL term: the policy is held near what it holds
        self._reference = reference if self.spec.algorithm.kl.kind != "none" else None
        self.steps = counters["steps"]
        self.version = max(self.version, counters["version"])
        self._old.clear()
        self._step = None
        self._optimizer.zero_grad()
        self.reshard()

    # --- shared with the warm start ----------------------------------------------------------------------------------

    def new_optimizer(self, lr: float) -> torch.optim.AdamW:
        settings = self.spec.optimizer
        return torch.optim.AdamW(
            cast(list[nn.Parameter], list(self.weights.values())),
            lr=lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def forward(
        self, rows: Rows, *, with_entropy: bool, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Policy.forward`, at the sampling temperature unless another is given."""
        at = self.spec.sampling.temperature if temperature is None else temperature
        found: tuple[torch.Tensor, torch.Tensor] = self.policy(rows, at, with_entropy)
        return found

    def clip_gradients(self, scale: float, limit: float) -> tuple[float, bool]:
        """Multiply gradients by `scale`, bound their global norm by `limit`; return the norm before the bound, and whether it
        bit. Raises TrainerError, with the gradients dropped, when the norm is not finite."""
        gradients = [cast(DTensor, weight.grad).to_local() for weight in self.weights.values()]
        squares = float(sum(gradient.double().square().sum() for gradient in gradients))
        norm = ranks.total(squares) ** 0.5 * scale
        if not np.isfinite(norm):
            self._optimizer.zero_grad()
            self._step = None
            raise TrainerError(
                f"the gradient norm of optimiser step {self.steps + 1} is {norm}; the weights were left as they were. "
                "Lower optimizer.lr or look at the batch"
            )
        factor = scale * min(1.0, limit / (norm + NORM_FLOOR))
        for gradient in gradients:
            gradient.mul_(factor)
        return norm, norm > limit

    def reshard(self) -> None:
        """Drop gathered weights that no backward pass will drop: the next forward pass would read them stale."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- within a step -----------------------------------------------------------------------------------------------

    def _accumulate_one(
        self, rows: Sequence[LossRow], whole: sequences.Totals | None, reference: torch.Tensor | None
    ) -> dict[str, float]:
        algorithm = self.spec.algorithm
        terms = replace(loss_terms(rows, self._old), reference=reference)
        padded = pad([one.row for one in rows])
        logprobs, entropy = self.forward(padded, with_entropy=self.spec.trainer.log_entropy)
        if sequences.needed(algorithm):
            mine = sequences.totals(rows, _by_row(rows, logprobs.detach()), self._old) if whole is None else whole
            terms = sequences.filled(terms, rows, mine)
        loss, sums = policy_loss(logprobs, padded.behaviour, terms, algorithm)
        loss.backward()  # type: ignore[no-untyped-call]
        share = sum(one.share for one in rows)
        if algorithm.loss.normalize == "constant":
            sums["loss_weight"] = share  # tokens weigh by a constant, the loss is a mean over trajectories
        return sums | {
            "entropy": float(entropy),
            "trajectories": share,
            "rejected_trajectories": sequences.rejected(rows, terms, algorithm),
            "micro_batches": 1.0,
            "computed_tokens": float(self.policy.computed_tokens),
        }

    def _scored(self, micro_batches: Sequence[Sequence[LossRow]]) -> list[torch.Tensor]:
        """Log-probabilities of each micro-batch under the weights in place, (N,) each, without gradient. A collective."""
        with torch.no_grad():
            found = [
                self.forward(pad([one.row for one in rows]), with_entropy=False)[0].clone() for rows in micro_batches
            ]
        self.reshard()
        return found

    def _whole_trajectories(self, micro_batches: Sequence[Sequence[LossRow]]) -> sequences.Totals | None:
        """Sums over the trajectories of all ranks; None where nothing needs them, or each lies in one micro-batch."""
        if not sequences.needed(self.spec.algorithm):
            return None
        rows = [one for micro_batch in micro_batches for one in micro_batch]
        unmoved = self._old_at == self.steps and all(one.key in self._old for one in rows)
        views = ranks.gather((sequences.spread(micro_batches), unmoved))
        if not any(is_spread for is_spread, _ in views):
            return None
        if all(still for _, still in views):  # what was kept as old is what a pass would give
            now = [self._old[one.key] for one in rows]
        else:
            scored = self._scored(micro_batches)
            now = [part for batch, found in zip(micro_batches, scored, strict=True) for part in _by_row(batch, found)]
        return sequences.added(ranks.gather(sequences.totals(rows, now, self._old)))

    def _keep_reference(self) -> None:
        """The weights of the first step or publish, whichever comes first: after a warm start, before any reward."""
        if self._reference is None and self.spec.algorithm.kl.kind != "none":
            self._reference = frozen(self.weights)

    def _reference_logprobs(self, micro_batches: Sequence[Sequence[LossRow]]) -> Sequence[torch.Tensor | None]:
        if self._reference is None:
            return [None] * len(micro_batches)
        with in_place(self.weights, self._reference, self.reshard):
            return self._scored(micro_batches)

    def _check_weight(self, step: _Step, sums: Mapping[str, float]) -> None:
        if not sums["loss_weight"]:
            raise TrainerError(f"step {step.number} has no sample; a step trains at least one")
        expected, got = step.expected_weight, sums["trajectories"]
        if expected is not None and abs(got - expected) > WEIGHT_TOLERANCE * max(expected, 1.0):
            raise TrainerError(
                f"step {step.number} was announced with {expected:g} trajectories and got {got:g}; "
                "samples were lost or sent twice"
            )

    def _set_lr(self) -> float:
        lr = learning_rate(self.spec.optimizer, self.steps, self.spec.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr


def _by_row(rows: Sequence[LossRow], values: torch.Tensor) -> list[NDArray[np.float32]]:
    """(N,) of a micro-batch as (trained,) per row."""
    ends = np.cumsum([len(one.row.targets) for one in rows])
    return [values.numpy()[end - len(one.row.targets) : end] for one, end in zip(rows, ends, strict=True)]
