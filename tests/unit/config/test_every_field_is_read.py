"""Every field of the schema is read outside of it, by code whose types say that it holds that part of the configuration.

A read of `x.batch` counts for `Schedule.batch` only where `x` is a `Schedule`: told by an annotation, by a match or
isinstance, by `y = x.schedule`, or by the chain `config.schedule.batch` itself.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import rollart
from rollart.config import learning, problems, schema, workers
from rollart.config.node import Node
from rollart.config.schema import RunConfig
from rollart.config.shape import Entries, Scalar, Section, Shape, Variants, shapes

PACKAGE = Path(rollart.__file__).parent
PARTS: dict[str, type[Node]] = {
    name: found
    for module in (learning, problems, schema, workers)
    for name, found in vars(module).items()
    if inspect.isclass(found) and issubclass(found, Node)
}
ROUNDS = 4
"""Names are passed on from line to line; no chain of names in the package is longer."""
Classes = frozenset[type[Node]]
NONE: Classes = frozenset()


def parts_of(shape: Shape) -> Classes:
    match shape:
        case Section(model=model):
            return frozenset({model})
        case Variants(models=models):
            return frozenset(models.values())
        case Entries(item=item):
            return parts_of(item)
        case _:
            return NONE


def named_in(annotation: ast.AST | None) -> Classes:
    """The parts that an annotation, a pattern or the second argument of isinstance names."""
    if annotation is None:
        return NONE
    found: set[type[Node]] = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id == "EnvConfig":
            found |= parts_of(shapes(schema.TaskConfig)["env"])
        elif isinstance(node, ast.Name) and node.id in PARTS:
            found.add(PARTS[node.id])
    return frozenset(found)


class Reads(ast.NodeVisitor):
    """What one module reads of the configuration. Fields of other classes are known by their names in all modules."""

    def __init__(self, fields: dict[str, Classes]) -> None:
        self.fields = fields
        self.names: dict[str, Classes] = defaultdict(frozenset)
        self.read: set[tuple[type[Node], str]] = set()
        self.chosen: set[type[Node]] = set()

    def of(self, node: ast.AST) -> Classes:
        match node:
            case ast.Name(id=name):
                return self.names[name]
            case ast.Attribute(value=base, attr=attr):
                owners = self.of(base)
                inner = [parts_of(shapes(owner)[attr]) for owner in owners if attr in owner.model_fields]
                own = self.names[f"self.{attr}"] if isinstance(base, ast.Name) and base.id == "self" else NONE
                return frozenset().union(*inner, own, NONE if owners else self.fields.get(attr, NONE))
            case ast.Subscript(value=base):
                return self.of(base)
            case ast.Call(func=ast.Attribute(value=base, attr="items" | "values")):
                return self.of(base)
            case ast.IfExp(body=body, orelse=other):
                return self.of(body) | self.of(other)
            case _:
                return NONE

    def bind(self, target: ast.AST, classes: Classes) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] |= classes
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.names[f"self.{target.attr}"] |= classes

    def visit_arg(self, node: ast.arg) -> None:
        self.names[node.arg] |= named_in(node.annotation)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=True):
                    self.bind(one, self.of(value))
            self.bind(target, self.of(node.value))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def _loop(self, target: ast.AST, over: ast.AST) -> None:
        self.bind(target.elts[-1] if isinstance(target, ast.Tuple) else target, self.of(over))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            self.bind(node.args[0], named_in(node.args[1]))
            self.chosen |= named_in(node.args[1])
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        for case in node.cases:
            self.bind(node.subject, named_in(case.pattern))
            self.chosen |= named_in(case.pattern)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.read |= {(owner, node.attr) for owner in self.of(node.value) if node.attr in owner.model_fields}
        self.generic_visit(node)


def all_parts(model: type[Node] = RunConfig) -> Iterator[tuple[type[Node], Classes]]:
    """Every part, with the variants that it is one of (itself alone where there is no choice)."""
    yield model, frozenset({model})
    for shape in shapes(model).values():
        for inner in parts_of(shape):
            yield from all_parts(inner)
            yield inner, parts_of(shape)


def unread(trees: list[ast.Module]) -> list[str]:
    fields: dict[str, Classes] = defaultdict(frozenset)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] |= named_in(node.annotation)
    read: set[tuple[type[Node], str]] = set()
    for tree in trees:
        reads = Reads(fields)
        for _ in range(ROUNDS):
            reads.visit(tree)
        read |= reads.read | {(part, "kind") for part in reads.chosen}
    told = {part for part, name in read if name == "kind"}
    variants = dict(all_parts())  # the last entry of a part is the one with its variants
    return sorted(
        f"{part.__name__}.{name}"
        for part, siblings in variants.items()
        for name, shape in shapes(part).items()
        if isinstance(shape, Scalar) or not parts_of(shape)
        if (part, name) not in read
        if not (name == "kind" and siblings - told <= {part})  # told by being none of the others
    )


def test_every_field_is_read_as_a_field_of_its_part() -> None:
    """Field case 37: a key that nothing reads would be a silent no-op."""
    placing = PACKAGE / "config" / "placement.py"  # it decides by what it reads, for all worlds alike
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "config" or path == placing]
    assert unread([ast.parse(path.read_text(encoding="utf-8")) for path in modules]) == []


def test_a_read_of_another_parts_field_of_the_same_name_does_not_count() -> None:
    """Field case 37: the check of the check: `batch` is a field of the schedule and of the warm start."""
    text = "def run(config: RunConfig, warm: WarmStart): return config.schedule.batch, warm.lr, other.steps"
    found = unread([ast.parse(text)])
    assert {"Schedule.batch", "WarmStart.lr"}.isdisjoint(found)
    assert {"WarmStart.batch", "Optimizer.lr", "Schedule.steps", "WarmStart.steps"} <= set(found)
