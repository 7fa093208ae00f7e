"""What one step of an inference engine costs, from the device's spec sheet and the model's shape.

Owns: `EngineCost`: a step that decodes some sequences and reads some prompt tokens, its parts, the memory that is left for
the KV cache. Invariant: weights of dense layers are read once per step, of experts only those that some token is routed
to; a step of nothing costs nothing. Why: every decision about placing rollouts asks one of two questions, how long is a
step and how much fits, and both must be answered for hardware that is not there.

Layout: a rank holds 1/tp of attention and dense blocks of layers/pp layers. With ep > 1 the experts are spread over ep ranks
and, where dp > 1, attention is data parallel inside the engine (each rank its own sequences); with ep = 1, dp counts whole
replicas, and `EngineCost` speaks of one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from rollart.core.errors import ConfigError
from rollart.core.resources import DEFAULT_DEGREES, Degrees
from rollart.perf.devices import GIB, Device
from rollart.perf.rooflines import WEIGHT_BYTES, Efficiency, all_reduce_s, all_to_all_s, attention_s, matmul_s
from rollart.perf.shapes import Matrix, ModelShape

RUNTIME_BYTES = 1.0 * GIB
"""Context of the driver, captured graphs and small workspaces of an engine's rank; activations are computed."""
COLLECTIVE_BYTES = 0.38 * GIB
"""Buffers of the collective library for a rank that talks to others (aiconfigurator: 342-392 MiB)."""
KERNELS_PER_LAYER = 6
"""Beside the matrix products: attention, two norms, rotation and cache write, activation, quantisation."""
KERNELS_PER_EXPERT_LAYER = 6
"""Routing, sorting, gathering and combining tokens."""
SAMPLE_PASSES = 6
"""Times that sampling walks over a row of fp32 logits."""
OUTSIDE_BYTES = 2.0
"""Embeddings and output head stay in 16 bits in published quantised models."""
_EXPERTS = ("expert_in", "expert_out")
_UNSHARDED = ("router", "latent")
_OUTSIDE = ("router", "head")


class _Product(NamedTuple):
    """A matrix as one rank holds it; `experts` above 0: so many copies over all ranks."""

    inputs: float
    outputs: float
    layers: int
    weight_bytes: float
    compute: str
    sampled: bool
    experts: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of a step on the device by what they are spent on."""

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    collectives: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.passes + self.collectives


def _check_work(**amounts: float) -> None:
    for name, value in amounts.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} of a step is {value}; give a finite number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """One engine: `degrees` of `shape` on `device`. Times are of the device alone, `factor` included; host work is apart."""

    device: Device
    shape: ModelShape
    degrees: Degrees = DEFAULT_DEGREES
    precision: str = "bf16"
    kv_dtype: str = "bf16"
    efficiency: Efficiency = field(default_factory=Efficiency)
    factor: float = 1.0
    """The one calibration constant of an (engine, device): all device times are multiplied with it."""
    memory_fraction: float = 0.9
    of_free: bool = False
    runtime_bytes: float = RUNTIME_BYTES
    step_tokens: float = 8192.0
    """Most tokens of a rank's step; activations of a step that large are kept free."""

    _products: tuple[_Product, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        d, m = self.degrees, self.shape
        if min(d) < 1:
            raise ConfigError(f"degrees {tuple(d)} of {m.name!r}: each must be at least 1")
        if d.ep > 1 and not m.experts:
            raise ConfigError(f"ep is {d.ep} but {m.name!r} has no experts; use ep=1")
        if d.ep > 1 and m.experts % d.ep:
            nearest = max(e for e in range(1, d.ep + 1) if m.experts % e == 0)
            raise ConfigError(f"ep is {d.ep} but {m.name!r} has {m.experts} experts; nearest valid value: {nearest}")
        if d.pp > m.layers:
            raise ConfigError(f"pp is {d.pp} but {m.name!r} has {m.layers} layers; nearest valid value: {m.layers}")
        for name, value in (("factor", self.factor), ("memory_fraction", self.memory_fraction)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of an engine is {value}; give a finite number above 0")
        for label in (self.precision, self.kv_dtype):
            if label not in WEIGHT_BYTES:
                raise ConfigError(f"unknown dtype {label!r}; known: {', '.join(WEIGHT_BYTES)}")

        object.__setattr__(self, "_products", tuple(self._product(matrix) for matrix in m.matrices()))

    # --- layout ------------------------------------------------------------------------------------------------------

    @property
    def attention_dp(self) -> int:
        """Ranks among which sequences are divided inside the engine."""
        return self.degrees.dp if self.degrees.ep > 1 else 1

    @property
    def ranks(self) -> int:
        return self.degrees.tp * self.degrees.pp * self.attention_dp

    @property
    def _expert_ranks(self) -> int:
        """Ranks over which one layer's experts lie, by expert or by slices of each."""
        return self.degrees.tp * self.attention_dp

    def weight_bytes(self) -> float:
        """Weights on one rank."""
        total = self.shape.embedding_parameters * OUTSIDE_BYTES / self.degrees.tp
        for matrix in self.shape.matrices():
            total += matrix.parameters * self._element_bytes(matrix) / self._shards(matrix)
        return total / self.degrees.pp

    def _element_bytes(self, matrix: Matrix) -> float:
        if self.shape.expert_bits and matrix.kind in _EXPERTS:
            return self.shape.expert_bits / 8.0
        if matrix.kind in _OUTSIDE or self.shape.expert_bits:
            return max(OUTSIDE_BYTES, WEIGHT_BYTES[self.precision])
        return WEIGHT_BYTES[self.precision]

    def _computes(self, matrix: Matrix) -> str:
        """The dtype that a matrix is multiplied in; experts published in 4 bits go with activations in 8 where the chip can."""
        if self.shape.expert_bits and matrix.kind in _EXPERTS:
            return "fp8" if "fp4" in self.device.flops else self.device.computes("bf16")
        return self.device.computes(self.precision if self._element_bytes(matrix) < OUTSIDE_BYTES else "bf16")

    def _shards(self, matrix: Matrix) -> int:
        if matrix.kind in _UNSHARDED:
            return 1
        return self._expert_ranks if matrix.kind in _EXPERTS else self.degrees.tp

    # --- memory ------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self) -> float:
        """KV cache of one token on a rank that holds it."""
        whole = self.shape.kv_bytes_per_token(WEIGHT_BYTES[self.kv_dtype]) / self.degrees.pp
        return whole / self._kv_shards()

    def _kv_shards(self) -> int:
        return 1 if self.shape.kv_rank else min(self.degrees.tp, self.shape.kv_heads)

    def activation_bytes(self) -> float:
        """Of the largest step of a rank: inputs and outputs of the widest product, in 16 bits."""
        widest = max(
            (matrix.inputs + matrix.outputs) * matrix.used / (self.degrees.tp if matrix.kind not in _UNSHARDED else 1)
            for matrix in self.shape.matrices()[:-1]
        )
        return self.step_tokens * (widest + 4.0 * self.shape.hidden) * 2.0

    def kv_capacity_tokens(self) -> float:
        """Tokens whose KV the engine holds, all of its ranks together. Raises `ConfigError` if the weights do not fit."""
        weights = self.weight_bytes()
        taken = weights + self.runtime_bytes + self.activation_bytes() + (COLLECTIVE_BYTES if self.ranks > 1 else 0.0)
        memory = self.device.memory_bytes
        room = self.memory_fraction * (memory - taken) if self.of_free else self.memory_fraction * memory - taken
        if room <= 0:
            raise ConfigError(
                f"{self.shape.name} in {self.precision} needs {weights / GIB:.1f} GiB of weights on each of {self.ranks} "
                f"{self.device.name} with {memory / GIB:.1f} GiB; raise tp, pp or ep"
            )
        return self.attention_dp * room / self.kv_bytes_per_token()

    def sequence_tokens(self, context: float) -> float:
        """Tokens' worth of cache that a sequence of `context` tokens holds: fewer where layers see a window only."""
        one = self.shape.kv_bytes_per_token(1.0)
        return (self.shape.kv_bytes(context, 1.0) + self.shape.state_bytes) / one if one else 1.0

    # --- time --------------------------------------------------------------------------------------------------------

    def decode_step_s(self, batch: float, context: float) -> float:
        """Seconds in which `batch` sequences of `context` tokens each get one more."""
        _check_work(batch=batch, context=context)
        return self.step_s(batch, context)

    def prefill_s(self, tokens: float, context: float = 0.0) -> float:
        """Seconds to read `tokens` of prompts of which each sees `context` earlier tokens and, on average, half of the new."""
        _check_work(tokens=tokens, context=context)
        return self.step_s(0.0, 0.0, prefill=tokens, prefill_context=context + tokens / 2.0)

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        """Seconds of a step that decodes `batch` sequences and reads `prefill` prompt tokens.

        `prefill_context`: tokens that a prompt token attends to on average. Over pp stages the batch goes in pp parts.
        """
        if batch + prefill <= 0:
            return 0.0
        pp = self.degrees.pp
        return (
            self.parts(batch / pp, context, prefill=prefill / pp, prefill_context=prefill_context).total * self.factor
        )

    def parts(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> StepParts:
        """All layers of one pass, every stage in turn, without the factor."""
        local = (self.efficiency.rank_imbalance if self.attention_dp > 1 else 1.0) / self.attention_dp
        tokens = batch + prefill
        return StepParts(
            products=sum(self._product_s(product, tokens, batch) for product in self._products),
            attention=self._attention_s(batch * local, context, prefill * local, prefill_context),
            passes=self._passes_s(tokens * local, batch * local),
            collectives=self._collectives_s(tokens),
        )

    def _product(self, matrix: Matrix) -> _Product:
        tp, experts = self.degrees.tp, matrix.kind in _EXPERTS
        shards = self._expert_ranks // self.degrees.ep if experts else 1 if matrix.kind in _UNSHARDED else tp
        by_rows = matrix.kind in ("attention_out", "ffn_out", "expert_out", "shared_out", "mamba_out")
        return _Product(
            inputs=matrix.inputs / (shards if by_rows else 1), outputs=matrix.outputs / (1 if by_rows else shards),
            layers=matrix.layers, weight_bytes=self._element_bytes(matrix), compute=self._computes(matrix),
            sampled=matrix.kind == "head", experts=matrix.experts if experts else 0, used=matrix.used,
        )  # fmt: skip

    def _product_s(self, product: _Product, tokens: float, batch: float) -> float:
        eff = self.efficiency
        local = (eff.rank_imbalance if self.attention_dp > 1 else 1.0) / self.attention_dp
        rows, copies, pad, reach = tokens * local, 1.0, 0.0, 1.0
        if product.experts:
            copies = product.experts * (1.0 - (1.0 - product.used / product.experts) ** tokens) / self.degrees.ep
            imbalance = eff.expert_imbalance if self.degrees.ep > 1 else 1.0
            rows = tokens * product.used / self.degrees.ep * imbalance / copies
            pad, reach = eff.expert_pad, eff.expert_matmul if product.weight_bytes < OUTSIDE_BYTES else 1.0
        elif product.sampled:
            rows = max(batch * local, 1.0)
        each = matmul_s(
            self.device, eff, rows, product.inputs, product.outputs, weight_bytes=product.weight_bytes,
            compute=product.compute, copies=copies, pad=pad, reach=reach,
        )  # fmt: skip
        return each * product.layers

    def _attention_s(self, batch: float, context: float, prefill: float, prefill_context: float) -> float:
        m, eff, tp = self.shape, self.efficiency, self.degrees.tp
        found = 0.0
        if batch:
            cache = batch * (m.kv_bytes(context, WEIGHT_BYTES[self.kv_dtype]) / self._kv_shards() + m.state_bytes / tp)
            flops = batch * m.attention_flops(context, absorbed=True) / tp
            found += attention_s(self.device, eff, flops=flops, kv_bytes=cache)
        if prefill:
            found += attention_s(
                self.device, eff, flops=prefill * m.attention_flops(prefill_context) / tp, kv_bytes=0.0
            )
        return found

    def _passes_s(self, tokens: float, batch: float) -> float:
        m, eff, d = self.shape, self.efficiency, self.degrees
        rate = self.device.memory_bytes_per_s * eff.memory
        moved = eff.passes * 2.0 * m.hidden * m.layers * tokens + SAMPLE_PASSES * 4.0 * m.vocab * batch
        routed = tokens * self.attention_dp / self._expert_ranks * m.top_k * (m.moe_latent or m.hidden)
        moved += (
            eff.expert_passes
            * 2.0
            * m.moe_layers
            * (routed if d.ep > 1 else tokens * m.top_k * (m.moe_latent or m.hidden))
        )
        kernels = KERNELS_PER_LAYER * m.layers + KERNELS_PER_EXPERT_LAYER * m.moe_layers
        return moved / rate + kernels * eff.kernel_s

    def _collectives_s(self, tokens: float) -> float:
        m, d, eff = self.shape, self.degrees, self.efficiency
        local = tokens / self.attention_dp
        reduced = all_reduce_s(self.device, eff, d.tp, local * m.hidden * 2.0)
        inner = m.attention_layers + m.mamba_layers + m.dense_layers + (m.moe_layers if d.ep == 1 else 0)
        found = inner * reduced
        if d.ep > 1:
            width = (m.moe_latent or m.hidden) * min(m.top_k, d.ep) * local
            sent = all_to_all_s(self.device, eff, self._expert_ranks, width * min(WEIGHT_BYTES[self.precision], 1.0))
            found += m.moe_layers * (sent + all_to_all_s(self.device, eff, self._expert_ranks, width * 2.0))
        if d.pp > 1:
            found += (d.pp - 1) * (
                eff.collective_s + local * m.hidden * 2.0 / (self.device.link_bytes_per_s * eff.link)
            )
        return found
