"""Named randomness: every draw is addressed by what it is for, so that a schedule does not change what is drawn."""

from __future__ import annotations

import hashlib
import random
from zlib import crc32


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


def unit(*address: object) -> float:
    """A number in (0, 1) for what it is for, without a generator: where millions are drawn, from simulated worlds say.

    A checksum, multiplied by an odd constant so that addresses which differ in one digit lie far apart.
    """
    return (((crc32(repr(address).encode()) * 0x9E3779B1) & 0xFFFFFFFF) + 0.5) / 2**32
