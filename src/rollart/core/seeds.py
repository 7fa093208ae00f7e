"""Named randomness: every draw is addressed by what it is for, so that a schedule does not change what is drawn."""

from __future__ import annotations

import hashlib
import random


def digest(*parts: object) -> str:
    """A short name for what `parts` say, equal in every process."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def seed_of(seed: int, purpose: str, *address: object) -> int:
    """A 63-bit seed for `purpose` at `address` (task, epoch, index, member, attempt, ..). Equal in every process."""
    text = "\x1f".join([str(seed), purpose, *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def rng(seed: int, purpose: str, *address: object) -> random.Random:
    """An independent generator for `purpose` at `address`."""
    return random.Random(seed_of(seed, purpose, *address))
