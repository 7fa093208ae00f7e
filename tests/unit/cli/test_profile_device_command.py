"""`rollart profile-device`: the file it writes, what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.cli.main import main
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
