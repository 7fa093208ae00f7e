"""The engine computes what the trainer computes: transformers' own model on the whole sequence is the reference."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    POSITIONS,
    by_traj,
    config,
    engine,
    ids,
    logprobs,
    mismatch,
    model,
    one,
    random_ids,
    request,
    run,
    trainer_logprobs,
    weights,
)
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from rollart.core.errors import EngineError
from rollart.core.types import Sampling
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.engine.shape import shape_of
from rollart.runtime.weights import fingerprint

MODELS = [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
CLOSE = 1e-5
"""Mean |difference| of log-probabilities in fp32."""
NEAR_TIE = 1e-4
BF16_CLOSE = 0.05
"""The same with 8 bits of mantissa: a few of its steps of 2^-8 at logits around 1."""


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_logprobs_equal_the_trainers_over_turns_of_mixed_lengths(family: str, tied: bool) -> None:
    core = engine(1, family, tied)
    lengths = np.random.default_rng(3)
    contexts = {f"t{n}": random_ids(int(lengths.integers(1, 50)), n) for n in range(12)}
    for turn in range(3):
        turns = [
            request(traj, context, turn=turn, max_tokens=int(lengths.integers(1, 12)))
            for traj, context in contexts.items()
        ]
        core.submit(turns)
        for id_, answer in run(core).items():
            context = contexts[id_.traj]
            assert mismatch(context, answer, family, tied) < CLOSE
            observation = random_ids(int(lengths.integers(1, 30)), turn)
            contexts[id_.traj] = np.concatenate([context, ids(answer), observation]).astype(np.int32)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_many_rows_of_unlike_length_scattered_over_the_slots(native: str) -> None:
    core = engine(kv_tokens=16384, max_live=64, prefill_tokens=1024, native=native)
    lengths = np.random.default_rng(0)
    contexts = {f"t{n}": random_ids(int(lengths.integers(1, 160)), n) for n in range(50)}
    for turn in range(2):
        chosen = lengths.choice(list(contexts), 50 - 26 * turn, replace=False).tolist()
        core.submit([request(t, contexts[t], turn=turn, max_tokens=int(lengths.integers(1, 12))) for t in chosen])
        for traj, answer in by_traj(core).items():
            assert mismatch(contexts[traj], answer) < CLOSE
            contexts[traj] = np.concatenate([contexts[traj], ids(answer), random_ids(9, turn)]).astype(np.int32)


@pytest.mark.parametrize("prefill_tokens", [1, 7, 64, 4096])
def test_a_prompt_cut_into_chunks_gives_the_same_logprobs(prefill_tokens: int) -> None:
    core = engine(prefill_tokens=prefill_tokens)
    context, greedy = random_ids(150), Sampling(temperature=0.0)
    core.submit([request("long", context, sampling=greedy), request("short", context[:9], sampling=greedy)])
    answers = by_traj(core)
    assert mismatch(context, answers["long"]) < CLOSE
    assert mismatch(context[:9], answers["short"]) < CLOSE
    assert answers["long"].prefilled_tokens == 150


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_greedy_output_equals_generate_up_to_near_ties(family: str, tied: bool) -> None:
    core, made = engine(1, family, tied), model(1, family, tied)
    prompts = [random_ids(n, n) for n in (3, 17, 40)]
    core.submit([request(f"g{n}", p, max_tokens=40, sampling=Sampling(temperature=0.0)) for n, p in enumerate(prompts)])
    answers = by_traj(core)
    for n, prompt in enumerate(prompts):
        tokens = torch.as_tensor(prompt.astype(np.int64))[None]
        generate: Any = made.generate
        wanted = generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        got = ids(answers[f"g{n}"])
        if got != wanted:
            at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
            with torch.no_grad():
                scores = made(torch.cat([tokens[0], torch.tensor(got[:at], dtype=torch.int64)])[None]).logits[0, -1]
            best = scores.topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"token {at} of prompt {n}"
        assert np.all(logprobs(answers[f"g{n}"]) <= 0.0)


def test_logprobs_are_taken_after_the_temperature_and_at_1_for_greedy() -> None:
    core, context = engine(), random_ids(20)
    for temperature in (0.6, 1.0, 1.7):
        answer = one(core, request(f"t{temperature}", context, sampling=Sampling(temperature=temperature, seed=5)))
        wanted = trainer_logprobs(model(1), [*context, *ids(answer)], temperature)[len(context) - 1 :]
        assert np.abs(logprobs(answer) - wanted).mean() < CLOSE
    answer = one(core, request("greedy", context, sampling=Sampling(temperature=0.0)))
    assert mismatch(context, answer) < CLOSE


def test_the_last_position_of_the_model_can_be_reached() -> None:
    context = random_ids(POSITIONS - 3)
    answer = one(engine(), request("edge", context, max_tokens=3))
    assert answer.finish == "length"
    assert mismatch(context, answer) < CLOSE


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_fingerprint_is_that_of_the_weights_under_their_own_names(family: str, tied: bool) -> None:
    assert engine(1, family, tied).fingerprint() == fingerprint(weights(1, family, tied))


def test_one_flipped_bit_of_any_tensor_changes_the_fingerprint() -> None:
    untouched = engine(1, "qwen3", False).fingerprint()
    for name, tensor in weights(1, "qwen3", False).items():
        changed = tensor.clone()
        changed.view(-1).view(torch.int32)[-1] ^= 1
        core = EngineCore(config("qwen3", tie_word_embeddings=False), max_live=1, kv_tokens=64, prefill_tokens=64)
        core.load(1, weights(1, "qwen3", False) | {name: changed})
        assert core.fingerprint() != untouched, name


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (MistralConfig(), "llama, qwen2, qwen3"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_type='linear'"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act='gelu'"),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=2),
            "sliding_attention",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(refused: object, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        shape_of(refused)


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    def load(tensors: dict[str, torch.Tensor]) -> None:
        EngineCore(config(), max_live=1, kv_tokens=64, prefill_tokens=64).load(1, tensors)

    good = weights(1)
    with pytest.raises(EngineError, match=r"'model\.layers\.9\.x' is not part of"):
        load(good | {"model.layers.9.x": torch.zeros(1)})
    with pytest.raises(EngineError, match=r"norm\.weight' is \(3,\)"):
        load(good | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(EngineError, match=r"bfloat16; this engine needs .* torch\.float32"):
        load(good | {"model.norm.weight": good["model.norm.weight"].bfloat16()})
    with pytest.raises(EngineError, match=r"lacks 1 tensors, among them 'model\.norm\.weight'"):
        load({name: tensor for name, tensor in good.items() if name != "model.norm.weight"})
    with pytest.raises(EngineError, match="ties its output matrix"):
        load(good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1})
    load(good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()})


@pytest.mark.parametrize("path", ["fast", "transformers"])
def test_bf16_weights_give_the_logprobs_of_the_bf16_model_in_fp32(path: str) -> None:
    core = EngineCore(config(), max_live=8, kv_tokens=1024, prefill_tokens=64, dtype=torch.bfloat16, path=path)  # type: ignore[arg-type]
    core.load(1, weights(1))
    rounded = copy.deepcopy(model(1)).bfloat16()
    assert core.fingerprint() == fingerprint({name: tensor.bfloat16() for name, tensor in weights(1).items()})
    context = random_ids(30)
    answer = one(core, request("t", context, max_tokens=20))
    got, wanted = logprobs(answer), trainer_logprobs(rounded, [*context, *ids(answer)])[29:]
    assert got.dtype == np.float32
    assert len(np.unique(np.abs(got) % 2**-8)) > 2, "not rounded to bf16"
    assert np.abs(got - wanted).mean() < BF16_CLOSE
    assert mismatch(context, answer) < BF16_CLOSE, "nor far from the fp32 model's"
