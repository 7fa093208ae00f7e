"""Families without layers of the trainer's own: their definition, one plain autograd step, and the engine's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_samples import VOCAB, gradients, random_samples, reference_step, spec_with, trainer_rank
from transformers import (
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from rollart.config.schema import Optimizer, PretrainedModel
from rollart.core.errors import TrainerError
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import beyond_blocks, build_model, hf_config, named_weights
from rollart.runtime.trainer.policy import Policy
from rollart.runtime.trainer.rows import Row, pad
from rollart.runtime.weights import unpack

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, intermediate_size=24),
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16),
    "llama with gelu": lambda: LlamaConfig(**SIZES, intermediate_size=24, hidden_act="gelu"),
    "qwen2 that slides": lambda: Qwen2Config(
        **SIZES, num_key_value_heads=2, intermediate_size=24, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
}  # fmt: skip


def row(read: int, trained: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(read, trained, replace=False)).astype(np.int64)
    return Row(
        ids=rng.integers(0, VOCAB, read),
        positions=places,
        targets=rng.integers(0, VOCAB, trained),
        behaviour=np.zeros(trained, np.float32),
    )


def plain(model: PreTrainedModel, rows: list[Row], temperature: float) -> tuple[torch.Tensor, float]:
    """Row by row, without padding."""
    found, entropy = [], 0.0
    for one in rows:
        logits = model(torch.from_numpy(one.ids)[None]).logits[0, one.positions] / temperature
        table = logits.log_softmax(-1)
        found.append(table.gather(1, torch.from_numpy(one.targets)[:, None])[:, 0])
        entropy -= float((table.exp() * table).sum().detach())
    return torch.cat(found), entropy


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_entropy_and_gradients_are_those_of_the_definition(kind: str) -> None:
    config = KINDS[kind]()
    model = build_model(config, seed=1)
    policy, rows = Policy(model), [row(20, 6, 1), row(13, 2, 2)]
    assert beyond_blocks(config) in policy.found.why
    assert policy.sharded_layers == []
    found, entropy = policy(pad(rows, min_rows=3, min_tokens=24), 0.7, True)
    expected, entropies = plain(model, rows, 0.7)
    assert torch.allclose(found, expected, atol=1e-5)
    assert float(entropy) == pytest.approx(entropies, rel=1e-5)
    weights, parameters = torch.linspace(-1, 1, len(found)), list(model.parameters())
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True),
        strict=True,
    ):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()) + 1e-7)


def test_rows_of_padding_alone_have_a_gradient_of_zero() -> None:
    policy = Policy(build_model(KINDS["gpt2"](), seed=1))
    found, entropy = policy(pad([]), 1.0, True)
    found.sum().backward()
    assert (len(found), float(entropy)) == (0, 0.0)
    assert all(weight.grad is not None and not weight.grad.any() for weight in policy.parameters())


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama with gelu"])
def test_one_step_of_a_rank_is_the_plain_one_and_its_weights_are_the_engines(kind: str, tmp_path: Path) -> None:
    """The gradient in float64, AdamW's step with it, and names and bytes in the engine as they left the trainer."""
    build_model(KINDS[kind](), seed=3).save_pretrained(tmp_path)
    folder = PretrainedModel(kind="pretrained", path=str(tmp_path))
    settings = Optimizer(lr=1e-2, warmup_steps=0, grad_clip=1e9)
    spec, samples = replace(spec_with(optimizer=settings), model=folder), random_samples(4)
    model = build_model(hf_config(folder, VOCAB), seed=0, weights=str(tmp_path)).double()
    reference = reference_step(spec, samples, model)
    with trainer_rank(spec) as rank:
        found = gradients(rank, samples[:2], samples[2:])
        rank.finish()
        published = rank.publish(1)
    assert published is not None
    assert found.keys() == reference.gradients.keys() == named_weights(model).keys()
    for name, gradient in reference.gradients.items():
        whole = gradient * reference.total_weight
        assert torch.allclose(found[name].double(), whole, atol=2e-5 * float(whole.abs().max())), name
    served = unpack(published.index, published.buckets)
    betas = (settings.beta1, settings.beta2)
    torch.optim.AdamW(model.parameters(), lr=1e-2, betas=betas, weight_decay=settings.weight_decay).step()
    for name, weight in named_weights(model).items():
        sure = reference.gradients[name].abs() > 1e-6  # AdamW's first step has the size of lr, whatever the gradient's
        assert torch.allclose(served[name].double()[sure], weight[sure], atol=1e-4), name
    core = EngineCore(hf_config(folder, VOCAB), max_live=2, kv_tokens=64, prefill_tokens=16)
    core.load(1, served)
    assert core.fingerprint() == published.digest


def test_what_no_causal_definition_computes_is_refused_before_a_step() -> None:
    looks_ahead = BertConfig(**SIZES, intermediate_size=24)
    with pytest.raises(TrainerError, match=r"'bert' a token looks at later ones.*is_decoder=true"):
        Policy(build_model(looks_ahead, seed=0))
    with pytest.raises(
        TrainerError, match=r"trainer\.native=required, but the model goes through its definition .*gpt2"
    ):
        Policy(build_model(KINDS["gpt2"](), seed=0), "required")
