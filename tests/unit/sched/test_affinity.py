"""Which pools suit a task: by a table, or by the time that its turns cost all who wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.seeds import unit
from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import device
from rollart.perf.engines import engine_facts
from rollart.perf.profiles import ServedProfile
from rollart.perf.serving import Server
from rollart.perf.shapes import model_shape
from rollart.sched.affinity import OFF, Ahead, Auto, Seen, Table

HALF_LIFE = 200
READS, SAMPLES = "reads", "samples"


@dataclass(frozen=True, slots=True)
class Flat:
    """`reads` reads ten times as fast, `samples` samples twice as fast; a sequence more makes a step longer by `per_live`."""

    read_s: Mapping[str, float] = field(default_factory=lambda: {READS: 1e-4, SAMPLES: 1e-3})
    step_s: Mapping[str, float] = field(default_factory=lambda: {READS: 0.02, SAMPLES: 0.01})
    per_live: float = 0.0

    def prefill_s(self, kind: str, tokens: float, *, live: float, context: float) -> float:
        return tokens * self.read_s[kind]

    def decode_s(self, kind: str, *, live: float, context: float) -> float:
        return self.step_s[kind] * (1 + self.per_live * live)


def an_auto(profile: Flat | ServedProfile | None = None, *, explore: float = 1e-9, **sampled: float) -> Auto:
    places = {READS: READS, SAMPLES: SAMPLES}
    return Auto(places, profile or Flat(), sampled=sampled, explore=explore, half_life=HALF_LIFE)


def turn(domain: str = "t", *, context: int = 100, cached: int = -1, draw: float = 0.999) -> Ahead:
    return Ahead(domain=domain, context=context, cached=cached, draw=draw)


def measure(
    auto: Auto, domain: str, pool: str, *, read: int, sampled: int, times: float = 1.0, turns: int = 50, live: int = 0,
    steady: bool = True, profile: Flat | None = None,
) -> None:  # fmt: skip
    """Turns that took `times` what they should have."""
    by = profile or Flat()
    seconds = by.prefill_s(pool, read, live=live, context=read)
    seconds += sampled * by.decode_s(pool, live=live + 1, context=read)
    for _ in range(turns):
        auto.measured(
            Seen(
                domain=domain, pool=pool, seconds=times * seconds, read=read, sampled=sampled, context=read, live=live,
                steady=steady,
            )
        )  # fmt: skip


def best(
    auto: Auto, ahead: Ahead, live: Mapping[str, int] | None = None, places: tuple[str, ...] = (READS, SAMPLES)
) -> str:
    loads = live or {}
    return min(places, key=lambda place: auto.cost_s(ahead, place, loads.get(place, 0), home=False))


# --- the table -----------------------------------------------------------------------------------------------------------


def test_a_table_prefers_by_task_then_by_default_then_not_at_all() -> None:
    table = Table({"swe": ("h800", "h20"), "default": ("h20",)})
    assert table.order("swe") == ("h800", "h20")
    assert table.order("math") == ("h20",)
    assert Table({"swe": ("h800",)}).order("math") == ()
    assert OFF.order("swe") == ()
    assert not table.learns
    assert [Table(places={"train": "h800"}).place(pool) for pool in ("train", "h20")] == ["h800", "h20"]


# --- by time -------------------------------------------------------------------------------------------------------------


def test_each_task_goes_where_its_turns_take_least() -> None:
    auto = an_auto()
    measure(auto, "prefill", READS, read=5000, sampled=20)
    measure(auto, "decode", READS, read=200, sampled=900)
    assert best(auto, turn("prefill")) == READS
    assert best(auto, turn("decode")) == SAMPLES


def test_time_decides_and_not_tokens() -> None:
    """97 % of the tokens of `swe` are read, and most of its time is decoding (PEARL): it goes where decoding is fast."""
    auto = an_auto()
    measure(auto, "swe", READS, read=3000, sampled=400)
    assert best(auto, turn("swe")) == SAMPLES


def test_before_anything_was_seen_the_prompt_is_known_and_limits_say_the_rest() -> None:
    auto = an_auto(short=10.0, long=5000.0)
    assert best(auto, turn("short", context=5000)) == READS
    assert best(auto, turn("long", context=5000)) == SAMPLES


def test_what_stands_in_the_way_of_many_goes_where_it_is_short() -> None:
    """Alone both tasks are faster on `samples`; where others wait there, the one that reads leaves it, the other does not."""
    auto = an_auto()
    measure(auto, "reader", READS, read=1000, sampled=200)
    measure(auto, "writer", READS, read=10, sampled=800)
    assert best(auto, turn("reader")) == best(auto, turn("writer")) == SAMPLES
    full = {READS: 8, SAMPLES: 8}
    assert best(auto, turn("reader"), full) == READS
    assert best(auto, turn("writer"), full) == SAMPLES


def test_a_full_pool_spills_into_the_other_once_that_costs_less() -> None:
    profile = Flat(per_live=0.1)
    auto = an_auto(profile)
    measure(auto, "t", SAMPLES, read=100, sampled=100, profile=profile)
    went = [best(auto, turn("t"), {SAMPLES: live}) for live in range(30)]
    assert went[0] == SAMPLES
    assert went[-1] == READS
    assert went == sorted(went, reverse=True), "once it spills it goes on to"


def test_a_pool_with_more_engines_takes_more() -> None:
    """Equal cost is not equal numbers: turns come one by one to the least loaded engine of either pool."""
    profile = Flat(read_s={READS: 1e-4, SAMPLES: 1e-4}, step_s={READS: 0.01, SAMPLES: 0.01}, per_live=0.2)
    auto = an_auto(profile)
    engines = {READS: [0] * 2, SAMPLES: [0] * 6}
    for _ in range(80):
        place = best(auto, turn(context=100), {name: min(loads) for name, loads in engines.items()})
        engines[place][engines[place].index(min(engines[place]))] += 1
    assert sum(engines[SAMPLES]) == pytest.approx(3 * sum(engines[READS]), rel=0.1)


def test_a_mixed_cluster_finds_the_table_of_rollart() -> None:
    """Qwen3-8B, 8 requests at once on an engine; prompts of many turns, or answers of thousands of tokens."""
    facts, shape = engine_facts("vLLM"), model_shape("qwen3-8b")
    devices = {READS: "H800", SAMPLES: "H20"}
    profile = ServedProfile(
        {name: Server(cost=engine_cost(device(chip), shape), facts=facts) for name, chip in devices.items()}
    )
    loads = {"frozen_lake": (900, 40), "webshop": (5000, 90), "gem_math": (200, 3000)}
    auto = an_auto(profile, **{domain: float(sampled) for domain, (_, sampled) in loads.items()})
    for domain, (read, sampled) in loads.items():
        auto.measured(
            Seen(domain=domain, pool=READS, seconds=0, read=read, sampled=sampled, context=read, live=0, steady=False)
        )
    live = {READS: 8, SAMPLES: 8}
    assert {domain: best(auto, turn(domain, context=read), live) for domain, (read, _) in loads.items()} == {
        "frozen_lake": READS, "webshop": READS, "gem_math": SAMPLES,
    }  # fmt: skip


# --- corrected by measurements ---------------------------------------------------------------------------------------------


def test_what_takes_longer_than_it_should_is_found_out_while_the_run_goes_on() -> None:
    auto = an_auto()
    measure(auto, "t", SAMPLES, read=100, sampled=100)
    assert auto.factor("t", SAMPLES) == pytest.approx(1.0)
    assert best(auto, turn()) == SAMPLES
    measure(auto, "t", SAMPLES, read=100, sampled=100, times=3.0, turns=100)
    assert auto.factor("t", SAMPLES) == pytest.approx(2.0, rel=0.15), "a hundred turns on, most of the old is forgotten"
    measure(auto, "t", SAMPLES, read=100, sampled=100, times=3.0, turns=5 * HALF_LIFE)
    assert auto.factor("t", SAMPLES) == pytest.approx(3.0, rel=0.1)
    assert best(auto, turn()) == READS
    assert auto.factor("t", READS) == auto.factor("another", SAMPLES) == 1.0


def test_turns_that_saw_new_weights_say_how_long_they_are_and_nothing_of_the_pool() -> None:
    auto = an_auto()
    measure(auto, "t", SAMPLES, read=100, sampled=100, times=50.0, steady=False)
    assert auto.factor("t", SAMPLES) == 1.0


def test_one_wild_measurement_is_not_believed() -> None:
    auto = an_auto()
    measure(auto, "t", SAMPLES, read=100, sampled=100, times=1e6, turns=1)
    assert auto.factor("t", SAMPLES) < 1.2


def test_a_share_of_the_new_trajectories_goes_to_any_pool() -> None:
    auto = an_auto(explore=0.2)
    measure(auto, "t", SAMPLES, read=10, sampled=500)
    chosen = [best(auto, turn(draw=unit("t", n))) for n in range(2000)]
    assert chosen.count(READS) == pytest.approx(0.1 * 2000, rel=0.3)
    at_home = turn(cached=50, draw=1e-6)
    assert best(auto, at_home) == SAMPLES, "only new ones"


# --- moving ----------------------------------------------------------------------------------------------------------------


def test_a_trajectory_moves_when_reading_all_of_it_again_is_worth_it_for_one_turn() -> None:
    auto = an_auto()
    measure(auto, "t", READS, read=50, sampled=100)
    for context, moves in ((500, True), (5000, False)):
        ahead = turn(context=context, cached=context - 50)
        stay_s = auto.cost_s(ahead, READS, 0, home=True)
        assert (auto.cost_s(ahead, SAMPLES, 0, home=False) < stay_s) is moves


def test_a_cache_that_is_void_holds_nobody() -> None:
    auto = an_auto()
    measure(auto, "t", READS, read=50, sampled=10)
    for cached, stays in ((4950, True), (0, False)):
        ahead = turn(context=5000, cached=cached)
        stay_s = auto.cost_s(ahead, SAMPLES, 0, home=True)
        assert (stay_s < auto.cost_s(ahead, READS, 0, home=False)) is stays


# --- whatever comes ----------------------------------------------------------------------------------------------------------


def test_pools_of_one_kind_are_one_place() -> None:
    auto = Auto({"a": SAMPLES, "b": SAMPLES, "c": READS}, Flat(), sampled={}, explore=0.05, half_life=HALF_LIFE)
    assert [auto.place(pool) for pool in ("a", "b", "c", "unknown")] == [SAMPLES, SAMPLES, READS, "unknown"]
    assert auto.order("t") == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([READS, SAMPLES, "nowhere"]), st.floats(0, 1e6), st.integers(0, 40_000), st.integers(0, 9000),
            st.floats(0, 300), st.booleans(),
        ),
        max_size=30,
    ),
    st.integers(0, 40_000), st.integers(-1, 40_000), st.integers(0, 300), st.booleans(), st.floats(0.001, 0.999),
)  # fmt: skip
def test_whatever_was_measured_a_cost_is_a_number_and_no_kind_is_lost(
    turns: list[tuple[str, float, int, int, float, bool]], context: int, cached: int, live: int, home: bool, draw: float
) -> None:
    auto = Auto({READS: READS, SAMPLES: SAMPLES}, Flat(per_live=0.1), sampled={"t": 100.0}, explore=0.05, half_life=1)
    for pool, seconds, read, sampled, others, steady in turns:
        auto.measured(
            Seen(
                domain="t",
                pool=pool,
                seconds=seconds,
                read=read,
                sampled=sampled,
                context=read,
                live=others,
                steady=steady,
            )
        )
    ahead = turn(context=context, cached=min(cached, context), draw=draw)
    for place in (READS, SAMPLES):
        assert 0 <= auto.cost_s(ahead, place, live, home=home) < 1e12
        assert 1 / 4.001 <= auto.factor("t", place) <= 4.001
