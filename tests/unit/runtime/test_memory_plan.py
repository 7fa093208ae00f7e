"""The plan of a run's memory: it adds up to what a run is refused by, and its estimate is near what torch keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollart.config.schema import RunConfig
from rollart.control.weights import VERSIONS_KEPT
from rollart.recipes.registry import resolve
from rollart.runtime import room
from rollart.runtime.memory_plan import activation_bytes, memory_plan
from rollart.runtime.model_sizes import ModelSizes
from rollart.runtime.trainer.rank import TrainerRank, spec_of


def config(**sections: Any) -> RunConfig:
    words = [f"{dotted.replace('__', '.')}={value}" for dotted, value in sections.items()]
    return resolve("first_run", words).config


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer__ranks": 3, "engine__count": 2, "envs__hosts": 2, "engine__kv_tokens": 1000},
        {"world__kind": "inline"},
        {"world__kind": "inline", "algorithm__kl__kind": "k3"},
        {"trainer__ranks": 2, "algorithm__kl__kind": "k3"},
        {"engine__kind": "vllm", "model__hidden": 128},
        {"engine__dtype": "bf16", "engine__count": 2},
        {"engine__device": "cuda", "engine__dtype": "bf16"},
    ],
)
def test_without_activations_the_parts_are_what_a_run_is_refused_by(sections: dict[str, Any]) -> None:
    asked = config(**sections)
    parts = [part for part in memory_plan(asked) if part.what != "trainer: activations" and part.place == "host"]
    assert sum(part.n_bytes for part in parts) == sum(room.memory_parts(asked).values())
    assert all(part.keys for part in parts)


@pytest.mark.parametrize("tokens", [64, 256])
def test_the_activations_are_near_what_torch_keeps_for_the_backward_pass(tokens: int) -> None:
    torch.set_num_threads(1)
    shape = ModelSizes(0, 3, 32, 64, 192, 500, 64)
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


def named(**sections: Any) -> dict[str, int]:
    return {part.what: part.n_bytes for part in memory_plan(config(**sections))}


def test_copies_that_come_and_go_are_parts_of_the_plan() -> None:
    plain, weights = named(), named()["trainer: weights"]
    assert "trainer: reference" not in plain
    assert plain["trainer: in passing"] == weights
    assert named(trainer__ranks=3)["trainer: in passing"] == 3 * weights
    assert named(algorithm__kl__kind="k3")["trainer: reference"] == weights
    assert named(world__kind="inline")["published weights"] == VERSIONS_KEPT * weights


def held(weights: Any) -> int:
    return sum(tensor.nbytes for tensor in weights)


@pytest.mark.parametrize("kl", ["none", "k3"])
def test_the_trainer_holds_as_many_copies_of_its_weights_as_are_counted(kl: str) -> None:
    """Of one rank after a step: weights, moments, reference; and what `publish` gives beside them."""
    asked = config(world__kind="inline", algorithm__kl__kind=kl)
    rank = TrainerRank(spec_of(asked, 97))
    try:
        rank.begin(0, total_weight=None)
        weights = held(weight.to_local() for weight in rank.weights.values())
        for weight in rank.weights.values():
            weight.grad = torch.zeros_like(weight)
        rank._optimizer.step()
        grads: list[Any] = [weight.grad for weight in rank.weights.values()]
        gradients = held(grad.to_local() for grad in grads)
        states: list[dict[str, Any]] = list(rank._optimizer.state.values())
        moments = held(state[name].to_local() for state in states for name in ("exp_avg", "exp_avg_sq"))
        reference = held(weight.to_local() for weight in (rank._reference or {}).values())
        rank._optimizer.zero_grad()
        published = rank.publish(0)
        assert published is not None
        buckets = sum(bucket.nbytes for bucket in published.buckets)
    finally:
        rank.close()
    counted = named(world__kind="inline", algorithm__kl__kind=kl)
    assert weights == counted["trainer: weights"]
    assert gradients == counted["trainer: gradients"]
    assert moments == counted["trainer: optimizer"]
    assert reference == counted.get("trainer: reference", 0)
    assert buckets == counted["published weights"] // VERSIONS_KEPT
