"""Whose forward pass the engine runs: its own for the families it knows, else the model's definition in transformers.

Owns the choice. Invariant: both kinds take the same batches and the same cache, so nothing above this module knows which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rollart.core.errors import EngineError
from rollart.runtime.compiled import Native, Wanted
from rollart.runtime.engine.batch import ALONE_WIDTH, Batch, staircase
from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.live_weights import LiveWeights
from rollart.runtime.engine.model import Decoder
from rollart.runtime.engine.named_weights import NamedWeights
from rollart.runtime.engine.native import DecodeKernel, decode_kernel
from rollart.runtime.engine.sampler import Plain
from rollart.runtime.engine.shape import Sizes, shape_of

Path = Literal["auto", "fast", "transformers"]


class Forward(Protocol):
    """Write keys and values of all tokens; logits (complete rows, vocab), or None when no row is complete."""

    def __call__(self, weights: Any, cache: KVCache, batch: Batch) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A model that can be run: what it needs of the cache, where its weights go, its forward pass."""

    path: Literal["fast", "transformers"]
    sizes: Sizes
    new_weights: Callable[[], NamedWeights]
    forward: Forward
    stairs: Tensor
    """The `staircase` that masks are cut from."""
    decoding: Native[DecodeKernel]

    @property
    def draw(self) -> Plain | None:
        """By what rows that are plain are drawn, if not by torch."""
        return None if self.decoding.kernel is None else self.decoding.kernel.draw

    @property
    def alone(self) -> int:
        """Tokens of the widest chunks that are attended one by one, each over its own length; others in groups of like ones."""
        kernel = self.decoding.kernel
        return 0 if kernel is None else ALONE_WIDTH if kernel.dtype == torch.float32 else 1


def backend_for(
    hf_config: Any, path: Path, dtype: torch.dtype, device: torch.device, *, native: Wanted = "auto"
) -> Backend:
    """The backend of a transformers configuration. `auto` is `fast` where that computes the model, else `transformers`.

    Raises EngineError for a model that the chosen path, or neither of the two, can run, and where the kernel is required and
    cannot be had; the message names what is in the way.
    """
    if device.type == "cuda":
        # cuDNN's attention plans anew for every length, and here nearly every step has one of its own
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = _backend_for(hf_config, path, dtype, device, native)
    if native == "required" and backend.decoding.kernel is None:
        raise EngineError(f"engine.native=required, but {backend.decoding.why}; mend that, or use engine.native=auto")
    return backend


def _backend_for(hf_config: Any, path: Path, dtype: torch.dtype, device: torch.device, native: Wanted) -> Backend:
    if path != "transformers":
        try:
            return _fast(hf_config, dtype, device, native)
        except EngineError as refused:
            if path == "fast":
                raise EngineError(f"{refused}; engine.path=auto runs it by its definition in transformers") from refused
    return _by_definition(hf_config, dtype, device)


def _fast(hf_config: Any, dtype: torch.dtype, device: torch.device, native: Wanted) -> Backend:
    shape = shape_of(hf_config)
    decoding = decode_kernel(dtype, device, shape.head_dim, native)
    return Backend(
        path="fast",
        sizes=shape,
        new_weights=lambda: LiveWeights(shape, dtype, device),
        forward=Decoder(shape, device, decoding.kernel).forward,
        stairs=staircase(shape.max_positions, dtype, device),
        decoding=decoding,
    )


def _by_definition(hf_config: Any, dtype: torch.dtype, device: torch.device) -> Backend:
    # Its imports take a second that the fast path does not need.
    from rollart.runtime.engine.hf_model import HFDecoder, ModuleWeights, sizes_of

    sizes = sizes_of(hf_config)
    stairs = staircase(sizes.max_positions, dtype, device)
    return Backend(
        path="transformers",
        sizes=sizes,
        new_weights=lambda: ModuleWeights(hf_config, dtype, device),
        forward=HFDecoder(hf_config, stairs).forward,
        stairs=stairs,
        decoding=Native(None, "the model runs by its definition in transformers"),
    )
