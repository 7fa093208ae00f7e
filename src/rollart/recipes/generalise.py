"""The second rung: a policy for maps that it has not seen.

Invariant: the success that counts is on held-back maps; the number of maps is what keeps a model from learning them by
heart.
"""

from __future__ import annotations

from rollart.config.schema import (
    EvalConfig,
    FrozenLakeEnv,
    Optimizer,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
    WarmStart,
)


def generalise() -> RunConfig:
    """Random solvable 4x4 maps, a fifth of them held back; at most 30 minutes on two cores."""
    return RunConfig(
        name="generalise",
        model=ScratchModel(layers=3, hidden=96, heads=4, kv_heads=4, ffn=288, max_positions=512),
        tasks={
            "frozen_lake": TaskConfig(
                env=FrozenLakeEnv(kind="frozen_lake", map="random"),
                size=4096,
                held_out=0.2,
                max_turns=12,
                max_tokens=2,
            )
        },
        schedule=Schedule(steps=1000, batch=256, group_size=16, max_staleness=1),
        optimizer=Optimizer(lr=1e-3, warmup_steps=10),
        warm_start=WarmStart(steps=200, episodes=2048),
        eval=EvalConfig(every=100, episodes=512),
    )
