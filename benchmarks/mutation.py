"""Share of small faults in `sched/` and `control/` that the tests or 300 torture seeds find, against a draw by seed from all
that a mutation tool makes, and against the project's own patches.

    make mutants SEED=0 COUNT=100

`draw` lists every mutant that cosmic-ray's operators make of these modules, draws by seed and writes patches (it runs where
cosmic-ray is installed: requirements/mutation.lock). `rollart torture --mutants DIR --json FILE` examines them. `score`
prints the share found with and without the survivors that tests/mutants/judged.yaml calls equivalent, and `page` writes the
page of the docs.

Not drawn: operators that need arguments, and what is no decision of the program: annotations, aliases of types, texts
(f-strings), and what does not compile or does not differ. The draw is uniform over the rest: the COUNT lowest by a digest of
seed and identity, so that a change elsewhere in a file leaves most of a draw as it was.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MUTATED = ("src/rollart/sched", "src/rollart/control")
JUDGED = ROOT / "tests" / "mutants" / "judged.yaml"
MOST_EQUIVALENT = 15
"""Survivors that may leave the count of one draw."""

Position = tuple[int, int]
"""Line from 1, column from 0."""
Judged = tuple[dict[str, str], dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    file: str
    operator: str
    line: str
    """Text of the line where it begins, without its indentation."""
    nth: int
    """Among the mutants of this file, operator and line text, in the order of the file."""
    occurrence: int
    """Among the mutants that this operator makes of the file, as cosmic-ray counts."""

    @property
    def id(self) -> str:
        """The same as long as its line and the number of equal lines above stay the same."""
        return f"{self.file} | {self.operator} | {self.line} | {self.nth}"

    def rank(self, seed: int) -> str:
        return hashlib.blake2b(f"{seed} {self.id}".encode(), digest_size=16).hexdigest()


# --- drawing -----------------------------------------------------------------------------------------------------------


def draw(seed: int, count: int, out: Path) -> None:
    """Write `count` patches to `out`, which holds no other patch afterwards."""
    files = sorted(
        str(path.relative_to(ROOT))
        for top in MUTATED
        for path in (ROOT / top).glob("*.py")
        if path.name != "__init__.py"
    )
    mutants = [mutant for file in files for mutant in all_mutants(file)]
    drawn: list[tuple[Mutant, str]] = []
    for mutant in sorted(mutants, key=lambda mutant: mutant.rank(seed)):
        if len(drawn) == count:
            break
        diff = difference(mutant)
        if diff:
            drawn.append((mutant, diff))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.patch"):
        old.unlink()
    for number, (mutant, diff) in enumerate(drawn):
        name = f"{number:03d}-{Path(mutant.file).parent.name}-{Path(mutant.file).stem}-{mutant.operator}.patch"
        (out / name).write_text(f"{mutant.id}\n\n{diff}", encoding="utf-8")
    sys.stdout.write(f"{len(drawn)} of {len(mutants)} mutants in {len(files)} files drawn with seed {seed}: {out}\n")


def all_mutants(file: str) -> Iterator[Mutant]:
    from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]
    from cosmic_ray.plugins import get_operator, operator_names  # type: ignore[import-not-found]

    source = (ROOT / file).read_text(encoding="utf-8")
    lines, spared = source.splitlines(), tuple(spans_spared(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue
        operator, seen = operator_class(), Counter[str]()
        positions = [where[0] for node in nodes for where in operator.mutation_positions(node)]
        for occurrence, start in enumerate(positions):
            text = lines[start[0] - 1].strip()
            seen[text] += 1
            if not any(begin <= start < end for begin, end in spared):
                operator_name = name.removeprefix("core/")
                yield Mutant(file=file, operator=operator_name, line=text, nth=seen[text] - 1, occurrence=occurrence)


def spans_spared(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """What is no decision of the program: annotations, aliases of types, texts."""
    for node in ast.walk(tree):
        spared: list[ast.expr | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            spared.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            spared.append(node.returns)
        elif isinstance(node, ast.JoinedStr):
            spared.append(node)
        yield from ((_start(one), _end(one)) for one in spared if one is not None)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr):
            yield _start(node), _end(node)


def _start(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def difference(mutant: Mutant) -> str:
    """The mutant as a unified diff; empty when it does not compile or is the same program."""
    from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    mutated = mutate_code(source, get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    try:
        if mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
            return ""
    except SyntaxError:
        return ""
    before, after = source.splitlines(keepends=True), mutated.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"a/{mutant.file}", f"b/{mutant.file}"))


# --- judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    found: list[dict[str, Any]]
    equivalent: list[tuple[dict[str, Any], str]]
    """Survivors that no test could find, each with its reason."""
    gaps: list[tuple[dict[str, Any], str]]
    """Other survivors, each with what is said of it, which may be nothing."""
    errors: list[dict[str, Any]]

    @property
    def share(self) -> float:
        return len(self.found) / max(1, len(self.found) + len(self.equivalent) + len(self.gaps))

    @property
    def share_without_equivalent(self) -> float:
        return len(self.found) / max(1, len(self.found) + len(self.gaps))


def tally(report: dict[str, Any], judged: Judged) -> Tally:
    """Raises SystemExit when the judgements do not fit: too many, or one about a mutant that was found."""
    equivalent, gaps = judged
    by_outcome = {
        outcome: [mutant for mutant in report["mutants"] if mutant["outcome"] == outcome]
        for outcome in ("found", "survived", "error")
    }
    wrong = [mutant["about"] for mutant in by_outcome["found"] if mutant["about"] in equivalent]
    if wrong:
        raise SystemExit(f"{JUDGED.name} calls equivalent what was found: {'; '.join(wrong)}")
    survived = by_outcome["survived"]
    same = [(mutant, equivalent[mutant["about"]]) for mutant in survived if mutant["about"] in equivalent]
    if len(same) > MOST_EQUIVALENT:
        raise SystemExit(f"{len(same)} survivors are called equivalent; at most {MOST_EQUIVALENT} may leave the count")
    return Tally(
        found=by_outcome["found"],
        equivalent=same,
        gaps=[(mutant, gaps.get(mutant["about"], "")) for mutant in survived if mutant["about"] not in equivalent],
        errors=by_outcome["error"],
    )


def judgements(path: Path) -> Judged:
    """Identity -> reason, of survivors that are called equivalent and of those that are not."""
    import yaml

    loaded = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}
    equivalent, gaps = (
        {entry["id"].strip(): entry["reason"].strip() for entry in loaded.get(name) or ()}
        for name in ("equivalent", "gaps")
    )
    return equivalent, gaps


def score(own: Tally, drawn: Tally) -> str:
    lines = [
        f"own patches: {len(own.found)} of {len(own.found) + len(own.equivalent) + len(own.gaps)} found",
        f"drawn: {len(drawn.found)} found, {len(drawn.gaps)} survived, {len(drawn.equivalent)} survived and are equivalent",
        f"drawn, all counted: {drawn.share:.1%}; without the equivalent ones: {drawn.share_without_equivalent:.1%}",
    ]
    for each in (own, drawn):
        lines += [f"error: {mutant['patch']}: {mutant['detail']}" for mutant in each.errors]
        lines += [f"survived: {mutant['patch']}: {_line(mutant)}" for mutant, _ in each.gaps]
    return "\n".join(lines) + "\n"


def _line(mutant: dict[str, Any]) -> str:
    return " ".join(mutant["about"].split())


# --- the page ----------------------------------------------------------------------------------------------------------


def page(own: Tally, drawn: Tally) -> str:
    """docs/mutation.md."""
    rows = [(mutant, _how(mutant)) for mutant in own.found] + [
        (mutant, f"**survived** {why}") for mutant, why in own.gaps
    ]
    parts = [
        "# Mutants\n\nFaults put into `sched/` and `control/` on purpose, and whether tests or 300 torture seeds find them. "
        "Made with `make mutants` (`benchmarks/mutation.py`); `rollart torture --mutants DIR` examines any other patches.\n",
        f"## Own patches: {len(own.found)} of {len(rows)} found\n",
        _table(("patch", "what is broken", "found by"), [(m["patch"], _line(m), how) for m, how in rows]),
        f"\n## Drawn by seed: {drawn.share_without_equivalent:.1%} found\n",
        f"{len(drawn.found)} found, {len(drawn.gaps)} survived; {len(drawn.equivalent)} more survived and are equivalent: no "
        f"test could tell them from the program. With those in the count {drawn.share:.1%} are found. By what:\n",
        _table(("by", "mutants"), sorted(Counter(_by(mutant) for mutant in drawn.found).items())),
        "\n### Survivors that are equivalent\n",
        _table(("mutant", "why"), [(_line(mutant), why) for mutant, why in drawn.equivalent]),
        "\n### Survivors that are not\n",
        _table(("mutant", "what it would take"), [(_line(mutant), why or "not judged") for mutant, why in drawn.gaps]),
    ]
    return "\n".join(parts)


def _by(mutant: dict[str, Any]) -> str:
    return f"{mutant['by']} ({mutant['step']})"


def _how(mutant: dict[str, Any]) -> str:
    return f"{mutant['step']}: {mutant['detail'].split(' - ')[0]}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return "None.\n"
    lines = [head, ["--"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")


# --- command line ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write patches")
    drawing.add_argument("out", type=Path)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--count", type=int, default=100)
    for name, what in (("score", "print the shares"), ("page", "print the page of the docs")):
        command = commands.add_parser(name, help=what)
        command.add_argument("own", type=Path, help="JSON of the project's own patches")
        command.add_argument("drawn", type=Path, help="JSON of drawn mutants")
    arguments = parser.parse_args(argv)
    if arguments.command == "draw":
        draw(arguments.seed, arguments.count, arguments.out)
        return
    judged = judgements(JUDGED)
    own, drawn = (
        tally(json.loads(path.read_text(encoding="utf-8")), judged) for path in (arguments.own, arguments.drawn)
    )
    sys.stdout.write(score(own, drawn) if arguments.command == "score" else page(own, drawn))


if __name__ == "__main__":
    main()
