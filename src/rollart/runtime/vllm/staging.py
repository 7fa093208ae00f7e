"""A version's weights on their way to vLLM: files in shared memory, in the layout that it loads.

Invariants: a folder is complete when its name is known to anybody; the embeddings of a model that ties them are written twice,
for an untied model of the same size. Why: on a CPU, vLLM lays the output embedding out anew when it loads a model and does not
do so again when weights are reloaded, so that tied embeddings would be served in two versions.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from rollart.core.types import Version
from rollart.runtime.weights import fingerprint

WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def first_model(folder: Path, config: PretrainedConfig) -> None:
    """A model of zeros, with which the server starts; it is never sampled from."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    tensors = {name: torch.zeros(weight.shape, dtype=torch.float32) for name, weight in model.named_parameters()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def write(folder: Path, version: Version, tensors: Mapping[str, Tensor]) -> tuple[Path, str]:
    """Returns where a version's tensors lie, and the digest of what can be read there, under the names that came."""
    place = folder / f"version-{version}"
    place.mkdir(exist_ok=True)
    named = dict(tensors)
    if HEAD not in named:
        named[HEAD] = named[EMBEDDING].clone()
    save_file(named, place / WEIGHTS, metadata={"format": "pt"})
    written = load_file(place / WEIGHTS)
    if HEAD not in tensors and torch.equal(written[HEAD], written[EMBEDDING]):
        del written[HEAD]
    return place, fingerprint(written)


def remove(folder: Path, *, but: Version | None = None) -> None:
    """Remove the versions in `folder`, and what the server started with."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    for place in folder.glob("version-*"):
        if but is None or place.name != f"version-{but}":
            shutil.rmtree(place, ignore_errors=True)
