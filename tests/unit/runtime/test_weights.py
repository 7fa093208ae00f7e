"""Buckets and fingerprints."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import StoreError
from rollart.runtime.weights import BucketLocation, fingerprint, manifest, pack, shards, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors_of(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{number}.weight": (torch.randn(shape, generator=generator) * 3).to(dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    data=st.data(),
    bucket_bytes=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_any_bucket_size_gives_the_same_weights(
    shapes: list[tuple[int, ...]], data: st.DataObject, bucket_bytes: int
) -> None:
    """Field case 25: bit for bit."""
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes)))
    tensors = tensors_of(shapes, dtypes, seed=len(shapes))
    index, buckets = pack(tensors, bucket_bytes)
    back = unpack(index, buckets)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
    assert fingerprint(back) == fingerprint(tensors)
    assert len(buckets) == index.n_buckets == math.ceil(index.n_bytes / bucket_bytes)
    assert all(bucket.nbytes == bucket_bytes for bucket in buckets[:-1])


def test_a_tensor_larger_than_a_bucket_is_split_over_buckets() -> None:
    tensors = {"big": torch.arange(100, dtype=torch.float32), "small": torch.ones(3)}
    index, buckets = pack(tensors, 64)
    assert [bucket.nbytes for bucket in buckets] == [64] * 6 + [28]
    assert torch.equal(unpack(index, buckets)["big"], tensors["big"])


def test_nan_and_negative_zero_travel_bit_for_bit() -> None:
    tensors = {"w": torch.tensor([float("nan"), -0.0, float("inf")])}
    back = unpack(*pack(tensors, 5))
    assert torch.equal(back["w"].view(torch.int32), tensors["w"].view(torch.int32))


def test_unpacked_weights_own_their_memory_and_read_only_buckets_are_accepted() -> None:
    index, buckets = pack({"w": torch.ones(4)}, 1024)
    buckets[0].flags.writeable = False
    back = unpack(index, buckets)
    back["w"] += 1
    assert unpack(index, buckets)["w"].tolist() == [1.0] * 4


def test_packed_weights_do_not_follow_later_changes() -> None:
    weight = torch.ones(4)
    index, buckets = pack({"w": weight}, 1024)
    weight += 1
    assert unpack(index, buckets)["w"].tolist() == [1.0] * 4


@given(bit=st.integers(0, 4 * 4 * 6 * 8 - 1))
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_is_found_by_the_fingerprint(bit: int) -> None:
    tensors = tensors_of([(6, 4), (4, 6), (24,), (2, 3, 4)], [torch.float32] * 4, seed=0)
    before = fingerprint(tensors)
    index, buckets = pack(tensors, 100)
    bucket, within = divmod(bit // 8, 100)
    buckets[bucket][within] ^= 1 << (bit % 8)
    assert fingerprint(unpack(index, buckets)) != before
    buckets[bucket][within] ^= 1 << (bit % 8)
    assert fingerprint(unpack(index, buckets)) == before


def test_the_fingerprint_depends_on_name_shape_and_type_but_not_on_order_or_layout() -> None:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    base = fingerprint({"a": weight, "b": torch.ones(1)})
    assert fingerprint({"b": torch.ones(1), "a": weight}) == base
    assert fingerprint({"a": weight.t().contiguous().t(), "b": torch.ones(1)}) == base
    assert fingerprint({"c": weight, "b": torch.ones(1)}) != base
    assert fingerprint({"a": weight.reshape(3, 2), "b": torch.ones(1)}) != base
    assert fingerprint({"a": weight.view(torch.int32), "b": torch.ones(1)}) != base


def test_shards_name_every_parameter_with_its_slice_and_bytes() -> None:
    index, _ = pack({"a.weight": torch.ones(3, 2), "scale": torch.tensor(1.0, dtype=torch.bfloat16)}, 8)
    assert shards(index) == {"a.weight/0/0-3/float32": 24, "scale/0/0-1/bfloat16": 2}


def test_a_manifest_has_one_handle_per_bucket_and_not_one_per_parameter() -> None:
    tensors = {f"p{number}": torch.ones(16) for number in range(50)}
    index, buckets = pack(tensors, 1024)
    published = manifest(3, index, buckets, fingerprint(tensors))
    assert published.buckets == 4
    assert isinstance(published.location, BucketLocation)
    assert len(published.location.handles) == 4
    assert published.n_bytes == 50 * 64
    assert published.fingerprint.digest == fingerprint(tensors)


def test_torn_and_missing_buckets_are_refused() -> None:
    index, buckets = pack({"w": torch.ones(100)}, 128)
    with pytest.raises(StoreError, match="3 buckets for an index of 4"):
        unpack(index, buckets[:-1])
    with pytest.raises(StoreError, match="bucket 3 has 15 bytes"):
        unpack(index, [*buckets[:-1], buckets[-1][:-1]])
    with pytest.raises(StoreError, match="offered whole"):
        manifest(1, index, buckets[:2], "x")
    with pytest.raises(StoreError, match="bucket_bytes=0"):
        pack({"w": torch.ones(1)}, 0)


def test_an_empty_set_of_weights_needs_no_bucket() -> None:
    index, buckets = pack({}, 16)
    assert (buckets, index.n_buckets, unpack(index, np.empty((0, 0), np.uint8))) == ([], 0, {})  # type: ignore[arg-type]
