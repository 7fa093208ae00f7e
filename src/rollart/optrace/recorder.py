"""Watches one rank's step: every operator that runs, what it depends on, what it leaves for the backward pass.

Owns the dispatch mode that sees the operators of a fake step, and the places in the model where they belong. Invariant: an
operator is seen once, with the local shapes of the rank (what DTensor works out about global shapes is not seen), and its
dependencies are the operators that last wrote the storages it touches. Why: nothing here knows a model; the same watcher
serves a transformers model, a GPT and a user's module. Imports torch: import this module inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollart.optrace.kernels import Work, base_name, is_view, tensors, work, written
from rollart.optrace.ops import Pass
from rollart.optrace.reads import Reads, no_answer

GATHERS = frozenset({"aten._foreach_copy_", "fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy"})
"""Around the gathering of sharded weights: no gradient is in them."""
STEP = "step"
"""Where operators belong that run once a step, whatever the parts."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One operator as it ran; `deps` are indices in the whole recording."""

    index: int
    name: str
    work: Work
    part: str
    during: Pass
    deps: tuple[int, ...] = ()
    saved_bytes: float = 0.0
    leads_on: bool = False
    """The gradient that leaves the part depends on it."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """What was seen, and what each part keeps."""

    seen: list[Seen] = field(default_factory=list)
    saved_bytes: dict[str, float] = field(default_factory=dict)
    boundary_bytes: dict[str, float] = field(default_factory=dict)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is on (`watch`), under the part and the pass that it was last told."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.reads = reads
        self.part = ""
        self.during: Pass = "forward"
        self._on = False
        self._muted = 0
        self._writer: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._kept: set[int] = set()
        self._remote: set[int] = set()
        self._entered: dict[int, str] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record inside."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Do not record inside: what the parallel library computes about shapes runs on no device."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def at(self, part: str, during: Pass) -> Iterator[None]:
        """Operators inside belong to `part` and `during`."""
        before = self.part, self.during
        self.part, self.during = part, during
        try:
            yield
        finally:
            self.part, self.during = before

    def never_kept(self, held: Sequence[torch.Tensor]) -> None:
        """Storages that are there anyway (weights, inputs), so that keeping them for the backward pass costs nothing."""
        for tensor in held:
            self._kept.add(self._storage(local(tensor)))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they come again as the operators of this rank
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or self._muted:
            return func(*args, **kwargs)
        answered, out = self.reads.answer(func, args, kwargs, self._depends_on_others(args))
        if not answered:
            try:
                out = func(*args, **kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as problem:
                raise no_answer(func) from problem
        if self._on:
            self._record(func, args, kwargs, out)
        return out

    def _depends_on_others(self, args: Sequence[Any]) -> bool:
        return any(self._storage(tensor) in self._remote for tensor in tensors(args))

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._alive.setdefault(key, storage)  # a freed storage's number would be given again
        return key

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = {self._storage(tensor) for tensor in (*tensors(args), *tensors(kwargs))}
        outputs = {self._storage(tensor) for tensor in tensors(out)}
        asked = work(func, args, kwargs, out)
        remote = not inputs.isdisjoint(self._remote) or (asked is not None and asked.stream == "comm")
        changed = {
            self._storage(tensor)
            for i in written(func)
            for tensor in tensors(args[i] if i < len(args) else kwargs.get(func._schema.arguments[i].name))
        }
        if func.namespace == "fsdp":
            changed |= outputs  # these two name spaces do not say in their schemas what they write
        elif func.namespace == "c10d" and args:
            changed |= {self._storage(tensor) for tensor in tensors(args[0])}
        if remote:
            self._remote |= outputs | changed
        if asked is None:
            self._rename(func, inputs, outputs)
            return
        touched = inputs | changed
        deps = sorted({self._writer[key] for key in touched if key in self._writer})
        seen = Seen(
            index=len(self.recording.seen), name=base_name(func), work=asked, part=self.part, during=self.during,
            deps=tuple(deps), leads_on=base_name(func) in GATHERS,
        )  # fmt: skip
        self.recording.seen.append(seen)
        for key in (outputs - inputs) | changed:
            self._writer[key] = seen.index

    def _rename(self, func: OpOverload, inputs: set[int], outputs: set[int]) -> None:
        """Results of a call without a kernel stand for what its arguments stood for."""
        if is_view(func):
            return
        writers = [self._writer[key] for key in inputs if key in self._writer]
        for key in outputs - inputs:
            if writers:
                self._writer[key] = max(writers)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor is kept for the backward pass: its storage counts once, in the part that made it or that it entered."""
        if not self._on:
            return tensor
        inner = local(tensor)
        key = self._storage(inner)
        if key not in self._kept:
            self._kept.add(key)
            size = float(inner.untyped_storage().nbytes())
            made = self._writer.get(key)
            maker = self.part if made is None else self.recording.seen[made].part
            owner = self._entered.get(key, maker)
            self.recording.saved_bytes[owner] = self.recording.saved_bytes.get(owner, 0.0) + size
            if made is not None and owner == maker:
                self.recording.seen[made].saved_bytes += size
        return tensor

    def enter(self, hidden: torch.Tensor, part: str) -> None:
        """What follows is `part`'s, which `hidden` enters."""
        self.part = part
        held = local(hidden)
        self._entered[self._storage(held)] = part
        self.recording.boundary_bytes[part] = float(held.numel() * held.element_size())

    def gradient_leaves(self, gradient: torch.Tensor) -> None:
        """The gradient that a part gives on: whatever it depends on is not the weights' business alone."""
        first = self._writer.get(self._storage(local(gradient)))
        waiting = [] if first is None else [first]
        seen = self.recording.seen
        while waiting:
            one = seen[waiting.pop()]
            if not one.leads_on and one.part == self.part and one.during == self.during:
                one.leads_on = True
                waiting += one.deps


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a distributed tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mark_parts(recorder: Recorder, layers: Sequence[torch.nn.Module], last: str) -> Callable[[], None]:
    """Tell the recorder when each layer begins, forward and backward; the operators after the last are `last`'s.

    What stands before the first layer belongs to whatever part was set before the forward pass. Returns what removes the marks.
    """
    before = recorder.part

    def arrives(index: int) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(iter(tensors([*args, *kwargs.values()])))
            _border(recorder, given, layer_name(index), layer_name(index - 1) if index else before)

        return hook

    def leaves(_: torch.nn.Module, args: tuple[Any, ...], out: Any) -> None:
        _border(recorder, tensors(out)[0], last, layer_name(len(layers) - 1))

    hooks = [
        layer.register_forward_pre_hook(arrives(index), prepend=True, with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    if layers:
        hooks.append(layers[-1].register_forward_hook(leaves))

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def layer_name(index: int) -> str:
    """The name that the layer has while it is recorded."""
    return f"layer {index}"


def _border(recorder: Recorder, hidden: torch.Tensor, ahead: str, behind: str) -> None:
    """From here on operators are those of the part `ahead`; backward, when the gradient is here, those of `behind`."""
    recorder.enter(hidden, ahead)

    def arrived(gradient: torch.Tensor) -> None:
        with recorder.mute():
            recorder.gradient_leaves(gradient)
        recorder.part = behind

    if hidden.requires_grad:
        handle = hidden.register_hook(arrived)  # type: ignore[no-untyped-call]
        hooks = hidden._backward_hooks
        assert hooks is not None
        # before what sharding does when the gradient of a layer's output is here; hooks run in the order of insertion
        others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        for key, hook in others:
            del hooks[key]
            hooks[key] = hook
