"""The main job, its control experiment, and the same in seconds.

Invariant: nothing in a warm start holds an answer, so what a run reaches above `warm` was learned from reward.
"""

from __future__ import annotations

from rollart.config.derive import changed
from rollart.config.schema import (
    Algorithm,
    BaselineConfig,
    EvalConfig,
    FrozenLakeEnv,
    MaxDigitEnv,
    Optimizer,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
    WarmStart,
)

TINY = ScratchModel(layers=2, hidden=64, heads=4, kv_heads=4, ffn=192, max_positions=512, tie_embeddings=False)
"""About 115 k parameters: the size at which one core learns both tasks within minutes."""

LAKE = TaskConfig(env=FrozenLakeEnv(kind="frozen_lake"), max_turns=10, max_tokens=2)
"""gymnasium's default map, as text. 10 turns: the shortest way has 6 moves. 2 tokens: a move and the newline."""

MAX_DIGIT = TaskConfig(
    env=MaxDigitEnv(kind="max_digit", digits=3), size=1000, held_out=0.2, ratio=2, max_turns=1, max_tokens=2
)
"""All problems of three digits, a fifth of them held back. Twice the lake's share: its trajectories are short, and more of
them at once keep single groups from deciding what is learned."""


def first_run() -> RunConfig:
    """A tiny model learns two tasks at once, asynchronously, on two cores."""
    return RunConfig(
        name="first_run",
        model=TINY,
        tasks={"frozen_lake": LAKE, "max_digit": MAX_DIGIT},
        schedule=Schedule(steps=300, batch=192, group_size=8, max_staleness=1),
        algorithm=Algorithm(entropy_coef=0.01),
        optimizer=Optimizer(lr=1e-3, beta2=0.99, decay="linear"),
        warm_start=WarmStart(steps=100, episodes=512),
        eval=EvalConfig(episodes=256),
    )


def first_run_shuffled() -> RunConfig:
    """The control experiment: `first_run` with rewards shuffled across groups, which leaves nothing to learn."""
    run = first_run()
    return changed(run, name="first_run_shuffled", algorithm=changed(run.algorithm, shuffle_rewards=True))


def smoke() -> RunConfig:
    """Every part of `first_run` at work for a few seconds; learns nothing."""
    return RunConfig(
        name="smoke",
        model=ScratchModel(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, max_positions=512),
        tasks={"frozen_lake": LAKE, "max_digit": MAX_DIGIT},
        schedule=Schedule(steps=3, batch=16, group_size=4, max_staleness=1),
        baselines=BaselineConfig(episodes=8),
        warm_start=WarmStart(steps=2, episodes=8, batch=8),
        eval=EvalConfig(episodes=8, concurrency=16),
    )
