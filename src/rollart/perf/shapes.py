"""Shapes of language models: from a transformers config, from numbers, or by the name of a public model.

Owns: what follows from a shape alone: matrices, parameters, FLOPs of a token, bytes of the KV cache. Invariant: the sum of
`matrices()` and the embeddings is the parameter count, and FLOPs and active parameters come from the same list, so that a
cost model that walks the list cannot disagree with the totals. Why: training and inference models price one list of
matrices; they differ in what they do with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.perf.names import best_entries, unknown, words

Kind = Literal[
    "qkv", "attention_out", "ffn_in", "ffn_out", "router", "expert_in", "expert_out", "shared_in", "shared_out",
    "latent", "mamba_in", "mamba_out", "head",
]  # fmt: skip
STATE_BYTES = 4
"""The state of a state-space layer is kept in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight matrix [inputs, outputs] that `layers` layers have, `experts` times each, of which a token uses `used`."""

    kind: Kind
    inputs: int
    outputs: int
    layers: int
    experts: int = 1
    used: int = 1

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.layers * self.experts

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.inputs * self.outputs * self.layers * self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. Counts are of layers, heads and experts, sizes in elements; 0 means that the model has no such part.

    A usual transformer leaves the four counts of layers by kind alone; hybrids give them.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: hidden / heads."""
    gated: bool = True
    """Three matrices in a feed-forward block (SwiGLU and kin), else two."""
    tied: bool = False
    positions: int = 0
    """Learned position embeddings."""
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_experts: int = 0
    shared_ffn: int = 0
    """Width of one shared expert; 0: moe_ffn."""
    moe_latent: int = 0
    """Experts work in this narrower space between two projections."""
    expert_bits: float = 0.0
    """Above 0: experts are published in this many bits only and stay so whatever the precision of the rest."""
    attention_layers: int = -1
    dense_layers: int = -1
    """With a dense feed-forward block; -1: all without experts, none with them."""
    moe_layers: int = -1
    window: int = 0
    windowed_layers: int = 0
    """Attention layers that see only the last `window` tokens."""
    q_rank: int = 0
    kv_rank: int = 0
    """Above 0: multi-head latent attention; head_dim is then the part of a head without positions."""
    rope_dim: int = 0
    v_dim: int = 0
    mamba_layers: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    mamba_groups: int = 0
    source: str = "user"

    def __post_init__(self) -> None:
        put = object.__setattr__
        for label in ("layers", "hidden", "heads", "vocab"):
            value = getattr(self, label)
            if not (isinstance(value, int) and value > 0):
                raise ConfigError(f"model {self.name!r}: {label} is {value!r}; give a whole number above 0")
        put(self, "kv_heads", self.kv_heads or self.heads)
        put(self, "head_dim", self.head_dim or self.hidden // self.heads)
        put(self, "shared_ffn", self.shared_ffn or self.moe_ffn)
        put(self, "v_dim", self.v_dim or self.head_dim)
        dense = self.dense_layers if self.dense_layers >= 0 else (0 if self.experts else self.layers)
        put(self, "dense_layers", dense)
        if self.moe_layers < 0:
            put(self, "moe_layers", self.layers - dense if self.experts else 0)
        if self.attention_layers < 0:
            put(self, "attention_layers", self.layers)
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ConfigError(
                f"model {self.name!r}: top_k is {self.top_k} of {self.experts} experts; give 1 to {self.experts}"
            )
        if self.dense_layers and self.ffn <= 0:
            raise ConfigError(f"model {self.name!r}: ffn is {self.ffn}; give the width of the dense feed-forward block")

    @property
    def qk_dim(self) -> int:
        return self.head_dim + self.rope_dim

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    def matrices(self) -> tuple[Matrix, ...]:
        """All weight matrices that tokens are multiplied with, fused as engines fuse them; the output head is last."""
        return (*_attention(self), *_feed_forward(self), *_mamba(self),
                Matrix(kind="head", inputs=self.hidden, outputs=self.vocab, layers=1))  # fmt: skip

    @property
    def embedding_parameters(self) -> int:
        """Of input embeddings that are not also the output head, and of positions."""
        return (0 if self.tied else self.vocab * self.hidden) + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All but norms and biases (below 0.1 %)."""
        return sum(matrix.parameters for matrix in self.matrices()) + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with, output head included, input embeddings not."""
        return sum(matrix.active for matrix in self.matrices())

    def flops_per_token(self, context: float) -> float:
        """Forward FLOPs of one token that attends to `context` tokens (for a causal pass over n tokens: n / 2)."""
        return 2.0 * self.active_parameters + self.attention_flops(context)

    def attention_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Forward FLOPs of one token's scores and values over all layers; `absorbed`: latent attention as decoding does it."""
        latent = absorbed and self.kv_rank
        width = 2 * self.kv_rank + self.rope_dim if latent else self.qk_dim + self.v_dim
        return 2.0 * self.heads * width * self._seen(context) + self._mamba_flops()

    def kv_bytes(self, context: float, element_bytes: float) -> float:
        """KV cache that one sequence of `context` tokens reads in a step, over all layers."""
        return self._kv_width * element_bytes * self._seen(context)

    def kv_bytes_per_token(self, element_bytes: float) -> float:
        """KV cache of one more token below the window, over all layers."""
        return self._kv_width * element_bytes * self.attention_layers

    @property
    def state_bytes(self) -> float:
        """State of the state-space layers of one sequence."""
        return STATE_BYTES * self.mamba_layers * self.mamba_inner * self.mamba_state

    @property
    def _kv_width(self) -> int:
        return self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.kv_heads * self.head_dim

    def _seen(self, context: float) -> float:
        full = self.attention_layers - self.windowed_layers
        return full * context + self.windowed_layers * min(context, self.window or context)

    def _mamba_flops(self) -> float:
        return 6.0 * self.mamba_layers * self.mamba_inner * self.mamba_state


def _attention(m: ModelShape) -> tuple[Matrix, ...]:
    n, h = m.attention_layers, m.hidden
    if n == 0:
        return ()
    if not m.kv_rank:
        return (
            Matrix(kind="qkv", inputs=h, outputs=(m.heads + 2 * m.kv_heads) * m.head_dim, layers=n),
            Matrix(kind="attention_out", inputs=m.heads * m.head_dim, outputs=h, layers=n),
        )
    down = Matrix(kind="qkv", inputs=h, outputs=m.q_rank + m.kv_rank + m.rope_dim, layers=n)
    queries = Matrix(kind="qkv", inputs=m.q_rank or h, outputs=m.heads * m.qk_dim, layers=n)
    keys = Matrix(kind="qkv", inputs=m.kv_rank, outputs=m.heads * (m.head_dim + m.v_dim), layers=n)
    return down, queries, keys, Matrix(kind="attention_out", inputs=m.heads * m.v_dim, outputs=h, layers=n)


def _feed_forward(m: ModelShape) -> tuple[Matrix, ...]:
    h, up = m.hidden, 2 if m.gated else 1
    found: list[Matrix] = []
    if m.dense_layers:
        found += [
            Matrix(kind="ffn_in", inputs=h, outputs=up * m.ffn, layers=m.dense_layers),
            Matrix(kind="ffn_out", inputs=m.ffn, outputs=h, layers=m.dense_layers),
        ]
    if m.experts and m.moe_layers:
        n, inside = m.moe_layers, m.moe_latent or h
        found += [
            Matrix(kind="router", inputs=h, outputs=m.experts, layers=n),
            Matrix(kind="expert_in", inputs=inside, outputs=up * m.moe_ffn, layers=n, experts=m.experts, used=m.top_k),
            Matrix(kind="expert_out", inputs=m.moe_ffn, outputs=inside, layers=n, experts=m.experts, used=m.top_k),
        ]
        if m.moe_latent:
            found.append(Matrix(kind="latent", inputs=h, outputs=2 * m.moe_latent, layers=n))
        if m.shared_experts:
            width = m.shared_experts * m.shared_ffn
            found += [
                Matrix(kind="shared_in", inputs=h, outputs=up * width, layers=n),
                Matrix(kind="shared_out", inputs=width, outputs=h, layers=n),
            ]
    return tuple(found)


def _mamba(m: ModelShape) -> tuple[Matrix, ...]:
    if not m.mamba_layers:
        return ()
    wide = 2 * m.mamba_inner + 2 * m.mamba_groups * m.mamba_state + m.mamba_heads
    return (
        Matrix(kind="mamba_in", inputs=m.hidden, outputs=wide, layers=m.mamba_layers),
        Matrix(kind="mamba_out", inputs=m.mamba_inner, outputs=m.hidden, layers=m.mamba_layers),
    )


def gpt_shape(*, layers: int, hidden: int, heads: int, vocab: int, ffn: int = 0, name: str = "") -> ModelShape:
    """A GPT as papers give it by numbers: two matrices of 4 x hidden unless `ffn` says otherwise, head tied to the input."""
    label = name or f"GPT {layers} x {hidden}"
    return ModelShape(
        name=label, layers=layers, hidden=hidden, heads=heads, ffn=ffn or 4 * hidden, vocab=vocab, gated=False, tied=True,
        source="numbers",
    )  # fmt: skip


@cache
def _table() -> dict[str, tuple[ModelShape, tuple[tuple[str, ...], ...]]]:
    text = files("rollart.perf").joinpath("tables/models.json").read_text(encoding="utf-8")
    table = {}
    for row in json.loads(text)["models"]:
        fields = {key: value for key, value in row.items() if key not in ("also", "provenance")}
        spellings = tuple(words(name) for name in (row["name"], *row.get("also", ())))
        table[row["name"]] = (ModelShape(**fields), spellings)
    return table


def known_models() -> tuple[str, ...]:
    return tuple(_table())


def model_shape(name: str, extra: Mapping[str, ModelShape] | None = None) -> ModelShape:
    """The public model that `name` means, as the field writes it: `meta-llama/Llama-3.1-70B-Instruct-FP8`.

    Owner, notes and words that are no part of the architecture (Instruct, FP8, dates) are ignored. `extra` holds the user's own
    shapes, found by exact name. An unknown name raises `ConfigError` with the nearest known ones.
    """
    if extra and name in extra:
        return extra[name]
    table = _table()
    entries = {
        f"{key}\n{index}": spelling for key, (_, spellings) in table.items() for index, spelling in enumerate(spellings)
    }
    fits = {key.split("\n")[0] for key in best_entries(name, entries)}
    if len(fits) != 1:
        raise unknown(
            "model", name, [*sorted(fits), *(extra or ()), *table], "or give its transformers config or numbers"
        )
    return table[fits.pop()][0]
