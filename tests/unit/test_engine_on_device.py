"""The script for accelerators: tried on a CPU at its smallest size, and what it does where something fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark_modules import BENCHMARKS, loaded

_bare_loop, sides = loaded("engine_bare_loop"), loaded("engine_sides")
script = loaded("engine_on_device")
CASES = [
    "decode_of_bandwidth", "prefill_of_flops", "train_hand_written_step_mfu", "stage_of_host_link", "rebuild_of_flops",
    "generate",
]  # fmt: skip
PARTS = {"stage_s", "apply_s", "fingerprint_s", "first_step_s", "rebuild_s"}


def test_every_case_has_all_its_runs_and_the_parts_of_new_weights_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    cases = script.recorded(out, {"size": "tiny"}, script.measure(torch.device("cpu"), "tiny"))
    assert list(cases) == CASES
    assert json.loads(out.read_text(encoding="utf-8"))["cases"] == list(cases.values())
    for case in cases.values():
        assert len(case["ratios"]) == script.REPEATS == 5
        assert 0.0 < case["ratio_min"] <= case["ratio_median"] <= case["ratio_max"]
        assert all(len(figure["all"]) == 5 for figure in case["ours"].values())
    parts = cases["stage_of_host_link"]["ours"]
    assert set(parts) == PARTS
    assert parts["rebuild_s"]["min"] >= parts["first_step_s"]["min"] > 0.0
    assert set(cases["generate"]["theirs"]["sweep"]) == {"dynamic", "static"}
    link = cases["stage_of_host_link"]["theirs"]["host_to_device_bytes_per_s"]
    weight_bytes = cases["stage_of_host_link"]["ratios"][0] * parts["stage_s"]["all"][0] * link
    n_weights = 512 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert weight_bytes == pytest.approx(2 * n_weights)


def test_a_setting_that_fails_is_named_and_the_best_of_the_others_counts() -> None:
    work = sides.workload(vocab=8, rows=2, group=1, prompt=3, turns=1, observation=0, new=5, ragged=False)

    def broken(_: object) -> float:
        raise RuntimeError("Python.h: No such file or directory")

    theirs = {"slow": lambda _: 3.0, "broken": broken, "fast": lambda _: 2.0}
    first, second, third = script.beside(lambda _: 1.0, theirs, work)
    assert (first["ratio_median"], first["theirs"]["setting"]) == (3.0, "slow")  # there before the next one is tried
    assert (second["ratio_median"], set(second["theirs"]["failed"])) == (3.0, {"broken"})
    assert "RuntimeError: Python.h" in third["theirs"]["failed"]["broken"]
    assert (third["ratio_median"], third["theirs"]["setting"], len(third["ratios"])) == (2.0, "fast", 5)
    (none,) = script.beside(lambda _: 1.0, {"broken": broken}, work)
    assert (none["ratio_median"], set(none["theirs"]["failed"])) == (None, {"broken"})


def test_our_own_failure_is_not_taken_for_a_setting_of_theirs() -> None:
    def ours(_: object) -> float:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        list(script.beside(ours, {"any": lambda _: 1.0}, sides.workload(
            vocab=8, rows=1, group=1, prompt=3, turns=1, observation=0, new=5, ragged=False)))  # fmt: skip


def test_what_was_measured_before_a_crash_is_in_the_file_whole(tmp_path: Path) -> None:
    out = tmp_path / "found.json"

    def cases() -> Iterator[dict[str, Any]]:
        yield {"case": "a", "ratio_median": 1.0}
        yield {"case": "b", "ratio_median": 1.0}
        yield {"case": "a", "ratio_median": 2.0}
        raise MemoryError

    with pytest.raises(MemoryError):
        script.recorded(out, {"name": "x"}, cases())
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(case["case"], case["ratio_median"]) for case in found["cases"]] == [("a", 2.0), ("b", 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_ids_and_mask_are_where_the_model_is() -> None:
    work = sides.workload(vocab=8, rows=2, group=1, prompt=3, turns=2, observation=1, new=2, ragged=False)
    seen = []

    def generate(batch: torch.Tensor, *, attention_mask: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        seen.append((batch.device.type, attention_mask.device.type))
        return torch.ones(len(batch), batch.shape[1] + max_new_tokens, dtype=torch.int64)

    model = SimpleNamespace(device=torch.device("meta"), generate=generate)
    assert sides.generate(model, "dynamic", reuse=False)(work) > 0.0
    assert seen == [("meta", "meta")] * 2


def test_without_pydantic_only_the_training_step_is_not_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run = (
        "import sys; sys.modules['pydantic'] = None; import engine_on_device as script; "
        f"sys.argv = ['x', '--device', 'cpu', '--size', 'tiny', '--json', {str(out)!r}]; sys.exit(script.main())"
    )
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1, done.stderr
    assert "no module 'pydantic'" in done.stderr
    cases = {case["case"]: case for case in json.loads(out.read_text(encoding="utf-8"))["cases"]}
    assert list(cases) == CASES
    assert [name for name, case in cases.items() if case["ratio_median"] is None] == ["train_hand_written_step_mfu"]
    assert "pydantic" in cases["train_hand_written_step_mfu"]["failed"]
