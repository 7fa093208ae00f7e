"""The compiled kernel of decoding rows: it attends as torch does, row by row, and reads from siblings only what is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from engine_cases import by_traj, engine, ids, mismatch, random_ids, request
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rollart.core.errors import EngineError
from rollart.runtime.compiled import COMPILERS, Wanted
from rollart.runtime.engine.batch import ALONE_REACH, ALONE_WIDTH, Layout, pack, staircase
from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.native import DecodeKernel, decode_kernel, even_parts
from rollart.runtime.engine.reads import Reads, by_token, reads_of

CPU = torch.device("cpu")
CAPACITY = 40


def kernel(dtype: torch.dtype = torch.float32, size: int = 32) -> DecodeKernel:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C compiler here")
    found = decode_kernel(dtype, CPU, size)
    assert found.kernel is not None, found.why
    return found.kernel


def drawn_reads(slots: int, seed: int) -> Reads:
    draws = np.random.default_rng(seed)
    rows = draws.permutation(slots)[: slots - 2]
    ends = draws.integers(1, CAPACITY + 1, len(rows))
    lead = draws.choice(rows, len(rows))
    return Reads(slots=rows, lead=lead, shared=draws.integers(0, ends), ends=ends)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize(("kv_heads", "sharing", "size"), [(4, 1, 32), (3, 3, 64), (2, 2, 128), (1, 4, 8), (2, 1, 80)])
def test_each_row_is_attended_as_torch_does_over_what_it_reads(
    dtype: torch.dtype, close: float, kv_heads: int, sharing: int, size: int
) -> None:
    attend, draws = kernel(dtype, size), torch.Generator().manual_seed(size)
    keys, values = (torch.randn(9, kv_heads, CAPACITY, size, generator=draws).to(dtype) for _ in range(2))
    reads = drawn_reads(9, size)
    wider = torch.randn(7, kv_heads * sharing + 1, size, generator=draws).to(dtype)
    queries = wider[:, : kv_heads * sharing]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        got = attend(queries, keys, values, reads)
        torch.set_num_threads(1)
        for row, (slot, lead, shared, end) in enumerate(
            zip(reads.slots, reads.lead, reads.shared, reads.ends, strict=True)
        ):
            seen_keys, seen_values = (
                torch.cat([part[lead, :, :shared], part[slot, :, shared:end]], 1).float().repeat_interleave(sharing, 0)
                for part in (keys, values)
            )
            wanted = scaled_dot_product_attention(queries[row, :, None].float(), seen_keys, seen_values)
            assert torch.allclose(got[row].float(), wanted[:, 0], atol=close, rtol=close)


def test_what_is_not_a_number_stays_so_in_its_own_row() -> None:
    attend = kernel()
    keys, values, queries = torch.randn(3, 1, CAPACITY, 32), torch.randn(3, 1, CAPACITY, 32), torch.randn(3, 1, 32)
    keys[1, 0, 7, 3] = float("nan")
    slots = np.arange(3)
    reads = Reads(slots=slots, lead=slots, shared=np.zeros(3, np.int64), ends=np.array([20, 20, 20]))
    found = attend(queries, keys, values, reads).isnan().view(3, -1)
    assert found[1].all()
    assert not found[[0, 2]].any()


def test_scores_of_any_size_have_shares_that_sum_to_one() -> None:
    attend, ones = kernel(), torch.ones(2, 1, CAPACITY, 32)
    slots = np.arange(2)
    reads = Reads(slots=slots, lead=slots, shared=np.zeros(2, np.int64), ends=np.array([CAPACITY, 1]))
    for scale in (0.0, 1.0, 1e3, 1e15):
        keys = torch.randn(2, 1, CAPACITY, 32) * scale
        assert torch.allclose(attend(torch.randn(2, 1, 32), keys, ones, reads), torch.ones(2, 1, 32), atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=8))
def test_what_a_row_reads_from_another_is_its_own_beginning(rows: list[tuple[int, int, int]]) -> None:
    """Rows of (family, tokens, kind of history): histories part at random places."""
    table = np.array([np.arange(16) % (kind + 2) for _, _, kind in rows], np.int32)
    slots, ends = np.arange(len(rows)), np.array([end for _, end, _ in rows])
    families = np.array([family for family, _, _ in rows])
    reads = reads_of(table, families, slots, ends)
    for slot, lead, shared, end in zip(slots, reads.lead, reads.shared, ends, strict=True):
        assert 0 <= shared < end
        assert shared <= ends[lead]
        assert families[lead] == families[slot]
        assert np.array_equal(table[slot, :shared], table[lead, :shared])
        longest = min(end - 1, ends[lead])
        if lead != slot and shared < longest:
            assert table[slot, shared] != table[lead, shared], "all that is alike is read once"
    assert not reads_of(table, None, slots, ends).shared.any()


def test_where_there_is_no_kernel_the_reason_is_told() -> None:
    for without, why in (
        (decode_kernel(torch.float16, CPU, 32), "there is no kernel for float16"),
        (decode_kernel(torch.float32, torch.device("meta"), 32), "the kernel is for CPUs, not for meta"),
        (decode_kernel(torch.float32, CPU, 512), "heads of 512 are wider than the 256 that the kernel takes"),
        (decode_kernel(torch.float32, CPU, 32, "off"), "engine.native=off"),
    ):
        assert without.kernel is None
        assert str(without) == f"torch: {why}"
        assert without.lacks == "", "no machine could mend that"


def test_an_engine_says_what_it_decodes_with_and_refuses_to_do_without_what_is_required() -> None:
    kernel()
    for wanted in get_args(Wanted):
        core = engine(native=wanted)
        assert core.native == ("torch: engine.native=off" if wanted == "off" else "compiled")
        assert core.lacks == ""
    assert engine(path="transformers").native.startswith("torch: the model runs by its definition")
    with pytest.raises(
        EngineError, match=r"engine.native=required, but the model runs by its definition in transformers"
    ):
        engine(native="required", path="transformers")


def test_siblings_sample_the_same_with_and_without_the_kernel() -> None:
    prompt, found = random_ids(40), []
    for native in ("auto", "off"):
        core = engine(native=native)
        core.submit([request(f"train/t/0/1/{n}", prompt, max_tokens=20) for n in range(6)])
        answers = by_traj(core)
        assert all(mismatch(prompt, answer) < 1e-5 for answer in answers.values())
        found.append({traj: ids(answer) for traj, answer in answers.items()})
    assert found[0] == found[1]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 20))
def test_rows_are_cut_into_runs_of_like_length(lengths: list[int], parts: int) -> None:
    cut = even_parts(np.array(lengths), parts)
    assert len(cut) <= parts
    assert [row for begin, end in cut for row in range(begin, end)] == list(range(len(lengths)))
    assert all(begin < end for begin, end in cut)
    longest = max(sum(lengths[begin:end]) for begin, end in cut)
    assert longest <= sum(lengths) / parts + max(lengths)


def test_few_rows_at_first_do_not_bound_the_threads_of_many_later() -> None:
    """Two rows first: of the four threads that torch has here, all are used when there are rows for them."""
    attend = kernel()
    slots, keys = np.arange(8), torch.randn(8, 1, CAPACITY, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    for n in (2, 8):
        reads = Reads(slots=slots[:n], lead=slots[:n], shared=np.zeros(n, np.int64), ends=np.full(n, CAPACITY))
        attend(torch.randn(n, 1, 32), keys, keys, reads)
    torch.set_num_threads(threads)
    assert attend._helpers.of(1)._max_workers == 3, "and the calling thread"


def test_shares_are_as_exact_as_the_kernel_says() -> None:
    """Two tokens, whose scores are 0 and x and whose values are 0 and 1: the answer is exp(x) / (1 + exp(x))."""
    attend = kernel()
    scores = -torch.linspace(0.0, 80.0, 4001)
    n = len(scores)
    queries, keys, values = (torch.zeros(n, 1, *size) for size in ((64,), (2, 64), (2, 64)))
    queries[:, 0, 0], keys[:, 0, 1, 0], values[:, 0, 1] = 8 * scores, 1.0, 1.0
    slots = np.arange(n)
    reads = Reads(slots=slots, lead=slots, shared=np.zeros(n, np.int64), ends=np.full(n, 2))
    got, exact = attend(queries, keys, values, reads)[:, 0, 0].double(), scores.double().sigmoid()
    off = ((got - exact) / exact).abs()
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    exponential, rest = 1e-7 if "fma" in flags else 4e-6, 3 * 2**-24
    assert off.max() < exponential + rest, "beside the exponential: a sum, a quotient, a product"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_each_token_of_a_chunk_reads_up_to_itself(rows: list[tuple[int, int, int]]) -> None:
    """Rows of (family, tokens, newest of them that are computed)."""
    table = np.zeros((len(rows), 16), np.int32)
    slots, ends = np.arange(len(rows)), np.array([end for _, end, _ in rows])
    widths = np.minimum(np.array([width for *_, width in rows]), ends)
    positions = np.concatenate([np.arange(end - width, end) for end, width in zip(ends, widths, strict=True)])
    whole = reads_of(table, np.array([family for family, *_ in rows]), slots, ends)
    each = by_token(whole, widths, positions)
    assert np.array_equal(each.ends, positions + 1)
    assert np.array_equal(each.slots, np.repeat(whole.slots, widths))
    assert np.array_equal(each.lead, np.repeat(whole.lead, widths))
    assert np.array_equal(each.shared, np.minimum(np.repeat(whole.shared, widths), positions))
    assert (each.shared < each.ends).all(), "its newest token is its own"


def test_siblings_that_part_early_read_what_one_of_them_writes_in_the_same_step() -> None:
    prompts = {f"train/t/0/0/{n}": [*random_ids(6, 1), *random_ids(14, n)] for n in range(4)}
    found = []
    for native in ("auto", "off"):
        core = engine(native=native)
        core.submit([request(traj, prompt, max_tokens=9) for traj, prompt in prompts.items()])
        answers = by_traj(core)
        assert all(mismatch(prompts[traj], answer) < 1e-5 for traj, answer in answers.items())
        found.append({traj: ids(answer) for traj, answer in answers.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [2, ALONE_WIDTH, ALONE_WIDTH + 1])
def test_chunks_are_computed_the_same_with_and_without_the_kernel(width: int, threads: int) -> None:
    first, found = random_ids(40), []
    torch.set_num_threads(threads)
    for native in ("auto", "off"):
        core = engine(native=native)
        core.submit([request(f"train/t/0/{n // 3}/{n % 3}", first, max_tokens=5 + n) for n in range(6)])
        answers = by_traj(core)
        seconds = {traj: [*first, *ids(answer), *random_ids(width - 1, 7)] for traj, answer in answers.items()}
        core.submit([request(traj, context, max_tokens=9, turn=1) for traj, context in seconds.items()])
        later = by_traj(core)
        assert all(mismatch(seconds[traj], answer) < 1e-5 for traj, answer in later.items())
        found.append({traj: ids(answer) for traj, answer in later.items()})
    assert found[0] == found[1]
    torch.set_num_threads(1)


def test_short_chunks_are_attended_token_by_token_where_that_was_measured_to_pay() -> None:
    kernel()
    for dtype, wide in ((torch.float32, ALONE_WIDTH), (torch.bfloat16, 1)):
        core = engine(dtype=dtype)
        assert core._backend.alone == wide
    assert engine(native="off")._backend.alone == 0
    cache, table = KVCache(engine().shape, torch.float32, CPU), np.zeros((3, 2 * ALONE_REACH), np.int32)
    cache.repack(np.empty(0, np.int64), 3, 2 * ALONE_REACH)
    layout = Layout(cache, table, staircase(2 * ALONE_REACH, torch.float32, CPU), ALONE_WIDTH, None)
    slots, widths, complete = np.arange(3), np.array([1, 5, 9]), np.ones(3, np.bool_)
    for longest, alone in ((ALONE_REACH, [True]), (ALONE_REACH + 1, [False, True])):
        batch = pack(layout, slots, longest - widths, widths, complete)
        assert [group.reads is not None for group in batch.groups] == alone
