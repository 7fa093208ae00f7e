"""What vLLM cannot serve is refused when the configuration is read."""

from __future__ import annotations

import pytest

from rollart.config.schema import VllmEngine
from rollart.core.errors import ConfigError
from rollart.recipes.registry import resolve

BASE = ["engine.kind=vllm", "model.hidden=64"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("sampling.top_p=0.9", "sampling.top_p=0.9 with engine.kind=vllm: vLLM does not return the probability mass"),
        ("sampling.top_k=5", "use sampling.top_k=0"),
        ("sampling.min_p=0.1", "use sampling.min_p=0, or engine.kind=native"),
        ("sampling.temperature=0.005", "use sampling.temperature=0.01 or more, or engine.kind=native"),
        ("model.hidden=32", "is 16 per head, for which vLLM has no kernel on a CPU; use 32 per head"),
        ("engine.max_model_len=100", "below model.max_positions=512"),
        ("engine.kv_tokens=100", "engine.kv_tokens"),
    ],
)
def test_a_setting_that_vllm_cannot_serve_is_refused_with_the_reason(word: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("smoke", [*BASE, word])
    assert told in str(error.value)


def test_vllm_is_chosen_by_its_kind() -> None:
    engine = resolve("smoke", [*BASE, "engine.kv_gb=2", "sampling.temperature=0.01"]).config.engine
    assert isinstance(engine, VllmEngine)
    assert engine.kv_gb == 2


def test_the_native_engine_stays_the_default() -> None:
    assert resolve("smoke", []).config.engine.kind == "native"
