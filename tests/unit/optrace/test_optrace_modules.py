"""Users' own modules, and host code in them that reads values which a capture does not have."""

from __future__ import annotations

import inspect
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rollart.core.errors import ConfigError
from rollart.optrace.capture import capture
from rollart.optrace.ops import Trace
from rollart.optrace.sources import resolve
from rollart.perf.train_plan import TrainingPlan

HIDDEN, VOCAB, BLOCKS = 128, 96, 3


def plan(dp: int = 1, tp: int = 1) -> TrainingPlan:
    return TrainingPlan(devices=dp * tp, dp=dp, tp=tp, micro_batch=2, global_batch=2 * dp, sequence=32)


def block() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = hidden.shape
            projected = self.qkv(self.norm(hidden)).view(batch, tokens, 3, -1, 64)
            query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
            return hidden + functional.dropout(mixed, 0.1, self.training)

    return Block()


def net(reads: str = "") -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, HIDDEN)
            self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = cast("torch.Tensor", self.tokens(ids))
            for one in self.blocks:
                hidden = one(hidden)
            if reads == "others":
                total = hidden.detach().sum()
                dist.all_reduce(total)
                if total.item() > 3:  # the line that reads what other ranks computed
                    hidden = hidden * 2
            if reads == "count":
                positive = (hidden.detach() > 0).nonzero()  # the line that reads how many there are
                hidden = hidden + positive.float().sum()
            return cast("torch.Tensor", self.head(hidden))

    return Net()


def plain_net() -> nn.Module:
    return net()


def talking_net() -> nn.Module:
    return net("others")


def sorting_net() -> nn.Module:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            different: torch.Tensor = torch.unique(ids)
            return self.weight.sum() * different.sum()

    return Sorting()


def counting_net() -> nn.Module:
    return net("count")


def convolution() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.empty(2, 3, 16, 16)


def no_module() -> int:
    return 3


def traced(function: str, asked: TrainingPlan | None = None) -> Trace:
    return capture(resolve(f"{__name__}:{function}"), asked or plan())


def line_of(words: str) -> int:
    lines, first = inspect.getsourcelines(net)
    return first + next(index for index, line in enumerate(lines) if words in line)


def test_a_module_of_blocks() -> None:
    trace = traced("plain_net")
    assert trace.layers == ("Block layer",) * BLOCKS
    part = trace.parts["Block layer"]
    tokens = 2 * 32
    products = 2 * tokens * 4 * HIDDEN**2
    assert sum(op.flops for op in part.forward if op.kind == "gemm") == products
    assert [op.shape for op in part.forward if op.kind == "attention"] == [(32, 32, 2 * HIDDEN // 64, 128)]
    assert [op.name for op in part.forward if "dropout" in op.name] == ["aten.native_dropout"]
    assert part.parameters == 4 * HIDDEN**2 + 2 * HIDDEN
    assert trace.parts["embedding"].parameters == trace.parts["head"].parameters == VOCAB * HIDDEN
    assert any("token ids" in note for note in trace.notes)


def test_a_module_without_blocks_is_one_layer() -> None:
    trace = traced("convolution")
    assert trace.layers == ("whole layer",)
    first, second = (op for op in trace.parts["whole layer"].forward if op.kind == "gemm")
    assert first.shape == (2 * 14 * 14, 8, 3 * 9, 1)
    assert second.flops == 2 * 2 * 12 * 12 * 8 * 8 * 9
    assert not trace.parts["head"].forward


def test_a_read_of_what_others_computed_needs_an_assumption() -> None:
    line = line_of("the line that reads what other ranks computed")
    with pytest.raises(
        ConfigError, match=rf"{__name__}.py:{line} .*what other ranks computed.*--assume {__name__}.py:{line}=1"
    ):
        traced("talking_net", plan(dp=4))
    assert not dist.is_initialized()
    where = f"{__name__}.py:{line}"
    source = resolve(f"{__name__}:talking_net")
    small, large = (capture(source, plan(dp=4), assume={where: value}) for value in ("1", "7.5"))
    assert len(large.parts["head"].forward) == len(small.parts["head"].forward) + 1  # hidden * 2
    assert [(op.axis, op.payload_bytes) for op in small.parts["head"].forward if op.stream == "comm"] == [("dp", 4.0)]
    assert large.reads[0].assumption == f"{where} = 7.5, as assumed by the user"
    assert "total.item()" in large.reads[0].where


def test_a_read_of_a_count_needs_one_too() -> None:
    line = line_of("the line that reads how many there are")
    with pytest.raises(ConfigError, match="the number of true values"):
        traced("counting_net")
    trace = capture(resolve(f"{__name__}:counting_net"), plan(), assume={f"{__name__}.py": "1000"})
    assert any(op.shape == (1000, 3) for op in trace.parts["head"].forward)
    assert str(line) in trace.reads[0].where


@pytest.mark.parametrize(
    ("function", "assume", "asked", "said"),
    [
        ("plain_net", {"model.py:3": "1"}, plan(), "'model.py:3' answers no read"),
        ("counting_net", {"test_optrace_modules.py": "many"}, plan(), "'many' is no value"),
        ("sorting_net", {}, plan(), "torch.unique.*depends on the values of its operands"),
        ("no_module", {}, plan(), "returned int"),
        ("nothing", {}, plan(), "has no attribute 'nothing'"),
        ("plain_net", {}, plan(tp=2), "with tp 1 and shards below 3, got tp 2"),
    ],
)
def test_what_cannot_be_is_refused(function: str, assume: dict[str, str], asked: TrainingPlan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        capture(resolve(f"{__name__}:{function}"), asked, assume=assume)
