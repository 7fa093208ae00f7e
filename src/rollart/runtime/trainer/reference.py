"""The reference of the KL term: the weights that reinforcement learning began from, frozen.

Invariant: outside of `in_place` the master weights are the present ones. Cost: one more copy of the weights in fp32, sharded
as they are (4 bytes per parameter, over the ranks), neither gradients nor moments, and while they are swapped one parameter
more; a forward pass without gradient per step, and two copies of the weights in memory for it. Kept weights are swapped into
the model rather than into a second one: a second one would be the same memory and every hook of sharded training twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch.distributed.tensor import DTensor

Frozen = dict[str, DTensor]


@torch.no_grad()
def frozen(weights: Mapping[str, DTensor]) -> Frozen:
    """A copy of the present weights."""
    return {name: cast(DTensor, weight.detach().clone()) for name, weight in weights.items()}


@contextmanager
def in_place(weights: Mapping[str, DTensor], reference: Frozen, reshard: Callable[[], None]) -> Iterator[None]:
    """Within it the model computes with the reference; no gradient may be taken there. `reshard` drops gathered weights."""
    _swap(weights, reference)
    try:
        yield
    finally:
        _swap(weights, reference)
        reshard()


@torch.no_grad()
def _swap(weights: Mapping[str, DTensor], reference: Frozen) -> None:
    for name, weight in weights.items():
        here, there = weight.to_local(), reference[name].to_local()
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)
