"""The step model and what it says of whole workloads: closed forms, monotony, limits, and known orders of magnitude."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.core.resources import Degrees
from rollart.perf.calibrated import Calibration, engine_cost, inference_calibration
from rollart.perf.devices import Device, device
from rollart.perf.engines import (
    SGLANG_EARLY,
    TRTLLM,
    UNKNOWN,
    VLLM_EARLY,
    VLLM_V0,
    VLLM_V1,
    engine_facts,
    engine_family,
)
from rollart.perf.inference import EngineCost
from rollart.perf.lengths import Lengths, varied
from rollart.perf.rooflines import Efficiency, all_reduce_s, matmul_s
from rollart.perf.serving import Server, Workload, serve
from rollart.perf.shapes import model_shape

H100 = device("H100")
LLAMA_8B, QWEN_MOE = model_shape("Llama-3.1-8B"), model_shape("Qwen3-235B-A22B")
PERFECT = Efficiency(
    matmul_bf16=1.0, matmul_fp8=1.0, matmul_fp4=1.0, memory=1.0, kv=1.0, attention=1.0, wave_half=0.0, inner_half=0.0,
    kernel_s=0.0, passes=0.0, expert_matmul=1.0, expert_passes=0.0, expert_pad=0.0, expert_imbalance=1.0,
    rank_imbalance=1.0, link=1.0, collective_s=0.0, host_step_s=0.0, host_sequence_s=0.0,
)  # fmt: skip


def engine(**changes: object) -> EngineCost:
    return replace(EngineCost(device=H100, shape=LLAMA_8B), **changes)  # type: ignore[arg-type]


# --- a step ----------------------------------------------------------------------------------------------------------


def test_a_perfect_device_decodes_one_sequence_in_the_time_to_read_the_weights() -> None:
    weights = 2.0 * LLAMA_8B.active_parameters
    step = engine(efficiency=PERFECT).decode_step_s(1, 0)
    assert step == pytest.approx(weights / H100.memory_bytes_per_s, rel=0.01)


def test_a_perfect_device_reads_a_long_prompt_in_the_time_of_its_flops() -> None:
    tokens = 32768
    body = LLAMA_8B.active_parameters - LLAMA_8B.vocab * LLAMA_8B.hidden
    flops = tokens * (2.0 * body + LLAMA_8B.attention_flops(tokens / 2))
    assert engine(efficiency=PERFECT).prefill_s(tokens) == pytest.approx(flops / H100.flops["bf16"], rel=0.03)


def test_a_token_touches_few_experts_and_a_batch_touches_all() -> None:
    moe = engine(shape=QWEN_MOE, degrees=Degrees(tp=8), efficiency=PERFECT)
    one, many = moe.parts(1, 0).products, moe.parts(4096, 0).products
    rate = H100.memory_bytes_per_s * 8
    assert one == pytest.approx(2.0 * QWEN_MOE.active_parameters / rate, rel=0.05)
    assert many > 2.0 * (QWEN_MOE.parameters - QWEN_MOE.embedding_parameters) / rate


def test_a_step_of_nothing_costs_nothing() -> None:
    assert engine().decode_step_s(0, 1000) == 0.0
    assert engine().prefill_s(0) == 0.0


LAYOUTS = [
    engine(),
    engine(precision="fp8", kv_dtype="fp8"),
    engine(degrees=Degrees(tp=8)),
    engine(degrees=Degrees(tp=2, pp=4)),
    engine(shape=QWEN_MOE, degrees=Degrees(tp=8), precision="fp8"),
    engine(shape=QWEN_MOE, degrees=Degrees(dp=8, ep=8), precision="fp8"),
    engine(shape=QWEN_MOE, degrees=Degrees(tp=2, dp=4, ep=8), precision="fp8"),
    engine(shape=model_shape("DeepSeek-V3"), degrees=Degrees(dp=16, ep=16), precision="fp8"),
    engine(shape=model_shape("Nemotron-3-Super"), degrees=Degrees(tp=4)),
]
AMOUNTS = st.floats(min_value=0.5, max_value=2e4)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(LAYOUTS), AMOUNTS, AMOUNTS, AMOUNTS, st.floats(min_value=1.0, max_value=3.0))
def test_more_work_never_takes_less_time_and_faster_hardware_never_more(
    cost: EngineCost, batch: float, context: float, prompt: float, more: float
) -> None:
    step = cost.step_s(batch, context, prefill=prompt, prefill_context=prompt / 2)
    assert math.isfinite(step)
    assert step > 0
    slack = 1.0 + 1e-9
    assert step <= cost.step_s(batch * more, context, prefill=prompt, prefill_context=prompt / 2) * slack
    assert step <= cost.step_s(batch, context * more, prefill=prompt, prefill_context=prompt / 2) * slack
    assert step <= cost.step_s(batch, context, prefill=prompt * more, prefill_context=prompt / 2) * slack
    faster = replace(
        cost.device, flops={dtype: more * rate for dtype, rate in cost.device.flops.items()},
        memory_bytes_per_s=more * cost.device.memory_bytes_per_s, link_bytes_per_s=more * cost.device.link_bytes_per_s,
    )  # fmt: skip
    assert (
        replace(cost, device=faster).step_s(batch, context, prefill=prompt, prefill_context=prompt / 2) <= step * slack
    )


def test_experts_in_four_bits_only_stay_so_whatever_the_precision() -> None:
    oss = model_shape("GPT-OSS-120B")
    weights = engine(shape=oss, precision="bf16").weight_bytes()
    assert weights == pytest.approx(65e9, rel=0.05)  # the published checkpoint
    assert engine(shape=oss, precision="fp8").weight_bytes() == weights


def test_collectives_cost_what_the_links_take() -> None:
    size = 1e9
    assert all_reduce_s(H100, PERFECT, 8, size) == pytest.approx(2 * 7 / 8 * size / H100.link_bytes_per_s)
    assert all_reduce_s(H100, PERFECT, 1, size) == 0.0
    assert engine(degrees=Degrees(tp=8)).parts(256, 1000).collectives > 0
    assert engine().parts(256, 1000).collectives == 0.0


def test_a_product_is_bound_by_memory_when_thin_and_by_compute_when_thick() -> None:
    thin = matmul_s(H100, PERFECT, 1, 8192, 8192, weight_bytes=2, compute="bf16")
    thick = matmul_s(H100, PERFECT, 65536, 8192, 8192, weight_bytes=2, compute="bf16")
    assert thin == pytest.approx(8192**2 * 2 / H100.memory_bytes_per_s, rel=0.01)
    assert thick == pytest.approx(2 * 65536 * 8192**2 / H100.flops["bf16"], rel=0.02)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_cache_gets_what_weights_leave() -> None:
    """vLLM reports about 400 thousand tokens for this model on this device."""
    tokens = engine_cost(H100, LLAMA_8B, engine="vLLM", version="0.9").kv_capacity_tokens()
    assert 380e3 < tokens < 470e3
    halved = engine_cost(H100, LLAMA_8B, kv_dtype="fp8").kv_capacity_tokens()
    assert halved == pytest.approx(2 * engine_cost(H100, LLAMA_8B).kv_capacity_tokens())


def test_attention_in_parallel_over_data_holds_each_sequence_once() -> None:
    shape = model_shape("DeepSeek-V3")
    wide = engine(shape=shape, precision="fp8", degrees=Degrees(dp=16, ep=16))
    sliced = engine(shape=shape, precision="fp8", degrees=Degrees(tp=16))
    assert wide.kv_capacity_tokens() > 6 * sliced.kv_capacity_tokens()  # the latent cache is whole on every tp rank


def test_what_cannot_be_is_refused_with_the_nearest_that_can() -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB of weights .* raise tp"):
        engine(shape=model_shape("Llama-3.1-70B")).kv_capacity_tokens()
    with pytest.raises(ConfigError, match="nearest valid value: 16"):
        engine(shape=QWEN_MOE, degrees=Degrees(dp=24, ep=24))
    with pytest.raises(ConfigError, match="has no experts"):
        engine(degrees=Degrees(ep=8, dp=8))
    with pytest.raises(ConfigError, match="nearest valid value: 32"):
        engine(degrees=Degrees(pp=64))
    with pytest.raises(ConfigError, match="unknown dtype 'fp7'"):
        engine(precision="fp7")
    with pytest.raises(ConfigError, match="batch of a step is nan"):
        engine().decode_step_s(math.nan, 1)
    with pytest.raises(ConfigError, match="factor"):
        engine(factor=math.inf)


# --- engines and calibration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "facts"),
    [
        ("vLLM", "0.5.4", VLLM_EARLY), ("vLLM", "v0.6.3.post1", VLLM_V0), ("vLLM", "0.19.0", VLLM_V1), ("vllm", "", VLLM_V1),
        ("SGLang", "0.3.0", SGLANG_EARLY), ("TensorRT-LLM (PyTorch backend)", "1.0", TRTLLM), ("something", "3", UNKNOWN),
    ],
)  # fmt: skip
def test_an_engine_is_known_by_name_and_version(name: str, version: str, facts: object) -> None:
    assert engine_facts(name, version) == facts


def test_notes_of_a_version_change_the_scheduler() -> None:
    assert engine_facts("vLLM", "0.6.0 (num-scheduler-steps 10)").steps_per_schedule == 10
    chunked = engine_facts("vLLM", "0.5.4 chunked prefill")
    assert (chunked.mixed, chunked.max_step_tokens) == (True, 512)
    assert engine_facts("SGLang", "0.3 chunked prefill").max_step_tokens == SGLANG_EARLY.max_step_tokens
    assert engine_family("TensorRT-LLM / TensorRT 10.2") == engine_family("TensorRT-LLM (PyTorch backend)")


def test_a_pair_without_a_constant_takes_that_of_its_engine_or_none() -> None:
    known = Calibration(constants={"vLLM | A": 0.5, "vLLM | B": 2.0, "SGLang | A": 3.0})
    assert known.factor("vLLM", "A") == 0.5
    assert known.factor("vLLM", "C") == pytest.approx(1.0)
    assert known.factor("SGLang 0.4", "C") == pytest.approx(3.0)
    assert known.factor("other", "A") == 1.0


def test_the_packaged_calibration_is_physical() -> None:
    packaged = inference_calibration()
    eff = packaged.efficiency
    for share in (eff.matmul_bf16, eff.matmul_fp8, eff.matmul_fp4, eff.memory, eff.kv, eff.attention, eff.link):
        assert 0.1 < share < 1.0
    assert all(0.5 < constant < 2.0 for constant in packaged.constants.values())


# --- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "prompt", "shortest"),
    [(195.0, 220.0, 0.0), (650.0, 860.0, 0.0), (1500.0, 1000.0, 0.0), (650.0, 860.0, 455.0), (195.0, 220.0, 190.0)],
)
def test_varied_lengths_keep_their_mean(mean: float, prompt: float, shortest: float) -> None:
    law, steps = varied(mean, prompt, shortest), 20000
    lengths = [law.quantile((i + 0.5) / steps) for i in range(steps)]
    assert sum(lengths) / steps == pytest.approx(mean, rel=2e-3)
    assert shortest <= min(lengths) <= max(lengths) <= law.longest == law.quantile(1.0)
    age = sum(length**2 for length in lengths) / steps / (2 * mean)
    assert law.age == pytest.approx(age, rel=5e-3)
    assert law.left(0.0, 0.0) == 1.0
    assert law.left(0.0, 1.0) == pytest.approx(1.0)
    assert law.left(law.longest, 1.0) == 0.0
    one = math.exp(-0.5772) / 64
    assert law.left(law.last(64, 1.0), 1.0) == pytest.approx(one)
    assert sum(law.left(t + 0.5, 0.0) for t in range(int(law.longest) + 1)) == pytest.approx(mean, rel=5e-3)


def test_fixed_lengths_end_together_unless_they_were_renewed() -> None:
    law = Lengths(100.0)
    assert (law.left(50, 0.0), law.left(50, 1.0), law.age, law.last(64, 0.0)) == (1.0, 0.5, 50.0, 100.0)


# --- workloads -------------------------------------------------------------------------------------------------------


def server(engine_name: str = "vLLM", version: str = "0.9", chip: Device = H100) -> Server:
    facts = engine_facts(engine_name, version)
    return Server(cost=engine_cost(chip, LLAMA_8B, engine=engine_name, version=version), facts=facts)


def test_without_an_end_throughput_is_batch_over_step_and_waits_agree_with_it() -> None:
    served = serve(server(), Workload(prompt=500, answer=500))
    assert served.tokens_per_s == pytest.approx(served.batch / served.tpot_s)
    assert served.saturated


@pytest.mark.parametrize("name", ["vLLM", "SGLang", "TensorRT-LLM"])
@pytest.mark.parametrize("lengths", ["fixed", "varied"])
def test_many_requests_come_to_the_steady_state_from_below(name: str, lengths: str) -> None:
    work = Workload(prompt=300, answer=200, lengths=lengths, requests=1e6)  # type: ignore[arg-type]
    steady = serve(server(name, ""), replace(work, requests=math.inf)).tokens_per_s
    few, many = (serve(server(name, ""), replace(work, requests=n)).tokens_per_s for n in (500, 1e6))
    assert few < many
    assert many == pytest.approx(steady, rel=0.03)


def test_a_rate_below_capacity_is_met_and_never_exceeded() -> None:
    work = Workload(prompt=220, answer=195, lengths="varied", rate_per_s=4.0)
    slow = serve(server(), work)
    assert not slow.saturated
    assert slow.tokens_per_s == pytest.approx(4.0 * 195)
    assert slow.batch == pytest.approx(4.0 * 195 * slow.tpot_s, rel=0.02)  # Little's law
    flooded = serve(server(), replace(work, rate_per_s=1e4, requests=3000))
    assert flooded.saturated
    assert flooded.tokens_per_s < serve(server(), replace(work, rate_per_s=math.inf)).tokens_per_s
    assert flooded.ttft_s(0.9) > flooded.ttft_s(0.1) > slow.ttft_s()


def test_fewer_sequences_at_a_time_are_faster_each_and_slower_together() -> None:
    few = serve(server(), Workload(prompt=500, answer=500, concurrency=8))
    many = serve(server(), Workload(prompt=500, answer=500, concurrency=128))
    assert few.tpot_s < many.tpot_s
    assert few.tokens_per_s < many.tokens_per_s


def test_ten_tokens_per_visit_of_the_scheduler_arrive_together() -> None:
    work = Workload(prompt=220, answer=195, lengths="varied", rate_per_s=2.0)
    served = serve(server("vLLM", "0.6.0 sched steps 10"), work)
    assert served.median_itl_s == pytest.approx(10 * served.steady.plain_s, rel=0.1)
    often = serve(server("vLLM", "0.6.0 sched steps 10"), replace(work, rate_per_s=20.0))
    assert often.median_itl_s > 11 * often.steady.plain_s  # most visits read a prompt too
    alone = serve(server("vLLM", "0.6.0"), replace(work, rate_per_s=20.0))
    assert alone.median_itl_s == alone.steady.plain_s  # most steps do not


def test_a_sequence_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a sequence of \d+ tokens .* does not fit"):
        serve(server(chip=device("A10")), Workload(prompt=100_000, answer=1000))


def test_answers_without_the_short_ones_end_closer_together() -> None:
    plain = Workload(prompt=860, answer=650, lengths="varied", requests=300, rate_per_s=10, concurrency=64)
    kept = replace(plain, shortest=455.0)
    wide, narrow = serve(server(), plain), serve(server(), kept)
    assert narrow.tokens_per_s > wide.tokens_per_s
    assert narrow.e2e_s(0.99) - narrow.ttft_s(0.99) < wide.e2e_s(0.99) - wide.ttft_s(0.99)
    with pytest.raises(ConfigError, match="shortest is 650"):
        replace(plain, shortest=650.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_workload_with_impossible_numbers_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="answer"):
        Workload(prompt=1, answer=bad)
    with pytest.raises(ConfigError, match="prompt"):
        Workload(prompt=math.inf, answer=1)
