"""What a device costs for a second, relative to an H20.

Owns the short table of relative costs. Invariant: a device without an entry has none; nothing is guessed from its peaks. Why:
pools of unlike devices can only be compared at equal cost, and list prices differ 2 to 4 times between sellers, so one number
per chip with its source is all that can honestly be typed in.
"""

from __future__ import annotations

from rollart.perf.devices import Device
from rollart.perf.names import words

RELATIVE_COST = {
    "H20": 1.0,
    "H800": 2.85,
    "H100": 2.85,
    "H200": 3.4,
    "A100": 1.25,
    "A800": 1.25,
    "B200": 4.6,
    "L40S": 1.1,
}
"""Chip -> cost of a second; H20 and H800: RollArt (arXiv 2512.22560), table 2. The others are inferred, to be replaced by
`cluster.pools.<name>.cost`: geometric mean of the span of 2026 list prices (dollars an hour: H100 2.0 to 6.2, H200 2.5 to
7.0, A100 0.80 to 3.00, B200 2.25 to 14.2, L40S 0.8 to 2.3) relative to the H100's, which is put at the H800's; A800 as A100."""


def relative_cost(device: Device) -> float | None:
    """Of one second of `device`, H20 = 1; None: no source says."""
    said = set(words(device.name))
    fits = [chip for chip in RELATIVE_COST if set(words(chip)) <= said]
    return RELATIVE_COST[max(fits, key=len)] if fits else None
