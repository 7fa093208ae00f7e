"""The reference of all settings, made from the schema: `python -m rollart.config.docs docs/configuration.md`.

Invariant: the file holds what the schema says and nothing else; a test compares the two. Why: a reference that is written
by hand is wrong after the first new field.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rollart.config.schema import Node, RunConfig
from rollart.config.shape import ANY, Entries, Free, Scalar, Section, Shape, Variants, shapes
from rollart.config.text import scalar_text

DEFAULT_COLUMNS = 40
"""Longest default that is printed whole."""
MADE_FROM_THE_SCHEMA = """# Configuration

*Made from the schema by `python -m rollart.config.docs docs/configuration.md`; change the classes, not this file.*

A run's values come in layers, each laid over the one before:

1. the defaults below,
2. a recipe (`rollart train first_run`) or a YAML file (`rollart train my.yaml`). A file may begin with
   `base: RECIPE_OR_FILE` and `presets: [NAME, ..]`,
3. presets named on the command line (`rollart train first_run sync`),
4. the machine's profile: `~/.config/rollart/machine.yaml` where it exists, or `--profile FILE`; `--profile none` for none,
5. `dotted.key=value` on the command line. A value is YAML (`1e-3`, `true`, `null`, `[a, b]`, `{a: 1}`); where text is asked
   for it is taken as it stands, unless it begins with a quote.

Maps merge, lists replace. A part with a `kind` has the keys of that kind only; another `kind` takes the keys of the
former one away. `tasks.NAME=null` takes a task away. An unknown key is an error that names the nearest one, a key given
twice in a file is an error, and all errors are reported together (rules across keys once each key is right by itself).
`rollart explain RECIPE_OR_FILE [key=value ..]` prints every value with its origin and what the numbers come to; a run
keeps both in its `config.yaml`, which can be run again.
"""

_BOUNDS = {"Ge": ("ge", ">="), "Gt": ("gt", ">"), "Le": ("le", "<="), "Lt": ("lt", "<")}
"""annotated-types' class, its attribute, and how it is written here."""


def reference() -> str:
    """The whole document."""
    blocks = [MADE_FROM_THE_SCHEMA]
    top = {name: shape for name, shape in shapes(RunConfig).items() if isinstance(shape, Scalar | Free)}
    blocks.append(_heading("Top level", "", RunConfig) + _table(RunConfig, "", top))
    for name, shape in shapes(RunConfig).items():
        if name not in top:
            blocks += _blocks(name, shape, RunConfig.model_fields[name])
    return "\n".join(blocks)


def _blocks(dotted: str, shape: Shape, field: FieldInfo) -> Iterator[str]:
    """One block per part at and below `dotted`."""
    match shape:
        case Section(model=model):
            yield from _part(dotted, "", model)
        case Variants(models=models, default=default, optional=optional):
            for kind, model in models.items():
                chosen = " (default)" if kind == default else ""
                yield from _part(dotted, f", kind: {kind}{chosen}", model)
            if optional:
                yield f"`{dotted}` may be null (default). {field.description or ''}\n"
        case Entries(item=item):
            yield from _blocks(f"{dotted}.{ANY}", item, field)
        case _:
            return


def _part(dotted: str, kind: str, model: type[Node]) -> Iterator[str]:
    own = {name: shape for name, shape in shapes(model).items() if isinstance(shape, Scalar | Free) and name != "kind"}
    yield _heading(f"`{dotted}`", kind, model) + (_table(model, f"{dotted}.", own) if own else "No keys of its own.\n")
    for name, shape in shapes(model).items():
        if not isinstance(shape, Scalar | Free):
            yield from _blocks(f"{dotted}.{name}", shape, model.model_fields[name])


def _heading(title: str, kind: str, model: type[Node]) -> str:
    text = " ".join((model.__doc__ or "").split())
    return f"## {title}{kind}\n\n{text}\n\n"


def _table(model: type[Node], prefix: str, own: Mapping[str, Shape]) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    for name, shape in own.items():
        field = model.model_fields[name]
        cells = [
            f"`{prefix}{name}`",
            _takes(shape, field),
            _default(field),
            " ".join((field.description or "").split()),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _takes(shape: Shape, field: FieldInfo) -> str:
    if not isinstance(shape, Scalar):
        return "map"
    if shape.choices:
        return ", ".join(f"`{choice}`" for choice in shape.choices)
    bounds = [
        f"{sign} {getattr(note, attribute):g}"
        for note in field.metadata
        for attribute, sign in [_BOUNDS.get(type(note).__name__, ("", ""))]
        if attribute
    ]
    return ", ".join([_type_name(shape.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) in (list, tuple):
        return f"list of {_type_name(get_args(annotation)[0])}"
    return " or ".join(_type_name(member) for member in get_args(annotation)) or str(annotation)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    text = scalar_text(field.get_default(call_default_factory=True))
    return f"`{text if len(text) <= DEFAULT_COLUMNS else text[: DEFAULT_COLUMNS - 3] + '...'}`"


def main(arguments: list[str]) -> int:
    """Write the reference to the file named by the one argument. Returns 2 when called otherwise."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m rollart.config.docs FILE\n")
        return 2
    Path(arguments[0]).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
