"""Users' own modules, and host code in them that reads values which a capture does not have."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rollart.core.errors import ConfigError
from rollart.optrace.capture import capture
from rollart.optrace.costs import LAYER_OPERATORS
from rollart.optrace.ops import Trace
from rollart.optrace.sources import resolve
from rollart.optrace.transforms import derived
from rollart.perf.train_plan import DEFAULT_FRAMEWORK, TrainingPlan

HIDDEN, VOCAB, BLOCKS = 128, 96, 3


def plan(dp: int = 1, tp: int = 1) -> TrainingPlan:
    return TrainingPlan(devices=dp * tp, dp=dp, tp=tp, micro_batch=2, global_batch=2 * dp, sequence=32)


CUT = replace(plan(), devices=2, cp=2)


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


def attending(how: str) -> nn.Module:
    """Attention with dropout, called as users do."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, HIDDEN)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            batch, tokens = ids.shape
            projected = self.qkv(self.tokens(ids)).view(batch, tokens, 3, 2, 64)
            query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
            attend = functional.scaled_dot_product_attention
            if how == "positions":
                made = attend(query, key, value, None, 0.1, True)
            elif how == "names":
                made = attend(query=query, key=key, value=value, dropout_p=0.1, is_causal=True)
            else:
                made = attend(query, key, value, torch.ones(tokens, tokens, dtype=torch.bool), dropout_p=0.1)
            return made.transpose(1, 2).flatten(2)

    return Attending()


by_positions, by_names, masked = (partial(attending, how) for how in ("positions", "names", "masked"))


def encoder() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.TransformerEncoderLayer(HIDDEN, 2, HIDDEN, batch_first=True))


def without_attention() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))


def half() -> nn.Module:
    return without_attention().half()


def double() -> nn.Module:
    return without_attention().double()


def insisting() -> nn.Module:
    class Insisting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(ids)
            if hidden.dtype is not torch.float32:
                raise TypeError("this head is for fp32")
            return cast("torch.Tensor", self.head(hidden))

    return Insisting()


def frozen() -> nn.Module:
    return without_attention().requires_grad_(False)


def asking(width: int, depth: int, *more: int, bias: bool = True) -> nn.Module:
    raise AssertionError("never called")


def raising() -> nn.Module:
    raise KeyError("width")


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
    assert [(op.axis, op.payload_bytes) for op in small.parts["head"].forward if op.stream == "comm"] == [
        ("dp", 2.0)
    ]  # a number in bf16
    assert large.reads[0].assumption == f"{where} = 7.5, as assumed by the user"
    assert "total.item()" in large.reads[0].where


def test_a_read_of_a_count_needs_one_too() -> None:
    line = line_of("the line that reads how many there are")
    with pytest.raises(ConfigError, match="the number of true values"):
        traced("counting_net")
    trace = capture(resolve(f"{__name__}:counting_net"), plan(), assume={f"optrace/{__name__}.py": "1000"})
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
        ("asking", {}, plan(), "takes width, depth; give a function that needs no arguments"),
        ("raising", {}, plan(), r"raised KeyError: 'width' \(test_optrace_modules.py:\d+\)"),
        ("HIDDEN", {}, plan(), "is int; give a function"),
        ("frozen", {}, plan(), "the loss depends on no parameter"),
        ("insisting", {}, plan(), r"fails in bf16 \(test_optrace_modules.py:\d+\): TypeError: this head"),
        (
            "counting_net",
            {"test_optrace_modules.py": "-5"},
            plan(),
            "-5: it counts true values of 8192; the nearest is 0",
        ),
        ("counting_net", {"test_optrace_modules.py": "99999"}, plan(), "the nearest is 8192"),
        ("counting_net", {"modules.py": "1"}, plan(), "the number of true values"),
        ("counting_net", {"e/test_optrace_modules.py": "1"}, plan(), "the number of true values"),
        ("counting_net", {"test_optrace_modules.py": "inf"}, plan(), "'inf' is no value"),
        ("without_attention", {}, CUT, "cp=2 cuts sequences, and no attention was seen"),
        ("convolution", {}, CUT, r"cp 2 cuts sequences of 32 tokens, its inputs are \[\(2, 3, 16, 16\)\]"),
    ],
)
def test_what_cannot_be_is_refused(function: str, assume: dict[str, str], asked: TrainingPlan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        capture(resolve(f"{__name__}:{function}"), asked, assume=assume)


@pytest.mark.parametrize(
    ("function", "share"), [("by_positions", 0.5), ("by_names", 0.5), ("masked", 1.0), ("encoder", 1.0)]
)
def test_attention_is_one_fused_kernel_whoever_calls_it_and_however(function: str, share: float) -> None:
    trace = traced(function)
    part = trace.parts["whole layer"]
    (forward,) = (op for op in part.forward if op.kind == "attention")
    (backward,) = (op for op in part.backward if op.kind == "attention_backward")
    assert forward.shape == backward.shape == (32, 32, 2 * 2, 128)
    assert forward.flops == share * 2 * 32 * 32 * 4 * 128
    assert not any(op.name == "aten.bmm" for op in (*part.forward, *part.backward))
    assert {op.dtype for op in part.forward if op.kind in ("gemm", "attention")} == {"bf16"}
    cut = derived(capture(resolve(f"{__name__}:{function}"), CUT), CUT, DEFAULT_FRAMEWORK)
    exchanged = [op.collective for op in cut.parts["whole layer"].backward if op.axis == "cp"]
    assert exchanged == ["all_gather", "reduce_scatter"]


def test_a_module_is_cast_to_the_dtype_of_the_plan_or_gives_it_its_own() -> None:
    def dtypes(trace: Trace) -> set[str]:
        parts = trace.parts.values()
        return {op.dtype for part in parts for op in (*part.forward, *part.backward) if op.kind == "gemm"}

    source = resolve(f"{__name__}:without_attention")
    cast_to = capture(source, plan())
    assert (dtypes(cast_to), cast_to.plan.dtype) == ({"bf16"}, "bf16")
    assert any("built in fp32, are cast to bf16" in note for note in cast_to.notes)
    narrow = capture(source, replace(plan(), dtype="fp8"))
    assert (dtypes(narrow), narrow.plan.dtype) == ({"bf16"}, "bf16")
    own = capture(replace(source, own_dtype=True), plan())
    assert (dtypes(own), own.plan.dtype) == ({"fp32"}, "fp32")
    assert any("no dtype was given" in note for note in own.notes)
    halved = capture(replace(resolve(f"{__name__}:half"), own_dtype=True), plan())
    assert (dtypes(halved), halved.plan.dtype) == ({"fp16"}, "fp16")
    with pytest.raises(ConfigError, match=r"its weights are torch\.float64"):
        capture(replace(resolve(f"{__name__}:double"), own_dtype=True), plan())


def test_the_law_of_the_host_is_of_as_many_operators_as_a_captured_layer_has() -> None:
    several = TrainingPlan(devices=1, micro_batch=1, global_batch=4, sequence=32)
    part = capture(resolve("llama3-8b"), several).parts["dense layer"]
    assert {"forward": len(part.forward), "backward": len(part.backward)} == LAYER_OPERATORS
