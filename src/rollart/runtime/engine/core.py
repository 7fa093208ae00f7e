"""The engine's core: continuous batching with token ids in and out, one step at a time, on one thread.

Owns the life of a request inside an engine. Invariants: no token is ever sampled from keys and values of another version
than the one served; a request is answered exactly once; between any two calls, tokens sampled so far = tokens delivered +
progress of the requests in `book().live`. Commands take effect between steps by construction: nothing runs beside a step.

    submit -> waiting --admit--> live --finish--> answered; its slot keeps the tokens for the next turn
               ^ held until its version |
               |                        | preempted: no room now, computed again later
               +------------------------+
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rollart.core.errors import EngineError, failure
from rollart.core.types import (
    EngineBook,
    Failure,
    Finish,
    Generation,
    Purpose,
    RequestId,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.runtime.compiled import Wanted
from rollart.runtime.engine import books
from rollart.runtime.engine.admission import WaitingRoom, refusal
from rollart.runtime.engine.backend import Path, backend_for
from rollart.runtime.engine.batch import Batch, Layout, pack
from rollart.runtime.engine.cache import CAPACITY_UNIT, Ints, KVCache, rounded
from rollart.runtime.engine.named_weights import NamedWeights, whole
from rollart.runtime.engine.sampler import draw
from rollart.runtime.engine.slots import Row, SlotKey, SlotTable
from rollart.runtime.engine.steps import next_step, take_over
from rollart.runtime.payload import TokenPayload, ids_of

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
CAPACITY_GROWTH = 1.5
"""Capacity grows by half at least, so that a sequence of n tokens is moved O(log n) times."""

Answer = tuple[RequestId, Generation]


class EngineCore:
    """One model on one device. Not thread-safe; every call returns at once but `step`, which runs one forward pass."""

    def __init__(
        self,
        hf_config: Any,
        *,
        max_live: int,
        kv_tokens: int,
        prefill_tokens: int,
        share_prefixes: bool = True,
        path: Path = "auto",
        native: Wanted = "auto",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """`max_live` requests are decoded together; `kv_tokens` bounds the cache, idle trajectories included;
        `prefill_tokens` bounds the tokens of a step apart from those of decoding rows (one each); `share_prefixes`: what
        siblings of a group begin with alike is computed once; `native`: whether decoding attends by the kernel of `native.py`.
        Raises EngineError where that is required and cannot be had."""
        if min(max_live, kv_tokens, prefill_tokens) < 1:
            raise EngineError(
                f"max_live={max_live}, kv_tokens={kv_tokens}, prefill_tokens={prefill_tokens}: each must be 1 or more"
            )
        self._device = torch.device(device)
        self._backend = backend_for(hf_config, path, dtype, self._device, native=native)
        self.shape, self.dtype = self._backend.sizes, dtype
        self.native, self.lacks = str(self._backend.decoding), self._backend.decoding.lacks
        """What decoding attends by, as records have it; why this machine has no kernel, though it could, or nothing."""
        self.version: Version = 0
        self._max_live, self._kv_tokens, self._prefill_tokens = max_live, kv_tokens, prefill_tokens
        self._share, self.asleep = share_prefixes, False
        self._cache = KVCache(self.shape, dtype, self._device)
        self._table = SlotTable(PURPOSES, kv_tokens)
        self.work = self._table.work
        self._weights: NamedWeights | None = None
        self._staged: tuple[Version, NamedWeights] | None = None
        self._spare: NamedWeights | None = None
        self._rows: dict[RequestId, Row] = {}
        self._waiting = WaitingRoom()
        self._ending: dict[RequestId, tuple[Finish, Failure | None]] = {}
        """Answered by the next step; until then their tokens are in `book().live`."""
        self._arrivals = self._rebuilt_tokens = 0
        self._sampled = np.zeros(len(PURPOSES), np.int64)

    # --- weights --------------------------------------------------------------------------------------------------

    def load(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """The initial weights: all tensors of the model's state_dict, in fp32 or the engine's dtype."""
        if self._weights is not None:
            raise EngineError(f"version {self.version} is loaded already; use stage and apply for version {version}")
        self.stage(version, tensors)
        self.apply(version)

    @torch.inference_mode()
    def stage(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Bring tensors of a version near; may be called many times, a bucket of tensors each. Serving goes on.

        The tensors are copied. Staging another version drops what was staged and not applied.
        """
        if self._staged is None or self._staged[0] != version:
            reused = self._staged[1] if self._staged else self._spare
            weights = reused or self._backend.new_weights()
            weights.missing = set(weights.named)
            self._staged, self._spare = (version, weights), None
        self._staged[1].put(tensors)

    def apply(self, version: Version, kept: Literal["rebuild", "abort"] = "rebuild") -> list[Answer]:
        """Serve a staged version from the next step on. Returns the requests that this aborted.

        `rebuild`: requests go on, their cache is computed anew when they next decode. `abort`: those that are live or have
        sampled answer `aborted`. Raises EngineError if the version is not wholly staged, or if requests pinned to the served
        version are in the engine: wait for them or `abort_pinned` first.
        """
        if self._weights is not None and version <= self.version:
            raise EngineError(f"version {version} cannot follow version {self.version}: version numbers only rise")
        new = whole(self._staged, version)
        if self._weights is not None and self.pinned_live():
            raise EngineError(
                f"requests pinned to version {self.version} are in the engine; let them end or call abort_pinned first"
            )
        sampling = [row for row in self._rows.values() if row.slot is not None or len(row.logprobs)]
        aborted = [self._answer(row, "aborted") for row in sampling] if kept == "abort" else []
        for slot in self._table.live():
            self._row(slot).close_span(int(self._table.length[slot] - self._table.n_context[slot]), self.version)
        self._weights, self._spare, self._staged = new, None if self.asleep else self._weights, None
        self.version = version
        self._table.invalidate()
        for row, why in self._waiting.sort_again(version):
            self._ending[row.request.id] = ("failed", why)
        return aborted

    def pinned_live(self) -> bool:
        """Whether a request in the engine may be sampled under the served version only."""
        return any(row.request.pin == self.version for row in self._rows.values())

    def abort_pinned(self) -> list[Answer]:
        """Answer the requests pinned to the served version `aborted`, now."""
        pinned = [row for row in self._rows.values() if row.request.pin == self.version]
        return [self._answer(row, "aborted") for row in pinned]

    @torch.inference_mode()
    def fingerprint(self) -> str:
        """Bitwise digest of the weights that are served, from the memory that the forward pass reads."""
        return self._live_weights().digest()

    @torch.inference_mode()
    def staged_fingerprint(self) -> str:
        """The same of what is staged, as it is laid out and cast. Raises EngineError when nothing is."""
        if self._staged is None:
            raise EngineError("nothing is staged; stage a version first")
        return self._staged[1].digest()

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests. One that can never be served is answered `failed` by the next step."""
        twice = [request.id for request in requests if request.id in self._rows]
        if twice or len({request.id for request in requests}) != len(requests):
            raise EngineError(f"request {twice or 'ids'} submitted twice; a re-send needs another `part`")
        for request in requests:
            ids = ids_of(request.context)
            key = SlotKey(request.id.traj, request.id.attempt)
            row = Row(request=request, key=key, arrival=self._arrivals, ids=ids, n_context=len(ids))
            self._arrivals += 1
            self._rows[request.id] = row
            why = refusal(request, ids, vocab=self.shape.vocab, row_tokens=self._row_tokens)
            why = why or self._waiting.put(row, self.version)
            if why is not None:
                self._ending[request.id] = ("failed", why)

    def abort(self, ids: Sequence[RequestId]) -> None:
        """These answer `aborted`, with the tokens so far, from the next step. Unknown ids are ignored."""
        self._ending.update({id_: ("aborted", None) for id_ in ids if id_ in self._rows and id_ not in self._ending})

    def forget(self, traj: TrajId, attempt: int) -> None:
        """The trajectory has no further turn: free what is kept for it. Live requests are not touched."""
        self._table.forget(SlotKey(traj, attempt))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Requests held for a newer version, or while it sleeps, are no work."""
        return bool(self._ending or (not self.asleep and (self._waiting.n_ready or self._table.n_live)))

    @property
    def live_count(self) -> int:
        """Requests that hold a slot and are decoded together."""
        return self._table.n_live

    @property
    def waiting_count(self) -> int:
        """Requests without a slot: ready, held for a version, preempted, or about to be refused."""
        return len(self._rows) - self._table.n_live

    def book(self) -> EngineBook:
        """Cumulative sampled tokens per purpose, and what the requests in the engine have of them."""
        return books.with_live(self.totals(), self.progress())

    def totals(self) -> EngineBook:
        """The book without its live requests."""
        sampled = dict(zip(PURPOSES, self._sampled.tolist(), strict=True))
        return EngineBook(sampled=sampled, rebuilt_tokens=self._rebuilt_tokens)

    def progress(self) -> tuple[books.Progress, ...]:
        return books.progress(self._rows.values(), self._table, self.version)

    # --- memory ---------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give back the cache, and the weights that are neither served nor staged; those that are leave a GPU for the host's
        memory. Requests are held until `wake`, what they have sampled is kept; aborts are answered. Idempotent.

        A version that is staged while it sleeps takes memory of the device again."""
        for slot in self._table.live():
            self._preempt(self._row(slot))
        self._cache.repack(self._table.repack(0, 0), 0, 0)
        self._spare = None
        self.asleep = True
        if self._device.type == "cuda":
            for weights in self._kept_weights():
                weights.put_away()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake(self) -> None:
        """Go on: held requests are admitted again and their cache is rebuilt. Idempotent."""
        for weights in self._kept_weights():
            weights.bring_back()
        self.asleep = False

    # --- a step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Admit, compute at most `prefill_tokens` of prompts, sample one token for every row that is ready for it.

        Returns what ended: finished, aborted and refused requests. Empty, and cheap, when there is nothing to do.
        """
        ending, self._ending = self._ending, {}
        answers = [self._answer(self._rows[id_], *how) for id_, how in ending.items() if id_ in self._rows]
        self._make_room_to_grow()
        self._admit()
        if not self._table.n_live:
            return answers
        weights = self._live_weights()
        batch = self._next_batch()
        logits = self._backend.forward(weights, self._cache, batch)
        return answers if logits is None else answers + self._sample(batch.complete, logits)

    def _next_batch(self) -> Batch:
        """What siblings have is copied, what is left for this step is laid out."""
        table = self._table
        if self._share:
            for (source, start, stop), slots in take_over(table).items():
                self._cache.copy(source, slots, start, stop)
        step = next_step(table, self._prefill_tokens, share=self._share)
        self._rebuilt_tokens += step.rebuilt_tokens
        families, backend = table.family if self._share else None, self._backend
        layout = Layout(self._cache, table.ids, backend.stairs, backend.alone, families)
        return pack(layout, step.slots, step.starts, step.widths, step.complete)

    def _sample(self, slots: Ints, logits: Tensor) -> list[Answer]:
        """Append one token to each of `slots`; answers for those that end with it."""
        table = self._table
        uniform, special = table.uniforms(slots), table.special(slots)
        tokens, logprobs, log_kept = draw(logits, uniform, special, plain=self._backend.draw)
        answers = []
        finite = np.isfinite(logprobs)
        if not finite.all():
            answers = self._answer_broken(slots[~finite])
            slots, tokens, logprobs = slots[finite], tokens[finite], logprobs[finite]
            log_kept = None if log_kept is None else log_kept[finite]
        positions = table.length[slots]
        table.ids[slots, positions] = tokens
        table.logprobs[slots, positions] = logprobs
        if log_kept is not None:
            table.log_kept[slots, positions] = log_kept
        table.length[slots] = positions + 1
        self._sampled += np.bincount(table.purpose[slots], minlength=len(PURPOSES))
        stopped = (table.stop[slots] == tokens[:, None]).any(1)
        for at in np.flatnonzero(stopped | (positions + 1 >= table.limit[slots])):
            answers.append(self._answer(self._row(slots[at]), "stop" if stopped[at] else "length"))
        return answers

    def _answer(self, row: Row, finish: Finish, why: Failure | None = None) -> Answer:
        """Take a request out of the engine; its tokens so far are the answer."""
        if row.slot is not None:
            self._table.release(row)
        else:
            self._waiting.discard(row)
        del self._rows[row.request.id]
        n = len(row.logprobs)
        row.close_span(n, self.version)
        sampling = row.request.sampling
        payload = TokenPayload(
            ids=row.ids[row.n_context :].copy(),
            logprobs=row.logprobs,
            log_kept_mass=row.log_kept if sampling.truncates and sampling.temperature > 0.0 else None,
        )
        tokens = Tokens(n_tokens=n, spans=tuple(row.spans), payload=payload)
        return row.request.id, Generation(
            tokens=tokens, finish=finish, prefilled_tokens=row.prefilled, rebuilt_tokens=row.rebuilt, failure=why
        )

    def _answer_broken(self, slots: Ints) -> list[Answer]:
        """Rows whose logits are not finite: nothing was sampled, and what they left in the cache must meet no other row."""
        why = failure("engine", "raised", f"logits of version {self.version} are not finite; look at its weights")
        answers = [self._answer(self._row(slot), "failed", why) for slot in slots]
        self._cache.scrub()
        self._table.invalidate()
        return answers

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def _row_tokens(self) -> int:
        """The longest sequence that can be held."""
        return min(self._kv_tokens, self.shape.max_positions)

    def _make_room_to_grow(self) -> None:
        """Every live row has a place for its next token; rows for which there is none are preempted: lowest priority,
        then youngest first. They are computed again when there is room."""
        table, live = self._table, self._table.live()
        need = int(table.length[live].max()) + 1 if len(live) else 0
        if need <= table.capacity:
            return
        capacity = self._capacity_for(need, len(live))
        stay = self._kv_tokens // capacity
        for slot in live[np.lexsort((table.arrival[live], -table.priority[live]))][stay:]:
            self._preempt(self._row(slot))
        self._repack(capacity)

    def _preempt(self, row: Row) -> None:
        """Its slot goes; its tokens and their versions stay with it until there is room."""
        self._table.release(row)
        row.close_span(len(row.logprobs), self.version)
        self._waiting.put(row, self.version)

    def _admit(self) -> None:
        while self._table.n_live < self._max_live and not self.asleep:
            row = self._waiting.first()
            if row is None or not self._make_room(len(row.ids) + 1):
                return
            self._waiting.discard(row)
            self._table.admit(row)

    def _make_room(self, need: int) -> bool:
        """Whether one more row of `need` tokens can be live; changes the size of the slots where that makes it so."""
        table = self._table
        if need > table.capacity:
            capacity = self._capacity_for(need, table.n_live + 1)
        elif table.has_room():
            return True
        else:
            # All slots are live. Shorter ones are more, if nobody needs the length; a unit to spare, or it is lost again.
            longest = max(need, int(table.length.max()) + 1)
            capacity = min(rounded(longest + CAPACITY_UNIT), self._row_tokens)
            if capacity * 2 > table.capacity:
                return False
        if self._kv_tokens // capacity <= table.n_live:
            return False
        self._repack(capacity)
        return True

    def _capacity_for(self, need: int, rows: int) -> int:
        """Tokens per slot: with room to grow if `rows` rows fit so, else just `need`."""
        tight = min(rounded(need), self._row_tokens)
        generous = min(max(tight, rounded(int(self._table.capacity * CAPACITY_GROWTH))), self._row_tokens)
        return generous if self._kv_tokens // generous >= rows else tight

    def _repack(self, capacity: int) -> None:
        slots = self._kv_tokens // capacity
        self._cache.repack(self._table.repack(slots, capacity), slots, capacity)

    def _row(self, slot: int) -> Row:
        row = self._table.rows[slot]
        assert row is not None
        return row

    def _kept_weights(self) -> list[NamedWeights]:
        return [one for one in (self._weights, self._staged[1] if self._staged else None) if one is not None]

    def _live_weights(self) -> NamedWeights:
        if self._weights is None:
            raise EngineError("no weights are loaded; call load first")
        return self._weights
