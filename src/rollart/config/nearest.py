"""Messages for names that do not exist: the dotted key, the variant that was chosen, and the nearest name that does.

Invariant: a name that is suggested can be used as it stands. Why its own module: keys, kinds, tasks, recipes and presets
are all looked up by name, and a bare "unknown" costs the user a search in the documentation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rollart.config.schema import Node
from rollart.config.shape import ANY, Variants, kind_of, shapes, walk

CUTOFF = 0.6
"""difflib's similarity below which a suggestion would be a guess: `foo` has no near name."""


def among(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the nearest of `names`; else `; there are: ..`; nothing when there are none."""
    known = list(names)
    near = difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; there are: {', '.join(known)}" if known else ""


def _fits(pattern: str, dotted: str) -> bool:
    """`dotted` is the key of `pattern` or leads to it; a part that stands for any name fits all."""
    parts, wanted = pattern.split("."), dotted.split(".")
    return len(wanted) <= len(parts) and all(
        part in (name, ANY) for part, name in zip(parts[: len(wanted)], wanted, strict=True)
    )


def fits_whole(pattern: str, dotted: str) -> bool:
    """`dotted` is the key of `pattern`, whatever names stand in it."""
    return pattern.count(".") == dotted.count(".") and _fits(pattern, dotted)


def _kinds_with(path: str, key: str) -> list[str]:
    """The kinds of the part at `path` that have `key`."""
    depth = len(path.split("."))
    found: dict[str, None] = {}
    for known in walk():
        if _fits(known.dotted, f"{path}.{key}"):
            for part, kind in known.kinds:
                if len(part.split(".")) == depth:
                    found[kind] = None
    return list(found)


def unknown_key(model: type[Node], path: str, key: str, rest: str = "") -> str:
    """Say that the part `model` at `path` has no `key`; `rest` is what was written below the key."""
    dotted = f"{path}.{key}" if path else key
    whole = f"{dotted}.{rest}" if rest else dotted
    kind = kind_of(model)
    if kind is not None:
        owners = _kinds_with(path, key)
        if owners:
            kinds = " and ".join(f"kind={owner}" for owner in owners)
            return f"{whole} is not a key of kind={kind} (it belongs to {kinds}); leave it out, or set {path}.kind={owners[0]}"
    of = f" for kind={kind}" if kind is not None else ""
    siblings = difflib.get_close_matches(key, list(shapes(model)), n=1, cutoff=CUTOFF)
    if siblings:
        near = f"{path}.{siblings[0]}" if path else siblings[0]
        below = f"{near}.{rest}"
        exists = rest and any(_fits(known.dotted, below) for known in walk())
        return f"{whole}: unknown{of}; did you mean {below if exists else near}?"
    elsewhere = _elsewhere(whole)
    if elsewhere:
        return f"{whole}: unknown{of}; did you mean {elsewhere}?"
    return f"{whole}: unknown{of}; {path or 'the configuration'} has the keys {', '.join(shapes(model))}"


def _elsewhere(dotted: str) -> str | None:
    """A key of another part: with the same last name, else with a similar dotted name."""
    keys = list(dict.fromkeys(known.dotted for known in walk()))
    last = dotted.rsplit(".", 1)[-1]
    same = [key for key in keys if key.rsplit(".", 1)[-1] == last]
    near = difflib.get_close_matches(dotted, same, n=1, cutoff=0.0) or same
    near = near or difflib.get_close_matches(dotted, keys, n=1, cutoff=CUTOFF)
    return _with_names(near[0], dotted) if near else None


def _with_names(pattern: str, dotted: str) -> str:
    """The pattern with the names that were written where it takes any; NAME where none was written."""
    parts, wanted = pattern.split("."), dotted.split(".")
    for place, part in enumerate(parts):
        if part == ANY:
            parts[place] = wanted[place] if wanted[:place] == parts[:place] and len(wanted) > place + 1 else "NAME"
    return ".".join(parts)


def unknown_kind(shape: Variants, path: str, kind: str) -> str:
    """Say that the part at `path` has no such variant."""
    return f"{path}.kind={kind}: unknown{among(kind, shape.models, f'{path}.kind=')}"


def part_given_a_value(shape: Variants, path: str, value: object, origin: str) -> str:
    """Say that the part at `path` was given one value; the likely wish is to choose its kind."""
    what = f"{path}={'null' if value is None else value} ({origin}): {path} has keys of its own"
    if value in shape.models:
        return f"{what}; write {path}.kind={value}"
    return f"{what}; choose {path}.kind from {', '.join(shape.models)}"
