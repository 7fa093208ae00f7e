"""How the turns of one trajectory are written in tokens: plainly, or by the model's own chat template.

Invariant: ids that were sampled are never made again from their text. As long as what is to be read begins with what the
engine has seen, only the rest is new and is encoded. A chat template may also change what stood before (many drop earlier
reasoning): then the engine's next context is another sequence, and a new segment begins where the two part. What it
shares with its parent are the parent's very ids; what follows is context and is trained in no segment again.

    seen    <user>a<assistant><think>so</think>b<end>
    whole   <user>a<assistant>b<end><user>c<assistant>
            ^-- shared --------^-- encoded: given -----^ the next action goes here
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rollart.core.types import Segment, Tokens
from rollart.runtime.chat import ChatTemplate, Message
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import Ids, Tokenizer


class Turns(Protocol):
    """Of one session; `first` begins it anew."""

    @property
    def segments(self) -> int | None:
        """Token sequences so far; None where it is always one."""
        ...

    def first(self, text: str) -> Ids:
        """What the model reads before its first action."""
        ...

    def action(self, ids: Ids) -> str:
        """The text of sampled ids, without the token that ended the turn."""
        ...

    def reply(self, action: Ids, text: str) -> Ids | Segment:
        """What the model reads after `action` that it has not seen; a segment where that is not a continuation."""
        ...


def turns_of(tokenizer: Tokenizer) -> Turns:
    return PlainTurns(tokenizer) if tokenizer.chat is None else ChatTurns(tokenizer, tokenizer.chat)


def given(ids: Ids) -> Tokens:
    """A piece that the environment's side wrote."""
    return Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids))


class PlainTurns:
    """Text, action, turn end, text: append-only."""

    segments: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(tokenizer.stop_ids)

    def first(self, text: str) -> Ids:
        ids = self._tokenizer.encode(text)
        begin = self._tokenizer.begin_ids
        return np.concatenate([np.asarray(begin, np.int32), ids]) if begin else ids

    def action(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids[:-1] if self._stopped(ids) else ids)

    def reply(self, action: Ids, text: str) -> Ids:
        ids = self._tokenizer.encode(text)
        if self._stopped(action):
            return ids
        return np.concatenate([np.asarray(self._tokenizer.turn_end_ids, np.int32), ids])

    def _stopped(self, action: Ids) -> bool:
        return len(action) > 0 and int(action[-1]) in self._stop_ids


class _Piece(NamedTuple):
    """A part of what the engine has seen."""

    ids: Ids
    text: str
    """As it stands in the rendered chat."""


class ChatTurns:
    """Messages in, what their rendering adds out."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._stop_ids = frozenset(tokenizer.stop_ids)
        self._messages: list[Message] = []
        self._seen: list[_Piece] = []
        self.segments: int | None = 1

    def first(self, text: str) -> Ids:
        self._messages = [*self._template.opening, {"role": "user", "content": text}]
        self._seen, self.segments = [], 1
        return self._encoded(self._template.render(self._messages))

    def action(self, ids: Ids) -> str:
        return self._split(ids)[0]

    def reply(self, action: Ids, text: str) -> Ids | Segment:
        said, end = self._split(action)
        self._messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
        self._seen.append(_Piece(action, said + end))
        seen = "".join(piece.text for piece in self._seen)
        whole = self._template.render(self._messages)
        return self._encoded(whole[len(seen) :]) if whole.startswith(seen) else self._branch(seen, whole)

    def _encoded(self, text: str) -> Ids:
        """Ids of text that nobody has seen yet."""
        ids = self._tokenizer.encode(text)
        self._seen.append(_Piece(ids, text))
        return ids

    def _split(self, ids: Ids) -> tuple[str, str]:
        """What was said, and the token that ended it."""
        stopped = len(ids) > 0 and int(ids[-1]) in self._stop_ids
        said = self._tokenizer.decode(ids[:-1] if stopped else ids)
        return said, self._tokenizer.decode(ids[-1:]) if stopped else ""

    def _branch(self, seen: str, whole: str) -> Segment:
        """The segment that reads `whole`: what it has in common with `seen` in the ids of that, then new ones."""
        common = _common(seen, whole)
        shared: list[_Piece] = []
        at = 0
        for piece in self._seen:
            part = piece if at + len(piece.text) <= common else self._beginning(piece.ids, whole[at:common])
            if len(part.ids):
                shared.append(part)
            at += len(part.text)
            if part is not piece:
                break
        parent, self._seen = (self.segments or 1) - 1, shared
        self.segments = parent + 2
        kept = _joined([piece.ids for piece in shared])
        new = self._encoded(whole[at:])
        return Segment(
            pieces=tuple(given(ids) for ids in (kept, new) if len(ids)), parent=parent, shared_tokens=len(kept)
        )

    def _beginning(self, ids: Ids, text: str) -> _Piece:
        """The longest beginning of `ids` that reads as a beginning of `text`."""
        count = (
            bisect.bisect_right(range(len(ids) + 1), len(text), key=lambda n: len(self._tokenizer.decode(ids[:n]))) - 1
        )
        while count > 0 and not text.startswith(self._tokenizer.decode(ids[:count])):
            count -= 1  # half a character reads as another one
        return _Piece(ids[:count], self._tokenizer.decode(ids[:count]) if count > 0 else "")


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _common(one: str, other: str) -> int:
    """Leading characters that are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
