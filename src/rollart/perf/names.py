"""Names of devices and models as people write them, read as sets of words.

Owns: the one rule by which a written name finds its entry in a table. Invariant: an entry is found only if all of its
words stand in the name, and the entry with most words wins, so `A100-SXM4-80GB` finds the A100 and never the A10. Why:
measurements of the field spell one chip and one model in many ways, and a name that is guessed wrongly is worse than a
name that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from rollart.core.errors import ConfigError

_NOTES = re.compile(r"\([^)]*\)|\[[^\]]*\]")
_WORD = re.compile(r"[a-z0-9.]+")
_FAMILY_AND_NUMBER = re.compile(r"([a-z]{3,})(\d[\d.]*)$")
"""`rtx4090`, `llama3.1`, `qwen3`: a family of three or more letters and its number are two words (`a100`, `v3`: one)."""
_COUNT = re.compile(r"\d+x(?=[a-z]+\d)")
"""`8xh100` is eight of them (`8x7b` is a size)."""
_CHIP_AND_FORM = re.compile(r"([a-z]{1,2}\d{2,4})(sxm\d?|pcie|nvl)$")


def words(name: str) -> tuple[str, ...]:
    """The words of a name in lower case, notes in parentheses or brackets and an owner before `/` left out."""
    plain = _NOTES.sub(" ", name.lower())
    plain = plain.rsplit("/", 1)[1] if re.fullmatch(r"\s*[\w.-]+/[\w. -]+", plain) else plain
    found: list[str] = []
    for written in _WORD.findall(plain):
        word = _COUNT.sub("", written)
        split = _FAMILY_AND_NUMBER.match(word) or _CHIP_AND_FORM.match(word)
        found += split.groups() if split else [word.strip(".")]
    return tuple(word for word in found if word)


def best_entries(name: str, entries: Mapping[str, Iterable[str]]) -> list[str]:
    """Keys of `entries` (key to the words that it needs) whose words all stand in `name`: those with most words."""
    said = set(words(name))
    fits = {key: len(set(needs)) for key, needs in entries.items() if needs and set(needs) <= said}
    most = max(fits.values(), default=0)
    return [key for key, size in fits.items() if size == most]


def unknown(what: str, name: str, known: Iterable[str], remedy: str) -> ConfigError:
    """The error for a name that no entry answers to, with the nearest names that would."""
    names = {key.lower(): key for key in known}
    near = get_close_matches(" ".join(words(name)), list(names), n=3, cutoff=0.3) or list(names)[:3]
    return ConfigError(f"unknown {what} {name!r}; nearest known: {', '.join(names[key] for key in near)}; {remedy}")
