"""Files that commands write beside what they print: checked before the work, so that hours do not end in a bad path."""

from __future__ import annotations

import json
from pathlib import Path

from rollart.core.errors import StoreError


def require_writable(path: Path) -> None:
    """Leaves no file where there was none. Raises StoreError."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}; nothing was run; name another file") from error


def write(path: Path, content: bytes) -> None:
    """Raises StoreError."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(path: Path, value: object) -> None:
    """Raises StoreError."""
    write(path, json.dumps(value, indent=1).encode() + b"\n")
