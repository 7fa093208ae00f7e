"""Patches applied to copies of a checkout: a small one here, whose package has the same name as the real one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollart.core.errors import ConfigError, RollartError
from rollart.sim.copies import checkout, copy_checkout
from rollart.sim.mutants import STEPS, Step, Verdict, broken_promise, examine, failed_test, run

ADDS = """def add(a: int, b: int) -> int:
    return a + b
"""
CHECKS = "import sys; from rollart.sums import add; print('FAILED adds - one and two'); sys.exit(add(1, 2) != 3)"
RUNS = "import rollart.sums; rollart.sums.add(0, 0)"
STEPS_HERE = (
    Step(name="runs", words=("-c", RUNS), by="torture", detail=broken_promise),
    Step(name="adds", words=("-c", CHECKS), by="test", detail=failed_test),
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    package = root / "src" / "rollart"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(ADDS)
    (root / "tests").mkdir()
    (root / "pyproject.toml").write_text("")
    return root


def a_patch(folder: Path, name: str, line: str, *, was: str = "    return a + b", about: str = "") -> Path:
    head = "--- a/src/rollart/sums.py\n+++ b/src/rollart/sums.py\n@@ -1,2 +1,2 @@\n def add(a: int, b: int) -> int:\n"
    path = folder / f"{name}.patch"
    path.write_text(f"{about}\n{head}-{was}\n+{line}\n")
    return path


def judged(root: Path, patches: Sequence[Path], steps: Sequence[Step] = STEPS_HERE) -> list[Verdict]:
    return asyncio.run(examine(root, patches, steps, workers=2, say=lambda line: None))


def test_each_patch_is_found_by_the_first_step_that_fails_or_survives(small: Path, tmp_path: Path) -> None:
    before = (small / "src" / "rollart" / "sums.py").read_text()
    minus, quiet, raises = judged(
        small,
        [
            a_patch(tmp_path, "minus", "    return a - b", about="Takes away.\nAnd says so."),
            a_patch(tmp_path, "quiet", "    return b + a"),
            a_patch(tmp_path, "raises", "    raise OSError(a, b)"),
        ],
    )
    assert (minus.outcome, minus.by, minus.step) == ("found", "test", "adds")
    assert minus.detail == "adds - one and two"
    assert minus.about == "Takes away.\nAnd says so."
    assert minus.files == ("src/rollart/sums.py",)
    assert (quiet.outcome, quiet.by) == ("survived", None)
    assert (raises.outcome, raises.by, raises.step) == ("found", "torture", "runs")
    assert (small / "src" / "rollart" / "sums.py").read_text() == before
    assert not list(small.rglob("*.pyc")), "the checkout itself is only read"


def test_a_patch_that_does_not_apply_or_changes_nothing_is_an_error(small: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.patch"
    empty.write_text("")
    same = a_patch(tmp_path, "same", "    return a + b")
    verdicts = judged(small, [a_patch(tmp_path, "strange", "    return a - b", was="    return a * b"), same, empty])
    assert [verdict.outcome for verdict in verdicts] == ["error"] * 3
    assert "does not apply" in verdicts[0].detail
    assert verdicts[1].detail == "it changes nothing"


def test_a_copy_that_fails_without_a_patch_ends_it(small: Path, tmp_path: Path) -> None:
    (small / "src" / "rollart" / "sums.py").write_text(ADDS.replace("+", "-"))
    with pytest.raises(RollartError, match="without any patch a copy fails at adds"):
        judged(small, [a_patch(tmp_path, "minus", "    return a - b")])


def test_a_copy_must_import_its_own_package(small: Path, tmp_path: Path) -> None:
    (small / "src" / "rollart").rename(small / "src" / "another")
    with pytest.raises(RollartError, match="does not import its own package"):
        judged(small, [a_patch(tmp_path, "minus", "    return a - b")])


def test_a_hang_is_a_find_that_leaves_no_process(small: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = f"    import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(3600)"
    seen: list[str] = []
    patch = a_patch(tmp_path, "hangs", hangs)
    (verdict,) = asyncio.run(examine(small, [patch], STEPS_HERE, workers=1, say=seen.append, slower=0.0, grace_s=3.0))
    assert (verdict.outcome, verdict.by, verdict.step) == ("found", "timeout", "runs")
    assert "not done after 3 s" in seen[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_byte_code_of_the_unpatched_source_is_never_taken_for_the_patched_one(small: Path, tmp_path: Path) -> None:
    """The patch keeps the size of the file, and may keep its time."""
    copy = copy_checkout(small, tmp_path / "home")
    assert list(copy.root.rglob("sums.*.pyc"))
    (verdict,) = judged(small, [a_patch(tmp_path, "minus", "    return a - b")])
    assert verdict.outcome == "found"


def test_the_real_steps_run_what_is_here() -> None:
    root = checkout()
    paths = [word for step in STEPS for word in step.words if word.startswith("tests/")]
    assert paths
    assert all((root / path).is_dir() for path in paths)


def test_the_own_patches_apply_to_the_source_as_it_is() -> None:
    patches = sorted((checkout() / "tests" / "mutants").glob("*.patch"))
    assert len(patches) == 20
    for patch in patches:
        checked = subprocess.run(
            ["git", "apply", "--check", str(patch)], cwd=checkout(), capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, f"mend {patch.name}: {checked.stderr}"


def test_a_folder_without_a_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.patch"):
        run(tmp_path, None, 1)


def test_the_reason_is_read_from_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert (
        failed_test("x\nFAILED tests/a.py::test_b - assert 1 == 2\n1 failed", out)
        == "tests/a.py::test_b - assert 1 == 2"
    )
    assert failed_test("Traceback\nImportError: no\n", out) == "ImportError: no"
    assert broken_promise("Traceback\nImportError: no\n", out) == "ImportError: no"
    assert broken_promise("", out) == "no output"
    out.write_text(json.dumps({"broken": [{"seed": 17, "promises": ["ledger does not close", "more"]}]}))
    assert broken_promise("17 seeds\n", out) == "seed 17: ledger does not close"


def test_a_step_that_ends_badly_without_a_broken_promise_finds_nothing(small: Path, tmp_path: Path) -> None:
    """Seeds that hold too little, say: a mutant that only changes the schedule has broken nothing."""
    code = "import pathlib, rollart.sums as s, sys; pathlib.Path(sys.argv[1]).write_text('{0}'); sys.exit(s.add(1, 2) != 3)"
    nothing, broken = (
        Step(name="torture", words=("-c", code.replace("{0}", text), "{out}"), by="torture", detail=broken_promise)
        for text in ('{"broken": []}', '{"broken": [{"seed": 3, "promises": ["p"]}]}')
    )
    patch = a_patch(tmp_path, "minus", "    return a - b")
    assert judged(small, [patch], [nothing])[0].outcome == "survived"
    assert judged(small, [patch], [nothing, broken])[0].detail == "seed 3: p"
