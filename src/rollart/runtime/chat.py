"""A model's own chat template: from messages to the text that the model was trained to read.

Owns nothing but the rendering; which of it is new to a trajectory is `envs/turns.py`'s matter. Invariant: the template
decides alone what stands around a message and what ends a turn; the end is one special token, which sampling can stop at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.core.errors import ConfigError

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""
PROBE = "abcxyz"
"""Content of the messages with which a template is tried: nothing that any template would take out or change."""


class ChatTemplate:
    """Of a transformers tokenizer `inner`, named `origin` in messages; `system`: the first message, empty for none."""

    def __init__(self, inner: Any, origin: str, system: str) -> None:
        self._inner = inner
        self._origin = origin
        self.opening: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        if not inner.chat_template:
            raise ConfigError(
                f"tokenizer.template=chat: the tokenizer in {origin!r} has no chat template; use a model that was trained on "
                "chats, or tokenizer.template=plain"
            )
        self.end_id = self._end_of_turn()

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant's next turn begins. Raises ConfigError when the template refuses."""
        return self._apply(messages, generation=True)

    def _apply(self, messages: Sequence[Message], *, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
            )
        except TemplateError as error:
            roles = " ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template in {self._origin!r} refuses messages of the roles {roles}: {error}; with "
                'tokenizer.system="" there is no system message'
            ) from error
        return text

    def _end_of_turn(self) -> int:
        """The special token that the template puts after what an assistant says."""
        said = [*self.opening, {"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        _, found, rest = self._apply(said, generation=False).rpartition(PROBE)
        ids: list[int] = self._inner.encode(rest, add_special_tokens=False)
        if not found or not ids or not self._is_special(ids[0]):
            raise ConfigError(
                f"tokenizer.template=chat: the template in {self._origin!r} does not end an assistant's turn with a special "
                f"token (it goes on with {rest[-40:]!r}), so no turn could end; use tokenizer.template=plain"
            )
        return ids[0]

    def _is_special(self, token: int) -> bool:
        added = self._inner.added_tokens_decoder.get(token)
        return token in self._inner.all_special_ids or bool(added is not None and added.special)
