"""How far vLLM's log-probabilities lie from transformers', and how long new weights take: JSON.

What: mean and largest |logp(vLLM) - logp(transformers)| of tokens that vLLM sampled under weights that it was given after its
start, and seconds of `reload_weights` over HTTP. Against what: fp32 transformers with the same weights. How:
`python benchmarks/vllm_mismatch.py --json FILE`, with `.venv-vllm` from `make vllm`; `--dtype bf16` for the other dtype.
The allowances of `runtime.probe.MISMATCH` were set from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rollart.config.schema import ScratchModel
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.vllm import client, staging
from rollart.runtime.vllm.actor import DTYPES, GENERATE
from rollart.runtime.vllm.server import ServerSpec, VllmServer

MODEL = ScratchModel(layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, max_positions=512)
VOCAB, PROMPT, SAMPLED, ROUNDS = 512, 64, 64, 5


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    config = hf_config(MODEL, VOCAB)
    spec = ServerSpec(
        python=options.python, max_live=16, max_model_len=512, kv_gb=1, dtype=DTYPES[options.dtype],
        threads=1, start_s=300.0,
    )  # fmt: skip
    server, began = VllmServer(spec, config), time.perf_counter()
    try:
        await server.start()
        start_s, reload_s, apart = time.perf_counter() - began, list[float](), list[float]()
        for seed in range(1, ROUNDS + 1):
            model = build_model(config, seed=seed)
            place, _ = staging.write(server.folder, seed, named_weights(model))
            await server.pause()
            began = time.perf_counter()
            await server.reload(place)
            reload_s.append(time.perf_counter() - began)
            await server.resume()
            apart += await _apart(server, model, seed)
        return {
            "name": "vllm_mismatch", "dtype": options.dtype, "parameters": sum(one.numel() for one in model.parameters()),
            "tokens": len(apart), "mean": sum(apart) / len(apart), "max": max(apart), "start_s": round(start_s, 1),
            "reload_s": [round(one, 4) for one in reload_s],
        }  # fmt: skip
    finally:
        server.stop()


async def _apart(server: VllmServer, model: Any, seed: int) -> list[float]:
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    sampling = {"temperature": 1.0, "max_tokens": SAMPLED, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    body = {"request_id": str(seed), "token_ids": ids, "stream": True, "sampling_params": sampling | {"seed": seed}}
    told: list[dict[str, Any]] = []
    async for event in client.events(server.socket, GENERATE, body):
        for choice in event["choices"]:
            told += choice["logprobs"]["content"]
    sampled = [one["token_id"] for one in told]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids + sampled])).logits[0].double(), -1)
    return [abs(one["logprob"] - float(logprobs[PROMPT - 1 + at, one["token_id"]])) for at, one in enumerate(told)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--json", default="", help="file; standard output without it")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())
    torch.set_num_threads(1)
    text = json.dumps(asyncio.run(measured(options)), indent=1) + "\n"
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
