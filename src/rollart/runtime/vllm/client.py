"""HTTP/1.1 to a server on a socket of the file system: whole answers, and answers that come in events.

Owns the wire. Invariants: nothing here blocks the loop; each request has a connection of its own, which is closed with it, so
hundreds may be under way; an answer that ends before its length says so, and a server that is gone, raise `ServerGone`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollart.core.errors import EngineError

MAX_LINE_BYTES = 16 << 20
"""Of one event or header line."""
MAX_ERROR_CHARS = 400
DATA = b"data: "
DONE = b"[DONE]"


class ServerGone(EngineError):
    """The server's end of the connection is gone."""


async def post(socket: Path, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The parsed answer (None: an empty one). Raises EngineError with the server's words unless it answers 200."""
    async with _asked(socket, "POST", path, body) as (reader, headers):
        return _parsed(path, await _whole(reader, headers))


async def healthy(socket: Path) -> bool:
    """Whether the server takes requests."""
    try:
        async with _asked(socket, "GET", "/health", None):
            return True
    except (EngineError, OSError):
        return False


async def events(socket: Path, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The answer's server-sent events, as they come, up to `[DONE]`."""
    async with _asked(socket, "POST", path, body) as (reader, headers):
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        left = b""
        while True:
            part = await (_chunk(reader) if chunked else reader.read(1 << 16))
            if not part:
                raise ServerGone(f"{path}: the answer ended in the middle")
            *whole, left = (left + part).split(b"\n\n")
            for event in whole:
                if event[len(DATA) :] == DONE:
                    return
                yield _parsed(path, event[len(DATA) :])


@asynccontextmanager
async def _asked(
    socket: Path, method: str, path: str, body: Mapping[str, Any] | None
) -> AsyncIterator[tuple[asyncio.StreamReader, dict[str, str]]]:
    """Send a request; gives the connection after the head of an answer of 200."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket), limit=MAX_LINE_BYTES)
    except OSError as error:
        raise ServerGone(f"{path}: no server at {socket} ({error.strerror})") from error
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        status = (await _line(reader)).split(b" ", 2)
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.partition(b":")
            headers[name.decode().strip().lower()] = value.decode().strip()
        if status[1:2] != [b"200"]:
            words = (await _whole(reader, headers)).decode(errors="replace")[:MAX_ERROR_CHARS]
            raise EngineError(f"{path}: the server answers {b' '.join(status[1:]).decode(errors='replace')}: {words}")
        yield reader, headers
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ServerGone(f"{path}: the connection broke: {error}") from error
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\n")).rstrip(b"\r\n")


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk; empty after the last."""
    size = int((await _line(reader)).partition(b";")[0], 16)
    data = await reader.readexactly(size + 2)
    return data[:size]


async def _whole(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts: list[bytes] = []
        while part := await _chunk(reader):
            parts.append(part)
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()


def _parsed(path: str, data: bytes) -> Any:
    """Raises EngineError for what is no JSON, or an error that came after the head of the answer."""
    if not data:
        return None
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise EngineError(f"{path}: the server answers what cannot be read: {data[:80]!r}") from error
    if isinstance(answer, dict) and answer.get("error"):
        raise EngineError(f"{path}: the server answers {json.dumps(answer['error'])[:MAX_ERROR_CHARS]}")
    return answer
