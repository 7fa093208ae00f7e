"""Draws: the frequencies are those of the exact distribution, and a draw depends on its own row only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import by_traj, engine, ids, one, payload, random_ids, request, run
from numpy.typing import NDArray

from rollart.core.types import Sampling
from rollart.runtime.engine.native import decode_kernel
from rollart.runtime.engine.sampler import BLOCK, WHOLE_VOCAB, Plain, Special, draw, stream_key, uniforms

N_DRAWS = 200_000
SIGMAS = 5.0
"""Frequencies may differ from the distribution by this many deviations of their own."""


def numbers(seed: int = 0, n: int = N_DRAWS) -> NDArray[np.float64]:
    return uniforms(np.full(n, stream_key(seed), np.uint64), np.arange(n))


@pytest.fixture(params=["torch", "compiled"])
def plain(request: pytest.FixtureRequest) -> Plain | None:
    """What draws plain rows; None: torch."""
    if request.param == "torch":
        return None
    found = decode_kernel(torch.float32, torch.device("cpu"), 32)
    if found.kernel is None:
        pytest.skip(found.why)
    return found.kernel.draw


def many(sampling: Sampling, n: int = N_DRAWS) -> Special:
    greedy = sampling.temperature == 0.0
    return Special(
        greedy=np.full(n, greedy),
        temperature=np.full(n, 1.0 if greedy else sampling.temperature, np.float32),
        truncates=np.full(n, sampling.truncates),
        top_k=np.full(n, sampling.top_k),
        top_p=np.full(n, sampling.top_p),
        min_p=np.full(n, sampling.min_p),
    )


def exact(scores: NDArray[np.float64], sampling: Sampling) -> tuple[NDArray[np.float64], float]:
    """The truncated distribution and the kept mass, by the plain definition: top-k, then top-p of what is left, then min-p."""
    full = np.exp(scores / sampling.temperature)
    full /= full.sum()
    kept = full.copy()
    ranked = np.argsort(-full, kind="stable")
    if sampling.top_k:
        kept[ranked[sampling.top_k :]] = 0.0
    share = kept / kept.sum()
    before = 0.0
    for token in ranked:
        if before >= sampling.top_p:
            kept[token] = 0.0
        before += share[token]
    kept[full < sampling.min_p * full.max()] = 0.0
    return kept / kept.sum(), float(kept.sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2),
        Sampling(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
        Sampling(top_k=1),
        Sampling(top_p=1e-9),
    ],
)
def test_frequencies_and_kept_mass_are_those_of_the_exact_distribution(sampling: Sampling, plain: Plain | None) -> None:
    scores = np.array([1.5, -0.3, 0.9, 0.0, 2.1, -2.0, 0.4, 1.1])
    special = None if sampling == Sampling() else many(sampling)
    rows = torch.tensor(scores, dtype=torch.float32).expand(N_DRAWS, -1)
    tokens, logprobs, log_kept = draw(rows, numbers(), special, plain=plain)
    wanted, kept_mass = exact(scores, sampling)
    deviation = np.sqrt(wanted * (1 - wanted) / N_DRAWS)
    got = np.bincount(tokens, minlength=len(scores)) / N_DRAWS
    assert np.all(np.abs(got - wanted) <= SIGMAS * deviation)
    assert np.all(got[wanted == 0.0] == 0.0)
    full = np.exp(scores / sampling.temperature)
    assert np.allclose(logprobs, np.log(full / full.sum())[tokens], atol=1e-6), "before truncation"
    if sampling.truncates:
        assert log_kept is not None
        assert np.allclose(log_kept, np.log(kept_mass), atol=1e-6)
        assert np.allclose(logprobs - log_kept, np.log(wanted[tokens]), atol=1e-5), "behaviour log-probability"
    else:
        assert log_kept is None


def test_rows_of_one_batch_keep_their_own_parameters(plain: Plain | None) -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).repeat_interleave(500, 0)
    kinds = [Sampling(temperature=0.0), Sampling(top_k=2), Sampling(temperature=2.0), Sampling(top_p=0.3, min_p=0.1)]
    parts = [many(kind, 500) for kind in kinds]
    together = Special(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in Special.__slots__})
    uniform = numbers(n=2000)
    tokens, logprobs, log_kept = draw(scores, uniform, together, plain=plain)
    assert log_kept is not None
    for n, part in enumerate(parts):
        rows = slice(500 * n, 500 * (n + 1))
        alone = draw(scores[rows], uniform[rows], part, plain=plain)
        assert np.array_equal(tokens[rows], alone[0])
        assert np.array_equal(logprobs[rows], alone[1])
        assert np.array_equal(log_kept[rows], np.zeros(500) if alone[2] is None else alone[2])
    assert np.array_equal(tokens[:500], scores[:500].argmax(-1).numpy())


def test_uniforms_are_open_even_and_without_pattern_over_neighbouring_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    keys = np.array([stream_key(int(seed)) for seed in range(300)], np.uint64)[seeds]
    values = uniforms(keys.ravel(), positions.ravel())
    assert 0.0 < values.min() < values.max() < 1.0
    assert len(np.unique(values)) == len(values)
    counts = np.histogram(values, bins=100, range=(0.0, 1.0))[0]
    assert np.all(np.abs(counts - 900) < SIGMAS * 30)
    grid = values.reshape(300, 300) - 0.5
    for neighbours in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(neighbours.mean() * 12) < SIGMAS / 300


def test_the_largest_uniform_still_draws_a_token_that_exists(plain: Plain | None) -> None:
    scores = torch.full((2, 7), -1000.0)
    scores[:, 2], scores[:, 4] = 0.0, 0.0
    assert draw(scores, np.array([2.0**-53, 1 - 2.0**-53]), plain=plain)[0].tolist() == [2, 4]


@pytest.mark.parametrize(("vocab", "kept"), [(WHOLE_VOCAB + 1, 1.0), (50 * BLOCK, 0.01), (40 * BLOCK + 7, 0.001)])
def test_a_draw_by_blocks_is_the_draw_from_the_whole(vocab: int, kept: float, plain: Plain | None) -> None:
    draws = torch.Generator().manual_seed(vocab)
    scores = torch.randn(64, vocab, generator=draws) * 3
    scores[torch.rand(64, vocab, generator=draws) >= kept] = -1000.0
    scores[:, vocab // 3] = 0.0
    edges = np.concatenate([[2.0**-53, 1 - 2.0**-53], np.full(62, 0.5)])
    close = 1e-6
    for n in range(20):
        uniform = edges if n == 0 else numbers(n, 64)
        tokens, logprobs, _ = draw(scores, uniform, plain=plain)
        full = scores.double().softmax(-1)
        below = full.cumsum(-1).numpy()
        rows = np.arange(64)
        assert np.all(below[rows, tokens] > uniform - close)
        assert np.all(below[rows, tokens] - full.numpy()[rows, tokens] < uniform + close)
        assert np.all(scores.numpy()[rows, tokens] > -1000.0)
        assert np.allclose(logprobs, full.log().numpy()[rows, tokens], atol=1e-5)


def test_a_draw_does_not_depend_on_what_else_is_in_the_batch() -> None:
    wanted = request("alone", random_ids(20), max_tokens=30, sampling=Sampling(seed=77))
    alone = one(engine(), wanted)
    crowd = engine()
    crowd.submit([request(f"before{n}", random_ids(5 * n + 1, n), max_tokens=9) for n in range(6)])
    for _ in range(3):
        crowd.step()
    crowd.submit(
        [request(f"with{n}", random_ids(30, n), max_tokens=50, sampling=Sampling(top_p=0.5)) for n in range(6)]
    )
    crowd.submit([wanted])
    assert ids(run(crowd)[wanted.id]) == ids(alone)
    other_seed = one(engine(), request("alone", random_ids(20), max_tokens=30, sampling=Sampling(seed=78)))
    assert ids(other_seed) != ids(alone)


def test_kept_mass_comes_with_truncated_requests_only() -> None:
    core, context = engine(), random_ids(10)
    core.submit(
        [
            request("cut", context, sampling=Sampling(top_k=2, seed=1)),
            request("whole", context, sampling=Sampling(seed=1)),
            request("greedy", context, sampling=Sampling(temperature=0.0, top_k=2)),
        ]
    )
    answers = {traj: payload(answer) for traj, answer in by_traj(core).items()}
    kept = answers["cut"].log_kept_mass
    assert kept is not None
    assert kept.shape == answers["cut"].ids.shape
    assert np.all(kept < 0.0)
    assert answers["whole"].log_kept_mass is None
    assert answers["greedy"].log_kept_mass is None


def test_tokens_without_a_mass_are_never_drawn(plain: Plain | None) -> None:
    scores = torch.full((4, 200), float("-inf"))
    scores[:2, 3], scores[2:, :50] = 0.0, 1.0
    tokens, logprobs, _ = draw(scores, np.array([2.0**-53, 1 - 2.0**-53] * 2), plain=plain)
    assert tokens.tolist() == [3, 3, 0, 49]
    assert np.allclose(logprobs, [0.0, 0.0, -np.log(50), -np.log(50)], atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_log_probability(bad: float, plain: Plain | None) -> None:
    for place in (0, 5, 69):
        scores = torch.zeros(3, 70)
        scores[1, place] = bad
        _, logprobs, _ = draw(scores, np.full(3, 0.5), plain=plain)
        assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert not np.isfinite(draw(torch.full((1, 70), -float("inf")), np.full(1, 0.5), plain=plain)[1]).any()


def test_both_ways_to_draw_give_the_same_tokens() -> None:
    found = decode_kernel(torch.float32, torch.device("cpu"), 32).kernel
    if found is None:
        pytest.skip("no C compiler here")
    scores = torch.randn(2000, 517, generator=torch.Generator().manual_seed(0)) * 4
    rules = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0), Sampling(top_p=0.6), Sampling(top_k=5)]
    by_rule = [many(rule, 400) for rule in rules]
    names = ("greedy", "temperature", "truncates", "top_k", "top_p", "min_p")
    special = Special(**{name: np.concatenate([getattr(one, name) for one in by_rule]) for name in names})
    for wanted, threads in ((None, 1), (special, 1), (None, 3)):
        torch.set_num_threads(threads)
        (ids_1, scores_1, kept_1), (ids_2, scores_2, kept_2) = (
            draw(scores, numbers(3, 2000), wanted, plain=way) for way in (None, found.draw)
        )
        assert (ids_1 != ids_2).sum() <= 1, "up to rounding at the border between two tokens"
        alike = ids_1 == ids_2
        assert np.allclose(scores_1[alike], scores_2[alike], atol=2e-6)
        assert (kept_1 is None) == (kept_2 is None) == (wanted is None)
        assert kept_1 is None or kept_2 is None or np.array_equal(kept_1, kept_2)
    torch.set_num_threads(1)
