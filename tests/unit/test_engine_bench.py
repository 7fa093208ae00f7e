"""The sides of benchmarks/engine.py: the bare loop computes what the model computes, and a workload is what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark_modules import loaded
from rollart.config.schema import ScratchModel
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, hf_config, named_weights

bare_loop, sides = loaded("engine_bare_loop"), loaded("engine_sides")
peers, _figures = loaded("engine_peers"), loaded("peers_figures")
feasibility, bench = loaded("engine_feasibility"), loaded("engine")
MODEL = ScratchModel(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, max_positions=128)
CONFIG = hf_config(MODEL, 48)
SIZES = {"vocab": 48, "rows": 6, "group": 3, "prompt": 12, "turns": 3, "observation": 5, "new": 7}


@pytest.mark.parametrize(
    ("rows", "n"), [(3, 10), (40, 40)], ids=["in one piece", "prompts in parts, two blocks of positions"]
)
def test_the_bare_loop_samples_under_the_model_over_two_turns(rows: int, n: int) -> None:
    model = build_model(CONFIG, seed=0)
    loop = bare_loop.BareLoop(CONFIG, named_weights(model), rows, n + 30)
    prompts, more = torch.randint(0, 48, (rows, n)), torch.randint(0, 48, (rows, 4))
    first, first_scores = loop.generate(prompts, 6)
    second, second_scores = loop.generate(torch.cat([first[:, -1:], more], 1), 5, n + 5)
    whole = torch.cat([prompts, first, more, second], 1)
    with torch.no_grad():
        scores = model(whole).logits[:, :-1].log_softmax(-1).gather(2, whole[:, 1:, None])[:, :, 0]
    assert torch.allclose(scores[:, n - 1 : n + 5], first_scores, atol=1e-5)
    assert torch.allclose(scores[:, n + 9 :], second_scores, atol=1e-5)


def test_the_bare_loops_rows_may_stand_at_other_positions() -> None:
    model = build_model(CONFIG, seed=0)
    loop = bare_loop.BareLoop(CONFIG, named_weights(model), 2, 64)
    ids, lengths = torch.randint(0, 48, (2, 40)), (40, 9)
    with torch.no_grad():
        wanted = torch.stack([model(ids[row : row + 1, :n]).logits[0, -1] for row, n in enumerate(lengths)])
        for row, n in enumerate(lengths):
            loop.step(ids[row : row + 1, : n - 1], torch.arange(n - 1)[None], row)
        last = torch.tensor([[ids[row, n - 1]] for row, n in enumerate(lengths)])
        found = loop.step(last, torch.tensor([[n - 1] for n in lengths]))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_draw_follows_the_distribution_and_tells_its_log_probability() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    tokens, logprobs = bare_loop.draw(logits.expand(20_000, 4))
    wanted = logits.log_softmax(-1)[0]
    assert torch.allclose(logprobs, wanted[tokens], atol=1e-6)
    assert torch.allclose(torch.bincount(tokens) / 20_000, wanted.exp(), atol=0.015)


def test_other_machines_figures_are_compared_by_a_matrix_product() -> None:
    record = feasibility.compared(1, [(9000.0, 100.0), (9900.0, 110.0), (4000.0, 100.0)])
    assert (record["tokens_per_gflop"], record["tokens_per_s"]) == (90.0, 9000.0)
    assert record["stated_tokens_per_s"][0] == 12_600.0
    assert record["equal_at_gflops"][0] == 140.0, "a machine with more than this was slower per operation"
    assert set(feasibility.STATED) == {1, 2}


def test_a_ragged_workload_has_other_lengths_and_siblings_have_one_prompt() -> None:
    equal, ragged = (sides.workload(**SIZES, ragged=ragged) for ragged in (False, True))
    assert (equal.lockstep, ragged.lockstep) == (True, False)
    assert (equal.n_tokens, equal.longest) == (6 * 3 * 7, 12 + 2 * 5 + 3 * 7)
    for work in (equal, ragged):
        assert all(np.array_equal(work.prompts[row], work.prompts[row // 3 * 3]) for row in range(6))


def test_every_side_samples_the_workload() -> None:
    model = build_model(CONFIG, seed=0)
    core = EngineCore(CONFIG, max_live=6, kv_tokens=1024, prefill_tokens=64)
    core.load(0, named_weights(model))
    equal, ragged = (sides.workload(**SIZES, ragged=ragged) for ragged in (False, True))
    for work in (equal, ragged):
        before = sum(core.book().sampled.values())
        assert sides.Ours(core)(work) > 0.0
        assert sum(core.book().sampled.values()) - before == work.n_tokens
        assert sides.generate(model, "dynamic", reuse=work.lockstep)(work) > 0.0
    assert sides.generate(model, "static", reuse=True)(equal) > 0.0
    assert sides.bare(CONFIG, named_weights(model))(equal) > 0.0


def test_a_setting_counts_by_the_median_of_its_runs_and_the_best_one_is_measured_against() -> None:
    work, order = sides.workload(**SIZES, ragged=False), list[str]()

    def side(name: str, *seconds: float) -> Callable[[object], float]:
        left = list(seconds)

        def run(_: object) -> float:
            order.append(name)
            return left.pop(0) if len(left) > 1 else left[0]

        return run

    # the first run of each is not counted; one lucky run makes no best setting
    theirs = {"even": side("even", 9.0, 2.0, 2.0, 2.0), "odd": side("odd", 9.0, 0.1, 3.0, 3.0)}
    case = bench.measured("tiny_x", work, side("ours", 9.0, 1.0), theirs, 3, "nothing")
    assert order[:8] == ["even", "odd"] * 4
    assert order[8:] == ["ours", "ours", "even", "even", "ours", "ours", "even"]
    assert case["theirs"]["setting"] == "even"
    assert case["theirs"]["sweep_tokens_per_s"] == {"even": work.n_tokens / 2, "odd": work.n_tokens / 3}
    assert (case["ratio_median"], case["target"], case["met"], case["pairs"]) == (2.0, 1.5, True, 3)
    assert not bench.measured("tiny_x", work, side("ours", 2.0), theirs, 1, "nothing")["met"]


def test_a_loop_case_has_the_loop_beside_generate_and_the_engine_without_its_kernel() -> None:
    work = sides.workload(**SIZES, ragged=False)
    peers = {"slow": lambda _: 9.0, "best": lambda _: 6.0}
    case = bench.loop_case("loop_x", work, lambda _: 2.0, lambda _: 5.0, lambda _: 4.0, peers, 3)
    assert (case["ratio_median"], case["loop_over_generate"], case["native_off"]["ratio_median"]) == (2.0, 1.5, 0.8)


@pytest.mark.vllm
def test_vllm_samples_the_same_workload_and_waits_without_computing(tmp_path: Path) -> None:
    heads_of_32 = hf_config(MODEL.model_copy(update={"hidden": 128}), 48)  # its kernels for CPUs have no narrower ones
    build_model(heads_of_32, seed=0).save_pretrained(tmp_path)
    ragged = sides.workload(**SIZES, ragged=True)
    with peers.vllm_sides(str(tmp_path), "fp32", ragged.longest, 6, 1) as found:
        assert len(found) == 2
        for side in found.values():
            assert side(ragged) > 0.0
            assert side(ragged) > 0.0
            assert side.idle_share() < 0.1
