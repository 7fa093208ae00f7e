"""pydantic's findings as lines for the user: what, the value, where it was set, and what to write instead.

Invariant: every finding becomes at least one line; a finding of an unknown type keeps pydantic's own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollart.config import nearest
from rollart.config.origins import DEFAULT, Leaf, Problem, Tree, leaves
from rollart.config.schema import RunConfig
from rollart.config.shape import Entries, Scalar, Section, Shape, Variants, shapes
from rollart.config.text import scalar_text

_REMEDIES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda ctx: "write a whole number",
    "int_from_float": lambda ctx: "write a whole number",
    "float_type": lambda ctx: "write a number",
    "finite_number": lambda ctx: "write a finite number",
    "bool_type": lambda ctx: "write true or false",
    "string_type": lambda ctx: "write text",
    "dict_type": lambda ctx: "write a map of keys and values",
    "greater_than": lambda ctx: f"too small; write more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"too small; write {ctx['ge']:g} or more",
    "less_than": lambda ctx: f"too large; write less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"too large; write {ctx['le']:g} or less",
    "literal_error": lambda ctx: f"write {ctx['expected']}",
    "string_pattern_mismatch": lambda ctx: f"write text that matches {ctx['pattern']}",
}
"""What to do, per type of pydantic's findings."""


_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=")
"""A key in the text of a broken rule."""


def problems_of(error: ValidationError, tree: Tree) -> list[Problem]:
    """The findings on a laid tree, in pydantic's order. Cross-field rules write whole lines of their own."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        path, leaf, shape = _place(detail["loc"], tree)
        if detail["type"] == "value_error":
            lines = str(detail["ctx"]["error"]).splitlines()
            found += [Problem(path=path, text=_rule(line, path, tree)) for line in lines]
        elif detail["type"] == "missing":
            found.append(Problem(path=path, text=_missing(path, shape, tree)))
        else:
            found.append(Problem(path=path, text=_bad_value(path, leaf, shape, detail)))
    return found


def _place(loc: tuple[int | str, ...], tree: Tree) -> tuple[str, Leaf | None, Shape]:
    """The dotted key, the leaf (None for a part or a missing key) and the shape that a finding is about."""
    shape: Shape = Section(model=RunConfig)
    at: Tree | None = tree
    path: list[str] = []
    steps = iter(loc)
    for step in steps:
        name = str(step)
        if isinstance(shape, Variants) and shape.tagged:  # pydantic puts the kind before the key
            shape = Section(model=shape.models[name])
            name = str(next(steps, ""))
            if not name:
                break
        path.append(name)
        match shape:
            case Section(model=model):
                shape = shapes(model).get(name, Scalar(annotation=Any))
            case Variants(models=models):
                kind = at.get("kind") if isinstance(at, dict) else None
                model = models[str(kind.value)] if isinstance(kind, Leaf) else next(iter(models.values()))
                shape = shapes(model).get(name, Scalar(annotation=Any))
            case Entries(item=item):
                shape = item
            case _:
                pass
        at = at.get(name) if isinstance(at, dict) else None
    return ".".join(path), at if isinstance(at, Leaf) else None, shape


def _rule(line: str, path: str, tree: Tree) -> str:
    """A broken rule with whole dotted names, and where each value that it names was set."""
    set_at = {key: leaf.origin for key, leaf in leaves(tree)}
    if path and _NAMED.match(line) and f"{path}.{line.partition('=')[0]}" in set_at:
        line = f"{path}.{line}"
    named = [key for key in dict.fromkeys(_NAMED.findall(line)) if set_at.get(key, DEFAULT) != DEFAULT]
    return f"{line} ({', '.join(f'{key}: {set_at[key]}' for key in named)})" if named else line


def _missing(path: str, shape: Shape, tree: Tree) -> str:
    parent, _, _ = path.rpartition(".")
    group, _, name = parent.rpartition(".")
    entries = {key.removeprefix(f"{group}.").split(".")[0] for key, _ in leaves(tree) if key.startswith(f"{group}.")}
    hint = nearest.among(name, sorted(entries - {name}), f"{group}.") if group else ""
    hint = hint if "did you mean" in hint else ""
    todo = f"choose {path}.kind from {', '.join(shape.models)}" if isinstance(shape, Variants) else "give it a value"
    return f"{path} is missing; {todo}{hint}"


def _bad_value(path: str, leaf: Leaf | None, shape: Shape, detail: ErrorDetails) -> str:
    remedy = _REMEDIES.get(detail["type"])
    todo = remedy(detail.get("ctx", {})) if remedy else detail["msg"]
    value = detail["input"] if leaf is None else leaf.value
    origin = "" if leaf is None else f" ({leaf.origin})"
    choices = shape.choices if isinstance(shape, Scalar) else ()
    if detail["type"] == "literal_error" and isinstance(value, str) and choices:
        near = nearest.among(value, choices)
        todo += near if "did you mean" in near else ""
    return f"{path}={scalar_text(value)}{origin}: {todo}"
