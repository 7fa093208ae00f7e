"""How weights travel: named tensors as one flat byte stream, cut into buckets; and how equality of weights is shown.

Owns the bucket format and the fingerprint. Invariant: `unpack(index, buckets)` gives back every tensor bit for bit,
whatever the bucket size, so the bucket size is a matter of memory and speed only. A transfer costs one call per bucket
and never one per parameter; a tensor may be cut over several buckets.

    names in sorted order    |-- embed --|-- layer 0 q --|- .. -|        the stream, without gaps
    bucket_bytes             |= bucket 0 =|= bucket 1 =|= bucket 2 =|

Names are those of the Hugging Face `state_dict`; tied embeddings appear once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.core.errors import StoreError
from rollart.core.types import Fingerprint, Manifest, Version

Bucket = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in the stream."""

    name: str
    dtype: str
    """As in `torch.<dtype>`, for example `float32`."""
    shape: tuple[int, ...]
    offset_bytes: int
    """Of its first byte in the stream."""
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightIndex:
    """What lies where in the buckets of one version."""

    entries: tuple[Entry, ...]
    """In stream order, which is the sorted order of the names."""
    bucket_bytes: int
    """Size of every bucket but the last."""

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)

    @property
    def n_buckets(self) -> int:
        return -(-self.n_bytes // self.bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLocation:
    """What `Manifest.location` is in this world: the index, and one handle per bucket.

    A handle is the bucket itself (uint8 array) inside one process, or a Ray object reference to it. To fetch a version,
    get the handles (one call per bucket at most) and `unpack(location.index, buckets)`.
    """

    index: WeightIndex
    handles: tuple[object, ...]


def pack(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> tuple[WeightIndex, list[Bucket]]:
    """Copy named CPU tensors of any dtypes and shapes into buckets of `bucket_bytes` (the last one may be shorter).

    The result shares no memory with the tensors. Raises StoreError for a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise StoreError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
    entries: list[Entry] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        n_bytes = tensor.numel() * tensor.element_size()
        entries.append(
            Entry(name=name, dtype=_dtype_name(tensor), shape=tuple(tensor.shape), offset_bytes=offset, n_bytes=n_bytes)
        )
        offset += n_bytes
    index = WeightIndex(entries=tuple(entries), bucket_bytes=bucket_bytes)
    buckets = [np.empty(min(bucket_bytes, offset - start), np.uint8) for start in range(0, offset, bucket_bytes)]
    for entry in entries:
        source = _bytes_of(tensors[entry.name])
        for bucket, within, part in _pieces(entry, bucket_bytes):
            buckets[bucket][within : within + part.stop - part.start] = source[part]
    return index, buckets


def unpack(index: WeightIndex, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
    """The tensors again, bit for bit, in memory of their own (buckets may be read-only and may go away).

    Raises StoreError when a bucket is missing or has the wrong size.
    """
    _check_sizes(index, buckets)
    tensors: dict[str, torch.Tensor] = {}
    for entry in index.entries:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        target = _bytes_of(tensor)
        for bucket, within, part in _pieces(entry, index.bucket_bytes):
            target[part] = buckets[bucket][within : within + part.stop - part.start]
        tensors[entry.name] = tensor
    return tensors


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest over (name, dtype, shape, bytes) of all tensors in sorted order of the names.

    Equal exactly when the weights are bitwise equal (up to collisions of a 128-bit hash): one flipped bit changes it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        # Lengths are part of what is hashed: no two different sets of tensors give the same stream.
        head = f"{name}\x1f{_dtype_name(tensor)}\x1f{tuple(tensor.shape)}\x1f".encode()
        digest.update(len(head).to_bytes(8, "big") + head)
        digest.update(_bytes_of(tensor).data)
    return digest.hexdigest()


def shards(index: WeightIndex) -> dict[str, int]:
    """`param/dim/start-stop/dtype` -> bytes, as a `Manifest` names what it holds. Here each parameter is one slice."""
    return {
        f"{entry.name}/0/0-{entry.shape[0] if entry.shape else 1}/{entry.dtype}": entry.n_bytes
        for entry in index.entries
    }


def manifest(
    version: Version, index: WeightIndex, handles: Sequence[object], digest: str, probe: tuple[float, ...] = ()
) -> Manifest:
    """The snapshot of one version whose buckets are behind `handles`. Raises StoreError when a handle is missing."""
    if len(handles) != index.n_buckets:
        raise StoreError(
            f"version {version}: {len(handles)} handles for {index.n_buckets} buckets; a version is offered whole"
        )
    return Manifest(
        version=version,
        shards=shards(index),
        buckets=index.n_buckets,
        fingerprint=Fingerprint(digest=digest, probe=probe),
        location=BucketLocation(index=index, handles=tuple(handles)),
    )


def _pieces(entry: Entry, bucket_bytes: int) -> Iterator[tuple[int, int, slice]]:
    """(bucket, offset within it, slice of the tensor's bytes) for each bucket that holds a part of the tensor."""
    start = 0
    while start < entry.n_bytes:
        bucket, within = divmod(entry.offset_bytes + start, bucket_bytes)
        stop = min(entry.n_bytes, start + bucket_bytes - within)
        yield bucket, within, slice(start, stop)
        start = stop


def _check_sizes(index: WeightIndex, buckets: Sequence[Bucket]) -> None:
    if len(buckets) != index.n_buckets:
        raise StoreError(f"{len(buckets)} buckets for an index of {index.n_buckets}; fetch all buckets of the version")
    for number, bucket in enumerate(buckets):
        wanted = min(index.bucket_bytes, index.n_bytes - number * index.bucket_bytes)
        if bucket.nbytes != wanted:
            raise StoreError(
                f"bucket {number} has {bucket.nbytes} bytes, the index says {wanted}; it is torn or foreign"
            )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> Bucket:
    """The tensor's bytes in row-major order; a view where the tensor is contiguous."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    array: Bucket = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
