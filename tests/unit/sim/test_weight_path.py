"""How long weights are on their way: RollArt's table, what is hidden of it, and what engines of a node share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.cluster import LinkConfig
from rollart.perf.shapes import model_shape
from rollart.sim.loop import run
from rollart.sim.transfer import NodePulls, buckets, same_devices, weight_path

PAPER = {"qwen3-8b": (1, 32.4, 6.2, 1.4), "qwen3-14b": (2, 67.8, 16.3, 5.1), "qwen3-32b": (4, 127.3, 29.7, 9.6)}
"""Model -> tensor-parallel ranks, push, pull and exposed seconds (RollArt, arXiv 2512.22560, table of weight transfer)."""


@pytest.mark.parametrize("model", PAPER)
def test_the_papers_table_comes_out(model: str) -> None:
    tp, push_s, pull_s, exposed_s = PAPER[model]
    path = weight_path(2.0 * model_shape(model).parameters, LinkConfig(), tp=tp)
    assert path.push_s == pytest.approx(push_s, rel=0.15)
    assert path.pull_s == pytest.approx(pull_s, rel=0.15)
    assert path.exposed_s == pytest.approx(exposed_s, rel=0.15)
    assert 0.22 <= path.exposed_s / path.pull_s <= 0.33
    assert path.naive_s == pytest.approx(push_s + pull_s, rel=0.15)


@given(
    n_bytes=st.floats(1e6, 2e12), tp=st.integers(1, 64), push=st.floats(0.01, 100), pull=st.floats(0.01, 100),
    load=st.floats(0.01, 100), slices=st.floats(0.01, 100), latency_s=st.floats(0, 1), gbit=st.floats(0.1, 1000),
)  # fmt: skip
def test_naive_is_push_and_pull_and_no_more_is_exposed_than_pulled(
    n_bytes: float, tp: int, push: float, pull: float, load: float, slices: float, latency_s: float, gbit: float
) -> None:
    """Oracle 10 of RollArt."""
    link = LinkConfig(
        gbit_per_s=gbit, push_gbyte_per_s=push, pull_gbyte_per_s=pull, load_gbyte_per_s=load, slice_gbyte_per_s=slices,
        latency_s=latency_s,
    )  # fmt: skip
    path = weight_path(n_bytes, link, tp=tp)
    assert path.naive_s == path.push_s + path.pull_s
    assert 0 < path.exposed_s <= path.pull_s
    assert path.push_s >= n_bytes / (gbit * 1e9 / 8)
    assert path.push_s >= n_bytes / (push * 1e9)
    twice = weight_path(2 * n_bytes, link, tp=tp)
    assert (twice.push_s, twice.pull_s, twice.exposed_s) > (path.push_s, path.pull_s, path.exposed_s)


def test_weights_that_stay_on_their_devices_go_no_other_way() -> None:
    path = same_devices(16e9, 4, 50e9)
    assert path.push_s == path.pull_s == 0.0
    assert path.load_s == 16e9 / 4 / 25e9
    assert buckets(16.4e9, LinkConfig()) == 17


def test_engines_of_one_node_share_a_pull() -> None:
    """Whoever asks first starts it; who asks while it goes on waits for its end, who asks later has it."""
    node, other = NodePulls(), NodePulls()
    ends: list[tuple[str, float]] = []

    async def ask(name: str, pulls: NodePulls, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await pulls.pull(1, 10.0)
        ends.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(
            ask("first", node, 0), ask("joins", node, 4), ask("late", node, 30), ask("alone", other, 4)
        )
        for version in range(2, 9):
            await node.pull(version, 1.0)

    run(main())
    assert ends == [("first", 10.0), ("joins", 10.0), ("alone", 14.0), ("late", 30.0)]
    assert sorted(node.pulls) == [7, 8]
