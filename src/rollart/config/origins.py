"""Where each value of a configuration comes from, and how layers of values are laid over each other.

Invariant: a laid tree holds every value of the configuration, defaults included, each in a `Leaf` with its origin. Maps
merge, lists and single values replace, a changed `kind` takes the keys of the other variant away. Nothing here raises for
what the user wrote: each problem becomes one line in `problems`, so that all of them are reported together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollart.config import nearest
from rollart.config.schema import Node
from rollart.config.shape import Entries, Free, Scalar, Section, Shape, Variants, kind_of, shapes
from rollart.config.text import Located, scalar_text

LayerName = Literal["default", "recipe", "file", "preset", "profile", "command line"]
"""In the order in which they are laid, lowest first; a file's recipe lies below the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The layer that gave a value, what the layer is called, and the line in it where that is known."""

    layer: LayerName
    name: str = ""
    line: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        return f"{self.layer} {self.name}{line}" if self.name else self.layer


DEFAULT = Origin(layer="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line for the user, and the dotted key that it is about."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value with its origin. `text` is what was written, for fields that take text."""

    value: Any
    origin: Origin
    text: str | None = None


Tree = Leaf | dict[str, "Tree"]
"""Nested like the configuration itself."""


# --- trees from what the layers are made of --------------------------------------------------------------------------


def tree_of(value: Any, origin: Origin) -> Tree:
    """A tree from plain values."""
    if isinstance(value, Mapping):
        return {str(key): tree_of(item, origin) for key, item in value.items()}
    return Leaf(value=value, origin=origin)


def tree_of_located(located: Located, layer: LayerName, name: str, *, lines: bool = True) -> Tree:
    """A tree from parsed YAML; each value's origin names its line where `lines` is true."""
    if isinstance(located.value, dict):
        return {key: tree_of_located(item, layer, name, lines=lines) for key, item in located.value.items()}
    origin = Origin(layer=layer, name=name, line=located.line if lines else None)
    return Leaf(value=located.value, origin=origin, text=located.text)


def tree_of_node(node: Node, origin: Origin) -> Tree:
    """What was set on purpose in a typed configuration; each part's `kind` always, its defaults never."""
    tree: dict[str, Tree] = {}
    for name in type(node).model_fields:
        if name in node.model_fields_set or name == "kind":
            tree[name] = _tree_of_any(getattr(node, name), origin)
    return tree


def _tree_of_any(value: Any, origin: Origin) -> Tree:
    if isinstance(value, Node):
        return tree_of_node(value, origin)
    if isinstance(value, Mapping):
        return {str(key): _tree_of_any(item, origin) for key, item in value.items()}
    return Leaf(value=value, origin=origin)


def defaults_of(model: type[Node]) -> dict[str, Tree]:
    """All defaults of a model, and its `kind`; fields that have no default are left out."""
    tree: dict[str, Tree] = {}
    for name, field in model.model_fields.items():
        if name == "kind":
            tree[name] = Leaf(value=kind_of(model), origin=DEFAULT)
        elif not field.is_required():
            default = field.get_default(call_default_factory=True)
            tree[name] = tree_of(default.model_dump() if isinstance(default, Node) else default, DEFAULT)
    return tree


# --- trees to plain values -------------------------------------------------------------------------------------------


def plain(tree: Tree) -> Any:
    """The values without their origins."""
    if isinstance(tree, Leaf):
        return tree.value
    return {key: plain(item) for key, item in tree.items()}


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every `(dotted key, leaf)`; an empty map is one leaf, and can only be a default."""
    if isinstance(tree, Leaf):
        yield prefix, tree
    elif not tree and prefix:
        yield prefix, Leaf(value={}, origin=DEFAULT)
    else:
        for key, item in tree.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else key)


# --- laying one tree over another ------------------------------------------------------------------------------------


def lay(shape: Shape, below: Tree | None, over: Tree, path: str, problems: list[Problem]) -> Tree | None:
    """Lay `over` on `below` at the dotted `path`; what cannot be laid is told in `problems` and left out.

    None: there is nothing at this place (a part whose kind is not known).
    """
    match shape:
        case Scalar():
            return _lay_scalar(shape, below, over, path, problems)
        case Section(model=model):
            return _lay_section(model, below, over, path, problems)
        case Variants():
            return _lay_variant(shape, below, over, path, problems)
        case Entries():
            return _lay_entries(shape, below, over, path, problems)
        case Free():
            return _lay_free(below, over, path, problems)


def _lay_scalar(shape: Scalar, below: Tree | None, over: Tree, path: str, problems: list[Problem]) -> Tree | None:
    if isinstance(over, dict):
        keys = ", ".join(f"{path}.{key}" for key in over) or "an empty map"
        text = f"{keys}: {path} is a single value and has no keys; write {path}=VALUE"
        problems.append(Problem(path=path, text=text))
        return below
    if shape.takes_text and over.text is not None and not isinstance(over.value, str | None):
        return Leaf(value=over.text, origin=over.origin)
    return Leaf(value=over.value, origin=over.origin)


def _lay_section(
    model: type[Node], below: Tree | None, over: Tree, path: str, problems: list[Problem]
) -> dict[str, Tree]:
    base: dict[str, Tree] = below if isinstance(below, dict) else defaults_of(model)
    if isinstance(over, Leaf):
        _not_a_map(path, over, tuple(shapes(model)), problems)
        return base
    return _lay_fields(model, base, over, path, problems)


def _shown(leaf: Leaf) -> str:
    return scalar_text(leaf.value)


def _not_a_map(path: str, over: Leaf, keys: tuple[str, ...], problems: list[Problem]) -> None:
    example = f", e.g. {path}.{keys[0]}=VALUE" if keys else ""
    text = f"{path}={_shown(over)} ({over.origin}): {path} has keys of its own; set those{example}"
    problems.append(Problem(path=path, text=text))


def _lay_fields(
    model: type[Node], below: dict[str, Tree], over: dict[str, Tree], path: str, problems: list[Problem]
) -> dict[str, Tree]:
    known = shapes(model)
    laid = dict(below)
    for key, item in over.items():
        dotted = f"{path}.{key}" if path else key
        if key not in known:
            rest, leaf = next(leaves(item), ("", None))
            text = nearest.unknown_key(model, path, key, rest)
            problems.append(Problem(path=dotted, text=text if leaf is None else f"{text} ({leaf.origin})"))
            continue
        result = lay(known[key], laid.get(key), item, dotted, problems)
        if result is not None:
            laid[key] = result
    # the order of the schema, whatever the order of the layers
    return {key: laid[key] for key in known if key in laid}


def _kind_in(tree: Tree | None) -> str | None:
    kind = tree.get("kind") if isinstance(tree, dict) else None
    return str(kind.value) if isinstance(kind, Leaf) else None


def _lay_variant(shape: Variants, below: Tree | None, over: Tree, path: str, problems: list[Problem]) -> Tree | None:
    if isinstance(over, Leaf):
        if over.value is None and shape.optional:
            return over
        text = nearest.part_given_a_value(shape, path, over.value, str(over.origin))
        problems.append(Problem(path=path, text=text))
        return below
    had = _kind_in(below)
    only = next(iter(shape.models)) if len(shape.models) == 1 else None
    kind = _kind_in(over) or had or shape.default or only
    if kind is None:
        text = f"{path}.kind is missing; use one of {', '.join(shape.models)}"
        problems.append(Problem(path=path, text=text))
        return None
    if kind not in shape.models:
        problems.append(Problem(path=path, text=nearest.unknown_kind(shape, path, kind)))
        return below
    model = shape.models[kind]
    base = below if kind == had and isinstance(below, dict) else defaults_of(model)
    return _lay_fields(model, base, over, path, problems)


def _lay_entries(shape: Entries, below: Tree | None, over: Tree, path: str, problems: list[Problem]) -> Tree:
    laid: dict[str, Tree] = dict(below) if isinstance(below, dict) else {}
    if isinstance(over, Leaf):
        text = f"{path}={_shown(over)} ({over.origin}): {path} is a map of names; set {path}.NAME.KEY"
        problems.append(Problem(path=path, text=text))
        return laid
    for name, item in over.items():
        dotted = f"{path}.{name}"
        if isinstance(item, Leaf) and item.value is None:
            if laid.pop(name, None) is None:
                near = nearest.among(name, laid, f"{path}.")
                text = f"{dotted}=null ({item.origin}): there is no {dotted} to take away{near}"
                problems.append(Problem(path=dotted, text=text))
            continue
        result = lay(shape.item, laid.get(name), item, dotted, problems)
        if result is not None:
            laid[name] = result
    return laid


def _lay_free(below: Tree | None, over: Tree, path: str, problems: list[Problem]) -> Tree | None:
    if isinstance(over, Leaf):
        _not_a_map(path, over, (), problems)
        return below
    return _merged(below, over)


def _merged(below: Tree | None, over: dict[str, Tree]) -> dict[str, Tree]:
    laid: dict[str, Tree] = dict(below) if isinstance(below, dict) else {}
    for key, item in over.items():
        laid[key] = _merged(laid.get(key), item) if isinstance(item, dict) else item
    return laid
