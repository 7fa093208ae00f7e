"""The closed forms of a batch workload against the same engine played token by token."""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean, median
from typing import NamedTuple

import pytest

from rollart.core.seeds import unit
from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import device
from rollart.perf.engines import engine_facts
from rollart.perf.serving import Server, Workload, serve
from rollart.perf.shapes import model_shape

SEQUENCES, SEEDS = 64, 4


class Played(NamedTuple):
    tokens_per_s: float
    paces: list[float]
    """Of each request, seconds per token after the first."""
    gaps: list[float]
    """Between two tokens of a request."""
    lives: list[float]
    """From arrival to the last token."""


def played(server: Server, work: Workload, seed: int) -> Played:
    """Prompts stop decoding, as many as are there and fit; each other step gives every running sequence a token."""
    count, context, most = int(work.requests), server.context(work), int(server.step_tokens // work.prompt)
    arrivals = [number / work.rate_per_s for number in range(count)]
    lengths = [max(round(work.law.quantile(unit("oracle", seed, number))), 2) for number in range(count)]
    left, first, last = list(lengths), [0.0] * count, [0.0] * count
    decode = cache(lambda running: server.step_s(running, context))
    read = cache(lambda prompts: server.step_s(0.0, 0.0, prompts * work.prompt, work.prompt))
    now, begun, running, gaps = 0.0, 0, list[int](), list[float]()
    while begun < count or running:
        if not running:
            now = max(now, arrivals[begun])
        here = sum(arrival <= now for arrival in arrivals[begun : begun + SEQUENCES])
        taken = min(here, SEQUENCES - len(running), most)
        given = list(range(begun, begun + taken)) or running
        now += read(taken) if taken else decode(len(running))
        if taken:
            running, begun = [*running, *given], begun + taken
        else:
            gaps += [now - last[number] for number in running]
        for number in given:
            left[number], first[number], last[number] = left[number] - 1, first[number] or now, now
        running = [number for number in running if left[number]]
    return Played(
        sum(lengths) / now, [(last[n] - first[n]) / (lengths[n] - 1) for n in range(count)], gaps,
        [end - come for end, come in zip(last, arrivals, strict=True)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "rate", "shortest"),
    [(150, math.inf, 0.0), (600, math.inf, 0.0), (600, 6.0, 0.0), (300, 30.0, 0.0), (300, 20.0, 120.0)],
)
def test_closed_forms_agree_with_the_engine_played_out(requests: int, rate: float, shortest: float) -> None:
    cost = engine_cost(device("H100"), model_shape("Llama-3.1-8B"), engine="vLLM", version="0.6.0")
    server = Server(cost=cost, facts=engine_facts("vLLM", "0.6.0"), max_sequences=SEQUENCES)
    work = Workload(
        prompt=220, answer=195, lengths="varied", requests=requests, rate_per_s=rate, shortest=shortest
    )  # fmt: skip
    says, was = serve(server, work), [played(server, work, seed) for seed in range(SEEDS)]
    assert says.tpot_s == pytest.approx(fmean(fmean(run.paces) for run in was), rel=0.05)
    assert says.tpot_quantile_s(0.5) == pytest.approx(fmean(median(run.paces) for run in was), rel=0.08)
    assert says.mean_itl_s == pytest.approx(fmean(fmean(run.gaps) for run in was), rel=0.05)
    assert says.median_itl_s == pytest.approx(fmean(median(run.gaps) for run in was), rel=0.05)
    assert says.e2e_s() == pytest.approx(fmean(fmean(run.lives) for run in was), rel=0.08)
    # how long the longest answer is, is a matter of chance where few are asked for
    assert says.tokens_per_s == pytest.approx(fmean(run.tokens_per_s for run in was), rel=0.12)
