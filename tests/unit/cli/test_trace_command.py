"""`rollart trace`: what it hands on, prints, writes and refuses. The prediction itself is tested with its own package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.main import main, parse
from rollart.cli.trace_text import described, plan_words
from rollart.cli.work import REAL, Work
from rollart.optrace.job import OPTIONS, Job
from rollart.optrace.prediction import ClassFigures, Prediction
from rollart.perf.memory import StageMemory
from rollart.perf.train_plan import TrainingPlan

GIB = 1 << 30
PLAN = TrainingPlan(
    devices=16, tp=2, pp=2, dp=4, micro_batch=1, global_batch=64, sequence=4096, shards=1, recompute="full", recompute_share=0.5
)  # fmt: skip


def a_class(name: str, **changes: Any) -> ClassFigures:
    memory = StageMemory(weights=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, activations=20 * GIB, buffers=4 * GIB)
    made = ClassFigures(
        name=name, ranks=8, busy_s=3.0, optimizer_s=0.1, host_s=0.2, exposed_s={"tp": 0.25, "dp": 0.05}, 
        comm_s={"tp": 0.5, "dp": 1.0}, bubble_s=0.4,
        memory=memory,
    )  # fmt: skip
    return replace(made, **changes)


def found(**changes: Any) -> Prediction:
    made = Prediction(
        model="llama3-8b", parameters=8e9, plan=PLAN, device="H100 SXM 80GB", device_memory_bytes=79.6 * GIB, interconnect="",
        framework="Megatron-Core", scale=1.075, scale_basis="analytic", step_s=4.0, log_std=0.1, model_flops=1.6e16,
        hardware_flops=2e16, peak_flops=989e12, host_s=0.01, jitter_s=0.02, classes=(a_class("stage 0"), a_class("stage 1")),
        provenance={"measured": 0.2, "analytic": 0.8}, sources={"roofline": 0.8, "profile": 0.2}, overlap_level=1,
        assumptions=("norm: below",), notes=("pp: derived",),
    )  # fmt: skip
    return replace(made, **changes)


def working(calls: list[tuple[Job, dict[str, Any]]], answer: Prediction | None = None) -> Work:
    def trace(job: Job, **given: Any) -> Prediction:
        calls.append((job, given))
        return answer or found()

    return replace(REAL, trace=trace)


def test_the_command_of_the_manual_asks_for_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[Job, dict[str, Any]]] = []
    words = "trace llama3-70b --tp 8 --pp 4 --dp 32 --seq 8192 --micro-batch 1 --global-batch 1024 --device h100"
    assert main(words.split(), work=working(calls)) == 0
    ((job, given),) = calls
    assert (job.model, job.device) == ("llama3-70b", "h100")
    plan = job.plan
    assert (plan.tp, plan.pp, plan.dp, plan.sequence, plan.micro_batch, plan.global_batch) == (8, 4, 32, 8192, 1, 1024)
    assert plan.devices == 1024
    assert given == {"timeline": None, "table": None, "lengths": ()}
    printed = capsys.readouterr().out
    for what in (
        "step time",
        "MFU",
        "bubble",
        "exposed comm",
        "memory, GiB",
        "durations rest on",
        "assumed: norm: below",
    ):
        assert what in printed


def test_every_option_has_a_flag() -> None:
    words = ["trace", "m"]
    for option in OPTIONS:
        value = {"whole": ["3"], "number": ["0.5"], "pairs": ["a=b"], "late": ["a=1"], "flag": []}.get(
            option.takes, ["x"]
        )
        words += [f"--{option.name.replace('_', '-')}", *value]
    given, plain = parse(words), parse(["trace", "m"])
    assert [option.name for option in OPTIONS if getattr(given, option.name) is None] == []
    assert [option.name for option in OPTIONS if getattr(plain, option.name) is not None] == []
    assert parse(["trace", "m", "--no-sequence-parallel"]).sequence_parallel is False


def test_the_command_line_goes_before_a_plan_file(tmp_path: Path) -> None:
    calls: list[tuple[Job, dict[str, Any]]] = []
    path = tmp_path / "plan.yaml"
    path.write_text("model: gpt2\ntp: 2\nmicro-batch: 4\nsequence_parallel: false\nassume: {norm: below}\nseq: 512\n")
    assert main(["trace", "--plan", str(path), "--seq", "1024"], work=working(calls)) == 0
    assert main(["trace", "llama3-8b", "--plan", str(path)], work=working(calls)) == 0
    (first, _), (second, _) = calls
    assert (first.model, second.model) == ("gpt2", "llama3-8b")
    assert (first.plan.tp, first.plan.micro_batch, first.plan.sequence, second.plan.sequence) == (2, 4, 1024, 512)
    assert first.assume == {"norm": "below"}


def test_json_holds_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["trace", "m", "--json", str(path)], work=working([])) == 0
    told = json.loads(path.read_text())
    assert told == json.loads(json.dumps(found().as_json()))
    assert told["figures"] == "estimated"
    assert told["low_s"] < told["step_s"] < told["high_s"]
    assert told["mfu"] == pytest.approx(1.6e16 / (4.0 * 16 * 989e12))
    assert told["exposed_s"] == {"tp": 0.25, "dp": 0.05}
    assert told["classes"][0]["memory"]["total"] == 40 * GIB


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trace"], "name a model to trace"),
        (["trace", "m", "--plan", "{}/absent.yaml"], "cannot be read"),
        (["trace", "m", "--plan", "{}/list.yaml"], "holds list, need a map"),
        (
            ["trace", "m", "--plan", "{}/odd.yaml"],
            "microbatch: there is no such option of a plan; did you mean micro_batch",
        ),
        (["trace", "m", "--table-lengths", "64"], "means nothing without --table FILE"),
        (["trace", "m", "--table", "{}/t", "--table-lengths", "64,x"], "give whole numbers"),
        (["trace", "m", "--json", "/proc/none/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_traced(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.yaml").write_text("- tp\n")
    (tmp_path / "odd.yaml").write_text("microbatch: 1\n")
    calls: list[tuple[Job, dict[str, Any]]] = []
    assert main([word.format(tmp_path) for word in words], work=working(calls)) != 0
    assert says in capsys.readouterr().err
    assert not calls


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "m", "--microbatch", "1"], work=working([]))
    assert "did you mean --micro-batch?" in capsys.readouterr().err


def changed(found: Prediction, change: Callable[[ClassFigures], ClassFigures]) -> Prediction:
    return replace(found, classes=tuple(change(one) for one in found.classes))


def test_what_does_not_fit_is_said() -> None:
    assert "DOES NOT FIT" not in described(found())
    full = changed(found(), lambda one: replace(one, memory=replace(one.memory, activations=90 * GIB)))
    assert "110.0 GiB of 79.6 GiB on the fullest rank DOES NOT FIT" in described(full)


def test_many_classes_are_cut_in_the_middle_and_said() -> None:
    many = replace(found(), classes=tuple(a_class(f"stage {at}") for at in range(20)))
    text = described(many)
    assert "stage 3 " in text
    assert "stage 10 " not in text
    assert "12 more rank classes" in text


def test_a_plan_is_told_in_words() -> None:
    assert plan_words(PLAN) == "tp 2 x pp 2 x dp 4, 1f1b, ZeRO 1, full recomputation of 50% of the layers, bf16"
    assert plan_words(TrainingPlan(devices=1, micro_batch=1, global_batch=1, sequence=8)) == "one device, bf16"


def test_the_level_of_overlap_is_the_one_that_was_applied() -> None:
    mixed = found(overlap_level=2, overlap_basis={"kernel name": 0.25, "physical": 0.75})
    assert "level 2 asked; applied: level 1 (SMs held) for 75%, level 2 (measured kernels) for 25%" in described(mixed)
    assert "level 1 asked; no computation runs beside communication" in described(found())
    assert mixed.as_json()["overlap_basis"] == {"kernel name": 0.25, "physical": 0.75}
