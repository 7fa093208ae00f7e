"""The server's process and folder: they come together and go together, however they go."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollart.config.schema import ScratchModel
from rollart.core.errors import EngineError
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.vllm import staging
from rollart.runtime.vllm.launcher import PREFIX, _group
from rollart.runtime.vllm.server import LAUNCHER, ServerSpec, VllmServer
from rollart.runtime.weights import fingerprint

MODEL = hf_config(ScratchModel(layers=1, hidden=64, heads=2, kv_heads=2, ffn=64, max_positions=64), 16)
SLEEPER = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"


def spec(python: str = sys.executable, *program: str) -> ServerSpec:
    return ServerSpec(
        python=python, program=program, max_live=1, max_model_len=64, kv_gb=1, dtype="float32", threads=1, start_s=20.0
    )


def started(spec: ServerSpec) -> str:
    server = VllmServer(spec, MODEL)
    with pytest.raises(EngineError) as error:
        asyncio.run(server.start())
    assert not server.folder.exists()
    return str(error.value)


def test_a_server_that_ends_while_it_starts_is_told_in_its_own_words() -> None:
    told = started(spec(sys.executable, "-c", "raise SystemExit('Error: no such kernel')"))
    assert "Error: no such kernel" in told


def test_an_interpreter_that_is_not_there_is_told_with_what_to_do() -> None:
    assert "make vllm" in started(spec("/nowhere/python"))


@pytest.mark.parametrize("how", ["input", "terminated"])
def test_the_launcher_ends_all_and_removes_the_folder(tmp_path: Path, how: str) -> None:
    folder = tmp_path / f"{PREFIX}one"
    folder.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCHER), str(folder), sys.executable, "-c", SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    if how == "input":
        launcher.stdin.close()
    else:
        launcher.send_signal(signal.SIGTERM)
    launcher.wait(20)
    launcher.stdout.close()
    launcher.stdin.close()
    assert not folder.exists()
    assert children
    assert not _group(int(children[0]))


TRACKER = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "sys.stdin.read(); time.sleep(1.5); os.unlink(sys.argv[2])"
)
TRACKED = (
    "import subprocess, sys, time; "
    f"subprocess.Popen([sys.executable, '-c', {TRACKER!r}, 'resource_tracker', sys.argv[1]], stdin=subprocess.PIPE); "
    "time.sleep(60)"
)


def test_what_removes_the_shared_memory_of_the_others_is_given_its_time(tmp_path: Path) -> None:
    folder, shared = tmp_path / f"{PREFIX}one", tmp_path / "psm_1"
    folder.mkdir()
    shared.touch()
    words = [sys.executable, str(LAUNCHER), str(folder), sys.executable, "-c", TRACKED, str(shared)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.stdin.close()
        assert launcher.wait(30) == 0
    assert not shared.exists()


def test_a_killed_launcher_takes_its_server_along_and_its_folder_goes_with_the_next(tmp_path: Path) -> None:
    folder, other = tmp_path / f"{PREFIX}one", tmp_path / f"{PREFIX}two"
    folder.mkdir()
    other.mkdir()
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCHER), str(folder), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    assert launcher.stdout.readline() == b"up\n"
    server = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])
    launcher.kill()
    launcher.wait()
    for stream in (launcher.stdin, launcher.stdout):
        stream.close()
    deadline = time.monotonic() + 20
    while _group(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _group(server)
    assert folder.exists()
    # with an input that stays open: at its end a launcher ends what it runs
    words = [sys.executable, str(LAUNCHER), str(other), sys.executable, "-c", ""]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as following:
        assert following.wait(20) == 0
    assert not folder.exists()
    assert not other.exists()


def test_tied_embeddings_are_written_twice_and_the_digest_is_that_of_what_came(tmp_path: Path) -> None:
    tensors = named_weights(build_model(MODEL, seed=1))
    place, digest = staging.write(tmp_path, 3, tensors)
    assert digest == fingerprint(tensors)
    written = load_file(place / staging.WEIGHTS)
    assert torch.equal(written[staging.HEAD], tensors[staging.EMBEDDING])
    staging.first_model(tmp_path, MODEL)
    assert load_file(tmp_path / staging.WEIGHTS).keys() == written.keys()
    staging.remove(tmp_path, but=3)
    assert place.exists()
    staging.remove(tmp_path)
    assert not place.exists()
