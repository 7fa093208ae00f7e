"""Key/value memory: `slots` rows of `capacity` tokens for every layer.

Owns the tensors and nothing else: who sits in which slot, and how many of its tokens are valid, is `slots.py`. Invariants:
slots x capacity <= kv_tokens; memory is finite everywhere (zeros at first), for masked attention multiplies by 0 what it masks.

Layout is (slot, kv head, token, head_dim): each head's tokens lie together, so that attention reads memory in long runs. One
capacity for all slots lets a batch attend over a plain slice. Rows are addressed only through `write_index` and `read`, so that
blocks can take the place of slots behind these two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollart.runtime.engine.shape import Sizes

Ints = NDArray[np.int64]
CAPACITY_UNIT = 64
"""A slot's capacity is a multiple of this many tokens: few repacks, little waste."""


class KVCache:
    """Starts without memory; `repack` gives it some."""

    def __init__(self, shape: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._heads = np.arange(shape.kv_heads)
        self.slots = 0
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def repack(self, kept: Ints, slots: int, capacity: int) -> None:
        """Move the rows `kept` to slots 0, 1, .. of new memory; tokens past `capacity` are lost, other rows too."""
        rows = on_device(kept, self._device)
        shared = min(capacity, self.capacity)
        size = (slots, self._shape.kv_heads, capacity, self._shape.head_dim)
        for tensors in (self.keys, self.values):
            for layer in range(self._shape.layers):
                new = torch.zeros(size, dtype=self._dtype, device=self._device)
                if len(kept):
                    new[: len(kept), :, :shared] = tensors[layer][rows, :, :shared]
                    tensors[layer] = new
                elif layer < len(tensors):
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.slots, self.capacity = slots, capacity

    def scrub(self) -> None:
        """Zero all memory, after values that are not finite may have been written."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def copy(self, source: int, slots: list[int], start: int, stop: int) -> None:
        """Give `slots` the keys and values that `source` has of tokens `start` to `stop`."""
        rows = on_device(np.array(slots), self._device)
        for tensor in (*self.keys, *self.values):
            tensor[rows, :, start:stop] = tensor[source, :, start:stop]

    def write_index(self, slots: Ints, positions: Ints) -> Ints:
        """Where tokens at `positions` of `slots` go, (n * kv_heads,): rows of a layer's memory seen as (.., head_dim)."""
        rows = slots[:, None] * self._shape.kv_heads + self._heads
        index: Ints = (rows * self.capacity + positions[:, None]).reshape(-1)
        return index

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store (tokens, kv_heads, head_dim) at a `write_index`."""
        size = self._shape.head_dim
        self.keys[layer].view(-1, size).index_copy_(0, index, keys.reshape(-1, size))
        self.values[layer].view(-1, size).index_copy_(0, index, values.reshape(-1, size))

    def read(self, layer: int, rows: slice | Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, kv_heads, reach, head_dim): a view for a slice of slots, else a copy."""
        keys, values = self.keys[layer][:, :, :reach], self.values[layer][:, :, :reach]
        if isinstance(rows, slice):
            return keys[rows], values[rows]
        return keys.index_select(0, rows), values.index_select(0, rows)


def rounded(tokens: int) -> int:
    """The smallest capacity that holds so many."""
    return -(-tokens // CAPACITY_UNIT) * CAPACITY_UNIT


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array where it is computed with; a transfer that the host does not wait for where that is another device."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
