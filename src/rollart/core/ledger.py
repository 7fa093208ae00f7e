"""The token ledger: every sampled token is in exactly one place, and two independent books agree on how many there are.

    sampled = trained + dropped[reason] + buffered + in_flight + eval

Control's book moves the tokens of each delivered turn from place to place. The engines' book is what each engine says it
has sampled. No term is a remainder, so a token lost or counted twice anywhere breaks `check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import InvariantBroken
from rollart.core.types import DROP_REASONS, DropReason, EngineBook, Purpose

Place = Literal["in_flight", "buffered", "trained", "eval"]


@dataclass(slots=True)
class Ledger:
    """Control's book. `delivered` counts per engine; places and reasons count over all engines."""

    in_flight: int = 0
    buffered: int = 0
    trained: int = 0
    eval: int = 0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    delivered: dict[str, int] = field(default_factory=dict)

    def deliver(self, engine: str, tokens: int, purpose: Purpose) -> None:
        """A turn's tokens arrived. Evaluation tokens are final at once; others are in flight."""
        self.delivered[engine] = self.delivered.get(engine, 0) + tokens
        if purpose == "eval":
            self.eval += tokens
        else:
            self.in_flight += tokens

    def move(
        self, source: Literal["in_flight", "buffered"], target: Literal["buffered", "trained"], tokens: int
    ) -> None:
        self._take(source, tokens)
        setattr(self, target, getattr(self, target) + tokens)

    def drop(self, source: Literal["in_flight", "buffered"], reason: DropReason, tokens: int) -> None:
        self._take(source, tokens)
        self.dropped[reason] += tokens

    def lose(self, engine: str, tokens: int, reason: DropReason = "engine_lost") -> None:
        """Tokens that an engine sampled and control never got: a lost engine's last reported progress, or a duplicate."""
        self.delivered[engine] = self.delivered.get(engine, 0) + tokens
        self.dropped[reason] += tokens

    def _take(self, source: Literal["in_flight", "buffered"], tokens: int) -> None:
        left = getattr(self, source) - tokens
        if tokens < 0 or left < 0:
            raise InvariantBroken(
                f"ledger: {tokens} tokens cannot leave {source!r}, which holds {getattr(self, source)}"
            )
        setattr(self, source, left)

    @property
    def accounted(self) -> int:
        """All tokens that have reached control, wherever they are now."""
        return self.in_flight + self.buffered + self.trained + self.eval + sum(self.dropped.values())

    def check(self, books: Mapping[str, EngineBook]) -> dict[str, int]:
        """Compare both books; return sampled tokens per engine.

        Raises InvariantBroken naming each engine whose own count differs from delivered + live, or if control's places do
        not add up to what was delivered.
        """
        wrong: list[str] = []
        sampled: dict[str, int] = {}
        for engine in sorted({*books, *self.delivered}):
            book = books.get(engine, EngineBook())
            live = sum(request.n_tokens for request in book.live.values())
            theirs, ours = sum(book.sampled.values()), self.delivered.get(engine, 0) + live
            sampled[engine] = theirs
            if theirs != ours:
                wrong.append(f"{engine} sampled {theirs} tokens, control has {ours} ({live} of them live)")
        if self.accounted != sum(self.delivered.values()):
            wrong.append(
                f"control's places hold {self.accounted} tokens, {sum(self.delivered.values())} were delivered"
            )
        if wrong:
            raise InvariantBroken("token ledger does not close: " + "; ".join(wrong))
        return sampled
