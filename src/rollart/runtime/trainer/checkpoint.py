"""A trainer's state on disk: weights, optimiser moments and counters in one safetensors file.

Invariants: a file is whole or absent (written beside its place, flushed, then renamed); it holds full tensors under their
`state_dict` names, so it can be loaded by any number of ranks and its weights read by anyone. What is loaded is checked
against the model before anything is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from rollart.core.errors import StoreError
from rollart.runtime.trainer import ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter."""
FORMAT = "rollart-trainer-1"


def full_weights(weights: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' shards, on every rank. A collective: all ranks must call it."""
    with torch.no_grad():
        return {name: weight.full_tensor() for name, weight in weights.items()}


def save(
    path: str,
    weights: Mapping[str, DTensor],
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
    reference: Mapping[str, DTensor] | None = None,
) -> None:
    """Write the file from rank 0; returns on every rank when it is in place. `reference`: frozen weights to be kept with them.

    Raises StoreError when it cannot be written.
    """
    tensors = {f"weight/{name}": tensor for name, tensor in full_weights(weights).items()}
    tensors |= {f"reference/{name}": tensor for name, tensor in full_weights(reference or {}).items()}
    for name, weight in weights.items():
        for moment in MOMENTS:
            if weight in optimizer.state:
                tensors[f"{moment}/{name}"] = optimizer.state[weight][moment].full_tensor()
    problem = ""
    if dist.get_rank() == 0:
        metadata = {"format": FORMAT} | {name: str(value) for name, value in counters.items()}
        try:
            _write({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata, Path(path))
        except (OSError, SafetensorError) as error:
            problem = f"cannot write the trainer's checkpoint {path}: {error}"
    ranks.agree(problem, StoreError)


def load(
    path: str, weights: Mapping[str, DTensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, int], dict[str, DTensor] | None]:
    """Put the file's weights and moments into the present ones, in place; return its counters and its frozen weights.

    Raises StoreError, with nothing changed, when the file is missing, torn or of another model.
    """
    problem = ""
    loaded: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        problem = f"cannot read the trainer's checkpoint {path}: {error}"
    ranks.agree(problem or _mismatch(path, weights, loaded, metadata), StoreError)
    for name, weight in weights.items():
        _local(weight).copy_(_local(_shard(loaded[f"weight/{name}"], weight)))
    optimizer.state.clear()
    steps = int(metadata["steps"])
    for name, weight in weights.items():
        if f"{MOMENTS[0]}/{name}" in loaded:
            moments = {moment: _shard(loaded[f"{moment}/{name}"], weight) for moment in MOMENTS}
            optimizer.state[weight] = {"step": torch.tensor(float(steps)), **moments}
    kept = {
        name: _shard(loaded[f"reference/{name}"], at) for name, at in weights.items() if f"reference/{name}" in loaded
    }
    return {name: int(value) for name, value in metadata.items() if name != "format"}, kept or None


def _write(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(dict(tensors), partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError):
        # a full disk must not stay full of it
        partial.unlink(missing_ok=True)
        raise


def _mismatch(
    path: str, weights: Mapping[str, DTensor], loaded: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    if metadata.get("format") != FORMAT:
        return f"{path} is not a trainer's checkpoint (format {metadata.get('format')!r}, wanted {FORMAT!r})"
    theirs = {name.removeprefix("weight/"): tuple(t.shape) for name, t in loaded.items() if name.startswith("weight/")}
    ours = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if wrong:
        name = wrong[0]
        return (
            f"{path} is of another model: {len(wrong)} parameters differ, first {name} "
            f"(file {theirs.get(name)}, model {ours.get(name)})"
        )
    return ""


def _shard(full: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank holds whole."""
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local()
