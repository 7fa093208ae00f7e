"""The beginning of a gguf file, as its specification lays it out."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rollart.runtime.gguf_header import header_of


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


FACTS = {
    "general.architecture": struct.pack("<I", 8) + text("llama"),
    "llama.block_count": struct.pack("<II", 4, 3),
    "llama.rope.freq_base": struct.pack("<If", 6, 0.5),
    "whether": struct.pack("<I?", 7, True),
    "tokens": struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
    "scores": struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3),
    "nested": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 5, 2) + struct.pack("<2i", 1, 2),
    "last": struct.pack("<Iq", 11, -7),
}
TENSORS = {"token_embd.weight": (8, 5), "norm": (8,)}


def gguf(version: int = 3) -> bytes:
    facts = b"".join(text(key) + value for key, value in FACTS.items())
    tensors = b"".join(
        text(name) + struct.pack(f"<I{len(size)}Q", len(size), *size) + struct.pack("<IQ", 2, 64)
        for name, size in TENSORS.items()
    )
    return b"GGUF" + struct.pack("<IQQ", version, len(TENSORS), len(FACTS)) + facts + tensors


def test_facts_and_shapes_are_read_and_arrays_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf() + b"weights that nobody reads")
    header = header_of(path)
    assert header.facts == {
        "general.architecture": "llama", "llama.block_count": 3, "llama.rope.freq_base": 0.5, "whether": True, "tokens": 2,
        "scores": 3, "nested": 1, "last": -7,
    }  # fmt: skip
    assert header.tensors == TENSORS
    assert header.elements == 48


@pytest.mark.parametrize("data", [b"", b"GGML" + gguf()[4:], gguf(1), gguf()[:-30], gguf()[:40]])
def test_what_is_no_whole_file_is_an_error_that_is_known(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises((ValueError, struct.error)):
        header_of(path)
