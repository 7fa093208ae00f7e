"""Text to token ids and back, with what a plain turn needs: where a text begins, what ends a turn, what pads.

Invariant: `encode` adds nothing of its own (no special tokens) and refuses what it cannot represent; `decode` never fails
on an id of the vocabulary and never hides one, so an action that holds padding or a special token is seen as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollart.config.schema import CharsTokenizer, HFTokenizer
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.chat import ChatTemplate
from rollart.runtime.pretrained import local_folder

TURN_END = "\n"
"""Ends an action in the plain template: one character, in every text tokenizer, and easy for a tiny model."""
PAD_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What a sampled padding id reads as: no environment takes it for an action, and a reader sees it."""
SHOWN_CHARS = 40
"""Characters of a refused text that the error quotes."""

Ids = NDArray[np.int32]


class Tokenizer(Protocol):
    """What environments, engines and baselines need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Ids before the first text of a sequence; empty for most."""
        ...

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """What the environment's side writes after an action that was cut before its stop token."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Each of these, sampled, ends a turn."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """Writes the turns; None: the plain template."""
        ...

    def encode(self, text: str) -> Ids:
        """Ids of `text`, shape (n_tokens,). Raises EnvError when a part of it has no id."""
        ...

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of `ids`. Raises EnvError for an id outside the vocabulary."""
        ...


class Chars:
    """One id per character of an alphabet; id 0 is padding, character i of the alphabet is id i + 1."""

    def __init__(self, config: CharsTokenizer) -> None:
        alphabet = config.alphabet
        self._id_of = {char: index + 1 for index, char in enumerate(alphabet)}
        self._text_of = (PAD_TEXT, *alphabet)
        self.vocab_size = len(alphabet) + 1
        self.pad_id = 0
        self.chat: ChatTemplate | None = None
        self.begin_ids: tuple[int, ...] = ()
        self.turn_end_ids: tuple[int, ...] = (self._id_of[TURN_END],)
        self.stop_ids: tuple[int, ...] = self.turn_end_ids

    def encode(self, text: str) -> Ids:
        try:
            return np.fromiter(map(self._id_of.__getitem__, text), np.int32, len(text))
        except KeyError as error:
            char: str = error.args[0]
            raise EnvError(
                f"character {char!r} (U+{ord(char):04X}) at position {text.index(char)} of {text[:SHOWN_CHARS]!r} is not in "
                "tokenizer.alphabet; add it there, or have the environment write without it"
            ) from None

    def decode(self, ids: Sequence[int] | Ids) -> str:
        plain: Sequence[int] = ids.tolist() if isinstance(ids, np.ndarray) else ids
        bad = [index for index in plain if not 0 <= index < self.vocab_size]
        if bad:
            raise _outside(bad[0], self.vocab_size)
        return "".join([self._text_of[index] for index in plain])


class HF:
    """A tokenizer of transformers, from a local folder or a package.

    Plain: a turn ends with its end-of-text token or with a newline token. Chat: with what its template puts after a turn.
    """

    def __init__(self, config: HFTokenizer) -> None:
        folder = local_folder(config.path)
        if not folder.is_dir():
            raise ConfigError(
                f"tokenizer.path={config.path!r} is not a folder; name a local folder with tokenizer.json"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(
                'tokenizer.kind=hf needs transformers; install it with: pip install "rollart[local]"'
            ) from None
        inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._inner = inner
        self.vocab_size = len(inner)
        self.chat: ChatTemplate | None = None
        self.begin_ids: tuple[int, ...] = ()
        if config.template == "chat":
            self.chat = ChatTemplate(inner, config.path, config.system)
            self.turn_end_ids: tuple[int, ...] = (self.chat.end_id,)
            self.stop_ids: tuple[int, ...] = self._stops((self.chat.end_id,))
        else:
            self.begin_ids = _begin_ids(inner)
            self.turn_end_ids = tuple(self.encode(TURN_END).tolist())
            if not self.turn_end_ids:
                raise ConfigError(f"the tokenizer in {config.path!r} has no token for the newline, which ends a turn")
            # a newline of several tokens cannot stop a turn: its first token may begin something else
            self.stop_ids = self._stops(self.turn_end_ids if len(self.turn_end_ids) == 1 else ())
        if not self.stop_ids:
            raise ConfigError(
                f"the tokenizer in {config.path!r} has neither an end-of-text token nor a newline of one token, so no turn "
                "could end; set eos_token in its tokenizer_config.json"
            )
        self.pad_id = int(inner.pad_token_id if inner.pad_token_id is not None else self.stop_ids[0])

    def _stops(self, more: tuple[int, ...]) -> tuple[int, ...]:
        end: int | None = self._inner.eos_token_id
        return tuple(dict.fromkeys((*(() if end is None else (end,)), *more)))

    def encode(self, text: str) -> Ids:
        return np.asarray(self._inner.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        plain: list[int] = [int(index) for index in ids]
        bad = [index for index in plain if not 0 <= index < self.vocab_size]
        if bad:
            raise _outside(bad[0], self.vocab_size)
        text: str = self._inner.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def build_tokenizer(config: CharsTokenizer | HFTokenizer) -> Tokenizer:
    """The tokenizer that `config` names. Raises ConfigError when it cannot be used."""
    return Chars(config) if isinstance(config, CharsTokenizer) else HF(config)


def _begin_ids(inner: Any) -> tuple[int, ...]:
    """The beginning-of-text token, where this tokenizer itself puts one before a text."""
    added = inner.encode("", add_special_tokens=True)
    begin: int | None = inner.bos_token_id
    return (begin,) if begin is not None and added[:1] == [begin] else ()


def _outside(index: int, vocab_size: int) -> EnvError:
    return EnvError(f"token id {index} is outside the vocabulary of {vocab_size}; the model is not this tokenizer's")
