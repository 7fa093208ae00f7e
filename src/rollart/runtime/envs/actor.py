"""The env host's process: an `EnvHost` behind a batched submit and a long poll."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping

from rollart.config.schema import CharsTokenizer, EnvHostConfig, HFTokenizer, TaskConfig
from rollart.runtime.envs.host import EnvHost
from rollart.runtime.tokenizers import build_tokenizer
from rollart.runtime.wire import Bell


class EnvHostActor:
    """An async Ray actor around `EnvHost`."""

    def __init__(
        self, tasks: Mapping[str, TaskConfig], tokenizer: CharsTokenizer | HFTokenizer, config: EnvHostConfig
    ) -> None:
        self._bell = Bell()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host = EnvHost(tasks, build_tokenizer(tokenizer), config, wake=self._wake)

    def _wake(self) -> None:
        """Called from the host's threads."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._bell.wake)

    async def start(self) -> int:
        self._loop = asyncio.get_running_loop()
        return os.getpid()

    async def submit(self, blob: bytes) -> None:
        self._host.submit(pickle.loads(blob))

    async def poll(self, wait_s: float) -> bytes:
        await self._bell.wait(wait_s)
        return pickle.dumps(self._host.take(), protocol=pickle.HIGHEST_PROTOCOL)

    async def close(self) -> None:
        """Close what is open, so that environments with processes of their own end before the host does."""
        await asyncio.get_running_loop().run_in_executor(None, self._host.close)

    def end(self) -> None:
        """Stop the threads, where the actor has no process that ends; what is open is given up, as it would be with one."""
        self._loop = None
        self._host.close(0.0)
