"""Schedules by name: fragments that are laid over any recipe.

    rollart train first_run sync            # the preset's values, under the origin `preset sync`

Invariant: a preset sets keys of `schedule` only, and all keys that its name speaks of, so that presets given one after
another do not mix. Why: a schedule is one choice, told by several numbers that must fit each other (design: staleness).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYNC: Mapping[str, Any] = {"schedule": {"max_staleness": 0, "sync_order": "early"}}
"""Each batch is sampled under the weights that it trains; rollout and training take turns."""

ONE_OFF: Mapping[str, Any] = {"schedule": {"max_staleness": 1, "sync_order": "paper"}}
"""A one-off pipeline: a batch is sampled while the one before it is trained. RollArt's alpha 0."""

OVERLAP: Mapping[str, Any] = {"schedule": {"max_staleness": 1, "sync_order": "early"}}
"""Engines take new weights as soon as they hold them; trajectories may span two versions. RollArt's alpha 1."""

ROLLART: Mapping[str, Any] = {"schedule": {"max_staleness": 2, "sync_order": "paper"}}
"""RollArt's default: get a batch, suspend, update, resume, train, with alpha 1 (section on the staleness bound)."""

ROLLART_EARLY: Mapping[str, Any] = {"schedule": {"max_staleness": 2, "sync_order": "early"}}
"""The window of RollArt's default with weights applied early. RollArt's alpha 2."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "sync": SYNC,
    "one_off": ONE_OFF,
    "overlap": OVERLAP,
    "rollart": ROLLART,
    "rollart_early": ROLLART_EARLY,
}
