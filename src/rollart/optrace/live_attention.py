"""Attention and dropout as torch runs them on a GPU, for models that are traced on a CPU.

Owns the choice of those kernels where torch chooses by the device. Invariant: what is called are torch's own operators, with
their own backward and their own kept tensors. Why: on a CPU torch would take other kernels for the same model, so the trace
would be of a step that nobody trains. Imports torch: import this module inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
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


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, dropout: float, scale: float | None
) -> torch.Tensor:  # fmt: skip
    """The fused kernel that adds a mask to the scores; of a mask of true and false torch makes one to add."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    aten = torch.ops.aten
    made: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout, False, scale=scale
    )[0]
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
    """Inside, dropout and attention are the kernels of a GPU, whoever calls them and however the operands are given."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given = dict(kwargs or {})
        if func is functional.dropout:
            return _dropout(*args, **given)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **given)
        if func is functional.multi_head_attention_forward:
            return _many_heads()(*args, **given)
        return func(*args, **given)


def _many_heads() -> Callable[..., Any]:
    """torch's own attention of many heads, which calls these two by their names in its module, where no mode sees it: a mode
    is off inside what it handles.
    """
    original = functional.multi_head_attention_forward
    names = {**original.__globals__, "dropout": _dropout, "scaled_dot_product_attention": _attention}
    made = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    made.__kwdefaults__ = original.__kwdefaults__
    return made


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """As `scaled_dot_product_attention`. What no fused kernel takes goes on to torch: operands of other than four
    dimensions, and a mask over heads that share keys.
    """
    if query.dim() == 4 and attn_mask is None:
        return fused_attention(query, key, value, dropout=dropout_p, scale=scale, causal=is_causal)
    if attn_mask is not None and query.dim() == 4 and query.shape[1] == key.shape[1]:
        return masked_attention(query, key, value, attn_mask, dropout=dropout_p, scale=scale)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
