"""The env host's process: an `EnvHost` behind a wire."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from rollart.config.schema import CharsTokenizer, EnvHostConfig, HFTokenizer, TaskConfig
from rollart.runtime.answering import Answering
from rollart.runtime.envs.host import Call, Done, EnvHost
from rollart.runtime.tokenizers import build_tokenizer
from rollart.runtime.wire import POLL_S


class EnvHostActor(Answering):
    """An async Ray actor around `EnvHost`."""

    def __init__(
        self, tasks: Mapping[str, TaskConfig], tokenizer: CharsTokenizer | HFTokenizer, config: EnvHostConfig
    ) -> None:
        super().__init__(beat_s=POLL_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host = EnvHost(tasks, build_tokenizer(tokenizer), config, wake=self._rung)

    def _rung(self) -> None:
        """Called from the host's threads."""
        loop = self._loop  # `end` may take it away
        if loop is not None:
            loop.call_soon_threadsafe(self.ring)

    async def start(self) -> int:
        self._loop = asyncio.get_running_loop()
        return os.getpid()

    def take_in(self, items: Sequence[Call]) -> None:
        self._host.submit(items)

    def take_out(self) -> list[Done]:
        done = self._host.take()
        for one in done:
            self.took(one.seconds)
        return done

    async def close(self) -> None:
        """Close what is open, so that environments with processes of their own end before the host does."""
        await asyncio.get_running_loop().run_in_executor(None, self._host.close)

    def end(self) -> None:
        """Stop the threads, where the actor has no process that ends; what is open is given up, as it would be with one."""
        self._loop = None
        self._host.close(0.0)
