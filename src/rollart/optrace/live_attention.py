"""Attention and dropout as torch runs them on a GPU, for models that are traced on a CPU.

Owns the choice of those kernels where torch chooses by the device. Invariant: what is called are torch's own operators, with
their own backward and their own kept tensors. Why: on a CPU torch would take other kernels for the same model, so the trace
would be of a step that nobody trains. Imports torch: import this module inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FUSED = "rollart_fused"
"""Name of the attention function in transformers' registry."""


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float = 0.0, scale: float | None = None,
    causal: bool = True, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """One fused kernel, key heads not repeated: [batch, heads, tokens, dimension], `key` and `value` with their own heads.

    `window`: a query sees only so many of the last keys. Returns the shape of `query` with the dimension of `value`.
    """
    aten = torch.ops.aten
    made: torch.Tensor
    if value.shape[-1] != query.shape[-1]:  # of the fused kernels this one takes a value dimension of its own
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scale
        )[0]
    elif window is not None and window < key.shape[2]:
        turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
        made = aten._flash_attention_forward(
            *turned, None, None, query.shape[2], key.shape[2], dropout, causal, False, scale=scale,
            window_size_left=window - 1, window_size_right=0,
        )[0].transpose(1, 2)  # fmt: skip
    else:
        made = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return made


def attention_of_layer(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers' attention modules call it; returns [batch, tokens, heads, dimension]."""
    made = fused_attention(query, key, value, dropout=dropout, scale=scaling, window=sliding_window)
    return made.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `FUSED` known to transformers, which makes no mask for a name without a mask function."""
    from transformers import AttentionInterface

    AttentionInterface.register(FUSED, attention_of_layer)


class GpuKernels(TorchFunctionMode):
    """Inside, dropout and attention without a mask are the kernels of a GPU, whoever calls them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            given, chance, training = _dropout(*args, **kwargs)
            return torch.native_dropout(given, chance, True)[0] if training and chance else given
        if func is functional.scaled_dot_product_attention and _fits(args, kwargs):
            query, key, value = args[:3]
            return fused_attention(
                query, key, value, dropout=kwargs.get("dropout_p", 0.0), scale=kwargs.get("scale"),
                causal=bool(kwargs.get("is_causal", False)),
            )  # fmt: skip
        return func(*args, **kwargs)


def _dropout(
    given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float, bool]:
    return given, p, training


def _fits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the fused kernels take the call: three operands [batch, heads, tokens, dimension] and no mask."""
    return len(args) == 3 and args[0].dim() == 4 and kwargs.get("attn_mask") is None
