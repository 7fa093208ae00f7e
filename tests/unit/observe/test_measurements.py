"""From a record to laws: costs that made a record are found in it again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.observe.measurements import USUAL, fitted


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(0.2, 5.0))
def test_the_law_of_a_record_without_noise_predicts_it(seed: int, factor: float) -> None:
    chance = np.random.default_rng(seed)
    features = chance.uniform(1.0, 200.0, size=(40, 3))
    true = factor * np.array(USUAL["env"]) * chance.uniform(0.5, 2.0, size=3)
    found, fit = fitted(features, features @ true, USUAL["env"])
    assert fit.error < 0.06
    assert (features @ np.array(found)).sum() == pytest.approx((features @ true).sum(), rel=0.03)
    assert min(found) >= 0.0


def test_what_a_record_cannot_tell_apart_keeps_its_usual_proportion_and_its_total() -> None:
    """Every window alike: any split explains it."""
    features = np.tile([30.0, 20.0, 150.0], (20, 1))
    usual = USUAL["env"]
    target = np.full(20, 0.2)
    found, fit = fitted(features, target, usual)
    assert fit.error < 0.01
    scale = 0.2 / float(features[0] @ np.array(usual))
    assert found == pytest.approx([scale * one for one in usual], rel=0.05)


def test_no_cost_is_below_0_whatever_the_noise() -> None:
    chance = np.random.default_rng(5)
    features = chance.uniform(0.0, 10.0, size=(30, 3))
    found, _ = fitted(features, np.abs(chance.normal(0.1, 0.1, size=30)), USUAL["env"])
    assert min(found) >= 0.0
