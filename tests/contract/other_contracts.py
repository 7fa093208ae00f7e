"""The contracts of the scorer, trainer and cluster ports."""

from __future__ import annotations

import asyncio
import math

from rigs import ClusterRig, ScorerRig, TrainerRig

from rollart.core.resources import DEFAULT_DEGREES, Lease
from rollart.core.types import Failure, Manifest

NEVER = float("inf")

# --- scorer --------------------------------------------------------------------------------------------------------------


async def a_score_is_a_finite_number(rig: ScorerRig) -> None:
    score = await rig.scorer.score(rig.good, deadline_s=asyncio.get_running_loop().time() + rig.score_s)
    assert isinstance(score, float)
    assert math.isfinite(score)


async def many_trajectories_are_scored_at_once(rig: ScorerRig) -> None:
    deadline = asyncio.get_running_loop().time() + rig.score_s
    scores = await asyncio.gather(*(rig.scorer.score(rig.good, deadline_s=deadline) for _ in range(20)))
    assert len(set(scores)) == 1
    assert isinstance(scores[0], float)


async def a_scorer_that_fails_is_a_failure_and_no_score(rig: ScorerRig) -> None:
    why = await rig.scorer.score(rig.broken, deadline_s=asyncio.get_running_loop().time() + rig.score_s)
    assert isinstance(why, Failure)
    assert (why.where, why.kind) == ("scorer", "raised")
    assert why.detail


async def a_score_that_passes_its_deadline_is_a_timeout(rig: ScorerRig) -> None:
    why = await rig.scorer.score(rig.slow, deadline_s=asyncio.get_running_loop().time() + rig.score_s)
    assert isinstance(why, Failure)
    assert (why.where, why.kind) == ("scorer", "timeout")


SCORER = [
    a_score_is_a_finite_number,
    many_trajectories_are_scored_at_once,
    a_scorer_that_fails_is_a_failure_and_no_score,
    a_score_that_passes_its_deadline_is_a_timeout,
]

# --- trainer -------------------------------------------------------------------------------------------------------------


async def what_is_published_says_what_it_is(rig: TrainerRig) -> None:
    manifest = await rig.trainer.publish(0)
    assert isinstance(manifest, Manifest)
    assert (manifest.version, manifest.base) == (0, None)
    assert manifest.n_bytes > 0
    assert manifest.buckets >= 1
    assert manifest.fingerprint.digest


async def weights_that_did_not_change_keep_their_fingerprint(rig: TrainerRig) -> None:
    first, second = await rig.trainer.publish(0), await rig.trainer.publish(1)
    assert second.version == 1
    assert first.fingerprint == second.fingerprint == (await rig.twin.publish(0)).fingerprint
    assert first.shards == second.shards


async def a_step_changes_the_weights_and_reports_on_it(rig: TrainerRig) -> None:
    before = await rig.trainer.publish(0)
    await rig.trainer.begin(0, total_weight=None)
    await rig.trainer.accumulate(rig.samples(0))
    await rig.trainer.accumulate(rig.samples(1))
    metrics = await rig.trainer.finish()
    assert metrics.keys() >= {"loss", "grad_norm", "lr", "weights_changed"}
    assert metrics["weights_changed"] == 1.0
    assert metrics["grad_norm"] > 0.0
    assert metrics["lr"] > 0.0
    assert (await rig.trainer.publish(1)).fingerprint != before.fingerprint


async def beginning_again_forgets_what_was_accumulated(rig: TrainerRig) -> None:
    await rig.trainer.begin(0, total_weight=None)
    await rig.trainer.accumulate(rig.samples(0))
    await rig.trainer.begin(0, total_weight=None)
    await rig.trainer.accumulate(rig.samples(1))
    again = await rig.trainer.finish()
    await rig.twin.begin(0, total_weight=None)
    await rig.twin.accumulate(rig.samples(1))
    once = await rig.twin.finish()
    assert again["grad_norm"] == once["grad_norm"]
    assert (await rig.trainer.publish(1)).fingerprint == (await rig.twin.publish(1)).fingerprint


async def accumulating_and_recomputing_change_no_weight(rig: TrainerRig) -> None:
    before = await rig.trainer.publish(0)
    await rig.trainer.logprobs(rig.samples(0))
    await rig.trainer.begin(0, total_weight=None)
    await rig.trainer.accumulate(rig.samples(0))
    assert (await rig.trainer.publish(1)).fingerprint == before.fingerprint


TRAINER = [
    what_is_published_says_what_it_is,
    weights_that_did_not_change_keep_their_fingerprint,
    a_step_changes_the_weights_and_reports_on_it,
    beginning_again_forgets_what_was_accumulated,
    accumulating_and_recomputing_change_no_weight,
]

# --- cluster -------------------------------------------------------------------------------------------------------------


async def acquire(rig: ClusterRig, role: str) -> Lease:
    deadline = asyncio.get_running_loop().time() + 60.0
    lease = await rig.cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=deadline)  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    return lease


async def a_lease_says_what_it_is_for(rig: ClusterRig) -> None:
    leases = [await acquire(rig, role) for role in rig.roles]
    assert [lease.role for lease in leases] == list(rig.roles)
    assert len({lease.id for lease in leases}) == len(leases)
    assert all(lease.devices and lease.pool == "default" for lease in leases)
    for lease in leases:
        await rig.cluster.release(lease.id)


async def each_role_can_be_started_and_released_twice(rig: ClusterRig) -> None:
    leases = [await acquire(rig, role) for role in rig.roles]
    for lease in leases:
        port = await rig.cluster.start(lease)
        assert not isinstance(port, Failure), port
    for lease in leases * 2:
        await rig.cluster.release(lease.id)


async def a_lease_on_which_nothing_was_started_can_be_released(rig: ClusterRig) -> None:
    lease = await acquire(rig, rig.roles[0])
    await rig.cluster.release(lease.id)


async def a_lost_engine_is_told_once_with_its_cause(rig: ClusterRig) -> None:
    lease = await acquire(rig, "mixed")
    engine = await rig.cluster.start(lease)
    changes = rig.cluster.changes()
    await rig.lose_engine(engine)  # type: ignore[arg-type]
    change = await anext(aiter(changes))
    assert (change.kind, change.role, change.subject) == ("lost", "mixed", engine.info.id)  # type: ignore[union-attr]
    assert change.failure is not None
    assert change.failure.detail
    await rig.cluster.release(lease.id)


CLUSTER = [
    a_lease_says_what_it_is_for,
    each_role_can_be_started_and_released_twice,
    a_lease_on_which_nothing_was_started_can_be_released,
    a_lost_engine_is_told_once_with_its_cause,
]
