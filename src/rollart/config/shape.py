"""What the schema looks like, as data: which dotted keys exist, under which `kind`, and what each one takes.

Invariant: this is read off `schema.py` and never written by hand, so a new field can be set, explained, documented and
tested without a change here. Why: merging layers, naming the nearest key and printing the reference all need the same
answer to "what may stand at this place".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rollart.config.schema import Node, RunConfig
from rollart.core.errors import InvariantBroken

ANY = "<name>"
"""Stands for a name that the user chooses, in the dotted keys that `walk` yields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One value; a list counts as one value, it is replaced as a whole."""

    annotation: Any

    @property
    def takes_text(self) -> bool:
        union = get_origin(self.annotation) in (Union, UnionType)
        return str in (get_args(self.annotation) if union else (self.annotation,))

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words of a Literal field; empty for other fields."""
        return tuple(map(str, get_args(self.annotation))) if get_origin(self.annotation) is Literal else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part with fixed keys."""

    model: type[Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """A part whose keys depend on its `kind`."""

    models: Mapping[str, type[Node]]
    default: str | None
    """The kind of the field's default; None where the user must choose, or where the part may be absent."""
    optional: bool
    """null is allowed: the part is absent."""
    tagged: bool
    """pydantic puts the kind into the location of an error below this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A map from names that the user chooses to parts of one shape."""

    item: Section | Variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A map with any keys and values, handed to somebody else's code."""


Shape = Scalar | Section | Variants | Entries | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One settable value. `kinds` are the `(dotted part, kind)` choices under which the key exists."""

    dotted: str
    field: FieldInfo
    shape: Scalar | Free
    kinds: tuple[tuple[str, str], ...]


def _is_node(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Node)


def kind_of(model: type[Node]) -> str | None:
    """The value of the model's `kind` field; None when it has none."""
    field = model.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def _part(annotation: Any, discriminator: Any = None, default: Any = None) -> Section | Variants | None:
    """The shape of a node, or of a union of nodes; None for everything else."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        found = next((note.discriminator for note in notes if isinstance(note, FieldInfo)), None)
        return _part(inner, found, default)
    union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if union else (annotation,)
    models = [member for member in members if _is_node(member)]
    if not models or len(models) + (type(None) in members) != len(members):
        return None
    kinds = [kind_of(model) for model in models]
    if len(models) == 1 and kinds[0] is None and not union:
        return Section(model=models[0])
    if None in kinds:
        raise InvariantBroken(f"schema: {annotation} is a union of parts, but not each of them has a `kind`")
    return Variants(
        models={str(kind): model for kind, model in zip(kinds, models, strict=True)},
        default=kind_of(type(default)) if isinstance(default, Node) else None,
        optional=type(None) in members,
        tagged=discriminator is not None,
    )


def shape_of(field: FieldInfo) -> Shape:
    """The shape of one field of the schema. Raises InvariantBroken for a map that is neither free nor made of parts."""
    annotation: Any = field.annotation
    part = _part(annotation, field.discriminator, field.default)
    if part is not None:
        return part
    if get_origin(annotation) is dict:
        item = get_args(annotation)[1]
        if item is Any:
            return Free()
        entry = _part(item)
        if entry is None:
            raise InvariantBroken(f"schema: {annotation} is a map of {item}; use parts or Any as its values")
        return Entries(item=entry)
    return Scalar(annotation=annotation)


@cache
def shapes(model: type[Node]) -> Mapping[str, Shape]:
    """The shapes of a model's fields, in the order of the schema."""
    return {name: shape_of(field) for name, field in model.model_fields.items()}


def _below(shape: Shape, dotted: str, field: FieldInfo, kinds: tuple[tuple[str, str], ...]) -> Iterator[Key]:
    match shape:
        case Scalar() | Free():
            yield Key(dotted=dotted, field=field, shape=shape, kinds=kinds)
        case Section(model=model):
            yield from walk(model, dotted, kinds)
        case Variants(models=models):
            for kind, model in models.items():
                yield from walk(model, dotted, (*kinds, (dotted, kind)))
        case Entries(item=item):
            yield from _below(item, f"{dotted}.{ANY}", field, kinds)


def walk(model: type[Node] = RunConfig, prefix: str = "", kinds: tuple[tuple[str, str], ...] = ()) -> Iterator[Key]:
    """Every key of the schema, variants included, in the order of the schema. A `kind` comes once per variant."""
    for name, shape in shapes(model).items():
        dotted = f"{prefix}.{name}" if prefix else name
        yield from _below(shape, dotted, model.model_fields[name], kinds)
