"""The soak's figures, on readings that are written by hand, and that its kills are spread over the roles."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmark_modules import loaded

soak_run, soak_drift, soak_kills = (loaded(name) for name in ("soak_run", "soak_drift", "soak_kills"))


def test_a_slope_is_that_of_the_line_through_the_points() -> None:
    assert soak_drift.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert soak_drift.slope([(0, 0), (1, 1), (2, 0), (3, 1)]) == pytest.approx(0.2)
    assert soak_drift.slope([(5, 7), (9, 7)]) == 0


def readings(leak_mb_per_min: float = 0.0, dearer: float = 1.0, busier: float = 1.0) -> list[object]:
    """100 minutes, a reading each: memory jumps in the first ten, CPU per trajectory goes from 1 s to `dearer` at half time,
    and a fixed computation from 1 s to `busier`."""
    cpu_s, found = 0.0, []
    for minute in range(101):
        cpu_s += 10 * (dearer if minute > 50 else 1.0)
        rss_mb = 300 + leak_mb_per_min * minute if minute >= 10 else 30.0 * minute
        found.append(
            soak_drift.Reading(60.0 * minute, rss_mb, 40, cpu_s, 10 * minute, 0, busier if minute > 50 else 1.0)
        )
    return found


def test_what_settles_in_the_first_tenth_is_no_drift() -> None:
    found = soak_drift.drift(readings())
    assert found.mb_per_min == pytest.approx(0, abs=1e-9)
    assert found.handles_per_min == 0
    assert found.cpu_ratio == pytest.approx(1)
    assert found.cpu_last_tenth_s == pytest.approx(1)


def test_a_leak_and_a_run_that_gets_dearer_are_seen() -> None:
    found = soak_drift.drift(readings(leak_mb_per_min=0.7, dearer=1.25))
    assert found.mb_per_min == pytest.approx(0.7)
    assert found.cpu_ratio == pytest.approx(1.25)


def test_a_machine_that_gets_busier_is_told_from_a_run_that_gets_dearer() -> None:
    found = soak_drift.drift(readings(dearer=1.2, busier=1.2))
    assert found.cpu_ratio == pytest.approx(1.2)
    assert found.yardstick_ratio == pytest.approx(1.2)
    assert soak_drift.yardstick_s() > 0


@pytest.mark.parametrize("kills", [1, 4, 10, 60])
def test_kills_are_spread_evenly_over_the_roles(kills: int) -> None:
    drawn = list(soak_kills.roles(kills, random.Random(3)))
    assert len(drawn) == kills
    counts = Counter({role: 0 for role in soak_kills.ROLES}) + Counter(drawn)
    assert max(counts.values()) - min(counts[role] for role in soak_kills.ROLES) <= 1
    assert set(soak_kills.ROLES) == set(soak_kills.RECOVERY)
