"""Field cases about first use: what must work before anybody has configured anything, and without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WATCHED = """
import ipaddress, sys
from pathlib import Path

out = Path(sys.argv[1])

def watch(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return  # a socket of this machine's file system, or no socket
    host = host.decode() if isinstance(host, bytes) else str(host)
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = host in ("localhost", "None", "")
    if not inside:
        with out.open("a") as found:
            found.write(f"{event} {host}\\n")
        raise OSError(f"no network: {event} {host}")

sys.addaudithook(watch)
"""
"""Refuses what leaves this machine and writes it down, so that an error which somebody swallows is seen as well."""
TRAIN = """
import os
from rollart.cli.main import main
os.chdir(sys.argv[2])
sys.exit(main(["train", "smoke", "--plain", "world.kind=inline", "output_dir=."]))
"""
LOOPBACK = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    fcntl.ioctl(asking, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
"""
"""A new name space has its loopback down; a machine without a network has it up."""
REACHES_OUT = """
import socket
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)  # an address that is reserved for documentation
except OSError:
    pass
"""


def alone() -> list[str]:
    """The words that give a command a network name space of its own, where this machine allows it."""
    for words in (["unshare", "--net", "--"], ["unshare", "--map-root-user", "--net", "--"]):
        try:
            tried = subprocess.run(
                [*words, sys.executable, "-c", LOOPBACK], capture_output=True, timeout=60, check=False
            )
        except OSError:
            return []
        if tried.returncode == 0:
            return words
    return []


def watched(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script without a network; its outcome, and what it tried to reach."""
    out = folder / "reached.txt"
    apart = alone()
    whole = (LOOPBACK if apart else "") + WATCHED + script
    command = [*apart, sys.executable, "-c", whole, str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done, out.read_text().splitlines() if out.exists() else []


def test_the_main_job_runs_without_a_network(tmp_path: Path) -> None:
    """Field case 41: the main job's parts, all in one process, in a name space without a network where there can be one."""
    done, reached = watched(tmp_path, TRAIN)
    assert reached == []
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["tokens"]["trained"] > 0


def test_what_reaches_out_is_noticed_though_its_error_is_swallowed(tmp_path: Path) -> None:
    """Field case 41: the proof of its proof."""
    done, reached = watched(tmp_path, REACHES_OUT)
    assert done.returncode == 0, done.stderr
    assert reached
    assert all("192.0.2.1" in line for line in reached)
