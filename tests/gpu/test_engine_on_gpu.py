"""The engine on a GPU: what it samples is what the model says, and what it reaches is measured. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from rollart.core.types import RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, named_weights
from rollart.runtime.payload import TokenPayload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_on_device.py"
SCRIPT_S = 480
VOCAB = 96
LLAMA = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=str)
def test_logprobs_are_those_of_the_full_forward(config: PretrainedConfig, dtype: torch.dtype, close: float) -> None:
    made = build_model(config, seed=1)
    core = EngineCore(config, max_live=32, kv_tokens=8192, prefill_tokens=100, dtype=dtype, device="cuda")
    core.load(1, named_weights(made))
    reference: Any = made
    reference = reference.to("cuda", dtype)
    draws = np.random.default_rng(0)
    prompts = {f"train/t/0/{n % 3}/{n}": draws.integers(0, VOCAB, 20 + 7 * (n % 3)).astype(np.int32) for n in range(12)}
    core.submit([_request(traj, prompt) for traj, prompt in prompts.items()])
    answered = 0
    while core.has_work:
        for id_, answer in core.step():
            payload = answer.tokens.payload
            assert isinstance(payload, TokenPayload)
            whole = torch.from_numpy(np.concatenate([prompts[id_.traj], payload.ids]).astype(np.int64)).cuda()
            with torch.no_grad():
                scores = reference(whole[None]).logits[0, :-1].float().log_softmax(-1)
            wanted = scores.gather(1, whole[1:, None])[len(prompts[id_.traj]) - 1 :, 0].cpu().numpy()
            assert np.abs(wanted - payload.logprobs).mean() < close
            answered += 1
    assert answered == len(prompts)


def test_decode_prefill_apply_and_training_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "engine_on_device.json"
    command = [sys.executable, str(SCRIPT), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = {case["case"]: case for case in json.loads(out.read_text(encoding="utf-8"))["cases"]}
    assert set(cases) == {"decode_of_bandwidth", "prefill_of_flops", "generate", "apply", "train_mfu"}
    assert all(case["ratio_median"] > 0.0 for case in cases.values())
    sys.stdout.write(json.dumps(cases, indent=1))


def _request(traj: str, prompt: NDArray[np.int32]) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(traj), 0, 0, 0), model="policy", purpose="train", domain="t",
        context=Segment(pieces=(Tokens(n_tokens=len(prompt), payload=TokenPayload(ids=prompt)),)), max_tokens=24,
        sampling=Sampling(seed=sum(map(ord, traj))),
    )  # fmt: skip
