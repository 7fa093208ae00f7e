"""What a gguf file says of itself at its beginning: its facts and the shapes of its tensors, without reading the weights.

Layout (the specification in ggml's `docs/gguf.md`, versions 2 and 3, little-endian): magic, version, number of tensors, number
of facts; per fact a key, a type and a value; per tensor a name, its extents, its type and where it lies. Invariant: reads
no further than that, and needs no package. Values of arrays are skipped, their lengths are kept.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type of a value to its format in `struct`."""
TEXT, ARRAY = 8, 9

Fact = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    facts: Mapping[str, Fact]
    """By key; of an array its length."""
    tensors: Mapping[str, tuple[int, ...]]
    """Extents by name, the fastest one first."""

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(math.prod(extents) for extents in self.tensors.values())


def header_of(path: Path) -> Header:
    """Raises ValueError, struct.error or OSError for what is no whole gguf file."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} is no gguf file")
        if (version := _scalar(file, "I")) not in VERSIONS:
            raise ValueError(f"{path} is a gguf file of version {version}, not of one of {VERSIONS}")
        n_tensors, n_facts = int(_scalar(file, "Q")), int(_scalar(file, "Q"))
        facts: dict[str, Fact] = {}
        for _ in range(n_facts):
            key = _text(file)
            facts[key] = _value(file, int(_scalar(file, "I")))
        tensors: dict[str, tuple[int, ...]] = {}
        for _ in range(n_tensors):
            name = _text(file)
            tensors[name] = tuple(int(_scalar(file, "Q")) for _ in range(int(_scalar(file, "I"))))
            file.seek(12, 1)  # type and place
    return Header(facts=facts, tensors=tensors)


def _scalar(file: BinaryIO, form: str) -> int | float | bool:
    value: int | float | bool = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]
    return value


def _text(file: BinaryIO) -> str:
    return file.read(int(_scalar(file, "Q"))).decode()


def _value(file: BinaryIO, kind: int) -> Fact:
    if kind == TEXT:
        return _text(file)
    if kind != ARRAY:
        return _scalar(file, _form(kind))
    of, length = int(_scalar(file, "I")), int(_scalar(file, "Q"))
    if of in (TEXT, ARRAY):
        for _ in range(length):
            _value(file, of)
    else:
        file.seek(length * struct.calcsize(f"<{_form(of)}"), 1)
    return length


def _form(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"values of type {kind} are not known")
    return SCALARS[kind]
