"""What is drawn, and how the survivors of a draw are counted: the parts of `benchmarks/mutation.py` that need no tool."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollart.sim.copies import checkout


@pytest.fixture(scope="module")
def mutation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_benchmark", checkout() / "benchmarks" / "mutation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def a_report(*outcomes: str) -> dict[str, Any]:
    return {
        "mutants": [
            {
                "patch": f"{number}.patch", "outcome": outcome, "about": f"file | operator | a | b {number}",
                "by": "test" if outcome == "found" else None, "step": "tests", "detail": f"test {number} - it fails",
            }
            for number, outcome in enumerate(outcomes)
        ]
    }  # fmt: skip


def test_equivalent_survivors_leave_the_count_and_gaps_do_not(mutation: ModuleType) -> None:
    report = a_report("found", "found", "found", "survived", "survived", "error")
    judged = ({"file | operator | a | b 4": "the same"}, {"file | operator | a | b 3": "a test of it"})
    tally = mutation.tally(report, judged)
    assert [mutant["patch"] for mutant in tally.found] == ["0.patch", "1.patch", "2.patch"]
    assert tally.share == pytest.approx(3 / 5)
    assert tally.share_without_equivalent == pytest.approx(3 / 4)
    assert [reason for _, reason in tally.gaps] == ["a test of it"]
    page = mutation.page(mutation.tally(a_report("found"), ({}, {})), tally)
    assert "75.0% found" in page
    assert "| file \\| operator \\| a \\| b 4 | the same |" in page
    score = mutation.score(tally, tally)
    assert "all counted: 60.0%; without the equivalent ones: 75.0%" in score
    assert "error: 5.patch" in score


def test_what_was_found_cannot_be_called_equivalent(mutation: ModuleType) -> None:
    with pytest.raises(SystemExit, match="what was found"):
        mutation.tally(a_report("found"), ({"file | operator | a | b 0": "the same"}, {}))


def test_no_more_than_fifteen_may_leave_the_count(mutation: ModuleType) -> None:
    same = {f"file | operator | a | b {number}": "the same" for number in range(16)}
    assert mutation.tally(a_report(*["survived"] * 15), (same, {})).share_without_equivalent == 0
    with pytest.raises(SystemExit, match="at most 15"):
        mutation.tally(a_report(*["survived"] * 16), (same, {}))


def test_judgements_are_read_with_ids_of_several_signs(mutation: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "judged.yaml"
    assert mutation.judgements(path) == ({}, {})
    path.write_text("equivalent:\n  - id: |-\n      a.py | Add | x: 'y' # z | 0\n    reason: same\ngaps: []\n")
    assert mutation.judgements(path) == ({"a.py | Add | x: 'y' # z | 0": "same"}, {})
    mutation.judgements(mutation.JUDGED)


def test_annotations_aliases_and_texts_are_spared_and_decisions_are_not(mutation: ModuleType) -> None:
    source = (
        'A = int | str\ndef f(x: int | None) -> str | None:\n    y: int | None = 1 | 2\n    return f"{x - 1} {y + 2}"\n'
    )
    spans = list(mutation.spans_spared(ast.parse(source)))

    def spared(line: int, text: str) -> bool:
        column = source.splitlines()[line - 1].index(text)
        return any(begin <= (line, column) < end for begin, end in spans)

    assert spared(1, "| str")
    assert spared(2, "| None) ")
    assert spared(2, "| None:")
    assert spared(3, "| None")
    assert spared(4, "- 1")
    assert not spared(3, "| 2")


def test_a_draw_is_by_seed_and_identity_alone(mutation: ModuleType) -> None:
    def of(line: str, occurrence: int) -> Any:
        return mutation.Mutant(file="a.py", operator="Add", line=line, nth=0, occurrence=occurrence)

    assert of("x + 1", 3).rank(0) == of("x + 1", 4).rank(0)
    assert of("x + 1", 3).rank(0) != of("x + 1", 3).rank(1)
    assert of("x + 1", 3).rank(0) != of("x + 2", 3).rank(0)
