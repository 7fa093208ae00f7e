"""Schedules and algorithms by name: fragments that are laid over any recipe.

    rollart train first_run sync dapo       # the presets' values, under the origins `preset sync` and `preset dapo`

Invariant: a preset is of one family and sets the same keys as the others of it, so that presets of one family given one after
another do not mix, and one of each go together; `ORDERS` alone shares its key with the schedules. The four baselines of the
papers also switch off what is RollArt's in a recipe, affinity and, for `sync`, serverless rewards: what they are compared with
is not to run on its mechanisms. Name `affinity` or `serverless` after one to give it back (`one_off affinity`). Why: a
schedule is one choice, told by several settings that must fit each other (design: staleness), and so is an algorithm. How large
steps and batches are stays the recipe's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fragment = Mapping[str, Any]


def _schedule(
    max_staleness: int, sync_order: str, *, enforce: str = "admission_and_release", barrier: str = "none",
    score: str = "trajectory", colocated: bool = False,
) -> Fragment:  # fmt: skip
    """A whole schedule."""
    return {
        "schedule": {
            "max_staleness": max_staleness, "sync_order": sync_order, "enforce": enforce, "barrier": barrier,
            "score": score, "colocated": colocated,
        }
    }  # fmt: skip


def _baseline(schedule: Fragment, **more: Any) -> Fragment:
    """A schedule of a system that knows no affinity; `more`: what else it does without."""
    return {**schedule, "affinity": {"kind": "off"}, **more}


SYNC = _baseline(_schedule(0, "early", barrier="turn", score="batch", colocated=True), rewards={"kind": "unlimited"})
"""The synchronous baseline of the papers: each batch is sampled under the weights that it trains, its environments step
together, its rewards are asked for when all have ended, from scorers that wait for them, and the same devices sample and train
in turn."""

SYNC_PLUS = _baseline(_schedule(0, "early", colocated=True))
"""The same with each trajectory by itself: its environment steps when it likes, its reward is asked for when it ends, from the
service that the recipe has (RollArt's Sync+, One-off and AReaL all have its serverless rewards)."""

ONE_OFF = _baseline(_schedule(1, "paper"))
"""A one-off pipeline: a batch is sampled while the one before it is trained. RollArt's alpha 0, without affinity."""

AREAL = _baseline(_schedule(1, "early", enforce="admission"))
"""AReaL as RollArt compares with it: staleness 1, looked at when a trajectory starts and not when it is trained, so that the
bound does not hold. For simulation; `train` refuses it."""

OVERLAP = _schedule(1, "early")
"""Engines take new weights as soon as they hold them; trajectories may span two versions. RollArt's alpha 1."""

ROLLART = _schedule(2, "paper")
"""RollArt's default: get a batch, suspend, update, resume, train, with alpha 1 (section on the staleness bound)."""

ROLLART_EARLY = _schedule(2, "early")
"""The window of RollArt's default with weights applied early. RollArt's alpha 2."""

REDUNDANCY: Mapping[str, Fragment] = {
    "redundancy": {"schedule": {"redundancy": 2}},
    "no_redundancy": {"schedule": {"redundancy": 0}},
}
"""Two members more than a group needs, the first that suffice close it (RollArt, redundant environments: 8 of 10)."""

ORDERS: Mapping[str, Fragment] = {
    "early": {"schedule": {"sync_order": "early"}},
    "paper": {"schedule": {"sync_order": "paper"}},
}
"""When weights are applied, by itself: given after a schedule, it changes this one thing of it."""

AFFINITY: Mapping[str, Fragment] = {
    "affinity": {"affinity": {"kind": "auto"}},
    "no_affinity": {"affinity": {"kind": "off"}},
}
"""Pools by measured time, in place of a recipe's table; or every engine for every task."""

REWARDS: Mapping[str, Fragment] = {
    "serverless": {"rewards": {"kind": "serverless"}},
    "local_rewards": {"rewards": {"kind": "local"}},
}
"""Rewards from instances that come and go with the calls, or from devices of their own (a pool with role score)."""


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
            "correction": correction or {"kind": "clip", "cap": 3.0},
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

GSPO = _algorithm(
    advantage=GROUP,
    loss={"kind": "gspo", "eps_clip_low": 3e-4, "eps_clip_high": 4e-4},
    correction={"kind": "tis", "cap": 2.0},
)
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
    "sync_plus": SYNC_PLUS,
    "one_off": ONE_OFF,
    "areal": AREAL,
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
FAMILIES: tuple[Mapping[str, Fragment], ...] = (SCHEDULES, ALGORITHMS, REDUNDANCY, ORDERS, AFFINITY, REWARDS)
PRESETS: Mapping[str, Fragment] = {name: fragment for family in FAMILIES for name, fragment in family.items()}
