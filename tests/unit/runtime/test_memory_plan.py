"""The plan of a run's memory: it adds up to what a run is refused by, and its estimate is near what torch keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollart.config.schema import RunConfig
from rollart.recipes.registry import resolve
from rollart.runtime import room
from rollart.runtime.memory_plan import activation_bytes, memory_plan


def config(**sections: Any) -> RunConfig:
    words = [f"{dotted.replace('__', '.')}={value}" for dotted, value in sections.items()]
    return resolve("first_run", words).config


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer__ranks": 3, "engine__count": 2, "envs__hosts": 2, "engine__kv_tokens": 1000},
        {"world__kind": "inline"},
        {"engine__kind": "vllm", "model__hidden": 128},
    ],
)
def test_without_activations_the_parts_are_what_a_run_is_refused_by(sections: dict[str, Any]) -> None:
    asked = config(**sections)
    parts = [part for part in memory_plan(asked) if part.what != "trainer: activations"]
    assert sum(part.n_bytes for part in parts) == sum(room.memory_parts(asked).values())
    assert all(part.keys for part in parts)


@pytest.mark.parametrize("tokens", [64, 256])
def test_the_activations_are_near_what_torch_keeps_for_the_backward_pass(tokens: int) -> None:
    torch.set_num_threads(1)
    shape = room.ModelSizes(0, 3, 32, 64, 192, 500)
    settings: dict[str, Any] = {"attn_implementation": "sdpa"}
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500, **settings,
        )
    )  # fmt: skip
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 500, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(ids, use_cache=False).logits
        loss: Any = torch.log_softmax(logits, -1).gather(-1, ids[..., None]).sum()
    loss.backward()
    ratio = activation_bytes(shape, tokens) / (sum(kept.values()) + 2 * logits.nbytes)  # logits and their gradient
    assert 2 / 3 < ratio < 3 / 2, f"estimated {ratio:.2f} of what is kept"
