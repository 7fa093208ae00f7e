"""Seconds by kind of engine: the cost model's, looked up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import device
from rollart.perf.engines import engine_facts
from rollart.perf.profiles import GRID, ServedProfile
from rollart.perf.serving import Server
from rollart.perf.shapes import model_shape

SERVERS = {
    chip: Server(cost=engine_cost(device(chip), model_shape("qwen3-8b")), facts=engine_facts("vLLM"))
    for chip in ("H800", "H20")
}
PROFILE = ServedProfile(SERVERS)


@given(st.sampled_from(["H800", "H20"]), st.integers(1, 200), st.floats(100, 30_000))
def test_a_step_is_the_servers_to_within_the_grid(kind: str, live: int, context: float) -> None:
    exact = SERVERS[kind].whole_step_s(live, context, 0.0, 0.0)
    assert PROFILE.decode_s(kind, live=live, context=context) == pytest.approx(exact, rel=GRID - 1)


@given(st.sampled_from(["H800", "H20"]), st.floats(1, 60_000), st.integers(0, 64), st.floats(100, 30_000))
def test_more_to_read_takes_longer_and_never_less_than_nothing(
    kind: str, tokens: float, live: int, context: float
) -> None:
    one = PROFILE.prefill_s(kind, tokens, live=live, context=context)
    assert one >= 0
    assert PROFILE.prefill_s(kind, 4 * tokens, live=live, context=context) >= one


def test_an_h20_samples_as_fast_as_an_h800_and_reads_several_times_as_slowly() -> None:
    """RollArt's reason for affinity."""
    samples = [PROFILE.decode_s(kind, live=4, context=4000) for kind in ("H800", "H20")]
    assert samples[1] < 1.05 * samples[0]
    reads = [PROFILE.prefill_s(kind, 8000, live=4, context=8000) for kind in ("H800", "H20")]
    assert reads[1] > 3 * reads[0]


def test_a_step_is_worked_out_once() -> None:
    profile = ServedProfile(SERVERS)
    for context in (1000.0, 1001.0, 1002.0):
        profile.decode_s("H20", live=5, context=context)
    assert len(profile._steps) == 1
