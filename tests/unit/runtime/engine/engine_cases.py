"""What the engine's tests share: tiny models, requests, and transformers' own answer to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollart.core.types import Generation, Purpose, RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest, Version
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.payload import TokenPayload

torch.set_num_threads(1)

VOCAB = 48
POSITIONS = 320
Ids = Sequence[int] | NDArray[np.int32]


KINDS: dict[str, tuple[Callable[..., PretrainedConfig], Callable[..., Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    """Two layers of 32 with grouped heads (4 over 2): small enough for a step to cost under a millisecond."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family != "qwen2":
        sizes["head_dim"] = 8
    return KINDS[family][0](**(sizes | changes))


@cache
def model(version: Version, family: str = "llama", tied: bool = True) -> PreTrainedModel:
    """The weights of a version: random in every tensor, norms and biases too, so that no part can be left out unseen."""
    made: PreTrainedModel = KINDS[family][1](config(family, tie_word_embeddings=tied)).eval()
    draws = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=draws))
    return made


def weights(version: Version, family: str = "llama", tied: bool = True) -> dict[str, Tensor]:
    """As they travel: names of the state_dict, tied embeddings once."""
    state = model(version, family, tied).state_dict()
    return {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}


def engine(version: Version = 1, family: str = "llama", tied: bool = True, **changes: Any) -> EngineCore:
    sizes = {"max_live": 32, "kv_tokens": 4096, "prefill_tokens": 64} | changes
    core = EngineCore(config(family, tie_word_embeddings=tied), **sizes)
    core.load(version, weights(version, family, tied))
    return core


def update(core: EngineCore, version: Version) -> None:
    core.stage(version, weights(version))
    assert core.apply(version) == []


def request(
    traj: str,
    context: Ids,
    *,
    turn: int = 0,
    max_tokens: int = 8,
    purpose: Purpose = "train",
    sampling: Sampling | None = None,
    **changes: Any,
) -> TurnRequest:
    ids = np.asarray(context, np.int32)
    return TurnRequest(
        id=RequestId(TrajId(traj), 0, turn, changes.pop("part", 0)),
        model="policy",
        purpose=purpose,
        domain="test",
        context=Segment(pieces=(Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids)),)),
        max_tokens=max_tokens,
        sampling=sampling or Sampling(seed=sum(map(ord, traj)) + turn),
        **changes,
    )


def run(core: EngineCore) -> dict[RequestId, Generation]:
    """Step until nothing is left to do; every request is answered once."""
    answers: dict[RequestId, Generation] = {}
    while core.has_work:
        for id_, generation in core.step():
            assert id_ not in answers
            answers[id_] = generation
    return answers


def by_traj(core: EngineCore) -> dict[str, Generation]:
    """As `run`, when no trajectory has two requests; in the order of the answers."""
    answers = run(core)
    named = {str(id_.traj): answer for id_, answer in answers.items()}
    assert len(named) == len(answers)
    return named


def one(core: EngineCore, wanted: TurnRequest) -> Generation:
    core.submit([wanted])
    return run(core)[wanted.id]


def payload(generation: Generation) -> TokenPayload:
    assert isinstance(generation.tokens.payload, TokenPayload)
    return generation.tokens.payload


def ids(generation: Generation) -> list[int]:
    return [int(token) for token in payload(generation).ids]


def logprobs(generation: Generation) -> NDArray[np.float32]:
    values = payload(generation).logprobs
    assert values is not None
    return values


def random_ids(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


@torch.no_grad()
def trainer_logprobs(made: PreTrainedModel, sequence: Ids, temperature: float = 1.0) -> NDArray[np.float32]:
    """(len - 1,): log-probability of every token but the first, by one full forward pass of transformers' model."""
    tokens = torch.as_tensor(np.asarray(sequence, np.int64))
    scores = made(tokens[None]).logits[0, :-1].float() / temperature
    values: NDArray[np.float32] = scores.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    return values


def mismatch(context: Ids, generation: Generation, family: str = "llama", tied: bool = True) -> float:
    """Mean |engine - trainer| over the sampled tokens, each under the version that its span names (temperature 1)."""
    sequence = [*np.asarray(context).tolist(), *ids(generation)]
    got, at, differences = logprobs(generation), 0, []
    for span in generation.tokens.spans:
        wanted = trainer_logprobs(model(span.version, family, tied), sequence)[len(context) - 1 :]
        differences.append(np.abs(got - wanted)[at : at + span.n_tokens])
        at += span.n_tokens
    assert at == generation.tokens.n_tokens == len(got)
    return float(np.concatenate(differences).mean()) if differences else 0.0
