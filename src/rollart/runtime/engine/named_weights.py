"""One set of weights as it travels: by the names of a Hugging Face `state_dict`, into memory that a forward pass reads.

Owns what every kind of weights does alike. Invariants: `named[name]` is a view of the memory that the forward pass reads,
so what `tensors` returns, and a fingerprint of it, is what is served and not a copy kept beside it; a set is served only when
`missing` is empty. Views stay valid while what they look at is `away` in host memory: their storages are emptied, not replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollart.core.errors import EngineError
from rollart.core.types import Version
from rollart.runtime.weights import fingerprint


class NamedWeights:
    """Uninitialised until every name has been put."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        """`kind` names the model in messages."""
        self._kind, self._dtype = kind, dtype
        self.named: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        """name -> (view of live memory, the shape it has in the state_dict)."""
        self.aliases: dict[str, str] = {}
        """Second names of tied tensors -> the name under which they travel."""
        self.missing: set[str] = set()
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Emptied storages with their bytes in host memory."""
        self._host: dict[str, Tensor] = {}
        """name -> those bytes, while they are away."""

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy some of the tensors in, cast to the dtype of this set.

        Raises EngineError for an unknown name, a wrong shape, or a dtype other than fp32 and this set's.
        """
        self.bring_back()
        for name, tensor in tensors.items():
            if name in self.aliases:
                _check_tied(name, tensor, self.aliases[name], tensors.get(self.aliases[name]))
                continue
            if name not in self.named:
                raise EngineError(
                    f"tensor {name!r} is not part of this {self._kind} model; "
                    f"it has {len(self.named)} tensors, among them {min(self.named)!r}"
                )
            view, size = self.named[name]
            if tuple(tensor.shape) != size or not self._can_cast(tensor.dtype):
                raise EngineError(
                    f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}; this engine needs {size} {view.dtype}"
                )
            view.copy_(tensor.reshape(view.shape))
            self.missing.discard(name)

    def _can_cast(self, given: torch.dtype) -> bool:
        """fp32 may be rounded to a smaller type; what was rounded already must not pass for fp32 again."""
        return given in (self._dtype, torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """The live weights under their Hugging Face names and shapes (copies where the layout differs)."""
        return {name: self._seen(name, view).reshape(size) for name, (view, size) in self.named.items()}

    def digest(self) -> str:
        """The fingerprint of the live weights."""
        return fingerprint({name: tensor.cpu() for name, tensor in self.tensors().items()})

    def put_away(self) -> None:
        """Move the memory to the host, pinned where it comes from a GPU; the device's is given back. Idempotent."""
        if self._away:
            return
        hosts: dict[int, Tensor] = {}
        for name, (view, _) in self.named.items():
            storage = view.untyped_storage()
            if storage.data_ptr() not in hosts:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=view.is_cuda)
                host.untyped_storage().copy_(storage, non_blocking=False)
                hosts[storage.data_ptr()] = host
                self._away.append((storage, host))
            self._host[name] = hosts[storage.data_ptr()]
        for storage, _ in self._away:
            storage.resize_(0)

    def bring_back(self) -> None:
        """Undo `put_away`. Idempotent."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage(), non_blocking=False)
        self._away.clear()
        self._host.clear()

    def _seen(self, name: str, view: Tensor) -> Tensor:
        """The view, or the same of its bytes on the host."""
        host = self._host.get(name)
        if host is None:
            return view
        return host.view(view.dtype).as_strided(view.size(), view.stride(), view.storage_offset())

    def _name(self, name: str, view: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        self.named[name] = (view, size or tuple(view.shape))
        return view


def whole(staged: tuple[Version, NamedWeights] | None, version: Version) -> NamedWeights:
    """What is staged as this version. Raises EngineError when it is not all there."""
    if staged is None or staged[0] != version:
        have = None if staged is None else staged[0]
        raise EngineError(f"version {version} is not staged (staged: {have}); stage all of its tensors first")
    missing = staged[1].missing
    if missing:
        raise EngineError(f"version {version} lacks {len(missing)} tensors, among them {min(missing)!r}")
    return staged[1]


def _check_tied(name: str, tensor: Tensor, original: str, other: Tensor | None) -> None:
    if other is None or not (tensor.data_ptr() == other.data_ptr() or torch.equal(tensor, other)):
        raise EngineError(
            f"this model ties its output matrix to the embedding, but {name} came without an equal {original}; "
            "publish the embedding only"
        )
