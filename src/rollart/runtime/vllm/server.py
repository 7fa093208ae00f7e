"""The server's process: started in its own environment, watched, and ended with everything that it started.

Owns the folder in shared memory in which socket, model configuration and weights on their way lie. Invariants: the folder goes
with the server; a server that ends by itself is told once, with the last lines that it wrote; nothing of it outlives this
process, whatever ends it (`launcher.py` sees to that).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PretrainedConfig

from rollart.core.errors import EngineError
from rollart.runtime.vllm import client, staging
from rollart.runtime.vllm.launcher import PREFIX

SHM = Path("/dev/shm")
LAUNCHER = Path(__file__).with_name("launcher.py")
MODEL = "policy"
"""The name that the server knows the model by."""
BLOCK_TOKENS = 32
"""Of key/value cache; vLLM's CPU kernels want a multiple of 32, and whole blocks only are found again."""
LOOK_S = 0.1
"""How often a server's process is looked at."""
END_S = 15.0
"""Longest wait for the launcher, longer than it may take to end a server; most often that is little more than a second."""
TAIL_BYTES = 16 << 10
TAIL_LINES = 12
MARKS = ("Error", "error:", "Exception", "Killed", "out of memory")
"""What a line holds that says why a server ended."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, abort_requests, collective_rpc
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server is started with."""

    python: str
    """Path of the interpreter of the environment in which vLLM is."""
    program: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server")
    """What the interpreter runs."""
    max_live: int
    max_model_len: int
    kv_gb: int
    dtype: str
    threads: int
    start_s: float


class VllmServer:
    """One server. `on_end` is called, from the running loop, when it ends without being told to."""

    def __init__(self, spec: ServerSpec, model: PretrainedConfig) -> None:
        self._spec = spec
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM if SHM.is_dir() else None))
        self.socket = self.folder / "http"

    async def start(self) -> None:
        """Returns when the server answers. Raises EngineError, with its last words, when it does not in time."""
        spec = self._spec
        self._log = tempfile.TemporaryFile(prefix=PREFIX)  # noqa: SIM115 - as long as the server
        try:
            await asyncio.to_thread(staging.first_model, self.folder, self._model)
            self._process = self._launched(self._log)
        except OSError as error:
            self.stop()
            raise EngineError(
                f"{spec.python} cannot be run: {error.strerror}; `make vllm` makes the environment"
            ) from error
        deadline = time.monotonic() + spec.start_s
        while not await client.healthy(self.socket):
            if (ended := self.ended()) or time.monotonic() > deadline:
                why = ended or f"vLLM was not up after engine.start_s={spec.start_s:g} s{self._tail()}"
                self.stop()
                raise EngineError(why)
            await asyncio.sleep(LOOK_S)

    def _launched(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        spec = self._spec
        own = {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_gb), "OMP_NUM_THREADS": str(spec.threads)}
        return subprocess.Popen(
            [spec.python, str(LAUNCHER), str(self.folder), *command(spec, self.folder, self.socket)],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **own},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return 0 if self._process is None else self._process.pid

    def ended(self) -> str:
        """Why the server is gone, in its own last words; empty while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        return f"vLLM ended with {self._process.returncode}{self._tail()}"

    async def watch(self, on_end: Callable[[str], None]) -> None:
        """Look after the process until it ends by itself."""
        while True:
            await asyncio.sleep(LOOK_S)
            if why := self.ended():
                return on_end(why)

    def stop(self) -> None:
        """End it and remove its folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tail(self) -> str:
        """The last lines of what it wrote that say what went wrong, or simply the last ones."""
        if self._log is None:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        told = [line for line in lines if any(mark in line for mark in MARKS)] or lines
        return "".join(f"\n  {line}" for line in told[-TAIL_LINES:])

    # --- what it can be asked ------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Every request under way ends as aborted; what comes is held until `resume`; cached prefixes are forgotten."""
        await client.post(self.socket, "/pause?mode=abort&clear_cache=true")

    async def resume(self) -> None:
        await client.post(self.socket, "/resume")

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests, by the ids they were sent with; those that it does not know are ignored."""
        await client.post(self.socket, "/abort_requests", {"request_ids": [f"generate-tokens-{one}" for one in ids]})

    async def reload(self, folder: Path) -> None:
        """Serve the weights in `folder` and forget cached prefixes; to be called while it is paused."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await client.post(self.socket, "/collective_rpc", body)
        await client.post(self.socket, "/reset_prefix_cache")

    async def score(self, id_: str, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `ids[1:]`, each after what stands before it, at temperature 1."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"request_id": id_, "token_ids": list(ids), "sampling_params": sampling, "stream": False}
        answer: dict[str, Any] = await client.post(self.socket, "/inference/v1/generate", body)
        found = answer["prompt_logprobs"]
        if not isinstance(found, list) or len(found) != len(ids):
            raise EngineError(f"vLLM answers no log-probabilities of a prompt: {json.dumps(found)[:80]}")
        return [float(found[at][str(one)]["logprob"]) for at, one in enumerate(ids) if at]


def command(spec: ServerSpec, folder: Path, socket: Path) -> list[str]:
    """How vLLM is started: token ids in and out on a socket in `folder`, with the weights that lie there."""
    return [
        spec.python, *spec.program, "--model", str(folder), "--served-model-name", MODEL, "--uds", str(socket),
        "--tokens-only", "--enable-scale-out", "--skip-tokenizer-init", "--dtype", spec.dtype,
        "--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_live), "--enforce-eager",
        "--enable-prefix-caching", "--block-size", str(BLOCK_TOKENS), "--scheduling-policy", "priority",
        "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
    ]  # fmt: skip
