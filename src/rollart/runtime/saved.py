"""A trained model on disk, in the Hugging Face layout, and as a trainer that only publishes it.

Invariant: a model folder is complete or absent: it is written beside its place and renamed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.core.errors import StoreError, TrainerError, TrainerLost
from rollart.core.types import Manifest, Sample, Version
from rollart.runtime.actors import fetch
from rollart.runtime.models import hf_config
from rollart.runtime.weights import BucketLocation, fingerprint, manifest, pack, unpack

FOLDER = "model"
WEIGHTS = "model.safetensors"


async def save_model(
    run_dir: Path, model: ScratchModel | PretrainedModel, vocab_size: int, published: Manifest
) -> Path:
    """Write a published version to `run_dir/model`; returns the folder. Raises StoreError, and TrainerLost when its bytes are
    gone, so that they must be published again."""
    location = published.location
    if not isinstance(location, BucketLocation):
        raise StoreError(f"version {published.version} is at {type(location).__name__}; it cannot be saved from there")
    try:
        buckets = [await fetch(handle) for handle in location.handles]
    except StoreError as error:
        raise TrainerLost(f"version {published.version} went with the trainer that published it: {error}") from error
    tensors = unpack(location.index, buckets)
    return await asyncio.to_thread(_write, run_dir, model, vocab_size, tensors, published.version)


def _write(
    run_dir: Path,
    model: ScratchModel | PretrainedModel,
    vocab_size: int,
    tensors: dict[str, torch.Tensor],
    version: int,
) -> Path:
    target, beside = run_dir / FOLDER, run_dir / f".{FOLDER}.part"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt", "version": str(version)})
        hf_config(model, vocab_size).save_pretrained(beside)
        (beside / "rollart.json").write_text(json.dumps({"version": version, "fingerprint": fingerprint(tensors)}))
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
    except OSError as error:
        raise StoreError(f"{target}: the model cannot be written: {error.strerror}") from error
    return target


def load_model(run_dir: Path) -> tuple[dict[str, torch.Tensor], Version]:
    """The saved weights and their version. Raises StoreError when they are missing or not those that were saved."""
    folder = run_dir / FOLDER
    try:
        facts = json.loads((folder / "rollart.json").read_text())
        tensors: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise StoreError(f"{folder}: no trained model there ({error.filename}); only a finished run has one") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"{folder}: the model cannot be read: {error}") from error
    if fingerprint(tensors) != facts["fingerprint"]:
        raise StoreError(
            f"{folder / WEIGHTS}: not the weights that were saved (fingerprint differs); the file is damaged"
        )
    return tensors, int(facts["version"])


class SavedWeights:
    """Implements of `ports.Trainer` what an evaluation needs: publishing given weights."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int, put: Callable[[Any], Any],
        probe: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self._tensors = tensors
        self._probe = probe
        self._put = put
        self._bucket_bytes = bucket_bytes

    async def publish(self, version: Version) -> Manifest:
        index, buckets = pack(self._tensors, self._bucket_bytes)
        return manifest(
            version, index, [self._put(bucket) for bucket in buckets], fingerprint(self._tensors), self._probe
        )

    async def stop(self) -> None:
        """Nothing runs."""

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        raise TrainerError("saved weights are not trained")

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        raise TrainerError("saved weights are not trained")

    async def finish(self) -> Mapping[str, float]:
        raise TrainerError("saved weights are not trained")

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        raise TrainerError("saved weights are not trained")

    async def resize(self, leases: Sequence[str]) -> None:
        raise TrainerError("saved weights have no ranks")

    async def checkpoint(self, path: str, mode: str) -> None:
        raise TrainerError("saved weights are a checkpoint already")
