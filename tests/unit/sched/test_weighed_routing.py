"""Routing where every pool may serve: what a turn costs in each of them decides."""

from __future__ import annotations

from test_routing import POOLS, a_cluster, a_router, load, steps_of

from rollart.sched.routing import Choice, Router


def weigh(
    router: Router, costs: dict[str, float], *, home: str | None = None, at_home: float = 0.0, min_version: int = 0,
    pin: int | None = None, draw: int = 0,
) -> Choice | None:  # fmt: skip
    """By a cost of each pool, to which each live request adds 1; a prefix saves `at_home`."""
    return router.weigh(
        home=home, min_version=min_version, pin=pin, draw=draw,
        cost_s=lambda pool, live, home: costs[pool] + live - (at_home if home else 0.0),
    )  # fmt: skip


def test_the_pool_of_least_cost_is_taken_until_it_is_full() -> None:
    router = a_router(("f", "fast", 1), ("b", "big", 1))
    went = []
    for _ in range(6):
        made = weigh(router, {"fast": 0.5, "big": 3.0})
        assert made is not None
        assert not made.fallback
        router.started(made.engine)
        went.append(made.engine)
    assert went == ["f", "f", "f", "b", "f", "b"]


def test_a_prefix_holds_a_trajectory_for_what_it_is_worth_and_only_between_pools() -> None:
    router = a_router(("f0", "fast", 1), ("f1", "fast", 1), ("b", "big", 1))
    load(router, "f0", 4)
    assert weigh(router, {"fast": 0, "big": 0}, home="f0", at_home=5) == Choice("f0", 4, True, False)
    assert weigh(router, {"fast": 0, "big": 0}, home="f0", at_home=3) == Choice("b", 0, False, False)
    assert weigh(router, {"fast": 0, "big": 9}, home="f0") == Choice("f0", 4, True, False), "its own pool is no other"
    assert weigh(router, {"fast": 4, "big": 8}, home="f0") == Choice("f0", 4, True, False), "of equals it stays"


def test_who_may_not_serve_is_not_weighed() -> None:
    router = a_router(("f", "fast", 1), ("b", "big", 2))
    costs = {"fast": 0.0, "big": 100.0}
    assert weigh(router, costs, min_version=2) == weigh(router, costs, home="f", pin=2) == Choice("b", 0, False, False)
    assert weigh(router, costs, home="gone") == Choice("f", 0, False, False)
    assert weigh(router, costs, min_version=3) is None
    assert weigh(Router(), costs, home="f") is None


def test_a_turn_is_weighed_at_the_same_cost_with_a_hundred_times_the_engines() -> None:
    found = []
    for engines in (24, 2400):
        router, seats = a_cluster(engines)
        seats.looked_at = 0
        steps = steps_of(lambda router=router: weigh(router, dict.fromkeys(POOLS, 1.0), home="e1"))  # type: ignore[misc]
        found.append((steps, seats.looked_at))
    assert found[0] == found[1]
    assert found[0][1] <= 10, "home, and in each other pool the two that were drawn"
