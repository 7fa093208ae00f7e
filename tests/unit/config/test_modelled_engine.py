"""Engines by name: those whose facts are known, and no others."""

from __future__ import annotations

import pytest

from rollart.core.errors import ConfigError
from rollart.recipes.registry import resolve


@pytest.mark.parametrize("name", ["vLLM", "vllm", "SGLang", "TensorRT-LLM"])
def test_engines_that_facts_are_known_of_are_taken(name: str) -> None:
    assert resolve("sim_small", [f"engine.name={name}"]).config.engine.kind == "modelled"


@pytest.mark.parametrize(("name", "near"), [("foo", ""), ("vLM", "vLLM"), ("SGLong", "SGLang")])
def test_an_unknown_engine_is_refused_when_the_configuration_is_read(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.name={name}: no facts are known of this engine; use {near}"):
        resolve("sim_small", [f"engine.name={name}"])
