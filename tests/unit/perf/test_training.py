"""The training step model: closed forms of FLOPs and traffic, what must not change a step, and what may only help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.devices import Device, device
from rollart.perf.links import Fabric, fabric
from rollart.perf.shapes import gpt_shape, model_shape
from rollart.perf.train_calibration import Calibration, calibration, flat_law, law_from, predict_step
from rollart.perf.train_comm import Group, collective_s, group, transfer_s
from rollart.perf.train_layers import Setting, TrainingLaw, body_cost
from rollart.perf.train_plan import Framework, TrainingPlan, framework
from rollart.perf.training import StepTime, fitting_plans, hardware_flops, model_flops, step_time

A100 = device("A100 SXM 80GB")
DGX = fabric("A100")
LAW = TrainingLaw()
QUIET = law_from({"jitter": 0.0, "step_host_s": 0.0, "host.layer_s": 0.0, "hop_s": 0.0})
GPT = gpt_shape(layers=48, hidden=8192, heads=64, vocab=51200)
PLAIN = Framework(attention="scores", dropout=True, fused=True, overlap_dp=False)
PLAN = TrainingPlan(
    devices=512, micro_batch=2, global_batch=1536, sequence=2048, tp=8, pp=4, dp=16, recompute="full"
)  # fmt: skip


def step(plan: TrainingPlan, *, chip: Device = A100, links: Fabric = DGX, law: TrainingLaw = LAW) -> StepTime:
    return step_time(GPT, plan, chip, links, PLAIN, law)


def setting(plan: TrainingPlan) -> Setting:
    return Setting(model=GPT, plan=plan, device=A100, fabric=DGX, framework=PLAIN, law=LAW)


def test_hardware_flops_are_equation_3_of_megatron() -> None:
    batch, s, layers, h, v = 1536, 2048, 48, 8192, 51200
    paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops(GPT, PLAN) == pytest.approx(paper, rel=0.01)
    useful = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert hardware_flops(GPT, replace(PLAN, recompute="none")) == pytest.approx(useful, rel=0.01)
    assert model_flops(GPT, PLAN) < useful


def test_the_parts_sum_to_the_step_and_all_of_them_are_there() -> None:
    found = step(PLAN)
    parts = {
        name: getattr(found, name)
        for name in StepTime.__dataclass_fields__
        if name.endswith("_s")
    }  # fmt: skip
    assert sum(parts.values()) == pytest.approx(found.total_s, rel=1e-12)
    assert all(value > 0 for value in parts.values())
    assert 0 < found.mfu(512, A100.peak_flops("bf16")) < 0.6


def test_one_rank_has_no_communication_and_no_bubble() -> None:
    alone = step(TrainingPlan(devices=1, micro_batch=2, global_batch=8, sequence=2048), law=QUIET)
    assert alone.tensor_comm_s == alone.pipeline_comm_s == alone.data_comm_s == alone.bubble_s == 0
    assert alone.total_s == pytest.approx(alone.compute_s + alone.optimizer_s)


def test_identical_ranks_do_not_change_a_step_when_communication_is_free() -> None:
    def free(op: str, payload_bytes: float, where: Group, links: Fabric) -> float:
        return 0.0

    one = TrainingPlan(devices=1, micro_batch=2, global_batch=8, sequence=2048)
    many = replace(one, devices=1024, dp=1024, global_batch=8 * 1024)
    alone, crowd = (step_time(GPT, plan, A100, DGX, PLAIN, QUIET, collectives=free) for plan in (one, many))
    assert crowd.total_s == pytest.approx(alone.total_s, rel=1e-12)


def test_the_bubble_is_p_minus_1_over_m_of_the_work() -> None:
    model = gpt_shape(layers=48, hidden=8192, heads=64, vocab=128)  # a head that is next to nothing
    found = step_time(model, PLAN, A100, DGX, PLAIN, QUIET)
    work = found.compute_s + found.tensor_comm_s + found.pipeline_comm_s
    assert found.bubble_s / work == pytest.approx(3 / PLAN.micro_batches, rel=0.01)


def test_full_recomputation_makes_6_tensor_reductions_a_layer_of_4() -> None:
    full, none = (body_cost(setting(replace(PLAN, recompute=again))) for again in ("full", "none"))
    traffic = [cost.comm_forward_s + cost.comm_backward_s for cost in (full, none)]
    assert traffic[0] / traffic[1] == pytest.approx(6 / 4)
    one = collective_s("all_reduce", 2 * 2 * 2048 * 8192, group(8, 1, DGX), DGX)
    assert traffic[1] == pytest.approx(4 * 48 * one)


plans = st.sampled_from(
    [
        PLAN,
        replace(PLAN, recompute="selective", sequence_parallel=True, schedule="interleaved", chunks=3),
        TrainingPlan(devices=64, micro_batch=1, global_batch=256, sequence=4096, dp=64, shards=3),
        TrainingPlan(devices=64, micro_batch=1, global_batch=256, sequence=4096, dp=64, shards=1),
        TrainingPlan(devices=64, micro_batch=1, global_batch=64, sequence=32768, tp=2, cp=4, dp=8, shards=2),
        TrainingPlan(
            devices=64, micro_batch=1, global_batch=256, sequence=4096, tp=2, pp=4, dp=8, schedule="zero_bubble"
        ),
    ]
)


@settings(max_examples=40, deadline=None)
@given(plans, st.sampled_from(["flops", "memory", "intra", "inter"]), st.floats(1.1, 4.0), st.booleans())
def test_faster_parts_never_slow_a_step(plan: TrainingPlan, part: str, factor: float, overlap: bool) -> None:
    works = replace(PLAIN, overlap_dp=overlap, overlap_tp=overlap, attention="flash2")
    chip, links = A100, DGX
    if part == "flops":
        chip = replace(chip, flops={dtype: factor * rate for dtype, rate in chip.flops.items()})
    elif part == "memory":
        chip = replace(chip, memory_bytes_per_s=factor * chip.memory_bytes_per_s)
    elif part == "intra":
        links = replace(links, intra_bytes_per_s=factor * links.intra_bytes_per_s)
    else:
        links = replace(links, inter_bytes_per_s=factor * links.inter_bytes_per_s)
    before = step_time(GPT, plan, A100, DGX, works, LAW).total_s
    assert step_time(GPT, plan, chip, links, works, LAW).total_s <= before * (1 + 1e-9)


def test_a_moe_step_exchanges_tokens_and_frozen_weights_need_no_gradients() -> None:
    model = model_shape("Qwen3-30B-A3B")
    h100, links = device("H100"), fabric("H100")
    plan = TrainingPlan(devices=64, micro_batch=1, global_batch=256, sequence=4096, dp=64, ep=8, shards=1)
    near = step_time(model, plan, h100, links, framework("Megatron-Core"), LAW)
    far = step_time(model, replace(plan, ep=32), h100, links, framework("Megatron-Core"), LAW)
    assert 0 < near.tensor_comm_s < far.tensor_comm_s
    frozen = step_time(model, replace(plan, lora=True), h100, links, framework("Megatron-Core"), LAW)
    assert frozen.compute_s < near.compute_s
    assert frozen.optimizer_s == frozen.data_comm_s == 0


def test_the_plan_that_fits_is_taken_and_without_one_the_smallest() -> None:
    works = framework("Megatron-Bridge")
    model, gb = model_shape("Llama-3-70B"), device("GB200")
    plan = TrainingPlan(devices=64, micro_batch=2, global_batch=256, sequence=8192, dp=64, shards=3)
    choices = [plan, replace(plan, recompute="full", recompute_share=0.5), replace(plan, recompute="full")]
    times = [step_time(model, choice, gb, fabric("GB200"), works, LAW).total_s for choice in choices]
    assert times == sorted(times)
    roomy = replace(gb, memory_bytes=1e13)
    assert fitting_plans(model, choices, roomy, works) == (choices[0],)
    tight = replace(gb, memory_bytes=1.0)
    assert fitting_plans(model, choices, tight, works) == (choices[2],)


def test_groups_stand_where_their_stride_puts_them() -> None:
    assert group(8, 1, DGX).domains == 1
    assert group(16, 1, DGX).domains == 2
    assert (group(16, 8, DGX).local, group(16, 2, DGX).local) == (1, 4)
    assert transfer_s(1e8, stride=1, fabric=DGX) < transfer_s(1e8, stride=8, fabric=DGX)
    assert collective_s("all_reduce", 1e8, group(1, 1, DGX), DGX) == 0
    near, far = (collective_s("all_reduce", 1e9, group(16, stride, DGX), DGX) for stride in (1, 8))
    assert near < far


def test_a_plan_whose_degrees_do_not_multiply_to_its_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not devices 7"):
        TrainingPlan(devices=7, micro_batch=1, global_batch=8, sequence=128, dp=2, tp=2)
    with pytest.raises(ConfigError, match="at least 1"):
        TrainingPlan(devices=1, micro_batch=0, global_batch=8, sequence=128)


def test_the_packaged_constants_are_sane_and_unknown_names_take_their_neighbours() -> None:
    known, table = calibration()
    assert table["provenance"]
    assert set(flat_law(known.law)) == set(flat_law(LAW))
    assert all(0.3 < scale < 3 for scale in known.scales.values())
    few = Calibration(law=LAW, scales={"a|h100": 2.0, "a|a100": 0.5, "b|h100": 1.5})
    assert few.scale("A", "H100") == (2.0, "measured")
    stand_ins = {asked: few.scale(*asked) for asked in (("a", "b200"), ("c", "a100"), ("c", "tpu"))}
    assert {origin for _, origin in stand_ins.values()} == {"analytic"}
    assert [scale for scale, _ in stand_ins.values()] == pytest.approx([1.0, 0.5, 1.5])
    with pytest.raises(ConfigError, match="known names"):
        law_from({"gemm": 1.0})
    with pytest.raises(ConfigError, match="finite"):
        law_from({"jitter": float("nan")})


def test_a_step_is_predicted_by_names_alone() -> None:
    found = predict_step(GPT, PLAN, "A100-80GB SXM", "Megatron-LM")
    assert found.total_s == predict_step(GPT, PLAN, "NVIDIA A100 SXM 80GB", "megatron-lm").total_s
    assert 0.2 < found.mfu(512, A100.peak_flops("bf16")) < 0.6
    stranger = predict_step(GPT, PLAN, "A100 SXM 80GB", "somebody's trainer")
    assert stranger.total_s > 0
