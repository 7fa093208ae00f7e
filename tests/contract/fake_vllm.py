"""A server that answers what `runtime.vllm` asks of vLLM, with a hash in place of a model. Standard library only, run by path.

Tokens depend on the served weights, the sequence's length and the seed; scores on the served weights and the tokens. It keeps
whole blocks of what it has read until a pause, and takes `STEP_S` for a step of everything that is under way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

STEP_S = 0.002
BLOCK = 32
HOLD = "hold"
"""While a file of this name lies in the model's folder, no turn gets beyond its first `SHOWN_TOKENS`."""
SHOWN_TOKENS = 8
EMBEDDING = "model.embed_tokens.weight"


def score(weights: int, before: int, token: int) -> float:
    """The log-probability of a token, in -3 .. -1."""
    return -1.0 - 2.0 * (zlib.crc32(f"{weights} {before} {token}".encode()) / 2**32)


def weights_of(path: Path) -> int:
    """A checksum of the embeddings in a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:start])[EMBEDDING]["data_offsets"]
    return zlib.crc32(data[start + first : start + last])


class Server:
    def __init__(self, model: Path, vocab: int, longest: int) -> None:
        self.weights = weights_of(model / "model.safetensors")
        self.gate = model / HOLD
        self.vocab, self.longest = vocab, longest
        self.going = asyncio.Event()
        self.going.set()
        self.aborted: set[str] = set()
        self.known: set[str] = set()
        self.blocks: set[tuple[int, ...]] = set()
        self.step = asyncio.Condition()

    async def steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            async with self.step:
                self.step.notify_all()

    async def generate(self, body: dict[str, Any], send: Callable[[bytes], Awaitable[None]]) -> None:
        id_, ids, wanted = f"generate-tokens-{body['request_id']}", list(body["token_ids"]), body["sampling_params"]
        self.known.add(id_)
        prompt, cached, finish = len(ids), self._cached(ids), ""
        while not finish:
            async with self.step:
                await self.step.wait()
            sampled: list[int] = []
            if id_ in self.aborted:
                finish = "abort"
            elif self.going.is_set() and not (len(ids) - prompt >= SHOWN_TOKENS and self.gate.exists()):
                token = zlib.crc32(f"{self.weights} {len(ids)} {wanted['seed']}".encode()) % self.vocab
                sampled, before = [token], ids[-1]
                self._keep(ids)
                ids.append(token)
                done = len(ids) - prompt >= wanted["max_tokens"] or len(ids) >= self.longest
                finish = "stop" if token in wanted["stop_token_ids"] else "length" if done else ""
            if sampled or finish:
                content = [{"token_id": one, "logprob": score(self.weights, before, one)} for one in sampled]
                choice = {"token_ids": sampled, "logprobs": {"content": content}, "finish_reason": finish or None}
                await send(json.dumps({"choices": [choice]}).encode())
        self.known.discard(id_)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids) - prompt}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        await send(json.dumps({"choices": [], "usage": usage | details}).encode())
        await send(b"[DONE]")

    def _cached(self, ids: list[int]) -> int:
        whole = [n for n in range(BLOCK, len(ids), BLOCK) if tuple(ids[:n]) in self.blocks]
        return max(whole, default=0)

    def _keep(self, ids: list[int]) -> None:
        self.blocks |= {tuple(ids[:n]) for n in range(BLOCK, len(ids) + 1, BLOCK)} if len(ids) % BLOCK < 2 else set()

    def answer(self, path: str, body: dict[str, Any]) -> object:
        match path.partition("?")[0]:
            case "/pause":
                self.going.clear()
                self.aborted |= self.known
                self.blocks.clear()
            case "/resume":
                self.going.set()
            case "/abort_requests":
                self.aborted |= set(body["request_ids"]) & self.known
            case "/collective_rpc":
                self.weights = weights_of(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            case "/inference/v1/generate":
                ids = body["token_ids"]
                pairs = itertools.pairwise(ids)
                scored = [{str(b): {"logprob": score(self.weights, a, b)}} for a, b in pairs]
                return {"prompt_logprobs": [None, *scored]}
            case "/health" | "/reset_prefix_cache":
                pass
            case _:
                return None
        return {"ok": True}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length"))
        body = json.loads(await reader.readexactly(length) or b"{}")
        path = head.split(" ")[1]

        async def send(data: bytes) -> None:
            event = b"data: " + data + b"\n\n"
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()

        if body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await self.generate(body, send)
            writer.write(b"0\r\n\r\n")
        else:
            answer = self.answer(path, body)
            data = json.dumps(answer).encode()
            status = b"404 Not Found" if answer is None else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + f"\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        writer.close()


async def main(options: dict[str, str]) -> None:
    model = Path(options["--model"])
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    server = Server(model, vocab, int(options["--max-model-len"]))
    stepping = asyncio.create_task(server.steps())
    listening = await asyncio.start_unix_server(server.serve, options["--uds"], limit=1 << 24)
    await asyncio.gather(stepping, listening.serve_forever())


if __name__ == "__main__":
    words = sys.argv[1:]
    asyncio.run(main({word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}))
