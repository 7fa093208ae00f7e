"""One connection between the control process and an actor: frames both ways over a socket, none of which blocks.

Owns how the two find each other, how each shows the other that it knows the key, and how bytes become frames. Two on one
machine meet at a Unix socket in a private folder, others over TCP, which is authenticated and not encrypted: like all
traffic between the nodes of a cluster, Ray's too. Invariants: nothing is unpickled that came from an end which does not
know the key; `ended` is told once, with the reason, unless this end closed the line itself; what the other end is too slow to
take is kept here, and told as `clogged`, so whoever asks before each frame keeps one frame at most.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import platform
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollart.core.errors import ClusterError

HEADER = struct.Struct("<IB")
"""Bytes of a frame's body, and its kind."""
BATCH, ANSWER, BROKEN = 1, 2, 3
"""Kinds of frames: items for the actor; an answer of it; why it will never answer again, in words."""
MOST_BYTES = 1 << 30
"""Of one frame; a longer one is no frame of ours, or more than a reader's memory should be trusted with."""
READ_BYTES = 1 << 16
"""Of one read: most frames are a few kilobytes, and a Unix socket holds 200."""
READS = 64
"""Most reads in a row: other work of the loop gets its turn."""
KEY_BYTES = NONCE_BYTES = 32
DIGEST = "sha256"
SHAKE_S = 5.0
"""Longest exchange of proofs with who has connected: so long a stranger that says nothing makes others wait."""
MEET_S = 20.0
"""Longest wait of either end for the other: an actor answers calls by then, so this is for a network that does not."""
SOCKET = "line"
"""Name of the socket in its folder."""

Address = str | tuple[str, int]
"""Path of a Unix socket; or host and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an actor gets over Ray before it listens."""

    key: bytes = field(repr=False)
    machine: str
    """Of the control process, as `this_machine` tells it."""
    folder: str
    """Where a socket may be made by an actor that sees it: of the control process alone, mode 0700."""


def this_machine() -> str:
    """This start of this machine: two processes that tell the same share a kernel, and so its Unix sockets."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()


class Line:
    """One end of a connection, once both have shown that they know the key. All of it happens in the loop that made it."""

    def __init__(
        self, sock: socket.socket, *, taken: Callable[[int, memoryview], None], ended: Callable[[str], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`taken`: a frame's kind and body, which is gone when this returns. `ended`: the other end is gone, or no end of
        ours. `freed`: the line is no longer clogged."""
        self._sock = sock
        self._taken = taken
        self._ended = ended
        self._freed = freed
        self._parts: list[bytes] = []
        self._have, self._need = 0, HEADER.size
        self._unsent: list[memoryview] = []
        self._deaf = ""
        """Why nothing can be sent any more."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock, self.look)

    @property
    def clogged(self) -> bool:
        """Not all of what was sent has left: the other end does not read, or the frame is large."""
        return bool(self._unsent)

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame, or what the system takes of it and the rest later. Raises ValueError for one that is too long."""
        if len(body) > MOST_BYTES:
            raise ValueError(f"{len(body)} bytes are more than the {MOST_BYTES} of one frame")
        if self._closed or self._deaf:
            return
        header = HEADER.pack(len(body), kind)
        if self._unsent:
            self._unsent.append(memoryview(header + body))
            return
        sent = self._sent(header, body)
        if sent < len(header) + len(body):
            self._unsent.append(memoryview(header + body)[sent:])
            self._loop.add_writer(self._sock, self._drain)

    def _sent(self, *parts: bytes | memoryview) -> int:
        """Bytes that the system took."""
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            # the reader tells the end, after what the other end may have said before it went
            self._deaf = error.strerror or type(error).__name__
            self._loop.call_soon(self.look)
            return sum(len(part) for part in parts)

    def _drain(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            sent = self._sent(part)
            if sent < len(part):
                self._unsent[0] = part[sent:]
                return
            self._unsent.pop(0)
        self._loop.remove_writer(self._sock)
        self._freed()

    def look(self) -> None:
        """Take what has come. The loop calls it; so may an actor between two pieces of its own work, whose loop would come
        round to it a piece later."""
        for _ in range(READS):
            if self._closed:
                return
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                if self._deaf:
                    # there is no end to read: the system refused, for want of memory say, and a frame is missing
                    self._end(self._deaf)
                return
            except OSError as error:
                self._end(error.strerror or type(error).__name__)
                return
            if not data:
                self._end("in the middle of a frame" if self._have else "it was closed at the other end")
                return
            self._arrived(data)
            if len(data) < READ_BYTES and not self._deaf:
                return
        if self._deaf:
            self._loop.call_soon(self.look)

    def _arrived(self, data: bytes) -> None:
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        whole = data if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._have = [], 0
        view, at = memoryview(whole), 0
        while not self._closed:
            left = len(whole) - at
            self._need = HEADER.size
            if left >= HEADER.size:
                n_bytes, kind = HEADER.unpack_from(whole, at)
                if n_bytes > MOST_BYTES:
                    self._end(f"{n_bytes} bytes were announced for one frame")
                    return
                self._need += n_bytes
            if left < self._need:
                self._parts, self._have = ([bytes(view[at:])] if left else []), left
                return
            self._taken(kind, view[at + HEADER.size : at + self._need])
            at += self._need

    def _end(self, why: str) -> None:
        self.close()
        self._ended(why)

    def close(self) -> None:
        """Idempotent. What is not sent yet never is."""
        if not self._closed:
            self._closed = True
            self._unsent.clear()
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()


# --- how two ends meet ---------------------------------------------------------------------------------------------------


def listening(offer: Offer, own_ip: Callable[[], str]) -> tuple[Address, socket.socket]:
    """A socket that waits for the control process, and its address. `own_ip`: under which that finds this machine.

    Raises OSError.
    """
    here = offer.machine == this_machine() and _private(offer.folder)
    address: Address = str(Path(offer.folder) / SOCKET) if here else (own_ip(), 0)
    sock = socket.socket(socket.AF_UNIX if here else _family(address[0]), socket.SOCK_STREAM)
    try:
        sock.bind(address)
        sock.listen(1)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return (address if here else sock.getsockname()[:2]), sock


def _private(folder: str) -> bool:
    """Whether it is here, and ours alone: another container may not have it, another user cannot use it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def accepted(listener: socket.socket, key: bytes, limit_s: float = MEET_S) -> socket.socket | None:
    """The first connection whose other end knows the key, or None when none comes in time. Closes the listener."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                sock, _ = await loop.sock_accept(listener)
                proven = False
                try:
                    proven = await _proven(sock, key, listens=True)
                finally:
                    if not proven:
                        sock.close()
                if proven:
                    return sock
    except TimeoutError:
        return None
    finally:
        listener.close()


async def connected(address: Address, key: bytes, limit_s: float = MEET_S) -> socket.socket:
    """A connection to an actor that listens. Raises ClusterError."""
    family = socket.AF_UNIX if isinstance(address, str) else _family(address[0])
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    proven = False
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
            proven = await _proven(sock, key, listens=False)
    except (OSError, TimeoutError) as error:
        # the address is left out: it differs from run to run
        raise ClusterError(
            f"no connection: {getattr(error, 'strerror', '') or f'none within {limit_s:g} s'}"
        ) from error
    finally:
        if not proven:
            sock.close()
    if not proven:
        raise ClusterError("no connection: what listens there has gone, or does not know the key of this run")
    return sock


async def _proven(sock: socket.socket, key: bytes, *, listens: bool) -> bool:
    """Whether the other end knows the key: each sends a random number, and proves that it can sign both.

    The side that connects proves first, so a stranger who connects is told nothing that was made with the key.
    It may have to wait for strangers who came before it: its own limit is the caller's.
    """
    loop = asyncio.get_running_loop()
    mine = secrets.token_bytes(NONCE_BYTES)

    def sign(side: bytes, *nonces: bytes) -> bytes:
        return hmac.digest(key, side + b"".join(nonces), DIGEST)

    try:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(SHAKE_S if listens else None):
            await loop.sock_sendall(sock, mine)
            other = await _exactly(sock, NONCE_BYTES)
            both = (mine, other) if listens else (other, mine)
            if listens:
                if not hmac.compare_digest(await _exactly(sock, KEY_BYTES), sign(b"connects", *both)):
                    return False
                await loop.sock_sendall(sock, sign(b"listens", *both))
                return True
            await loop.sock_sendall(sock, sign(b"connects", *both))
            return hmac.compare_digest(await _exactly(sock, KEY_BYTES), sign(b"listens", *both))
    except (OSError, TimeoutError, EOFError):
        return False


async def _exactly(sock: socket.socket, n_bytes: int) -> bytes:
    """Raises EOFError when the other end closes before."""
    loop, parts = asyncio.get_running_loop(), b""
    while len(parts) < n_bytes:
        part = await loop.sock_recv(sock, n_bytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts
