"""Writes docs/field_cases.md: each field case with the tests that hold it, found by their docstrings.

A test that holds a case has a docstring that begins with `Field case N:`. Run `make docs`; a test compares the page with
the tests.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "field_cases.md"
BEGINS = re.compile(r"Field case (\d+):")
LATER = "later"
CASES: dict[int, str] = {
    1: "one rollout of a group never returns: it is timed out, counted and replaced, the others train",
    2: "all producers die: the run ends before its watchdog, their failure in the last lines",
    3: "fewer problems than the run needs: epochs follow one another, nobody waits",
    4: "a lost status message: the lease expires and the prompt is issued again exactly once",
    5: "an evaluation interval divides the last step: the final evaluation is written, then the run ends",
    6: "resuming while engines wait for a version: the first step comes in normal time",
    7: "more devices asked for than there are: an error before launch lists both",
    8: "within 30 s of the last step nothing of the run is left",
    9: "groups of sizes 3, 2, 3 in any order: zero-mean advantages in each",
    10: "equal rewards in a group: advantages of exactly 0",
    11: "rewards 1, 0, 1, 0 of one task instance: advantages of both signs with mean 0",
    12: "a group baseline over groups of one: refused with the reason",
    13: "an unscored trajectory: out of mean, deviation and loss, and counted",
    14: "a KL term on tokens of the environment never changes a return",
    15: "rows of padding change no metric and no gradient",
    16: "a trajectory that an update interrupts keeps one length throughout and its old versions",
    17: "frozen weights: mean probability ratio 1 at any temperature",
    18: "truncated sampling: corrected for by the kept mass, or refused",
    19: "the gradient is the same for any micro-batches and any split over ranks",
    20: "what is trained are the ids that the engine saw and sampled, with any tokenizer",
    21: "max_staleness 0: every trained token has the trainer's version",
    22: "asynchronous training without behaviour log-probabilities: refused",
    23: "after an update a prompt is answered as by a fresh engine",
    24: "after every sync engines serve what the trainer published, bit by bit",
    25: "any bucket size gives the same weights",
    26: "one environment raises: the step is done with the others, the failure is counted",
    27: "5 % of trajectories fail: less than 10 % of the work is thrown away",
    28: "a tool or model server is down for a minute: no sample with reward 0 comes of it",
    29: "a completion that arrives twice or late is ignored",
    30: "a trajectory's whole life stays under one deadline",
    31: "a scorer that fails leaves a sample unscored, not 0",
    32: "after an interrupt and a restart nothing of the earlier run is left",
    33: "problems buffered at a checkpoint are trained once each",
    34: "a data set that changed between save and resume: a warning and a fresh start in it",
    35: "a resumed run consumes what an uninterrupted one does",
    36: "each task has its own cursor in a checkpoint",
    37: "an unknown key is an error with the nearest name; none is a silent no-op",
    38: "every field can be set by its dotted name",
    39: "`explain` prints what a configuration comes to",
    40: "the resolved mix is printed and kept with the run",
    41: "the core needs no environment package and no GPU library; the main job needs no network",
    42: "each number that an environment returns appears as a metric of its task",
    43: "a resumed run goes on in the same stream of metrics",
    44: "logging entropy costs no peak memory",
    45: "host memory does not grow over 200 steps",
    46: "a sync makes at most one call per bucket",
    47: "a starved, saturated or blocked part is named in plain words",
}
"""What must hold, in short."""


def tests_by_case(tests: Path) -> dict[int, list[str]]:
    """Case -> `file::test`, sorted. Raises ValueError for a case that CASES does not have."""
    found: dict[int, list[str]] = defaultdict(list)
    for module in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in BEGINS.findall(ast.get_docstring(node) or ""):
                    found[int(number)].append(f"{module.relative_to(tests.parent)}::{node.name}")
    if unknown := found.keys() - CASES.keys():
        raise ValueError(f"field cases {sorted(unknown)}: not in docs/field_cases.py CASES; add them there")
    return {number: sorted(names) for number, names in found.items()}


def page() -> str:
    """The page in Markdown."""
    held = tests_by_case(ROOT / "tests")
    lines = [
        "# Field cases",
        "",
        "What goes wrong for users of systems of this kind, as conditions, and the tests that hold each. Made by",
        "docs/field_cases.py from docstrings that begin with `Field case N:`.",
        "",
        f"{len(held)} of {len(CASES)} are held; the others are marked `{LATER}`.",
        "",
        "| case | what must hold | tests |",
        "|---|---|---|",
    ]
    for number, what in CASES.items():
        names = "<br>".join(f"`{name}`" for name in held.get(number, ())) or LATER
        lines.append(f"| {number} | {what} | {names} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
