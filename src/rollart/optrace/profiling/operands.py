"""Operands of an operator in place, and the call on them.

Owns `Ready` and the types that operands can have. Invariant: a call is made on operands of its own, so that calls in turn find
what a step finds. Why: products, attention and passes are made in different ways and timed in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op

DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A call with its operands in place. `first`: the operand that the operator before has just written, or None."""

    run: Callable[[], object]
    first: torch.Tensor | None
    held_bytes: float
    exact: bool = True


def dtype_of(op: Op) -> torch.dtype:
    """Raises ConfigError for a dtype that torch has no operands of."""
    if op.dtype not in DTYPES:
        raise ConfigError(f"{op.name} {op.shape}: dtype {op.dtype!r} cannot be measured; known: {', '.join(DTYPES)}")
    return DTYPES[op.dtype]


def nbytes(*tensors: torch.Tensor) -> float:
    """Bytes of all of them together."""
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
