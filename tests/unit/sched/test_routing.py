"""Where a turn goes: the engine with its prefix, the pool that suits it, the less loaded of two; and what that costs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.core.seeds import rng
from rollart.sched.routing import Choice, IndexedSet, Router

POOLS = ("fast", "big", "old")


def a_router(*engines: tuple[str, str, int]) -> Router:
    router = Router()
    for engine, pool, version in engines:
        router.joined(engine, pool, version)
    return router


def load(router: Router, engine: str, turns: int) -> None:
    for _ in range(turns):
        router.started(engine)


def choose(
    router: Router,
    *,
    home: str | None = None,
    pools: tuple[str, ...] = (),
    min_version: int = 0,
    pin: int | None = None,
    draw: int = 0,
) -> Choice | None:
    return router.choose(home=home, pools=pools, min_version=min_version, pin=pin, draw=draw)


# --- the order of preference -----------------------------------------------------------------------------------------


def test_a_trajectory_goes_back_to_the_engine_with_its_prefix_however_loaded() -> None:
    router = a_router(("e0", "p", 1), ("e1", "p", 1))
    load(router, "e0", 50)
    assert choose(router, home="e0") == Choice("e0", 50, True, False)


def test_a_prefix_outside_the_preferred_pool_is_kept_and_said() -> None:
    router = a_router(("e0", "big", 1), ("e1", "fast", 1))
    assert choose(router, home="e0", pools=("fast",)) == Choice("e0", 0, True, True)


@pytest.mark.parametrize("why", ["lost", "never joined", "too old", "not the pinned version"])
def test_a_prefix_that_cannot_be_used_is_given_up(why: str) -> None:
    router = a_router(("home", "p", 1), ("other", "p", 2))
    if why == "lost":
        router.left("home")
    made = choose(
        router,
        home="unheard of" if why == "never joined" else "home",
        min_version=2 if why in ("too old", "never joined") else 0,
        pin=2 if why == "not the pinned version" else None,
    )
    assert made == Choice("other", 0, False, False)


def test_pools_are_tried_in_the_order_of_affinity_then_in_the_order_in_which_they_joined() -> None:
    router = a_router(("o", "old", 3), ("b", "big", 2), ("f", "fast", 1))
    affinity = ("fast", "big")
    assert choose(router, pools=affinity) == Choice("f", 0, False, False)
    assert choose(router, pools=affinity, min_version=2) == Choice("b", 0, False, True)
    assert choose(router, pools=affinity, min_version=3) == Choice("o", 0, False, True)
    assert choose(router, pools=affinity, min_version=4) is None
    assert choose(router, pools=()) == Choice("o", 0, False, False)
    router.applied("b", 4)
    assert choose(router, pools=(), min_version=4) == Choice("b", 0, False, False), (
        "without affinity nothing falls back"
    )
    assert choose(router, pools=("nowhere",)) == Choice("o", 0, False, True)


def test_a_full_preferred_pool_is_still_preferred() -> None:
    """A table is about hardware; spilling over by load is for `weigh` to decide."""
    router = a_router(("f", "fast", 1), ("b", "big", 1))
    load(router, "f", 9)
    assert choose(router, pools=("fast",)) == Choice("f", 9, False, False)


def test_a_pin_is_exact_and_a_minimum_is_not() -> None:
    router = a_router(("e1", "p", 1), ("e2", "p", 2), ("e3", "p", 3))
    assert {made.engine for draw in range(64) if (made := choose(router, min_version=2, draw=draw << 16 | draw))} == {
        "e2",
        "e3",
    }
    for version in (1, 2, 3):
        assert choose(router, pin=version, min_version=3) == Choice(f"e{version}", 0, False, False)
    assert choose(router, pin=4) is None
    assert choose(router, home="e1", pin=2) == Choice("e2", 0, False, False)


def test_nobody_is_chosen_where_nobody_is() -> None:
    router = Router()
    assert choose(router) is None
    assert choose(router, home="e", pools=("p",), pin=0) is None


# --- notes -----------------------------------------------------------------------------------------------------------


def test_versions_on_an_engine_never_go_back() -> None:
    router = a_router(("e", "p", 3))
    with pytest.raises(InvariantBroken, match="'e' went back from version 3 to 2"):
        router.applied("e", 2)
    assert router.version("e") == 3
    router.applied("e", 3)
    router.applied("e", 7)
    assert (router.version("e"), router.oldest) == (7, 7)
    assert choose(router, pin=3) is None


def test_an_engine_joins_once_and_nobody_else_leaves() -> None:
    router = a_router(("e", "p", 0))
    with pytest.raises(InvariantBroken, match="'e' joined twice"):
        router.joined("e", "p", 0)
    with pytest.raises(KeyError):
        router.left("f")
    router.left("e")
    assert len(router) == 0
    assert "e" not in router
    assert router.version("e") is None


def test_the_load_is_what_was_started_and_not_finished() -> None:
    router = a_router(("e", "p", 0), ("f", "p", 0))
    load(router, "e", 3)
    router.started("f")
    router.finished("e")
    router.applied("e", 1)
    assert router.loads == {"e": 2, "f": 1}


def test_a_turn_that_ends_after_its_engine_was_lost_counts_nowhere() -> None:
    router = a_router(("e", "p", 0), ("f", "p", 0))
    router.started("e")
    router.left("e")
    router.finished("e")
    assert router.loads == {"f": 0}


@dataclass(slots=True)
class Seen:
    """What a router must know, kept the slow way."""

    engines: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Engine -> pool, version, load."""
    joined: list[str] = field(default_factory=list)

    def eligible(self, min_version: int, pin: int | None) -> set[str]:
        return {
            engine
            for engine, (_, version, _) in self.engines.items()
            if (version == pin if pin is not None else version >= min_version)
        }


moves = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "leave", "apply", "start", "start", "finish", "choose", "choose"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.one_of(st.none(), st.integers(0, 4)),
        st.integers(0, 2**32 - 1),
    ),
    min_size=30,
    max_size=60,
)


@settings(max_examples=50)
@given(moves)
def test_whatever_happened_a_choice_is_eligible_in_the_best_pool_and_the_less_loaded_of_two(
    steps: list[tuple[str, int, int, int | None, int]],
) -> None:
    router, seen = Router(), Seen()
    for move, which, version, pin, draw in steps:
        engine = f"e{which}"
        pool, at, turns = seen.engines.get(engine, (POOLS[which % 3], version, 0))
        if move == "join" and engine not in seen.engines:
            router.joined(engine, pool, version)
            seen.engines[engine] = (pool, version, 0)
            seen.joined += [pool] if pool not in seen.joined else []
        elif engine not in seen.engines:
            continue
        elif move == "leave":
            router.left(engine)
            del seen.engines[engine]
        elif move == "apply":
            router.applied(engine, at + version)
            seen.engines[engine] = (pool, at + version, turns)
        elif move == "start":
            router.started(engine)
            seen.engines[engine] = (pool, at, turns + 1)
        elif move == "finish" and turns:
            router.finished(engine)
            seen.engines[engine] = (pool, at, turns - 1)
        elif move == "choose":
            check_choice(router, seen, home=engine if which % 2 else None, min_version=version, pin=pin, draw=draw)
        assert router.loads == {name: seat[2] for name, seat in seen.engines.items()}


def twice(index: int, n: int) -> int:
    """The draw that picks the engine at `index` of `n` both times."""
    return (index << 16) + (index - (index << 16)) % n


def check_choice(router: Router, seen: Seen, *, home: str | None, min_version: int, pin: int | None, draw: int) -> None:
    affinity = POOLS[:2]
    made = choose(router, home=home, pools=affinity, min_version=min_version, pin=pin, draw=draw)
    eligible = seen.eligible(min_version, pin)
    if made is None:
        assert not eligible
        return
    assert made.engine in eligible
    assert made.load == seen.engines[made.engine][2]
    if home in eligible:
        assert (made.engine, made.sticky) == (home, True)
        return
    assert not made.sticky
    order = [*affinity, *(pool for pool in seen.joined if pool not in affinity)]
    best = next(pool for pool in order if any(seen.engines[engine][0] == pool for engine in eligible))
    assert seen.engines[made.engine][0] == best
    assert made.fallback is (best != affinity[0])
    n = sum(seen.engines[engine][0] == best for engine in eligible)
    drawn = [
        choose(router, pools=affinity, min_version=min_version, pin=pin, draw=twice(index, n))
        for index in (draw % n, (draw >> 16) % n)
    ]
    loads = {one.engine: one.load for one in drawn if one is not None}
    assert made.engine in loads
    assert made.load == min(loads.values())


# --- balance ---------------------------------------------------------------------------------------------------------


def test_every_engine_of_a_pool_can_be_chosen() -> None:
    router = a_router(*((f"e{i}", "p", i % 3) for i in range(12)))
    draws = [rng(0, "draw", i).getrandbits(32) for i in range(400)]
    chosen = Counter(made.engine for draw in draws if (made := choose(router, draw=draw)))
    assert len(chosen) == 12
    assert max(chosen.values()) < 3 * 400 / 12, "equal loads are served about equally"


def fullest_above_mean(engines: int, turns: int, *, two_choices: bool) -> float:
    router = a_router(*((f"e{i}", "p", 0) for i in range(engines)))
    for turn in range(turns):
        draw = rng(0, "draw", turn).getrandbits(32)
        if not two_choices:
            draw = twice(draw % engines, engines)
        made = choose(router, draw=draw)
        assert made is not None
        router.started(made.engine)
    return max(router.loads.values()) - turns / engines


@pytest.mark.parametrize("engines", [64, 256])
def test_two_choices_keep_the_fullest_engine_near_the_mean_where_one_does_not(engines: int) -> None:
    """Mitzenmacher 2001: log log n / log 2 + O(1) above the mean, however many turns; one draw grows with the turns."""
    turns = 16 * engines
    assert fullest_above_mean(engines, turns, two_choices=True) <= 3
    assert fullest_above_mean(engines, turns, two_choices=False) >= 8


# --- cost ------------------------------------------------------------------------------------------------------------


def steps_of(call: Callable[[], object]) -> int:
    """Byte codes that `call` runs, and calls of built-in functions."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


class CountingDict(dict[str, Any]):
    """A dictionary that counts how many of its items were looked at, in bulk as well."""

    looked_at = 0

    def __getitem__(self, key: str) -> Any:
        self.looked_at += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.looked_at += len(self)
        return super().__iter__()

    def items(self) -> Any:
        self.looked_at += len(self)
        return super().items()

    def values(self) -> Any:
        self.looked_at += len(self)
        return super().values()


def a_cluster(engines: int) -> tuple[Router, CountingDict]:
    router = a_router(*((f"e{i}", POOLS[i % 3], 5 + i % 2) for i in range(engines)))
    seats = CountingDict(router._seats)
    router._seats = seats
    return router, seats


def costs(engines: int) -> dict[str, tuple[int, int]]:
    """Steps and seats looked at, per kind of decision and note."""
    router, seats = a_cluster(engines)
    router.started("e1")
    calls: dict[str, Callable[[], object]] = {
        "sticky": lambda: choose(router, home="e1"),
        "drawn": lambda: choose(router, pools=POOLS, draw=0),
        "pinned": lambda: choose(router, pools=POOLS, pin=6, draw=0),
        "none": lambda: choose(router, pools=POOLS, min_version=9),
        "started": lambda: router.started("e2"),
        "finished": lambda: router.finished("e2"),
        "applied": lambda: router.applied("e3", 6),
        "left": lambda: router.left("e4"),
    }
    out = {}
    for name, call in calls.items():
        seats.looked_at = 0
        out[name] = (steps_of(call), seats.looked_at)
    return out


def test_a_decision_costs_the_same_with_a_hundred_times_the_engines() -> None:
    few, many = costs(24), costs(2400)
    assert few == many
    assert few["drawn"][1] <= 3, "only the two that were drawn, and the chosen one's load"


def test_a_decision_costs_the_same_after_a_thousand_versions() -> None:
    def cost(versions: int) -> int:
        router = a_router(("e0", "p", 0), ("e1", "p", 0))
        for version in range(1, versions):
            router.applied("e0", version)
            router.applied("e1", version)
        return steps_of(lambda: choose(router, min_version=0, draw=0))

    assert cost(3) == cost(1000)


def test_a_scan_would_show_in_the_count_of_steps() -> None:
    small, large = a_cluster(24)[1], a_cluster(2400)[1]
    assert steps_of(lambda: min(small, key=lambda e: e)) < steps_of(lambda: min(large, key=lambda e: e))
    assert (small.looked_at, large.looked_at) == (24, 2400)


# --- the set ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), min_size=10, max_size=40))
def test_an_indexed_set_is_a_set_whose_every_place_is_filled(steps: list[tuple[bool, str]]) -> None:
    own, model = IndexedSet(), set[str]()
    for add, item in [*((True, item) for item in "abcdef"), *steps]:
        if add:
            own.add(item)
            model.add(item)
        elif item in model:
            own.remove(item)
            model.remove(item)
        else:
            with pytest.raises(KeyError):
                own.remove(item)
        assert len(own) == len(model)
        assert sorted(own) == sorted(model) == sorted(own[i] for i in range(len(own)))
        assert all((item in own) is (item in model) for item in "abcdef")


def test_removing_from_an_indexed_set_moves_one_item_only() -> None:
    items: Iterable[str] = [f"i{n}" for n in range(100)]
    own = IndexedSet()
    for item in items:
        own.add(item)
    before = list(own)
    own.remove("i10")
    after = list(own)
    assert [i for i in range(99) if before[i] != after[i]] == [10]
    Random(0).shuffle(before)
    assert set(before) - set(after) == {"i10"}
