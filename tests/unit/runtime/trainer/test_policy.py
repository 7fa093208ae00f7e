"""The trainer's forward pass: the same as transformers', for less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trainer_samples import (
    VOCAB,
    gradients,
    random_samples,
    reference_step,
    rows_of,
    sample,
    sampled,
    spec_with,
    train_step,
    trainer_rank,
    written,
)

from rollart.config.schema import Optimizer, SamplingConfig, ScratchModel, TrainerConfig
from rollart.core.types import Sample
from rollart.runtime.models import build_model, hf_config
from rollart.runtime.trainer.policy import Policy, token_logprobs
from rollart.runtime.trainer.rows import Row, pad, row_of

FAMILIES = ("llama", "qwen2", "qwen3")
PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")


def random_row(read: int, trained: int, seed: int = 0) -> Row:
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(read, trained, replace=False)).astype(np.int64)
    return Row(
        ids=rng.integers(0, VOCAB, read),
        positions=positions,
        targets=rng.integers(0, VOCAB, trained),
        behaviour=np.zeros(trained, np.float32),
    )


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", [2, 18], ids=["pruned last layer", "whole last layer"])
def test_logprobs_and_gradients_equal_those_of_transformers(family: Any, trained: int, native: Any) -> None:
    spec = ScratchModel(
        family=family, layers=3, hidden=16, heads=4, kv_heads=2, ffn=24, tie_embeddings=family != "qwen3"
    )
    model = build_model(hf_config(spec, VOCAB), seed=1)
    rows = [random_row(20, trained, seed=1), random_row(18, 1, seed=2)]
    temperature = 0.7

    logprobs, entropy = Policy(model, native)(pad(rows), temperature, True)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    model.double().zero_grad()
    expected, entropies = [], 0.0
    for row in rows:
        logits = model(torch.from_numpy(row.ids)[None]).logits[0, row.positions] / temperature
        table = logits.log_softmax(-1)
        expected.append(table.gather(1, torch.from_numpy(row.targets)[:, None])[:, 0])
        entropies -= float((table.exp() * table).sum().detach())
    reference = torch.cat(expected)
    (reference * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(logprobs.double(), reference, atol=1e-5)
    assert float(entropy) == pytest.approx(entropies, rel=1e-5)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        scale = float(weight.grad.abs().max())
        assert torch.allclose(found[name].double(), weight.grad, atol=2e-5 * scale), name
    assert len(found) == len(list(model.parameters()))


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_frozen_costs_no_gradient_and_changes_none(family: Any, native: Any) -> None:
    """Norms alone are trained: the products that gradients of other weights need are left out."""
    spec = ScratchModel(family=family, layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, tie_embeddings=False)
    model = build_model(hf_config(spec, VOCAB), seed=1)
    policy, rows = Policy(model, native), pad([random_row(20, 8)])

    def gradients_and_products() -> tuple[dict[str, torch.Tensor], int]:
        model.zero_grad()
        logprobs, _ = policy(rows, 1.0, False)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            logprobs.sum().backward()
        products = sum(event.count for event in seen.key_averages() if event.key in PRODUCTS)
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, products

    whole, all_products = gradients_and_products()
    frozen = [name for name, _ in model.named_parameters() if "norm" not in name]
    for name, one in model.named_parameters():
        one.requires_grad_(name not in frozen)
    found, products = gradients_and_products()
    assert found.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(gradient, whole[name]) for name, gradient in found.items())
    assert products < 0.6 * all_products


@pytest.mark.parametrize("chunk_bytes", [1, 2 * 6 * 8, 10**6], ids=["one row", "two rows", "all rows"])
def test_token_logprobs_and_their_gradients_do_not_depend_on_chunks(chunk_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 4, 5, 4, 3])
    logprobs, entropy = token_logprobs(hidden, head, targets, 1.5, True, chunk_bytes=chunk_bytes)
    found = torch.autograd.grad(logprobs.square().sum(), [hidden, head])
    table = (hidden @ head.T / 1.5).log_softmax(-1)
    exact = table.gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad(exact.square().sum(), [hidden, head])
    assert torch.allclose(logprobs, exact)
    assert torch.allclose(found[0], expected[0])
    assert torch.allclose(found[1], expected[1])
    assert float(entropy) == pytest.approx(float(-(table.exp() * table).sum().detach()))


def test_the_gradient_of_token_logprobs_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 0.6, False)[0], (hidden, head))


@pytest.mark.parametrize(("extra_rows", "extra_tokens", "extra_trained"), [(3, 0, 0), (0, 17, 0), (0, 0, 5), (2, 9, 4)])
def test_padding_changes_no_logprob_and_no_gradient(extra_rows: int, extra_tokens: int, extra_trained: int) -> None:
    rows = [random_row(12, 3, seed=1), random_row(7, 2, seed=2)]
    model = Policy(
        build_model(hf_config(ScratchModel(layers=2, hidden=16, heads=2, kv_heads=2, ffn=24), VOCAB), seed=1)
    )

    def run(**minima: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        logprobs, entropy = model(pad(rows, **minima), 1.0, True)
        logprobs.sum().backward()
        return (
            logprobs.detach(),
            entropy,
            [weight.grad.clone() for weight in model.parameters() if weight.grad is not None],
        )

    plain = run()
    padded = run(min_rows=2 + extra_rows, min_tokens=12 + extra_tokens, min_trained=3 + extra_trained)
    assert torch.allclose(plain[0], padded[0], atol=1e-6)
    assert float(plain[1]) == pytest.approx(float(padded[1]), rel=1e-6)
    for one, other in zip(plain[2], padded[2], strict=True):
        assert torch.allclose(one, other, atol=1e-5 * float(one.abs().max()))


def test_padding_rows_change_no_metric_and_no_gradient_of_a_step() -> None:
    """Field case 15: padding has neither a gradient nor a place in a mean."""
    samples = random_samples(6)
    frozen = spec_with(optimizer=Optimizer(lr=0.0))
    layout = {"micro_batches", "computed_tokens"}
    with trainer_rank(frozen) as rank:
        plain, plain_metrics = gradients(rank, samples), rank.finish()
        empty: list[Sample] = []
        padded, padded_metrics = gradients(rank, empty, samples, empty, empty), rank.finish()
    assert padded_metrics["micro_batches"] == 4
    for name, gradient in plain.items():
        assert torch.equal(gradient, padded[name]), name
    for name in plain_metrics.keys() - layout:
        assert padded_metrics[name] == pytest.approx(plain_metrics[name], rel=1e-12), name


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest sum of live allocations during a call as torch counts them, temporaries inside operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def test_entropy_logging_costs_no_peak_memory() -> None:
    """Field case 44: measured over a whole accumulate with logits that dominate everything else; entropy made the plain way
    is noticed."""
    ids = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
    one = sample(written(ids[:100]), sampled(ids[100:], [-3.0] * 300))
    model = ScratchModel(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8)
    peaks = {}
    for logged in (False, True):
        spec = spec_with(
            model=model, trainer=TrainerConfig(log_entropy=logged), optimizer=Optimizer(lr=0.0), vocab=8000
        )
        with trainer_rank(spec) as rank:
            train_step(rank, [one])
            rows = rows_of(rank, [[one]])
            rank.begin(1, total_weight=None)
            peaks[logged] = peak_bytes(lambda rank=rank, rows=rows: rank.accumulate(rows))  # type: ignore[misc]
            assert ("entropy" in rank.finish()) is logged
    logits_bytes = 300 * 8000 * 4
    assert peaks[False] >= logits_bytes
    assert peaks[True] - peaks[False] < 0.01 * logits_bytes

    logits = torch.randn(300, 8000)
    table = logits.log_softmax(-1)
    assert peak_bytes(lambda: (table.exp() * table).sum()) >= 2 * logits_bytes, "the meter sees nothing"


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_frozen_weights_give_a_mean_probability_ratio_of_one_at_the_sampling_temperature(temperature: float) -> None:
    """Field case 17: draw with transformers at a temperature, train with learning rate 0: engine and trainer agree on every
    token."""
    sampling = SamplingConfig(temperature=temperature)
    spec = spec_with(sampling=sampling, optimizer=Optimizer(lr=0.0))
    model = build_model(hf_config(spec.model, spec.vocab_size), seed=spec.seed)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (64, 4), generator=generator)
    drawn: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(8):
            table = (model(ids).logits[:, -1] / temperature).log_softmax(-1)
            token = torch.multinomial(table.exp(), 1, generator=generator)
            drawn.append(table.gather(1, token)[:, 0])
            ids = torch.cat([ids, token], 1)
    logprobs = torch.stack(drawn, 1).tolist()
    samples = [
        sample(written(row[:4]), sampled(row[4:], logprobs[number]), traj=f"train/t/0/{number}/0")
        for number, row in enumerate(ids.tolist())
    ]
    with trainer_rank(spec) as rank:
        metrics = train_step(rank, samples[:40], samples[40:])
        rows = [row_of(one, need_behaviour=True, truncates=False) for one in samples]
        with torch.no_grad():
            other = rank.forward(pad(rows), with_entropy=False, temperature=temperature * 1.7)[0]
            gap = float((other - pad(rows).behaviour).abs().mean())
        rank.reshard()
    for name in ("ratio_mean", "mismatch_ratio_mean", "tis_mean"):
        assert abs(metrics[name] - 1) < 0.05, name
    assert metrics["mismatch_abs_max"] < 1e-5
    assert metrics["mismatch_kl"] < 1e-9
    # The mean ratio of any two policies is 1 in expectation: what shows the right temperature is each token's difference.
    assert gap > 0.01, "another temperature would not be noticed"


def test_a_step_equals_the_reference_where_a_branch_shares_a_prefix_with_its_parent() -> None:
    stem = sample(written([1, 2, 3]), sampled([4, 5], [-3.0, -2.5]), written([6]), sampled([7], [-2.0]), weight=0.75)
    branch = sample(
        written([1, 2, 3]),
        sampled([4, 5], [-3.0, -2.5]),
        written([8, 9]),
        sampled([2], [-3.1]),
        weight=0.25,
        index=1,
        shared=5,
    )
    spec = spec_with(optimizer=Optimizer(lr=0.0))
    reference = reference_step(spec, [stem, branch])
    with trainer_rank(spec) as rank:
        metrics = train_step(rank, [stem, branch])
    assert metrics["tokens"] == 4
    assert metrics["loss"] == pytest.approx(reference.loss, abs=1e-6)
