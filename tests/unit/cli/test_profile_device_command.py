"""`rollart profile-device`: the file it writes, what it says, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollart.cli import trace
from rollart.cli.main import main
from rollart.optrace.measured_ops import measurable, work_of
from rollart.optrace.predict import rank_trace
from rollart.perf.device_profile import read_profile

TRIAL = ["--device", "cpu", "--grid", "tiny", "--minutes", "0.01", "--ranks", "1"]


def test_a_profile_is_written_described_and_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cpu.json"
    assert main(["profile-device", "--out", str(out), *TRIAL]) == 0
    first = read_profile(out)
    said = capsys.readouterr().out
    assert said.rstrip().endswith(str(out))
    assert all(word in said for word in ("TFLOP/s", "GB/s", "torch", "us an operator"))
    assert main(["profile-device", "--out", str(out), "--add", *TRIAL]) == 0
    assert {row.signature for row in read_profile(out).ops} >= {row.signature for row in first.ops}
    assert list(tmp_path.iterdir()) == [out]


def test_the_operators_of_a_job_are_measured_before_all_others(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "cpu.json"
    plan.write_text(
        "model: gpt:layers=2,hidden=64,heads=4,vocab=96\nseq: 32\nglobal_batch: 4\ndtype: fp32\nframework: plain\n"
        f"profile: {out}\n"
    )
    assert main(["profile-device", "--out", str(out), "--plan", str(plan), *TRIAL[:-3], "0.05", *TRIAL[-2:]]) == 0
    job = trace.job_in(plan)
    assert job.profile == out
    wanted = measurable(rank_trace(replace(job, profile=None)))
    known = {row.signature for row in read_profile(out).ops}
    products = [work_of(op).signature for op in wanted if op.kind in ("gemm", "attention", "attention_backward")]
    assert len(products) > 8
    assert known.issuperset(products)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--device", "abacus"], "abacus"), (["--device", "cpu", "--grid", "huge"], "huge"),
     (["--device", "cpu", "--minutes", "-1"], "minutes is -1")],
)  # fmt: skip
def test_what_cannot_be_measured_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["profile-device", "--out", str(tmp_path / "x.json"), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
