"""The trainer's kernels: what torch computes in float64, to rounding, for any shape; and the layers made of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from trainer_samples import VOCAB

from rollart.config.schema import ScratchModel
from rollart.core.errors import TrainerError
from rollart.runtime.compiled import COMPILERS, Native
from rollart.runtime.models import build_model, hf_config
from rollart.runtime.trainer.kernels import Heads, Kernels, Looking, kernels_for
from rollart.runtime.trainer.packing import Runs
from rollart.runtime.trainer.policy import Policy, token_logprobs
from rollart.runtime.trainer.rows import Row, pad

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**31)
FEW = settings(max_examples=25, deadline=None)


def kernels() -> Kernels:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C compiler here")
    found = kernels_for(torch.float32, CPU)
    assert found.kernel is not None, found.why
    return found.kernel


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 2**31))


def close(got: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> bool:
    """Within a few roundings of the largest number there."""
    return bool(((got.double() - wanted).abs() <= tolerance * (1 + wanted.abs().max())).all())


@FEW
@given(st.integers(1, 150), st.integers(1, 70), SEEDS, st.booleans())
def test_norms_and_their_gradients(rows: int, width: int, seed: int, past: bool) -> None:
    hidden, weight, grad = drawn(seed, rows, width), drawn(seed + 1, width), drawn(seed + 2, rows, width)
    out, scale = kernels().norm(hidden, weight, 1e-3)
    exact, by = hidden.double().requires_grad_(), weight.double().requires_grad_()
    wanted = exact * (exact.square().mean(1, keepdim=True) + 1e-3).rsqrt() * by
    by_hidden, by_weight = torch.autograd.grad(wanted, (exact, by), grad.double())
    of = (hidden, weight, scale)
    got, got_weight = kernels().norm_back(grad, of, hidden if past else None, (True, True))
    assert got is not None
    assert got_weight is not None
    assert close(out, wanted.detach())
    assert close(got, by_hidden + hidden if past else by_hidden, 1e-5)
    assert close(got_weight, by_weight)
    assert kernels().norm_back(grad, of, None, (False, False)) == (None, None)


@FEW
@given(st.integers(1, 40), st.integers(1, 70), SEEDS, st.sampled_from([0.1, 1.0, 30.0]))
def test_gated_products_and_their_gradients(rows: int, width: int, seed: int, spread: float) -> None:
    both, grad = drawn(seed, rows, 2 * width) * spread, drawn(seed + 1, rows, width)
    exact = both.double().requires_grad_()
    wanted = functional.silu(exact[:, :width]) * exact[:, width:]
    (by_both,) = torch.autograd.grad(wanted, exact, grad.double())
    assert close(kernels().gate(both), wanted.detach())
    assert close(kernels().gate_back(both, grad), by_both)


@FEW
@given(st.integers(1, 9), st.integers(1, 90), SEEDS, st.sampled_from([0.3, 1.0, 1.7]))
def test_log_probabilities_of_targets_their_entropy_and_gradients(
    rows: int, vocabulary: int, seed: int, temperature: float
) -> None:
    hidden, head = drawn(seed, rows, 5) * 3, drawn(seed + 1, vocabulary, 5)
    targets = torch.arange(rows) * seed % vocabulary
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, entropy = token_logprobs(
        hidden, head, targets, temperature, True, chunk_bytes=8 * vocabulary, kernels=kernels()
    )
    wanted, expected = token_logprobs(exact[0], exact[1], targets, temperature, True)
    assert close(got.detach(), wanted.detach(), 5e-6)
    assert float(entropy) == pytest.approx(float(expected), abs=1e-4)
    assert float(token_logprobs(hidden, head, targets, temperature, False, kernels=kernels())[1]) == 0.0
    weights = drawn(seed + 2, rows)
    for one, other in zip(
        torch.autograd.grad(got @ weights, leaves),
        torch.autograd.grad(wanted @ weights.double(), exact),
        strict=True,
    ):
        assert close(one, other, 1e-4)  # a probability is as exact as the logits that were subtracted


def drawn_runs(draws: np.random.Generator, n_sequences: int, longest: int) -> tuple[Runs, int]:
    """Sequences that share what they begin with, of whose own tokens some ask; and the number of tokens."""
    prompt = int(draws.integers(1, longest + 1))
    lengths = draws.integers(prompt, prompt + longest, n_sequences)
    lengths[0] = prompt
    own = prompt + np.cumsum(lengths - prompt) - (lengths - prompt)
    asks = [np.flatnonzero(draws.random(n) < draws.choice([0.1, 1.0])) for n in lengths]
    asks[0] = np.arange(prompt)  # tokens that nobody else asks for
    counts = np.array([len(places) for places in asks])
    runs = Runs(
        lead=np.zeros(n_sequences, np.int64),
        shared=np.full(n_sequences, prompt),
        own=own,
        begins=np.append(0, np.cumsum(counts)),
        asked=draws.permutation(int(counts.sum())),
        places=np.concatenate(asks),
        longest=int(max(places[-1] + 1 for places in asks if len(places))),
    )
    return runs, prompt + int((lengths - prompt).sum())


def plain_attention(heads: Heads, how: Looking, size: int) -> Tensor:
    """Query by query from the definition."""

    def turned(rows: Tensor, token: int) -> Tensor:
        left, right = rows.chunk(2, -1)
        return rows * how.cos[token] + torch.cat([-right, left], -1) * how.sin[token]

    runs, out = how.runs, [torch.empty(0)] * len(heads.queries)
    q, k, v = (part.reshape(len(part), -1, size) for part in heads)
    keys = torch.stack([turned(row, token) for token, row in enumerate(k)])
    for sequence in range(len(runs.lead)):
        for query in range(runs.begins[sequence], runs.begins[sequence + 1]):
            place = int(runs.places[query])
            at = np.arange(place + 1)
            shared = runs.shared[sequence]
            tokens = np.where(at < shared, runs.lead[sequence] + at, runs.own[sequence] + at - shared)
            groups = q.shape[1] // k.shape[1]
            seen, values = (part[tokens].repeat_interleave(groups, 1) for part in (keys, v))
            row = int(runs.asked[query])
            scores = torch.einsum("hd,thd->ht", turned(q[row], int(tokens[-1])), seen) * how.scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()
    return torch.stack(out)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([2, 9, 40]),
    st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    st.sampled_from([2, 6, 16, 32, 34, 64]),
    SEEDS,
)
def test_attention_and_its_gradients(
    n_sequences: int, longest: int, heads_of: tuple[int, int], size: int, seed: int
) -> None:
    kv_heads, groups = heads_of
    runs, n_tokens = drawn_runs(np.random.default_rng(seed), n_sequences, longest)
    widths = [kv_heads * groups * size, kv_heads * size, kv_heads * size]
    cuts = (widths[0], widths[0] + widths[1])
    joined = drawn(seed, n_tokens, sum(widths))
    heads = Heads(drawn(seed + 1, len(runs.asked), widths[0]), *torch.tensor_split(joined, cuts, 1)[1:])
    angles = drawn(seed + 2, n_tokens, size // 2).repeat(1, 2)
    how = Looking(runs, angles.cos(), angles.sin(), size**-0.5)
    out, log_sums = kernels().attend(heads, how)
    exact = Heads(*(part.double().requires_grad_() for part in heads))
    wanted = plain_attention(exact, Looking(runs, angles.double().cos(), angles.double().sin(), how.scale), size)
    assert close(out, wanted.detach())
    grad, held = drawn(seed + 3, *out.shape), drawn(seed + 4, *joined.shape)
    into = Heads(torch.empty_like(heads.queries), *torch.tensor_split(held.clone(), cuts, 1)[1:])
    kernels().attend_back(heads, how, out, log_sums, grad, into)
    by = torch.autograd.grad(wanted, exact, grad.double())
    before = torch.tensor_split(held, cuts, 1)
    assert close(into.queries, by[0], 5e-6)
    assert close(into.keys - before[1], by[1], 5e-6)
    assert close(into.values - before[2], by[2], 5e-6)
    # heads are parted among threads, so any number of them gives the same bits
    torch.set_num_threads(2)
    again, _ = kernels().attend(heads, how)
    torch.set_num_threads(1)
    assert torch.equal(again, out)


def test_what_is_not_a_number_stays_so_in_its_own_row() -> None:
    hidden, weight = drawn(0, 3, 40), drawn(1, 40)
    hidden[1, 7] = float("nan")
    for got in (kernels().norm(hidden, weight, 1e-6)[0], kernels().gate(hidden)):
        assert got.isnan().any(1).tolist() == [False, True, False]
    found, _, entropy = kernels().target(hidden, torch.tensor([0, 1, 2]), 1.0)
    assert found.isnan().tolist() == [False, True, False]
    assert np.isnan(entropy)
    runs, n_tokens = drawn_runs(np.random.default_rng(2), 1, 20)
    heads = Heads(*(drawn(seed, n_tokens, 8) for seed in range(3)))
    heads.keys[n_tokens - 1, 0] = float("nan")
    seen = kernels().attend(heads, Looking(runs, torch.ones(n_tokens, 8), torch.zeros(n_tokens, 8), 1.0))[0].isnan()
    asks_last = runs.asked[runs.places == n_tokens - 1].tolist()
    assert seen.any(1).nonzero()[:, 0].tolist() == asks_last


def rows_of_groups(seed: int, groups: int, members: int, prompt: int, rest: int) -> list[Row]:
    """Rows that begin alike within a group; some of what follows is trained."""
    draws = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        stem = draws.integers(0, VOCAB, prompt)
        for _ in range(members):
            ids = np.concatenate([stem, draws.integers(0, VOCAB, draws.integers(1, rest + 1))])
            chosen = np.flatnonzero(draws.random(len(ids) - prompt) < 0.6) + prompt
            positions = np.append(prompt - 1, chosen)
            behaviour = np.zeros(len(positions), np.float32)
            rows.append(Row(ids=ids, positions=positions, targets=ids[positions % len(ids)], behaviour=behaviour))
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@settings(max_examples=6, deadline=None)
@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 5, 20]), st.sampled_from([1, 12, 50]))
def test_layers_with_kernels_are_those_of_torch(
    family: Any, seed: int, groups: int, members: int, prompt: int, rest: int
) -> None:
    kernels()
    spec = ScratchModel(family=family, layers=2, hidden=24, heads=2, kv_heads=1, ffn=20, tie_embeddings=False)
    model = build_model(hf_config(spec, VOCAB), seed=1)
    rows = pad(rows_of_groups(seed, groups, members, prompt, rest))

    def run(native: Any) -> tuple[Tensor, float, dict[str, Tensor]]:
        model.zero_grad()
        logprobs, entropy = Policy(model, native)(rows, 0.8, True)
        logprobs.square().sum().backward()
        found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        return logprobs.detach(), float(entropy), found

    (got, entropy, gradients), (wanted, expected, by) = run("required"), run("off")
    assert close(got, wanted.double(), 5e-6)
    assert entropy == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == by.keys()
    for name, gradient in by.items():
        assert close(gradients[name], gradient.double(), 3e-5), name
    again, _, same = run("required")
    assert torch.equal(again, got)
    assert all(torch.equal(one, gradients[name]) for name, one in same.items())


def test_where_there_are_no_kernels_the_reason_is_told(tmp_path: Path) -> None:
    spec = hf_config(ScratchModel(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8), VOCAB)
    model = build_model(spec, seed=1)
    assert Policy(model, "off").found == Native(None, "trainer.native=off")
    with pytest.raises(
        TrainerError, match=r"trainer.native=required, but there are no kernels for float64; mend that, or"
    ):
        Policy(model.double(), "required")
    assert kernels_for(torch.float32, torch.device("cuda")).why == "the kernels are for CPUs, not for cuda"
    code = """
import torch
from rollart.runtime.trainer.kernels import kernels_for
print(kernels_for(torch.float32, torch.device("cpu")).lacks)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.stdout.strip() == "no C compiler (cc, gcc, clang) is on the PATH"
