"""What a configuration comes to (field cases 39 and 40)."""

from __future__ import annotations

import json

from rollart.config.explain import advisories, as_data, explain, parameters_of, schedule_in_words, sizes
from rollart.config.load import Known, resolve
from rollart.config.schema import (
    EngineConfig,
    EnvHostConfig,
    PythonEnv,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
    TrainerConfig,
)
from rollart.recipes import registry


def task(ratio: float, max_turns: int, max_tokens: int) -> TaskConfig:
    return TaskConfig(
        env=PythonEnv(kind="python", entry="m:C"), ratio=ratio, max_turns=max_turns, max_tokens=max_tokens
    )


CONFIG = RunConfig(
    tasks={"long": task(3, 10, 4), "short": task(1, 1, 8)},
    schedule=Schedule(
        steps=5, batch=96, group_size=8, steps_per_batch=2, max_staleness=2, redundancy=2, redundant_groups=3
    ),
    trainer=TrainerConfig(ranks=5),
    engine=EngineConfig(count=2, max_live=100),
    envs=EnvHostConfig(hosts=3, sessions_per_host=200),
)


def test_the_numbers_of_a_batch_follow_from_the_configuration() -> None:
    found = sizes(CONFIG)
    assert found.prompts_per_batch == 12
    assert found.trajectories_per_batch == 96
    assert found.mix == {"long": 0.75, "short": 0.25}
    assert found.sampled_tokens_per_batch == 72 * 10 * 4 + 24 * 1 * 8
    assert found.most_tokens_per_batch == 96 * 10 * 4
    assert (found.steps_per_batch, found.groups_per_step, found.trajectories_per_step) == (2, 6, 48)
    assert found.most_tokens_per_step == 48 * 10 * 4
    long = found.tasks["long"]
    assert (long.groups_per_batch, long.trajectories_per_batch, long.trajectories_per_step) == (9, 72, 36)
    assert (long.tokens_per_trajectory, found.tasks["short"].tokens_per_trajectory) == (40, 8)
    assert found.trajectories_per_rank_step == 10, "48 over 5 ranks: the fullest has 10"
    assert found.groups_window == 3 * 12 + 3
    assert found.trajectories_window == 39 * 10


def test_the_parameters_of_a_model_worked_out_by_hand() -> None:
    model = ScratchModel(layers=2, hidden=8, heads=2, kv_heads=1, ffn=16, tie_embeddings=False)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    layer = attention + 3 * 8 * 16 + 2 * 8
    assert parameters_of(model, 10) == 2 * (10 * 8) + 2 * layer + 8
    assert parameters_of(model.model_copy(update={"family": "qwen2"}), 10) == 2 * (10 * 8) + 2 * (layer + 16) + 8
    assert parameters_of(model.model_copy(update={"family": "qwen3"}), 10) == 2 * (10 * 8) + 2 * (layer + 8) + 8


def test_explain_prints_the_figures_the_mix_and_every_value_with_its_origin() -> None:
    """Field case 39: prompts, groups, trajectories and tokens per step, optimizer steps per batch, sizes per rank."""
    resolved = resolve("mine", ["optimizer.lr=0.5"], known=Known(recipes={"mine": lambda: CONFIG}, presets={}))
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in explain(resolved).splitlines()}
    assert rows["prompts per batch"].startswith("prompts per batch 12 ")
    assert rows["groups per batch"] == "groups per batch 12 of 8 trajectories"
    assert rows["trajectories per batch"].startswith("trajectories per batch 96 fewer only where members fail")
    assert rows["tokens per batch"].startswith("tokens per batch 3840 sampled, at most")
    assert rows["tokens in this mix"].startswith("tokens in this mix 3072 sampled per batch")
    assert rows["optimizer steps per batch"] == (
        "optimizer steps per batch 2 6 groups, 48 trajectories, at most 1920 sampled tokens each"
    )
    assert rows["ranks"].startswith("ranks 5 10 trajectories per rank")
    assert rows["window of groups"].startswith("window of groups 39 ")
    assert rows["task"] == "task mix groups trajectories per optimizer step tokens of one, at most instances"
    assert rows["long"] == "long 75.0 % 9 72 36 40 1"
    assert rows["short"] == "short 25.0 % 3 24 12 8 1"
    assert rows["optimizer.lr"] == "optimizer.lr 0.5 command line"
    assert rows["schedule.batch"] == "schedule.batch 96 recipe mine"
    assert rows["schedule.mix_window"] == "schedule.mix_window 10 default"
    assert set(resolved.origins) <= set(rows)


def test_what_may_surprise_is_noted() -> None:
    notes = "\n".join(advisories(CONFIG))
    assert "390 trajectories may want a turn at once, but engine.count x engine.max_live is 200" in notes
    rare = CONFIG.model_copy(update={"tasks": {"often": task(1000, 1, 1), "rare": task(1, 1, 1)}})
    assert any(line.startswith("tasks.rare: its share is below one group") for line in advisories(rare))


def algorithm_notes(*words: str) -> list[str]:
    notes = advisories(registry.resolve("first_run", words).config)
    return [line.partition(":")[0] for line in notes if line.startswith("algorithm.")]


def test_settings_that_undo_each_other_are_noted() -> None:
    gspo = ["algorithm.loss.kind=gspo", "algorithm.correction.kind=tis"]
    assert algorithm_notes(*gspo, "schedule.steps_per_batch=1") == [
        "algorithm.loss.kind=gspo with schedule.steps_per_batch=1"
    ]
    assert algorithm_notes(*gspo, "schedule.steps_per_batch=2") == []
    half = "algorithm.advantage.kind=dr_grpo"
    assert algorithm_notes(half) == ["algorithm.advantage.kind=dr_grpo with algorithm.loss.normalize=trajectory"]
    assert algorithm_notes(half, "algorithm.loss.normalize=constant") == []
    assert algorithm_notes("dr_grpo") == []
    drop, pp = "algorithm.zero_variance=drop", "algorithm.advantage.kind=reinforce_pp"
    assert algorithm_notes(drop, pp) == [drop]
    assert algorithm_notes(drop, pp, "algorithm.advantage.baseline=batch") == [
        drop,
        f"{drop} with algorithm.advantage.baseline=batch",
    ]


def test_a_schedule_is_told_in_the_words_of_its_table() -> None:
    """The table of staleness: bound 0 is synchronous, `paper` has alpha one below the bound, `early` has alpha equal to it."""
    assert schedule_in_words(Schedule(max_staleness=0)).startswith("synchronous")
    assert schedule_in_words(Schedule(max_staleness=1, sync_order="paper")).endswith("alpha 0: a one-off pipeline")
    assert "alpha 1:" in schedule_in_words(Schedule(max_staleness=2, sync_order="paper"))
    assert schedule_in_words(Schedule(max_staleness=2)).endswith("alpha 2")


def test_a_trajectory_samples_no_more_than_the_context_holds() -> None:
    config = CONFIG.model_copy(update={"model": ScratchModel(max_positions=32)})
    assert sizes(config).tasks["long"].tokens_per_trajectory == 32
    assert sizes(config).most_tokens_per_batch == 96 * 32


def test_the_same_is_there_for_machines() -> None:
    resolved = resolve("mine", ["optimizer.lr=0.5"], known=Known(recipes={"mine": lambda: CONFIG}, presets={}))
    data = json.loads(json.dumps(as_data(resolved)))
    assert data["sizes"]["tasks"]["long"]["share"] == 0.75
    assert data["sizes"]["most_tokens_per_batch"] == 3840
    assert data["values"]["optimizer.lr"] == {"value": 0.5, "origin": "command line"}
    assert data["values"].keys() == dict(resolved.origins).keys()
    assert data["notes"] == advisories(CONFIG)


def test_a_cluster_is_told_by_its_pools_and_a_schedule_by_all_that_it_asks_for() -> None:
    """Not by `engine.count` and `trainer.ranks`, which it does not use."""

    def rows(*words: str) -> dict[str, str]:
        text = explain(registry.resolve("rollart_128gpu", words))
        return {line.split("  ")[0]: " ".join(line.split()) for line in text.splitlines()}

    plain = rows("no_affinity")
    assert plain["trainer"] == "trainer 32 devices of pool train (H800)"
    text = explain(registry.resolve("rollart_128gpu"))
    assert "16  of pool h800 (H800): mixed, of 4 devices (tp 4), 256 requests at once each" in text
    assert "8  of pool h20 (H20): mixed, of 4 devices (tp 4), 256 requests at once each" in text
    assert not {"ranks", "tokens per rank at once", "barrier", "colocated", "enforce"} & set(plain)
    assert "at most 2 RollArt's order" in plain["staleness"]
    sync = rows("sync")
    assert "at most 0 synchronous" in sync["staleness"]
    assert sync["barrier"].startswith("barrier turn the trajectories of a batch take each turn together")
    assert sync["score"].startswith("score batch rewards are asked for when the last")
    assert sync["colocated"].startswith("colocated true rollout and training take turns")
    assert rows("areal")["enforce"].endswith("its bound does not hold")
    few = "\n".join(advisories(registry.resolve("sim_small", ["engine.max_live=4"]).config))
    assert "trajectories may want a turn at once, but the engines of cluster.pools take 32; the rest queues" in few
    assert advisories(registry.resolve("sim_small").config) == []
