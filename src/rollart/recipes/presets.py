"""Schedules and algorithms by name: fragments that are laid over any recipe.

    rollart train first_run sync dapo       # the presets' values, under the origins `preset sync` and `preset dapo`

Invariant: a preset is of one family, sets keys of that family only, and sets all of them, so that presets of one family given
one after another do not mix, and one of each go together. Why: a schedule is one choice, told by several numbers that must
fit each other (design: staleness), and so is an algorithm. How large steps and batches are stays the recipe's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fragment = Mapping[str, Any]

SYNC: Fragment = {"schedule": {"max_staleness": 0, "sync_order": "early"}}
"""Each batch is sampled under the weights that it trains; rollout and training take turns."""

ONE_OFF: Fragment = {"schedule": {"max_staleness": 1, "sync_order": "paper"}}
"""A one-off pipeline: a batch is sampled while the one before it is trained. RollArt's alpha 0."""

OVERLAP: Fragment = {"schedule": {"max_staleness": 1, "sync_order": "early"}}
"""Engines take new weights as soon as they hold them; trajectories may span two versions. RollArt's alpha 1."""

ROLLART: Fragment = {"schedule": {"max_staleness": 2, "sync_order": "paper"}}
"""RollArt's default: get a batch, suspend, update, resume, train, with alpha 1 (section on the staleness bound)."""

ROLLART_EARLY: Fragment = {"schedule": {"max_staleness": 2, "sync_order": "early"}}
"""The window of RollArt's default with weights applied early. RollArt's alpha 2."""


def _algorithm(
    *, advantage: Fragment, loss: Fragment, kl: Fragment | None = None, correction: Fragment | None = None,
    zero_variance: str = "train",
) -> Fragment:  # fmt: skip
    """A whole algorithm; the clip is PPO's where `loss` names no other bounds."""
    bounds = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
    return {
        "algorithm": {
            "advantage": advantage,
            "loss": {"normalize": "trajectory", **bounds, **loss},
            "correction": correction or {"kind": "tis", "cap": 2.0},
            "reject": {"kind": "none"},
            "kl": kl or {"kind": "none"},
            "zero_variance": zero_variance,
        }
    }


GROUP: Fragment = {"kind": "grpo", "normalize_std": True}

GRPO = _algorithm(advantage=GROUP, loss={"kind": "ppo_clip"}, kl={"kind": "k3", "coef": 0.04})
"""GRPO as it was published: each trajectory weighs 1, with a KL term (DeepSeekMath, section 4.2)."""

DR_GRPO = _algorithm(advantage={"kind": "dr_grpo"}, loss={"kind": "ppo_clip", "normalize": "constant"})
"""Dr.GRPO: no division by the deviation, none by a trajectory's own length (Liu et al. 2025, section 3.2)."""

RLOO = _algorithm(advantage={"kind": "rloo"}, loss={"kind": "ppo_clip", "normalize": "constant"})
"""Leave-one-out baseline; a trajectory is one action, so its log-probabilities are summed (Ahmadian et al. 2024)."""

REINFORCE_PP = _algorithm(
    advantage={"kind": "reinforce_pp", "baseline": "group"},
    loss={"kind": "ppo_clip", "normalize": "token"},
    kl={"kind": "k2", "coef": 1e-3},
)
"""REINFORCE++ with the group's mean as baseline: normalised over the batch, the KL term in the loss (Hu 2025)."""

DAPO = _algorithm(
    advantage=GROUP,
    loss={"kind": "ppo_clip", "normalize": "token", "eps_clip_high": 0.28},
    zero_variance="drop",
)
"""DAPO: clip higher, every token alike, groups with equal rewards sampled anew (sections 3.1 to 3.3; its shaping of overlong
answers is a matter of the environment's reward)."""

GSPO = _algorithm(advantage=GROUP, loss={"kind": "gspo", "eps_clip_low": 3e-4, "eps_clip_high": 4e-4})
"""GSPO: one clipped ratio per trajectory (Zheng et al. 2025, section 5.1). Of use with schedule.steps_per_batch above 1:
with 1, every ratio is 1."""

CISPO = _algorithm(
    advantage=GROUP, loss={"kind": "cispo", "normalize": "token", "eps_clip_low": 1.0, "eps_clip_high": 4.0}
)
"""CISPO: no token loses its gradient (MiniMax-M1, section 3.1)."""

DECOUPLED = _algorithm(
    advantage=GROUP, loss={"kind": "decoupled"}, correction={"kind": "masked", "low": 0.0, "high": 5.0}
)
"""Decoupled PPO: the clip is around the proximal policy; tokens that were more than five times likelier there than when they
were sampled leave the loss (AReaL, section 5.2)."""

SCHEDULES: Mapping[str, Fragment] = {
    "sync": SYNC,
    "one_off": ONE_OFF,
    "overlap": OVERLAP,
    "rollart": ROLLART,
    "rollart_early": ROLLART_EARLY,
}
ALGORITHMS: Mapping[str, Fragment] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "rloo": RLOO,
    "reinforce_pp": REINFORCE_PP,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "decoupled": DECOUPLED,
}
PRESETS: Mapping[str, Fragment] = {**SCHEDULES, **ALGORITHMS}
