"""Which pools suit a task: by a table, or by what turns were measured to take at equal cost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.seeds import unit
from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import device
from rollart.perf.shapes import model_shape
from rollart.sched.affinity import OFF, Auto, Kind, Table

H800, H20 = Kind(name="H800", cost=2.85), Kind(name="H20", cost=1.0)
QWEN = model_shape("qwen3-8b")
EXPLORE, HALF_LIFE = 0.05, 200


def an_auto(**pools: Kind) -> Auto:
    return Auto(pools or {"h800": H800, "h20": H20}, explore=EXPLORE, half_life=HALF_LIFE)


def measure(auto: Auto, domain: str, pool: str, seconds: float, *, tokens: int = 100, turns: int = 20) -> None:
    for _ in range(turns):
        auto.measured(domain, pool, seconds=seconds, tokens=tokens)


def chosen(auto: Auto, domain: str, trajectories: int = 2000) -> Counter[str]:
    orders = (auto.order(domain, unit("t", n)) for n in range(trajectories))
    return Counter(order[0] for order in orders if order)


# --- the table -----------------------------------------------------------------------------------------------------------


def test_a_table_prefers_by_task_then_by_default_then_not_at_all() -> None:
    table = Table({"swe": ("h800", "h20"), "default": ("h20",)})
    assert table.order("swe", 0.5) == ("h800", "h20")
    assert table.order("math", 0.5) == ("h20",)
    assert Table({"swe": ("h800",)}).order("math", 0.5) == ()
    assert OFF.order("swe", 0.5) == ()
    assert not table.draws
    assert [Table(alike={"train": "h800"}).place(pool) for pool in ("train", "h20")] == ["h800", "h20"]


# --- measured ------------------------------------------------------------------------------------------------------------


def test_each_task_goes_where_it_costs_less_and_a_share_elsewhere_to_measure_there_too() -> None:
    """On two H800 for the price of six H20, prefill-heavy tasks take 0.53 of the time, decode-heavy ones longer (RollArt)."""
    auto = an_auto()
    measure(auto, "prefill", "h800", 1.0)
    measure(auto, "prefill", "h20", 1.0 * 2.85 / 0.53)
    measure(auto, "decode", "h800", 1.0)
    measure(auto, "decode", "h20", 1.0 * 2.85 * 0.6)
    for domain, suits, other in (("prefill", "H800", "H20"), ("decode", "H20", "H800")):
        where = chosen(auto, domain)
        assert where[suits] > 0.8 * where.total()
        assert where[other] >= 0.04 * where.total()
        assert auto.order(domain, 0.99999)[-1] in ("H800", "H20")


def test_time_decides_and_not_tokens() -> None:
    """97 % of the tokens of `swe` are read, and most of its time is decoding (PEARL): it belongs with the decode-heavy task, on
    the pool that decodes faster, where another one reads for most of its time."""
    auto = an_auto()
    rates = {"h800": (50_000.0, 100.0), "h20": (7_500.0, 120.0)}  # tokens a second, read and sampled
    loads = {"swe": (3000, 100), "math": (100, 900), "reading": (20_000, 40), "reading more": (20_000, 20)}
    for domain, (read, sampled) in loads.items():
        for pool, (reads, samples) in rates.items():
            measure(auto, domain, pool, read / reads + sampled / samples, tokens=sampled)
    found = {domain: chosen(auto, domain).most_common(1)[0][0] for domain in loads}
    assert found == {"swe": "H20", "math": "H20", "reading": "H800", "reading more": "H800"}


def test_a_pool_that_is_slow_or_full_for_all_is_not_left_by_all() -> None:
    """Ten times slower for every task: who gains most there still goes there."""
    auto = an_auto()
    for domain, h800, h20 in (("a", 1.0, 20.0), ("b", 1.0, 10.0), ("c", 1.0, 5.0)):
        measure(auto, domain, "h800", h800)
        measure(auto, domain, "h20", h20)
    assert auto.shares("a")["H800"] > 0.85
    assert auto.shares("b")["H800"] == pytest.approx(0.5)
    assert auto.shares("c")["H20"] > 0.85


def test_a_mixed_cluster_finds_the_table_of_rollart_from_the_time_of_its_turns() -> None:
    """Qwen3-8B, 32 requests at once on an engine; prompts of many turns, or answers of a thousand tokens."""
    auto, live = an_auto(), 32
    engines = {"h800": engine_cost(device("H800"), QWEN), "h20": engine_cost(device("H20"), QWEN)}
    for domain, read, sampled in (("frozen_lake", 6000, 40), ("webshop", 5000, 90), ("gem_math", 200, 900)):
        for pool, engine in engines.items():
            seconds = live * engine.prefill_s(read) + sampled * engine.decode_step_s(live, read + sampled)
            measure(auto, domain, pool, seconds, tokens=sampled)
    found = {domain: chosen(auto, domain).most_common(1)[0][0] for domain in ("frozen_lake", "webshop", "gem_math")}
    assert found == {"frozen_lake": "H800", "webshop": "H800", "gem_math": "H20"}


def test_what_takes_longer_now_is_found_out_while_the_run_goes_on() -> None:
    auto = an_auto()
    for pool in ("h800", "h20"):
        measure(auto, "other", pool, 1.0)
    measure(auto, "t", "h800", 2.0, turns=1000)
    measure(auto, "t", "h20", 1.0, turns=1000)
    assert chosen(auto, "t").most_common(1)[0][0] == "H20"
    measure(auto, "t", "h20", 10.0, turns=HALF_LIFE)
    assert auto.costs("t")["H20"] == pytest.approx(0.055, rel=0.02), (
        "a half-life on, the new time counts as much as the old"
    )
    assert chosen(auto, "t").most_common(1)[0][0] == "H800"


def test_nothing_is_preferred_before_there_is_something_to_compare() -> None:
    auto = an_auto()
    measure(auto, "t", "h800", 1.0, turns=100)
    measure(auto, "t", "h20", 1.0, turns=100)
    assert auto.order("t", 0.5) == (), "one task alone uses what is there"
    measure(auto, "u", "h800", 1.0, turns=100)
    measure(auto, "u", "h20", 1.0, turns=7)
    assert auto.order("t", 0.5) == auto.order("u", 0.5) == ()
    measure(auto, "u", "h20", 1.0, turns=2)
    assert auto.order("t", 0.5) != ()
    assert auto.order("another", 0.5) == ()


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "nowhere"]), st.floats(0.001, 100)), max_size=60), st.floats(0, 1))
def test_pools_that_are_alike_are_never_told_apart(turns: list[tuple[str, float]], draw: float) -> None:
    """Oracle 8: on a homogeneous cluster affinity is no matter, however noisy its measurements are."""
    auto = Auto({"a": H800, "b": H800}, explore=EXPLORE, half_life=1)
    for pool, seconds in turns:
        auto.measured("t", pool, seconds=seconds, tokens=10)
    assert auto.order("t", draw) == ()
    assert not auto.draws


def test_pools_of_one_kind_are_one_place() -> None:
    auto = an_auto(a=H20, b=H20, c=H800)
    measure(auto, "t", "a", 1.0, turns=5)
    measure(auto, "t", "b", 1.0, turns=5)
    measure(auto, "t", "c", 1.0)
    measure(auto, "u", "a", 1.0)
    measure(auto, "u", "c", 1.0)
    assert [auto.place(pool) for pool in ("a", "b", "c", "unknown")] == ["H20", "H20", "H800", "unknown"]
    assert set(auto.order("t", 0.5)) == {"H20", "H800"}


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=5), st.floats(0.001, 0.999), st.floats(0, 1, exclude_max=True),
    st.integers(1, 500),
)  # fmt: skip
def test_shares_are_shares_and_an_order_names_every_kind_once(
    seconds: list[float], explore: float, draw: float, half_life: int
) -> None:
    pools = {f"p{n}": Kind(name=f"k{n}", cost=1.0 + n) for n in range(len(seconds))}
    auto = Auto(pools, explore=explore, half_life=half_life)
    for pool, each in zip(pools, seconds, strict=True):
        measure(auto, "t", pool, each)
        measure(auto, "u", pool, 1.0)
    assert sum(auto.shares("t").values()) == pytest.approx(1.0)
    assert min(auto.shares("t").values()) > 0
    assert sorted(auto.order("t", draw)) == sorted(kind.name for kind in pools.values())
