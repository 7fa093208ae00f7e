"""What an engine tells of the requests in it: in every answer as plain rows, as an `EngineBook` where somebody looks.

Invariant: a book from rows says what a book of `Live` objects would; rows are a third of the work, and most are never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rollart.core.types import EngineBook, Live, RequestId, TrajId, Version
from rollart.runtime.engine.slots import Row, SlotTable

Progress = tuple[TrajId, int, int, int, int, Version | None]
"""A request's id, its tokens so far, and the version of the oldest."""


def progress(rows: Iterable[Row], table: SlotTable, served: Version) -> tuple[Progress, ...]:
    """Of each request in the engine; what a live one samples now is of the served version."""
    lengths = table.length.tolist()
    found: list[Progress] = []
    for row in rows:
        n = len(row.logprobs) if row.slot is None else lengths[row.slot] - row.n_context
        oldest = None if not n else row.spans[0].version if row.spans else served
        found.append((*row.request.id, n, oldest))
    return tuple(found)


def with_live(totals: EngineBook, rows: Iterable[Progress]) -> EngineBook:
    """The whole book."""
    live = {RequestId(*row[:4]): Live(n_tokens=row[4], oldest_version=row[5]) for row in rows}
    return replace(totals, live=live)
