"""What a run writes as config.yaml, and the dialect of YAML it is written in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config.load import Known, Resolved, dump, load_file, resolve
from rollart.config.schema import PythonEnv, RunConfig, TaskConfig
from rollart.config.text import parse, scalar_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(bool), inner, max_size=3),
    max_leaves=6,
)


def resolved_with(kwargs: dict[str, Any]) -> Resolved:
    run = RunConfig(name="kept", tasks={"mine": TaskConfig(env=PythonEnv(kind="python", entry="m:C", kwargs=kwargs))})
    return resolve(
        "kept", ["optimizer.lr=1e-5", "tasks.mine.ratio=2"], known=Known(recipes={"kept": lambda: run}, presets={})
    )


def test_the_origin_of_each_value_stands_beside_it() -> None:
    lines = dump(resolved_with({})).splitlines()
    assert "name: kept  # recipe kept" in lines
    assert "  lr: 1.0e-05  # command line" in lines
    assert "  batch: 64  # default" in lines
    assert "    ratio: 2.0  # command line" in lines
    assert sum("  # " in line for line in lines if not line.startswith("#")) == len(resolved_with({}).origins)


def test_a_dumped_configuration_loads_back_and_every_value_comes_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    resolved = resolved_with({"a": {"b": [1, "x"]}, "empty": {}, "text": "two\nlines # no comment: here"})
    path.write_text(dump(resolved), encoding="utf-8")
    again = load_file(path)
    assert again.config == resolved.config
    assert list(again.origins) == list(resolved.origins)
    empty = ("empty", "pools", "devices", "script")  # a map without entries has no line of its own
    values = {key: origin.layer for key, origin in again.origins.items() if key.rpartition(".")[2] not in empty}
    assert set(values.values()) == {"file"}


@settings(max_examples=30)
@given(st.dictionaries(TEXT.filter(bool), VALUES, max_size=4))
def test_any_value_survives_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    resolved = resolved_with(kwargs)
    path.write_bytes(dump(resolved).encode())
    assert load_file(path).config == resolved.config


@given(VALUES)
def test_a_value_is_one_line_and_reads_back_as_itself(value: Any) -> None:
    text = scalar_text(value)
    assert "\n" not in text
    assert plain(parse(f"key: {text}  # origin", "test").value["key"].value) == value


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item.value) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5E+3", -2500.0),
        ("16_000", 16000),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("1.2.3", "1.2.3"),
        (".inf", math.inf),
        ("e5", "e5"),
        ("-", "-"),
    ],
)
def test_plain_words_mean_what_they_look_like(text: str, value: object) -> None:
    """YAML 1.1 reads `1e-3` as text, `010` as eight, `1:30` as ninety and `no` as false."""
    found = parse(f"{{key: {text}}}" if text != "-" else '{key: "-"}', "test").value["key"].value
    assert (type(found), found) == (type(value), value)
