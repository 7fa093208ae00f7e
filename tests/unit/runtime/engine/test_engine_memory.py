"""Room for keys and values: slots grow, shrink, are evicted and preempted, and what is sampled stays the same."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import by_traj, engine, ids, mismatch, one, random_ids, request, run, update, weights

from rollart.core.types import Generation, TrajId
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.weights import fingerprint


def held(core: EngineCore) -> int:
    return core._cache.slots * core._cache.capacity


def alone(traj: str, context: np.ndarray, max_tokens: int) -> Generation:
    return one(engine(), request(traj, context, max_tokens=max_tokens))


def test_rows_that_do_not_fit_are_preempted_and_go_on_where_they_stopped() -> None:
    core = engine(kv_tokens=256, prefill_tokens=512)
    contexts = {f"t{n}": random_ids(20 + n, n) for n in range(4)}
    core.submit([request(traj, context, max_tokens=120) for traj, context in contexts.items()])
    answers: dict[str, Generation] = {}
    fewest, delivered = 4, 0
    while core.has_work:
        for id_, answer in core.step():
            answers[str(id_.traj)] = answer
            delivered += answer.tokens.n_tokens
        assert held(core) <= 256
        book = core.book()
        assert sum(book.sampled.values()) == delivered + sum(live.n_tokens for live in book.live.values())
        if core.live_count:
            fewest = min(fewest, core.live_count)
    assert fewest == 1, "144 tokens each: one at a time in the end"
    for traj, context in contexts.items():
        assert ids(answers[traj]) == ids(alone(traj, context, 120))
        assert mismatch(context, answers[traj]) < 1e-5
        assert answers[traj].prefilled_tokens == len(context)
    assert answers["t0"].rebuilt_tokens == 0, "the oldest is never preempted"
    assert answers["t3"].rebuilt_tokens > 0
    assert core.book().rebuilt_tokens == sum(answer.rebuilt_tokens for answer in answers.values())


def test_a_preempted_row_that_meets_an_update_keeps_its_versions() -> None:
    core = engine(1, kv_tokens=128)
    core.submit([request("a", random_ids(40), max_tokens=80), request("b", random_ids(40, 1), max_tokens=60)])
    while core.live_count != 1:
        core.step()
    update(core, 2)
    answers = by_traj(core)
    for traj, context in (("a", random_ids(40)), ("b", random_ids(40, 1))):
        assert [span.version for span in answers[traj].tokens.spans] == [1, 2]
        assert mismatch(context, answers[traj]) < 1e-5


def test_the_lowest_priority_is_preempted_first() -> None:
    core = engine(kv_tokens=128)
    core.submit(
        [request("low", random_ids(40), max_tokens=60), request("high", random_ids(40), max_tokens=60, priority=1)]
    )
    answers = by_traj(core)
    assert answers["high"].rebuilt_tokens == 0
    assert answers["low"].rebuilt_tokens > 0


def test_the_trajectory_unused_for_longest_loses_its_cache_and_counts_as_rebuilt() -> None:
    core = engine(kv_tokens=4 * 64)
    contexts = {f"t{n}": random_ids(30, n) for n in range(5)}
    answers = {traj: one(core, request(traj, context, max_tokens=4)) for traj, context in contexts.items()}
    for traj in ("t4", "t1", "t0"):
        longer = np.concatenate([contexts[traj], ids(answers[traj]), random_ids(5)]).astype(np.int32)
        again = one(core, request(traj, longer, turn=1, max_tokens=4))
        assert (again.rebuilt_tokens, again.prefilled_tokens) == ((33, 6) if traj == "t0" else (0, 6))
        assert mismatch(longer, again) < 1e-5


def test_a_forgotten_trajectory_frees_its_slot_for_others() -> None:
    core = engine(kv_tokens=2 * 64)
    one(core, request("kept", random_ids(30)))
    one(core, request("ended", random_ids(30)))
    core.forget(TrajId("ended"), 0)
    one(core, request("next", random_ids(30)))
    assert one(core, request("kept", random_ids(30), part=1)).prefilled_tokens == 0
    core.forget(TrajId("never seen"), 0)
    back = one(core, request("ended", random_ids(30), part=1))
    assert (back.prefilled_tokens, back.rebuilt_tokens) == (30, 0), "nothing of a forgotten trajectory is remembered"


def test_growing_slots_keep_the_caches_of_others() -> None:
    core = engine()
    first = one(core, request("small", random_ids(20)))
    one(core, request("big", random_ids(200)))
    longer = [*random_ids(20), *ids(first), 1, 2, 3]
    again = one(core, request("small", longer, turn=1))
    assert (again.prefilled_tokens, again.rebuilt_tokens) == (4, 0)
    assert mismatch(longer, again) < 1e-5


def test_slots_shrink_again_when_a_long_request_is_gone_and_many_short_ones_wait() -> None:
    core = engine(kv_tokens=1024, max_live=64)
    one(core, request("long", random_ids(250), max_tokens=50))
    assert core._cache.slots <= 4
    core.submit([request(f"s{n}", random_ids(10, n), max_tokens=20) for n in range(8)])
    core.step()
    assert core.live_count == 8
    for id_, answer in run(core).items():
        assert mismatch(random_ids(10, int(id_.traj[1:])), answer) < 1e-5


def test_a_long_request_waits_for_room_and_is_not_passed_by_shorter_ones() -> None:
    core = engine(kv_tokens=256)
    core.submit([request(f"s{n}", random_ids(10, n), max_tokens=30) for n in range(4)])
    core.step()
    core.submit([request("long", random_ids(200), max_tokens=20), request("after", [1, 2], max_tokens=2)])
    order = list(by_traj(core))
    assert order.index("long") > max(order.index(f"s{n}") for n in range(4))
    assert order.index("after") > order.index("s0")


def test_what_is_remembered_of_evicted_trajectories_is_bounded() -> None:
    core = engine(kv_tokens=128)
    for n in range(60):
        one(core, request(f"t{n}", random_ids(50, n), max_tokens=1))
    remembered = sum(map(len, core._table._ghosts.values()))
    assert remembered == core._table._ghost_tokens <= 4 * 128


def test_a_sleeping_engine_holds_no_cache_and_goes_on_where_it_stopped() -> None:
    core, context = engine(1), random_ids(30)
    one(core, request("idle", context))
    update(core, 2)
    core.submit([request("going", context, max_tokens=20), request("aborted", context, max_tokens=20)])
    for _ in range(5):
        core.step()
    core.sleep()
    core.sleep()
    assert (held(core), core._spare, core.has_work, core.live_count) == (0, None, False, 0)
    assert all(tensor.numel() == 0 for tensor in (*core._cache.keys, *core._cache.values))
    core.submit([request("held", context)])
    core.abort([request("aborted", context).id])
    assert core.has_work
    ((_, aborted),) = core.step()
    assert (aborted.finish, aborted.tokens.n_tokens, core.has_work, core.waiting_count) == ("aborted", 5, False, 2)
    assert core.step() == []
    core.wake()
    answers = by_traj(core)
    assert ids(answers["going"]) == ids(one(engine(2), request("going", context, max_tokens=20)))
    assert (answers["going"].prefilled_tokens, answers["going"].rebuilt_tokens) == (30, 34)
    assert ids(answers["held"]) == ids(one(engine(2), request("held", context)))
    again = one(core, request("idle", context, part=1))
    assert (again.prefilled_tokens, again.rebuilt_tokens) == (0, 30), "what was kept before is known, not cached"


def test_weights_that_come_to_a_sleeping_engine_are_served_when_it_wakes() -> None:
    core, context = engine(1), random_ids(30)
    core.submit([request("t", context, max_tokens=10)])
    for _ in range(4):
        core.step()
    core.sleep()
    update(core, 2)
    assert core._spare is None
    core.wake()
    answer = by_traj(core)["t"]
    assert [(span.version, span.n_tokens) for span in answer.tokens.spans] == [(1, 4), (2, 6)]
    assert mismatch(context, answer) < 1e-5


@pytest.mark.parametrize("path", ["fast", "transformers"])
def test_weights_that_are_away_hold_no_memory_of_the_device_and_come_back_as_they_were(path: str) -> None:
    core, context = engine(1, path=path), random_ids(30)
    served, digest = core._kept_weights()[0], fingerprint(weights(1))
    served.put_away()
    served.put_away()
    assert {view.untyped_storage().nbytes() for view, _ in served.named.values()} == {0}
    assert core.fingerprint() == digest, "of the host's memory"
    served.bring_back()
    served.bring_back()
    assert core.fingerprint() == digest
    assert ids(one(core, request("t", context))) == ids(one(engine(1), request("t", context)))
    core.stage(2, weights(2))
    core._kept_weights()[1].put_away()
    core.stage(2, weights(2))
    core.apply(2)
    assert mismatch(context, one(core, request("u", context))) < 1e-5
