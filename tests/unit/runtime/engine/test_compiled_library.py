"""The library that the machine's compiler makes: whatever is wrong with that is an answer, in a time that is known."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollart.runtime.compiled import COMPILERS, DECODING, build


def compilers(folder: Path, script: str) -> str:
    """A folder that holds one `cc`, which does what a shell script says."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    return str(folder)


def real() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        pytest.skip("no C compiler here")
    return found


def test_without_a_compiler_the_names_that_were_looked_for_are_told(tmp_path: Path) -> None:
    assert build(DECODING, search=str(tmp_path), root=tmp_path) == "no C compiler (cc, gcc, clang) is on the PATH"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no licence for that >&2; exit 1", "passes.c: no licence for that"),
        ("exit 0", "nothing was made"),
        ('while [ "$1" != -o ]; do shift || exit 0; done; echo garbage > "$2"', "attention.so"),
        ("sleep 60 & wait", "--version .. had not ended after 0.2 s"),
        ('[ "$1" = --version ] && exit 0; sleep 60 & wait', "had not ended after 0.2 s"),
    ],
    ids=["refuses", "makes nothing", "makes no library", "hangs at once", "hangs over the source"],
)
def test_a_compiler_that_fails_says_why_and_leaves_nothing_behind(tmp_path: Path, script: str, why: str) -> None:
    began = time.monotonic()
    answer = build(
        DECODING,
        search=compilers(tmp_path / "bin", script),
        root=tmp_path / "kept",
        limit_s=0.2 if "60" in script else 30,
    )
    assert isinstance(answer, str)
    assert why in answer
    assert "\n" not in answer
    assert time.monotonic() - began < 30.0, "what a compiler has started is ended with it"
    if "garbage" not in script:
        assert list((tmp_path / "kept").rglob("*.so")) == []


def test_a_file_that_is_no_program_is_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("text")
    (tmp_path / "cc").chmod(0o755)
    assert "Exec format error" in str(build(DECODING, search=str(tmp_path), root=tmp_path))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = build(DECODING, search=compilers(tmp_path / "bin", "exit 0"), root=tmp_path / "file")
    assert isinstance(answer, str)
    assert "set XDG_CACHE_HOME to a folder that can" in answer


def test_a_library_that_changed_on_disk_is_made_again(tmp_path: Path) -> None:
    """Same size, one byte less good: it is neither loaded nor left to stand."""
    counting = f'echo "$1" >> {tmp_path}/calls; exec {real()} "$@"'
    search = compilers(tmp_path / "bin", counting)
    assert isinstance(build(DECODING, search=search, root=tmp_path / "kept"), ctypes.CDLL)
    (made,) = (tmp_path / "kept").rglob("attention.so")
    whole = made.read_bytes()
    damaged = bytearray(whole)
    damaged[0] ^= 1
    # beside it and renamed: the first one is loaded in this process
    (tmp_path / "damaged").write_bytes(damaged)
    (tmp_path / "damaged").replace(made)
    for _ in range(2):
        assert isinstance(build(DECODING, search=search, root=tmp_path / "kept"), ctypes.CDLL)
    assert made.stat().st_size == len(whole)
    assert made.read_bytes()[:4] == b"\x7fELF"
    compiled = [line for line in (tmp_path / "calls").read_text().split() if line != "--version"]
    assert len(compiled) == 2


def test_a_process_without_a_compiler_decodes_by_torch_and_says_so(tmp_path: Path) -> None:
    """PATH holds none: what decodes is torch alone, with the reason."""
    code = """
import torch
from rollart.runtime.engine.native import decode_kernel
decoding = decode_kernel(torch.float32, torch.device("cpu"), 32)
print(decoding, "|", decoding.lacks)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    why = "no C compiler (cc, gcc, clang) is on the PATH"
    assert done.stdout.strip() == f"torch: {why} | {why}"
