"""What single operator calls cost: FLOPs, bytes, and which of them run nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from rollart.optrace.kernels import Work, base_name, is_view, touched_bytes, work

aten = torch.ops.aten


def called(func: OpOverload, *args: Any, **kwargs: Any) -> Work | None:
    return work(func, args, kwargs, func(*args, **kwargs))


def cost(func: OpOverload, *args: Any, **kwargs: Any) -> Work:
    found = called(func, *args, **kwargs)
    assert found is not None
    return found


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), inner=st.integers(1, 300), batch=st.integers(1, 5))
def test_products(rows: int, columns: int, inner: int, batch: int) -> None:
    one = cost(aten.mm.default, meta(rows, inner), meta(inner, columns))
    many = cost(aten.bmm.default, meta(batch, rows, inner), meta(batch, inner, columns))
    biased = cost(aten.addmm.default, meta(columns), meta(rows, inner), meta(inner, columns))
    assert one.flops == biased.flops == 2 * rows * columns * inner
    assert one.moved_bytes == 2 * (rows * inner + inner * columns + rows * columns)
    assert one.written_bytes == 2 * rows * columns
    assert many.flops == batch * one.flops
    assert many.moved_bytes == batch * one.moved_bytes
    assert biased.moved_bytes == one.moved_bytes + 2 * columns
    assert many.shape == (rows, columns, inner, batch)


def test_grouped_products_are_balanced() -> None:
    offsets = meta(4, dtype=torch.int32)
    forward = cost(aten._grouped_mm.default, meta(128, 32), meta(4, 32, 16), offsets)
    assert forward.shape == (32, 16, 32, 4)
    assert forward.flops == 2 * 128 * 32 * 16
    weights = cost(aten._grouped_mm.default, meta(32, 128), meta(128, 16), offsets)
    assert weights.shape == (32, 16, 32, 4)
    assert weights.flops == forward.flops


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal: bool) -> None:
    query, key = meta(2, 8, 64, 16), meta(2, 2, 64, 16)
    found = cost(aten._scaled_dot_product_flash_attention.default, query, key, key, 0.0, causal)
    assert found.kind == "attention"
    assert found.shape == (64, 64, 16, 32)
    assert found.flops == 2 * 64 * 64 * 16 * 32 * (0.5 if causal else 1)
    backward = cost(
        aten._scaled_dot_product_flash_attention_backward.default, query, query, key, key, query,
        meta(2, 8, 64, dtype=torch.float32), None, None, 64, 64, 0.0, causal, meta(2), meta(1),
    )  # fmt: skip
    assert backward.kind == "attention_backward"
    assert backward.flops == 2.5 * found.flops


def test_a_window_leaves_fewer_keys() -> None:
    turned = meta(1, 64, 8, 16)
    found = cost(
        aten._flash_attention_forward.default, turned, turned, turned, None, None, 64, 64, 0.0, True, False,
        window_size_left=15, window_size_right=0,
    )  # fmt: skip
    assert found.shape == (64, 32, 8, 32)
    assert found.flops == 64 * 16 * 2 * 8 * 32


@pytest.mark.parametrize(
    "func", [aten.view.default, aten.transpose.int, aten.expand.default, aten.detach.default, aten.split.Tensor]
)
def test_views_run_nothing(func: OpOverload) -> None:
    extra: dict[OpOverload, tuple[Any, ...]] = {
        aten.view.default: ([8, 2],), aten.transpose.int: (0, 1), aten.expand.default: ([4, 4],), aten.split.Tensor: (2,)
    }  # fmt: skip
    assert is_view(func)
    assert called(func, meta(4, 4), *extra.get(func, ())) is None


def test_allocations_run_nothing_but_fills_do() -> None:
    assert called(aten.empty_like.default, meta(4, 4)) is None
    assert cost(aten.zeros_like.default, meta(4, 4)).moved_bytes == 32
    assert cost(aten.fill_.Scalar, meta(4, 4), 1.0).moved_bytes == 32
    assert cost(aten.copy_.default, meta(4, 4), meta(4, 4, dtype=torch.float32)).moved_bytes == 32 + 64


def test_passes_read_operands_once_and_write_results() -> None:
    added = cost(aten.add.Tensor, meta(8, 4), meta(8, 4))
    assert (added.moved_bytes, added.written_bytes) == (3 * 64, 64)
    shared = cost(aten.add.Tensor, meta(8, 4), meta(1, 4).expand(8, 4))
    assert shared.moved_bytes == 2 * 64 + 8
    changed = cost(aten.mul_.Tensor, meta(8, 4), meta(8, 4))
    assert (changed.moved_bytes, changed.written_bytes) == (3 * 64, 64)
    assert touched_bytes(meta(1, 4).expand(8, 4)) == 8


def test_lookups_touch_the_rows_that_are_asked_for() -> None:
    table, rows = meta(1000, 8), meta(5, dtype=torch.int64)
    assert cost(aten.embedding.default, table, rows).moved_bytes == 2 * 5 * 16 + 40
    back = cost(aten.embedding_dense_backward.default, meta(5, 8), rows, 1000, -1, False)
    assert back.moved_bytes == 1000 * 16 + 2 * 5 * 16 + 40
    assert base_name(aten.embedding.default) == "aten.embedding"


def test_the_fused_update_reads_four_and_writes_three() -> None:
    lists = [[torch.ones(4, 4)] for _ in range(4)]
    found = work(aten._fused_adamw_.default, [*lists, [], [torch.ones(())]], {}, None)
    assert found is not None
    assert (found.moved_bytes, found.written_bytes) == (7 * 64, 3 * 64)
