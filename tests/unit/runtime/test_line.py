"""A connection between two processes: frames come whole and in order, nobody blocks, and a stranger gets and gives nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ClusterError
from rollart.runtime.line import BATCH, HEADER, MOST_BYTES, Address, Line, Offer, accepted, connected, listening

KEY = b"k" * 32
END_S = 20.0
"""Longest wait of a test for what must come; never waited out when things work."""


class End:
    """One end of a line, and what came out of it."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.ends: list[str] = []
        self.freed = 0
        self.changed = asyncio.Event()
        self.line = Line(sock, taken=self._taken, ended=self._ended, freed=self._freed)

    def _taken(self, kind: int, body: memoryview) -> None:
        self.frames.append((kind, bytes(body)))
        self.changed.set()

    def _ended(self, why: str) -> None:
        self.ends.append(why)
        self.changed.set()

    def _freed(self) -> None:
        self.freed += 1

    async def until(self, there: Callable[[], bool]) -> None:
        async with asyncio.timeout(END_S):
            while not there():
                self.changed.clear()
                await self.changed.wait()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.lists(st.integers(1, 400), max_size=12))
def test_frames_come_whole_and_in_order_however_they_were_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(HEADER.pack(len(body), kind) + body for kind, body in enumerate(bodies))

    async def main() -> None:
        here, there = socket.socketpair()
        end, at = End(here), 0
        for cut in [*cuts, len(stream)]:
            there.sendall(stream[at : at + cut])
            at += cut
            end.line.look()
        await end.until(lambda: len(end.frames) == len(bodies))
        assert end.frames == list(enumerate(bodies))
        end.line.close()
        there.close()

    asyncio.run(main())


def test_what_is_not_read_yet_blocks_nobody_and_comes_when_it_is_read() -> None:
    bodies = [bytes([n]) * 300_000 for n in range(20)]

    async def main() -> None:
        here, there = socket.socketpair()
        sender = End(here)
        for body in bodies:
            sender.line.send(BATCH, body)
        assert sender.line.clogged
        assert not sender.freed
        reader = End(there)
        await reader.until(lambda: len(reader.frames) == len(bodies))
        assert reader.frames == [(BATCH, body) for body in bodies]
        await asyncio.sleep(0)
        assert not sender.line.clogged
        assert sender.freed == 1
        sender.line.close()
        await reader.until(lambda: bool(reader.ends))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (b"", "it was closed at the other end"),
        (HEADER.pack(9, BATCH) + b"half", "in the middle of a frame"),
        (b"\xff" * 64, f"{2**32 - 1} bytes were announced for one frame"),
    ],
)
def test_the_end_of_the_other_end_is_told_once_after_what_it_said(last: bytes, why: str) -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        end = End(here)
        there.sendall(HEADER.pack(2, BATCH) + b"hi" + last)
        there.close()
        end.line.send(BATCH, b"too late")
        await end.until(lambda: bool(end.ends))
        end.line.look()
        assert (end.frames, end.ends) == ([(BATCH, b"hi")], [why])

    asyncio.run(main())


def test_a_frame_that_is_too_long_is_refused_before_anything_of_it_is_sent() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MOST_BYTES + 1

    async def main() -> None:
        here, there = socket.socketpair()
        end = End(here)
        with pytest.raises(ValueError, match=f"more than the {MOST_BYTES} of one frame"):
            end.line.send(BATCH, Long())
        assert not end.line.clogged
        end.line.close()
        there.close()

    asyncio.run(main())


def test_a_system_that_refuses_to_send_ends_the_line_for_a_frame_is_missing() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        end = End(here)
        there.sendall(HEADER.pack(2, BATCH) + b"hi")
        there.shutdown(socket.SHUT_RD)  # from now on nothing can be sent, and there is no end to read either
        end.line.send(BATCH, b"lost")
        await end.until(lambda: bool(end.ends))
        assert (end.frames, end.ends) == ([(BATCH, b"hi")], ["Broken pipe"])
        there.close()

    asyncio.run(main())


# --- how two ends meet ---------------------------------------------------------------------------------------------------


def offer(folder: Path, machine: str) -> Offer:
    return Offer(key=KEY, machine=machine, folder=str(folder))


def own_ip() -> str:
    return "127.0.0.1"


async def stranger(address: Address, *, sends: bytes) -> None:
    """Connects without the key, says something and goes."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    await loop.sock_sendall(sock, sends)
    sock.close()


def open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    return set(os.listdir(folder)) if folder.is_dir() else set()


@pytest.mark.parametrize("here", [True, False])
def test_two_ends_meet_in_the_folder_of_one_machine_or_over_tcp_and_strangers_keep_nobody_out(
    here: bool, tmp_path: Path
) -> None:
    from rollart.runtime.line import this_machine

    async def main() -> None:
        before = open_files()
        address, listener = listening(offer(tmp_path, this_machine() if here else "another"), own_ip)
        assert (address == str(tmp_path / "line")) == here
        accepting = asyncio.ensure_future(accepted(listener, KEY))
        await stranger(address, sends=b"")
        await stranger(address, sends=HEADER.pack(3, BATCH) + b"x" * 200)
        with pytest.raises(ClusterError, match="does not know the key"):
            await connected(address, b"z" * 32)
        near = await connected(address, KEY)
        far = await accepting
        assert far is not None
        one, two = End(near), End(far)
        one.line.send(BATCH, b"hello")
        await two.until(lambda: bool(two.frames))
        assert two.frames == [(BATCH, b"hello")]
        with pytest.raises(ClusterError, match="no connection: "):
            await connected(address, KEY)  # one only
        one.line.close()
        two.line.close()
        assert open_files() == before

    asyncio.run(main())


def test_who_is_not_met_in_time_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        before = open_files()
        _, listener = listening(offer(tmp_path, "another"), own_ip)
        assert await accepted(listener, KEY, limit_s=0.01) is None
        with pytest.raises(ClusterError, match="no connection: No such file"):
            await connected(str(tmp_path / "nothing"), KEY)
        assert open_files() == before

    asyncio.run(main())


def test_a_folder_that_is_not_private_is_no_place_for_a_socket(tmp_path: Path) -> None:
    from rollart.runtime.line import this_machine

    tmp_path.chmod(0o755)
    address, listener = listening(offer(tmp_path, this_machine()), own_ip)
    listener.close()
    assert address[0] == own_ip()
    assert list(tmp_path.iterdir()) == []
