"""What `explain` works out from a configuration is what the runtime makes of it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollart.config.explain import parameters_of
from rollart.config.schema import CharsTokenizer, ScratchModel
from rollart.runtime.models import hf_config
from rollart.runtime.tokenizers import build_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_that_explain_prints_are_those_of_the_model(
    family: Literal["llama", "qwen2", "qwen3"], tied: bool
) -> None:
    config = ScratchModel(family=family, layers=2, hidden=32, heads=4, kv_heads=2, ffn=40, tie_embeddings=tied)
    vocabulary = build_tokenizer(CharsTokenizer()).vocab_size
    assert vocabulary == len(CharsTokenizer().alphabet) + 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(config, vocabulary))  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters_of(config, vocabulary)
