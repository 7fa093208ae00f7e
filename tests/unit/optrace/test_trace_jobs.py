"""From options and plan files to a job: every option ends in the job, and what cannot be is refused with what can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.optrace.job import OPTIONS, Job, Late, is_module, job_from
from rollart.optrace.plan_checks import check, divisor
from rollart.perf.shapes import ModelShape, model_shape
from rollart.perf.train_plan import TrainingPlan

LLAMA = model_shape("llama3-70b")
MOE = model_shape("qwen3-30b-a3b")
NARROW = model_shape("qwen2-0.5b")
GIVEN: dict[str, Any] = {
    "tp": 2, "pp": 4, "dp": 3, "cp": 2, "ep": 2, "chunks": 2, "seq": 512, "micro_batch": 2, "global_batch": 48, "shards": 2,
    "dtype": "fp8", "recompute": "full", "recompute_share": 0.5, "schedule": "gpipe", "sequence_parallel": True,
    "device": "A100", "interconnect": "PCIe", "framework": "torchtitan", "profile": "p.json", "assume": ["norm=below"],
    "straggler": ["stage 1=0.5", "3=1.5x"], "overlap_level": "0", "clip": False, "built_layers": 3, "jitter": 0.1, "seed": 4,
    "capture": False,
}  # fmt: skip
FIELDS = {
    "seq": "sequence", "straggler": "late",
}  # fmt: skip


def read(job: Job, name: str) -> Any:
    field = FIELDS.get(name, name)
    return getattr(job.plan, field) if field in TrainingPlan.__dataclass_fields__ else getattr(job, field)


def test_the_options_are_those_that_are_tested_here() -> None:
    assert {option.name for option in OPTIONS} == set(GIVEN)


@pytest.mark.parametrize("name", list(GIVEN))
def test_every_option_ends_in_the_job(name: str) -> None:
    wanted = {
        "profile": Path("p.json"), "assume": {"norm": "below"}, "overlap_level": 0,
        "straggler": {"stage 1": Late(delay_s=0.5), "3": Late(factor=1.5)},
    }.get(name, GIVEN[name])  # fmt: skip
    job = job_from("llama3-70b", {name: GIVEN[name]})
    assert read(job, name) == wanted
    assert read(job_from("llama3-70b", {}), name) != wanted


def test_defaults_follow_from_what_is_given() -> None:
    plain = job_from("llama3-70b", {})
    assert (plain.framework, plain.plan.shards, plain.plan.sequence_parallel) == (
        "Megatron-Core/Megatron-Bridge",
        0,
        False,
    )
    assert job_from("my.models:build", {}).framework == "PyTorch"
    many = job_from("llama3-70b", {"tp": 8, "pp": 4, "dp": 2, "chunks": 2})
    assert many.plan.devices == 64
    assert (many.plan.shards, many.plan.sequence_parallel, many.plan.schedule) == (1, True, "interleaved")
    assert many.plan.micro_batches == 32
    assert not job_from("llama3-70b", {"tp": 8, "framework": "Megatron-DeepSpeed"}).plan.sequence_parallel


def test_a_function_of_a_module_is_told_from_other_names() -> None:
    assert is_module("my.models:build")
    assert not any(map(is_module, ("llama3-70b", "gpt:layers=2,hidden=64", "./config.json", "meta-llama/Llama-3.1-8B")))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"microbatch": 2}, "microbatch: there is no such option of a plan; did you mean micro_batch"),
        ({"tp": "two"}, "tp=two: it takes a whole number"),
        ({"tp": 1.5}, "tp=1.5: it takes a whole number"),
        ({"tp": True}, "tp=True"),
        ({"tp": 0}, "tp=0: it is 1 or more"),
        ({"recompute": "ful"}, "recompute=ful: it takes none, selective, full; did you mean full"),
        ({"shards": 4}, "shards=4: it is a ZeRO stage, 0 to 3; use 3"),
        ({"recompute_share": 0}, "recompute_share=0.0: it is above 0"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel=maybe: it takes true or false"),
        ({"assume": ["norm"]}, "assume norm: give NAME=VALUE"),
        ({"straggler": ["stage 1=y"]}, "give CLASS=SECONDS"),
        ({"straggler": ["stage 1=2x"]}, "a factor is of one rank"),
        ({"straggler": ["1=0.5x"]}, "a factor of at least 1"),
        ({"jitter": -0.1}, "jitter=-0.1: they are 0 or more"),
        ({"straggler": {"stage 1": -1}}, "give seconds of at least 0"),
        ({"overlap_level": 3}, "overlap_level=3: it takes 0, 1, 2"),
        ({"global_batch": -1}, "global_batch=-1"),
        ({"jitter": 1.5}, "jitter=1.5: .* below 1; use jitter=0.1"),
        ({"framework": "Megatorn-Core"}, "framework=Megatorn-Core: .* did you mean megatron core"),
        ({"seq": float("inf")}, "seq=inf: it takes a whole number"),
        ({"capture": False, "assume": ["m.py=1"]}, "without capture no code runs that could read a value"),
        ({"capture": False, "clip": False}, "clip=False, built_layers=2: without capture"),
        ({"capture": False, "built_layers": 0}, "built_layers=0: without capture no layer is built"),
        ({"framework": "Foo"}, "framework=Foo: what it does is not known; Known: .*nemo.*; plain is PyTorch"),
    ],
)
def test_an_option_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job_from("llama3-70b", given)


@pytest.mark.parametrize(
    ("given", "shape", "says"),
    [
        (
            {"dp": 3, "global_batch": 32},
            LLAMA,
            "global_batch=32 is no multiple of dp x micro_batch = 3; use global_batch=33",
        ),
        ({"tp": 3, "sequence_parallel": False}, LLAMA, "tp=3 does not divide the 64 heads of .*; use tp=2"),
        ({"pp": 100}, LLAMA, "pp=100 x chunks=1 is more than the 80 layers"),
        ({"pp": 3, "chunks": 2, "global_batch": 6}, LLAMA, "pp=3 x chunks=2 does not divide the 80 layers"),
        ({"ep": 2, "dp": 2}, LLAMA, "ep=2 but .* has no experts; use ep=1"),
        ({"ep": 3, "dp": 3}, MOE, "ep=3 does not divide the 128 experts"),
        ({"ep": 3, "dp": 2}, MOE, "ep=3 does not divide the 2 ranks of a stage"),
        ({"cp": 3}, LLAMA, "cp=3 does not divide seq=4096; use cp=2"),
        ({"tp": 8, "seq": 1004}, LLAMA, "sequence_parallel splits 1004 tokens over tp=8; use seq=1008"),
        ({"schedule": "dualpipe"}, LLAMA, "schedule=dualpipe .* use zero_bubble"),
        ({"schedule": "interleaved"}, LLAMA, "schedule=interleaved with pp=1, chunks=1: both must be 2 or more"),
        ({"chunks": 2, "pp": 2, "schedule": "1f1b"}, LLAMA, "chunks=2 with schedule=1f1b"),
        ({"chunks": 2, "pp": 2, "global_batch": 5}, LLAMA, "multiples of pp=2, has 5; use global_batch=4"),
        (
            {"tp": 14, "seq": 7168},
            NARROW,
            "tp=14 does not divide the 4864 columns of the feed-forward block .*; use tp=2",
        ),
        ({"tp": 6, "seq": 6144}, model_shape("qwen2-1.5b"), "tp=6 does not divide .*; use tp=4"),
        ({"tp": 8, "seq": 1004, "sequence_parallel": False}, MOE, "tp=8 shares the 1004 tokens .*; use seq=1008"),
        ({"recompute_share": 0.5}, LLAMA, "recompute_share=0.5 with recompute=none: .* use recompute=full"),
        ({"recompute": "selective", "recompute_share": 0.5}, LLAMA, "with recompute=selective: a share is of full"),
    ],
)
def test_a_plan_that_does_not_divide_is_refused_with_the_nearest(
    given: dict[str, Any], shape: ModelShape, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(job_from("llama3-70b", given).plan, shape)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(job_from("llama3-70b", {"tp": 3, "ep": 5, "global_batch": 7, "micro_batch": 2}).plan, LLAMA)
    assert len(str(caught.value).splitlines()) >= 4


@pytest.mark.parametrize("name", ["llama3-70b", "llama3-8b", "qwen2-0.5b", "mixtral-8x7b", "deepseek-v3", "gpt-3-175b"])
def test_the_tensor_parallelism_that_is_proposed_is_accepted(name: str) -> None:
    shape = model_shape(name)
    for asked in range(1, 40):
        plan = TrainingPlan(devices=asked, micro_batch=1, global_batch=8, sequence=4 * asked, tp=asked)
        try:
            check(plan, shape)
        except ConfigError as problem:
            fits = int(str(problem).rpartition("use tp=")[2])
            plan = replace(plan, devices=fits, sequence=4 * fits, tp=fits)
            check(plan, shape)
        assert shape.heads % plan.tp == 0
        assert not shape.dense_layers or shape.ffn % plan.tp == 0


def test_a_framework_is_one_that_is_known_or_plain() -> None:
    assert job_from("llama3-70b", {"framework": "plain"}).framework == "PyTorch"
    for known in (
        "NeMo",
        "MegaScale",
        "PyTorch DDP",
        "Composer/PyTorch FSDP + FlashAttention",
        "DeepSpeed ZeRO-3 in Megatron-LM",
    ):
        assert job_from("llama3-70b", {"framework": known}).framework == known


def test_a_module_of_ones_own_is_checked_for_what_is_known_and_has_no_pipeline() -> None:
    plan = job_from("m:f", {"tp": 3, "global_batch": 7}).plan
    check(replace(plan, sequence_parallel=False), None)
    assert divisor(64, 3) == 2
    with pytest.raises(ConfigError, match=r"pp=2, chunks=1: a module of your own is one stage.*dp=6"):
        check(job_from("m:f", {"pp": 2, "dp": 3}).plan, None)
    with pytest.raises(ConfigError, match="pp=2, chunks=2: a module of your own is one stage"):
        check(job_from("m:f", {"pp": 2, "chunks": 2}).plan, None)


def test_a_module_of_ones_own_has_no_numbers_to_be_written_down_from() -> None:
    with pytest.raises(ConfigError, match="m:f: a module of your own has no numbers"):
        job_from("m:f", {"capture": False})


def test_a_module_of_ones_own_keeps_its_dtype_unless_one_is_given() -> None:
    assert job_from("m:f", {}).own_dtype
    assert job_from("m:f", {"dtype": None}).own_dtype
    assert not job_from("m:f", {"dtype": "bf16"}).own_dtype
    assert not job_from("llama3-70b", {}).own_dtype
