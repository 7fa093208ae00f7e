"""Folders that are made once per user and then used by every run and process: converted weights, compiled games.

Invariants: a folder is whole or absent, because it is made beside its place and renamed; of several processes that make
the same one at the same time, one wins and the others take what it made; what was cut or changed on disk is seen and made
anew. Everything here can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rollart.core.errors import StoreError

LIST = "made.json"
"""Names, sizes and digests of the files of a folder; written last."""
CHUNK_BYTES = 1 << 20
PUT_TRIES = 8
"""As many processes may find the same folder damaged, and each take away what another has just put there."""


def cache_root(environ: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home) -> Path:
    """`rollart` in the user's folder for caches, as desktops agree on it. Raises StoreError for a user without a home."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or home() / ".cache") / "rollart"
    except RuntimeError as error:
        raise StoreError(f"no place for what is made once ({error}); set XDG_CACHE_HOME to a folder") from error


def made_once(name: str, make: Callable[[Path], None], root: Path | None = None, *, every_byte: bool = False) -> Path:
    """The folder `name` below `root` (by default the user's cache); `make` fills an empty one if it is not there yet.

    `name` must say everything that decides the content. `every_byte`: read what is there, and make it anew also where only
    bytes changed. Raises StoreError when the place cannot be written.
    """
    target = (root or cache_root()) / name
    good = is_unchanged if every_byte else is_whole
    if good(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StoreError(
            f"{target}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    try:
        make(beside)
        _seal(beside)
        _put(beside, target, good)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file that was made is there with its size."""
    return _holds(folder, lambda path, size, digest: path.is_file() and path.stat().st_size == size)


def is_unchanged(folder: Path) -> bool:
    """Whether every file holds the bytes that were made: reads them all."""
    return is_whole(folder) and _holds(folder, lambda path, size, digest: _digest(path) == digest)


def _holds(folder: Path, test: Callable[[Path, int, str], bool]) -> bool:
    """Whether every file passes; not where another process takes the folder away meanwhile."""
    listed = _listed(folder)
    try:
        return bool(listed) and all(test(folder / name, size, digest) for name, (size, digest) in listed.items())
    except OSError:
        return False


def _put(beside: Path, target: Path, good: Callable[[Path], bool]) -> None:
    """Rename into place. One that is there already is kept if it is good, and moved out of the way if it is not."""
    why = ""
    for _ in range(PUT_TRIES):
        try:
            beside.rename(target)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            return
        if good(target):
            return
        damaged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            # another process may have moved it away, or put its own there: the next try tells
            with suppress(FileNotFoundError):
                target.rename(damaged)
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    raise StoreError(f"{target}: cannot be put in place ({why}); delete what is there")


def _seal(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {str(path.relative_to(folder)): (path.stat().st_size, _digest(path)) for path in files}
    if not listed:
        raise StoreError(f"{folder.name}: nothing was made")
    (folder / LIST).write_text(json.dumps(listed), encoding="utf-8")


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest by name; empty where the list is missing or torn."""
    try:
        listed: dict[str, tuple[int, str]] = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return listed


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
