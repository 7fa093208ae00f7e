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
from collections.abc import Callable
from pathlib import Path

from rollart.core.errors import StoreError

LIST = "made.json"
"""Names, sizes and digests of the files of a folder; written last."""
CHUNK_BYTES = 1 << 20


def cache_root() -> Path:
    """`rollart` in the user's folder for caches, as desktops agree on it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"


def made_once(name: str, make: Callable[[Path], None], root: Path | None = None) -> Path:
    """The folder `name` below `root` (by default the user's cache); `make` fills an empty one if it is not there yet.

    `name` must say everything that decides the content. Raises StoreError when the place cannot be written.
    """
    target = (root or cache_root()) / name
    if is_whole(target):
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
        _put(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file that was made is there with its size."""
    listed = _listed(folder)
    return bool(listed) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, (size, _) in listed.items()
    )


def is_unchanged(folder: Path) -> bool:
    """Whether every file holds the bytes that were made: reads them all."""
    return is_whole(folder) and all(_digest(folder / name) == digest for name, (_, digest) in _listed(folder).items())


def _put(beside: Path, target: Path) -> None:
    """Rename into place. One that is there already is kept if it is whole, and moved out of the way if it is not."""
    for _ in range(2):
        try:
            beside.rename(target)
        except OSError as error:
            if is_whole(target):
                return
            if not target.exists():
                raise StoreError(f"{target}: cannot be put in place: {error.strerror}") from error
            damaged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            return
    raise StoreError(f"{target}: damaged, and it cannot be replaced; delete it")


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
