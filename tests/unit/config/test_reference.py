"""docs/configuration.md is made from the schema and is up to date."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollart.config.docs import main, reference
from rollart.config.schema import Node, RunConfig, ScratchModel
from rollart.config.shape import Entries, Section, Variants, shapes, walk

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_reference_is_what_the_schema_says(tmp_path: Path) -> None:
    written = tmp_path / "configuration.md"
    assert main([str(written)]) == 0
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_every_key_stands_in_the_reference() -> None:
    text = reference()
    assert [key.dotted for key in walk() if f"`{key.dotted}`" not in text and not key.dotted.endswith("kind")] == []


def test_every_part_of_a_configuration_is_described() -> None:
    """A name says what `layers` or `lr` is; parts and variants need a sentence."""
    assert [model.__name__ for model in parts(RunConfig) if not model.__doc__] == []
    assert ScratchModel in parts(RunConfig)


def parts(model: type[Node]) -> Iterator[type[Node]]:
    yield model
    for shape in shapes(model).values():
        below = shape.item if isinstance(shape, Entries) else shape
        models = list(below.models.values()) if isinstance(below, Variants) else []
        for inner in [below.model] if isinstance(below, Section) else models:
            yield from parts(inner)


def test_a_call_without_a_file_is_refused() -> None:
    assert main([]) == 2
