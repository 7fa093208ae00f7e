"""Rows without padding and prompts once: nothing that is trained changes, whatever rows have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_samples import VOCAB

from rollart.config.schema import ScratchModel
from rollart.core.types import TrajId
from rollart.learn.batching import SHARED_TOKENS, computed_tokens
from rollart.runtime.models import build_model, hf_config
from rollart.runtime.trainer.packing import micro_batches, pack
from rollart.runtime.trainer.policy import Policy
from rollart.runtime.trainer.rows import LossRow, Row, pad

FAMILIES = ("llama", "qwen2", "qwen3")
LONG = SHARED_TOKENS + 3


def episode(prompt: int, turns: list[tuple[int, int]], seed: int, *, length: int = LONG) -> Row:
    """A prompt of `length` tokens, told by its number, then (sampled, observed) tokens turn by turn."""
    rng = np.random.default_rng(seed)
    ids, trained = [np.random.default_rng(1000 + prompt).integers(0, VOCAB, length)], list[int]()
    n = length
    for sampled, observed in turns:
        trained += range(n, n + sampled)
        ids.append(rng.integers(0, VOCAB, sampled + observed))
        n += sampled + observed
    all_ids, places = np.concatenate(ids), np.array(trained)
    return Row(
        ids=all_ids[: places[-1]],
        positions=places - 1,
        targets=all_ids[places],
        behaviour=np.zeros(len(places), np.float32),
    )


GROUPS = [
    *(episode(0, [(3 + member, 2), (4, 0)], member) for member in range(3)),
    episode(1, [(5, 0)], 10),
    *(episode(2, [(1, 0)], 20 + member, length=LONG + 4) for member in range(2)),
    episode(3, [(2, 6), (2, 0)], 30, length=2),
    *(episode(4, [(3, 20), (1, 0)], 40 + member) for member in range(2)),
]
"""Groups with long and short prompts, alone and in company, of one turn and two, with one token and more."""
OBSERVED = [episode(0, [(2, 25), (1, 0)], 50 + member) for member in range(2)]
"""Mostly observed: the last layer is pruned."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [GROUPS, OBSERVED], ids=["groups", "mostly observed"])
def test_packed_gradients_are_those_of_the_definition_row_by_row(family: Any, rows: list[Row]) -> None:
    spec = ScratchModel(family=family, layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, tie_embeddings=False)
    model = build_model(hf_config(spec, VOCAB), seed=1)
    logprobs, _ = Policy(model)(pad(rows), 0.7, True)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    model.double().zero_grad()
    expected = []
    for row in rows:
        table = (model(torch.from_numpy(row.ids)[None]).logits[0, row.positions] / 0.7).log_softmax(-1)
        expected.append(table.gather(1, torch.from_numpy(row.targets)[:, None])[:, 0])
    (torch.cat(expected) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(logprobs.double(), torch.cat(expected), atol=1e-5)
    assert len(found) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(found[name].double(), weight.grad, atol=2e-5 * float(weight.grad.abs().max())), name


def test_a_prompt_is_computed_once_and_padding_never() -> None:
    packed = pack(pad(GROUPS, min_rows=len(GROUPS) + 2, min_tokens=70))
    shared = 2 * LONG + (LONG + 4) + LONG
    assert len(packed.ids) == sum(len(row.ids) for row in GROUPS) - shared


def test_mostly_observed_rows_ask_in_the_last_layer_for_what_is_trained() -> None:
    packed = pack(pad(OBSERVED))
    assert packed.last.asking is not None
    assert len(packed.last.asking) == 2 * 3 - 1, "both first tokens are predicted from the end of their prompt"
    assert len(packed.trained) == 2 * 3


EPISODES = st.lists(
    st.builds(
        episode,
        st.integers(0, 2),
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3),
        st.integers(0, 99),
        length=st.sampled_from([1, SHARED_TOKENS, LONG]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(EPISODES)
def test_every_token_reads_its_own_row_up_to_itself_whatever_is_shared(rows: list[Row]) -> None:
    packed = pack(pad(rows))
    read = {}
    for plan in (packed.whole, packed.last):
        assert plan.back is not None
        seen: list[list[int]] = []
        for block in plan.blocks:
            asked, width = block.queries.shape
            causal = torch.ones(width, block.keys.shape[1], dtype=torch.bool).tril()
            for row in range(asked):
                looks = causal if block.mask is None else block.mask[row, 0]
                seen += [packed.ids[block.keys[row][looks[at]]].tolist() for at in range(width)]
        read[id(plan)] = [seen[place] for place in plan.back.tolist()]
    asking = range(len(packed.ids)) if packed.last.asking is None else packed.last.asking.tolist()
    for tokens, place in zip(read[id(packed.whole)], packed.places.tolist(), strict=True):
        assert len(tokens) == place + 1
    assert [tokens[-1] for tokens in read[id(packed.whole)]] == packed.ids.tolist()
    assert [read[id(packed.whole)][token] for token in asking] == read[id(packed.last)]
    trained = [read[id(packed.last)][place] for place in packed.trained.tolist()]
    assert trained == [row.ids[: place + 1].tolist() for row in rows for place in row.positions.tolist()]


@settings(max_examples=60, deadline=None)
@given(EPISODES)
def test_what_a_pass_computes_is_known_from_lengths_and_prompts(rows: list[Row]) -> None:
    """By this a simulated trainer costs what a real one does."""
    starts = [int(row.positions[0]) + 1 for row in rows]
    prompts = [(row.ids[:start].tobytes(), start) for row, start in zip(rows, starts, strict=True)]
    assert len(pack(pad(rows)).ids) == computed_tokens(range(len(rows)), [len(row.ids) for row in rows], prompts)


def loss_row(row: Row, number: int) -> LossRow:
    return LossRow(key=(TrajId(f"train/t/0/{number}/0"), 0), row=row, advantage=1.0, token_weight=1.0, share=1.0)


def test_rows_of_one_prompt_stay_together_on_one_rank() -> None:
    rows = [loss_row(episode(number % 4, [(6, 0)], number), number) for number in range(32)]
    (one,) = micro_batches(rows, ranks=1, micro_batch_tokens=150)
    assert sorted(row.key for batch in one for row in batch) == sorted(row.key for row in rows)
    assert len(one) > 1
    of_prompt = [{batch for batch, held in enumerate(one) if row in held} for row in rows]
    assert all(of_prompt[number] == of_prompt[number % 4] for number in range(32))


def test_a_prompt_with_too_many_rows_for_one_pass_is_split_like_any_rows() -> None:
    rows = [loss_row(episode(0, [(6, 0)], number), number) for number in range(32)]
    (one,) = micro_batches(rows, ranks=1, micro_batch_tokens=100)
    assert sum(map(len, one)) == 32
    assert max(map(len, one)) <= 100 // (LONG + 5)
    assert len(micro_batches(rows, ranks=3, micro_batch_tokens=100)) == 3
