"""What decisions know of devices: seconds of the work that may be placed on one kind of engine or another.

Tables, calibration files and live fits implement it alike. Invariant: a profile is asked, never changed, by a decision; what
is learned while a run goes on is kept beside it, by whoever learns it.
"""

from __future__ import annotations

from typing import Protocol


class Profile(Protocol):
    """Seconds by kind of engine, host work included."""

    def prefill_s(self, kind: str, tokens: float, *, live: float, context: float) -> float:
        """What reading `tokens` of a prompt adds to the steps of an engine with `live` sequences of `context` tokens."""
        ...

    def decode_s(self, kind: str, *, live: float, context: float) -> float:
        """A step that gives each of `live` sequences of `context` tokens one more."""
        ...
