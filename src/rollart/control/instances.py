"""Which problem is next: one cursor per task over shuffled epochs.

Invariant: an epoch visits every training instance once; a data set shorter than the run wraps into the next epoch and
never makes anybody wait. The order depends on (seed, task, epoch) alone.
"""

from __future__ import annotations

from typing import Literal

from rollart.core.seeds import digest, rng
from rollart.core.snapshot import CursorState
from rollart.core.types import TaskInstance, TaskSpec


class Cursor:
    def __init__(self, spec: TaskSpec, seed: int, *, epoch: int = 0, position: int = 0) -> None:
        self._spec = spec
        self._seed = seed
        self.epoch = epoch
        self.position = position
        self._order = self._shuffled()
        self._data = ""

    def next(self) -> TaskInstance:
        if self.position == len(self._order):
            self.epoch += 1
            self.position = 0
            self._order = self._shuffled()
        index = self._order[self.position]
        self.position += 1
        return TaskInstance(task=self._spec.name, epoch=self.epoch, index=index, seed=self._spec.train[index])

    @property
    def data(self) -> str:
        """Digest of the data set: its instances and what decides them."""
        if not self._data:
            seeds = self._spec.train
            self._data = digest(self._spec.data, seeds if isinstance(seeds, range) else ",".join(map(str, seeds)))
        return self._data

    @property
    def state(self) -> CursorState:
        return CursorState(epoch=self.epoch, position=self.position, data=self.data)

    def restore(self, state: CursorState) -> bool:
        """Go on from `state`. False: the data set is another one, so it is begun at its index 0, as a new epoch."""
        same = state.data == self.data
        self.epoch, self.position = (state.epoch, state.position) if same else (state.epoch + 1, 0)
        self._order = self._shuffled()
        return same

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._spec.train)))
        rng(self._seed, "order", self._spec.name, self.epoch).shuffle(order)
        return order


Split = Literal["train", "held_out"]


def evaluation(spec: TaskSpec, split: Split, *, ordinal: int, episodes: int | None) -> list[tuple[TaskInstance, int]]:
    """(instance, member) of each episode of a run's `ordinal`-th evaluation, over the instances of `split`.

    Instances come up equally often (to within one), or once each where `episodes` is None; `member` tells the episodes of
    one instance apart.
    """
    seeds = spec.held_out if split == "held_out" else spec.train
    return [
        (TaskInstance(task=spec.name, epoch=ordinal, index=i % n, seed=seeds[i % n], purpose="eval"), i // n)
        for n in [len(seeds)]
        for i in range(n if episodes is None else episodes)
    ]


def splits(spec: TaskSpec) -> tuple[Split, ...]:
    """What an evaluation of the task looks at."""
    present: dict[Split, bool] = {"train": len(spec.train) > 0, "held_out": len(spec.held_out) > 0}
    return tuple(split for split, some in present.items() if some)
