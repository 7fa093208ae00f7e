"""How large a model is, told by its description: parameters, layers and widths.

Invariant: no weights are read and no model inside a package is converted for it; neither torch nor transformers is imported.
Why its own module: what a run needs is told before anything that it needs is loaded.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rollart.config.explain import parameters_of
from rollart.config.real import model_of
from rollart.config.schema import CharsTokenizer, RunConfig, ScratchModel
from rollart.core.errors import ConfigError
from rollart.runtime.gguf_header import header_of
from rollart.runtime.pretrained import gguf_of, package_of

UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, struct.error)
"""What reading a foreign model's description may raise."""


class ModelSizes(NamedTuple):
    parameters: int
    layers: int
    kv_width: int
    """Elements of a token's keys in one layer."""
    hidden: int
    ffn: int
    vocabulary: int
    q_width: int
    """Elements of a token's queries in one layer."""


def model_sizes(config: RunConfig) -> ModelSizes:
    """Zeros for a folder or file that cannot be read: building the model tells what is wrong with it. Raises ConfigError for a
    package that is not installed."""
    model = model_of(config)
    if isinstance(model, ScratchModel):
        # of a tokenizer from a folder the size is not known here; its part is left out of an estimate from below
        vocabulary = len(config.tokenizer.alphabet) + 1 if isinstance(config.tokenizer, CharsTokenizer) else 0
        width = model.kv_heads * (model.hidden // model.heads)
        return ModelSizes(
            parameters_of(model, vocabulary), model.layers, width, model.hidden, model.ffn, vocabulary, model.hidden
        )
    try:
        return sizes_of_path(model.path)
    except ConfigError:
        raise
    except UNREADABLE:
        return ModelSizes(0, 0, 0, 0, 0, 0, 0)


def sizes_of_path(path: str) -> ModelSizes:
    """Of a model in a folder, or inside a package, which is not converted for it. Raises ConfigError for a package that is not
    installed, or one of `UNREADABLE`."""
    package = package_of(path)
    return _of_folder(Path(path)) if package is None else _of_gguf(gguf_of(package))


@functools.cache
def _of_gguf(path: Path) -> ModelSizes:
    header = header_of(path)
    kind = header.facts["general.architecture"]
    layers, hidden, ffn, heads = (
        int(header.facts[f"{kind}.{name}"])
        for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    )
    head = int(header.facts.get(f"{kind}.attention.key_length", hidden // heads))
    kv_heads = int(header.facts.get(f"{kind}.attention.head_count_kv", heads))
    vocabulary = header.tensors["token_embd.weight"][1]
    return ModelSizes(header.elements, layers, kv_heads * head, hidden, ffn, vocabulary, heads * head)


def _of_folder(folder: Path) -> ModelSizes:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # GPT-2 and its like have names of their own
    told = {"num_hidden_layers": told.get("n_layer"), "hidden_size": told.get("n_embd")} | told
    heads = told.get("num_attention_heads") or told["n_head"]
    head = told.get("head_dim") or told["hidden_size"] // heads
    parameters = sum(_elements(path) for path in folder.glob("*.safetensors"))
    return ModelSizes(
        parameters, told["num_hidden_layers"], (told.get("num_key_value_heads") or heads) * head,
        told["hidden_size"], told.get("intermediate_size") or 0, told.get("vocab_size") or 0, heads * head,
    )  # fmt: skip


def _elements(path: Path) -> int:
    """Elements of all tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        head: Mapping[str, Mapping[str, list[int]]] = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__")
