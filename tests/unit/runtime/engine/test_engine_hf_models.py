"""Models by their own definition in transformers, through the engine's cache: the full forward pass is the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import by_traj, config, engine, ids, logprobs, one, random_ids, request, run, trainer_logprobs
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from rollart.core.errors import EngineError
from rollart.core.types import Generation
from rollart.runtime.definition import attention_of
from rollart.runtime.engine.backend import backend_for
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import named_weights
from rollart.runtime.weights import fingerprint

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**GPT2),
    "gemma": lambda: GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8),
    "gemma2": lambda: Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=12),
    "gptj": lambda: GPTJConfig(**GPT2, rotary_dim=4),
    "opt": lambda: OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=64, word_embed_proj_dim=32),
    "falcon": lambda: FalconConfig(**SIZES, alibi=False),
    "phi": lambda: PhiConfig(**SIZES),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "llama": lambda: config("llama"),
}
CLOSE = 1e-5


@cache
def policy(family: str, seed: int = 1) -> PreTrainedModel:
    """Random in every parameter, without dropout."""
    made: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        FAMILIES[family](), attn_implementation=attention_of(FAMILIES[family]())
    ).eval()
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            centre = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=draws))
    return made


def serving(family: str, **changes: Any) -> EngineCore:
    sizes: dict[str, Any] = {"max_live": 16, "kv_tokens": 2048, "prefill_tokens": 40, "path": "transformers"} | changes
    core = EngineCore(FAMILIES[family](), **sizes)
    core.load(1, named_weights(policy(family)))
    return core


def difference(family: str, context: Any, answer: Generation) -> float:
    wanted = trainer_logprobs(policy(family), [*np.asarray(context).tolist(), *ids(answer)])[len(context) - 1 :]
    return float(np.abs(logprobs(answer) - wanted).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_full_forward_over_turns_of_mixed_lengths(family: str) -> None:
    core, lengths = serving(family), np.random.default_rng(3)
    contexts = {f"train/echo/0/{n % 3}/{n}": random_ids(int(lengths.integers(1, 40)), n % 3) for n in range(7)}
    for turn in range(2):
        core.submit([request(t, c, turn=turn, max_tokens=3 + len(c) % 5) for t, c in contexts.items()])
        for traj, answer in by_traj(core).items():
            assert difference(family, contexts[traj], answer) < CLOSE
            contexts[traj] = np.concatenate([contexts[traj], ids(answer), random_ids(9, turn)]).astype(np.int32)


def test_siblings_compute_their_prompt_once() -> None:
    core, prompt = serving("gpt2"), random_ids(60)
    core.submit([request(f"train/echo/0/0/{member}", prompt) for member in range(4)])
    answers = by_traj(core)
    assert sorted(answer.prefilled_tokens for answer in answers.values()) == [1, 1, 1, 60]
    assert all(difference("gpt2", prompt, answer) < CLOSE for answer in answers.values())


def test_both_paths_draw_the_same_tokens() -> None:
    fast, slow = engine(), engine(path="transformers")
    wanted = [request(f"t{n}", random_ids(5 + 3 * n, n), max_tokens=12) for n in range(5)]
    for core in (fast, slow):
        core.submit(wanted)
    one_way, other_way = run(fast), run(slow)
    assert {id_: ids(answer) for id_, answer in one_way.items()} == {id_: ids(a) for id_, a in other_way.items()}


@pytest.mark.parametrize("family", ["gpt2", "gemma", "llama"])
def test_the_fingerprint_is_that_of_the_weights_under_their_own_names(family: str) -> None:
    assert serving(family).fingerprint() == fingerprint(named_weights(policy(family)))


def test_tied_weights_may_come_twice_if_they_are_equal() -> None:
    core, state = serving("gpt2"), policy("gpt2").state_dict()
    core.stage(2, state)
    core.apply(2)
    with pytest.raises(EngineError, match="ties its output matrix"):
        core.stage(3, state | {"lm_head.weight": state["lm_head.weight"] + 1})


def test_auto_takes_the_fast_path_where_it_can() -> None:
    def path(made: PretrainedConfig) -> str:
        return backend_for(made, "auto", torch.float32, torch.device("cpu")).path

    assert (path(config()), path(FAMILIES["gpt2"]())) == ("fast", "transformers")
    assert one(serving("phi", path="auto"), request("t", [1, 2])).tokens.n_tokens == 8


@pytest.mark.parametrize(
    ("made", "path", "why"),
    [
        (GPT2Config(**GPT2), "fast", "model_type='gpt2' is not supported.*engine.path=auto"),
        (MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=12), "auto", "sliding_window=12"),
        (MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2), "auto", "mamba model with layer_types"),
        # its alibi takes no 4-D mask, and says so in a step only
        (
            FalconConfig(**SIZES, alibi=True),
            "auto",
            "model_type='falcon' does not run as a causal language model with a cache",
        ),
        (
            BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4),
            "auto",
            "model_type='bloom' has no max_position_embeddings in its configuration",
        ),
    ],
)
def test_a_model_that_neither_path_can_run_is_refused_by_name(made: PretrainedConfig, path: Any, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        backend_for(made, path, torch.float32, torch.device("cpu"))
