"""Plain aligned tables: the same on a terminal, in a file and in a test."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "
WHOLE = 1000.0
"""From here on a number says enough without a fraction."""


def table(
    rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), right: Sequence[int] = (), indent: str = ""
) -> str:
    """`rows` below `head`, each column as wide as its widest cell; `right`: columns that are set to the right."""
    lines = [*([head] if head else []), *rows]
    if not lines:
        return ""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    cells = (
        [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join(indent + GAP.join(line).rstrip() for line in cells)


def amount(value: float) -> str:
    """A number with four digits that count; whole and with separated thousands where it has more before the point."""
    return f"{value:,.0f}" if abs(value) >= WHOLE else f"{value:.4g}"


def duration(seconds: float) -> str:
    """With the unit that leaves one to three digits before the point; long ones in whole seconds."""
    if seconds >= WHOLE:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or seconds == 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
