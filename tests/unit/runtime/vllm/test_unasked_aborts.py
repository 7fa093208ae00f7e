"""A server that ends turns which nobody told it to end does not hold the loop for ever."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollart.config.engines import VllmEngine
from rollart.config.schema import ScratchModel
from rollart.core.types import Generation, RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.encoding import decoded
from rollart.runtime.payload import TokenPayload
from rollart.runtime.vllm.actor import MOST_UNASKED_ABORTS, VllmActor

MODEL = ScratchModel(layers=1, hidden=64, heads=2, kv_heads=1, ffn=96, max_positions=64)


class Aborting:
    """In place of the server: it samples one token of every turn that is sent, then aborts it, `n_aborts` times in all."""

    def __init__(self, socket: Path, n_aborts: int) -> None:
        self.socket, self.folder, self.left, self.sent = socket, socket.parent, n_aborts, 0

    def ended(self) -> str:
        return ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        await reader.readexactly(length)
        self.sent += 1
        finish = "abort" if self.left else "length"
        self.left -= 1
        logprobs = {"content": [{"token_id": 5, "logprob": -1.0}]}
        answer = {"choices": [{"token_ids": [5], "logprobs": logprobs, "finish_reason": finish}]}
        body = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()


async def answered(n_aborts: int, folder: Path) -> tuple[Generation, int]:
    """What comes of one turn, and how often it was sent."""
    server: Any = Aborting(folder / "s", n_aborts)
    ids = Tokens(n_tokens=4, payload=TokenPayload(ids=np.arange(4, dtype=np.int32)))
    turn = TurnRequest(
        id=RequestId(TrajId("t"), 0, 0, 0), model="policy", purpose="train", domain="d", context=Segment(pieces=(ids,)),
        max_tokens=20, sampling=Sampling(seed=3), pin=None, min_version=1,
    )  # fmt: skip
    async with await asyncio.start_unix_server(server.serve, server.socket), asyncio.timeout(20):
        actor = VllmActor(MODEL, 97, VllmEngine(kind="vllm"), lambda spec, config: server)
        actor._version = 1
        actor.take_in([turn])
        answers: Sequence[tuple[RequestId, Generation]] = ()
        while not answers:
            answers = decoded(await actor.poll(10.0)).answers
    return answers[0][1], server.sent


def test_a_turn_that_is_aborted_again_and_again_fails_and_says_so() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        got, sent = asyncio.run(answered(1000, Path(folder)))
    assert (got.finish, sent) == ("failed", MOST_UNASKED_ABORTS + 1)
    assert got.failure is not None
    assert f"aborted this turn {sent} times" in got.failure.detail


def test_a_turn_that_is_aborted_a_few_times_goes_on_from_its_tokens() -> None:
    with tempfile.TemporaryDirectory() as folder:
        got, sent = asyncio.run(answered(MOST_UNASKED_ABORTS, Path(folder)))
    assert (got.finish, got.tokens.n_tokens, sent) == ("length", MOST_UNASKED_ABORTS + 1, MOST_UNASKED_ABORTS + 1)
