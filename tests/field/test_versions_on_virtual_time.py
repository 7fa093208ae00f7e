"""Field cases about wrong training in silence and about weights, as far as virtual time proves them."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from rollart.core.types import Failure
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, check, random_env, simulate


@pytest.mark.parametrize("rebuilds", [True, False])
def test_tokens_of_a_turn_that_an_update_cut_keep_their_versions_and_their_length(rebuilds: bool) -> None:
    """Field case 16: turns that weight updates interrupt, kept by the engine or aborted by it and resumed. Pieces, spans and
    turns keep one length, old tokens carry the old version, and no token is sampled twice or lost."""
    tasks = [a_task(max_tokens=40)]
    config = a_config(tasks, schedule={"steps": 6, "max_staleness": 3}, engines=2)
    engine = EngineModel(token_s=0.1, prefetch_s=0.1, apply_s=0.2, rebuilds=rebuilds)
    sim = simulate(config, tasks, SimCluster(engine=engine, env=random_env(), trainer=TrainerModel(finish_s=1.0)))
    check(sim)
    parts: dict[tuple[str, int, int], list[dict[str, object]]] = defaultdict(list)
    for row in sim.of("turn_done"):
        parts[row["traj"], row["attempt"], row["turn"]].append(row)
    cut = [rows for rows in parts.values() if len(rows) > 1]
    assert bool(cut) is not rebuilds, "a kept turn stays one request, an aborted one goes on in another"
    for rows in cut:
        assert [row["part"] for row in rows] == list(range(len(rows)))
        assert {row["finish"] for row in rows[:-1]} == {"aborted"}
    several = [t for t in sim.kept if t.status == "done" and len(t.spans) > 1]
    assert several
    for trajectory in several:
        for segment in trajectory.segments:
            sampled = [piece for piece in segment.pieces if piece.sampled]
            assert segment.n_sampled == sum(piece.n_tokens for piece in sampled)
            for piece in sampled:
                assert piece.n_tokens == sum(span.n_tokens for span in piece.spans)
        full = sum(
            row["finish"] == "length" for row in sim.of("turn_done", traj=trajectory.id, attempt=trajectory.attempt)
        )
        assert full == trajectory.turns
        assert trajectory.n_sampled == 40 * trajectory.turns, "a turn that was cut goes on to its whole length"


@pytest.mark.parametrize("redundancy", [0, 2])
def test_with_max_staleness_0_every_trained_token_has_the_trainers_version(redundancy: int) -> None:
    """Field case 21: the synchronous schedule. What the trainer was given for version v + 1 was sampled under v, to the
    last token, though engines and environments are slow and members are redundant."""
    tasks = [a_task("a"), a_task("b", ratio=2)]
    config = a_config(tasks, engines=2, schedule={"steps": 6, "max_staleness": 0, "redundancy": redundancy})
    engine = EngineModel(token_s=0.1, prefetch_s=0.7, apply_s=0.3)
    sim = simulate(
        config, tasks, SimCluster(engine=engine, env=random_env(mean_s=2.0), trainer=TrainerModel(finish_s=3.0))
    )
    check(sim)
    batches = sim.cluster.trainers[0].batches
    assert len(batches) == 6
    for version, batch in enumerate(batches):
        assert len(batch) == 16
        spans = [span for sample in batch for piece in sample.segment.pieces for span in piece.spans]
        assert {span.version for span in spans} == {version}


@pytest.mark.parametrize("order", ["early", "paper"])
def test_after_every_update_engines_serve_what_the_trainer_published(order: str) -> None:
    """Field case 24: the fingerprint of what each engine serves equals the trainer's after every sync, seven in a row."""
    tasks = [a_task()]
    config = a_config(tasks, engines=2, schedule={"steps": 6, "max_staleness": 1, "sync_order": order})
    engine = EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1)
    sim = simulate(config, tasks, SimCluster(engine=engine, env=random_env(), trainer=TrainerModel(finish_s=3.0)))
    check(sim)
    published = {row["version"]: row["digest"] for row in sim.of("published")}
    assert len(set(published.values())) == 7
    for engine_id in ("engine-0", "engine-1"):
        served = {row["version"]: row["digest"] for row in sim.of("applied", engine=engine_id)}
        assert served == published


def test_a_version_costs_each_engine_one_fetch_and_one_apply() -> None:
    """Field case 46: a sync is one prefetch and one apply per engine and version, whatever the number of parameters."""
    calls: Counter[tuple[str, Command]] = Counter()

    def counted(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        calls[engine, command] += 1
        return None

    tasks = [a_task()]
    engine = EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1, fault=counted)
    cluster = SimCluster(engine=engine, env=random_env(), trainer=TrainerModel(finish_s=3.0))
    sim = simulate(a_config(tasks, engines=3, schedule={"steps": 5}), tasks, cluster)
    check(sim)
    for index in range(3):
        assert calls[f"engine-{index}", "prefetch"] == calls[f"engine-{index}", "apply"] == 6
    assert [row["version"] for row in sim.of("published")] == [0, 1, 2, 3, 4, 5]
