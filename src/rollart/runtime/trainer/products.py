"""Matrix products of the trainer.

Why one place: for float32 on CPUs there is a faster one than the BLAS library behind `linear`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether torch's operator for single linear layers is there, by which its compiler computes them too: for these shapes
(thousands of rows, a width of some hundred) faster than the BLAS library behind `linear`."""


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows @ weight.T + bias: (N, K), (M, K), (M,) -> (N, M)."""
    if ONEDNN and rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.numel():
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.contiguous(), bias, "none", [], "")
        return out
    return functional.linear(rows, weight, bias)
