"""The engine on a GPU: what it samples is what the model says, and what it reaches is measured. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from rollart.core.types import RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.payload import TokenPayload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "engine_on_device.py"
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
    torch.manual_seed(1)
    reference: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    reference.train(mode=False)
    core = EngineCore(config, max_live=32, kv_tokens=8192, prefill_tokens=100, dtype=dtype, device="cuda")
    core.load(1, {name: parameter.detach() for name, parameter in reference.named_parameters()})
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


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_sleeping_engine_gives_the_weights_memory_back(config: PretrainedConfig) -> None:
    core = EngineCore(config, max_live=4, kv_tokens=512, prefill_tokens=100, device="cuda")
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    tensors = {name: parameter.detach() for name, parameter in made.named_parameters()}
    core.load(1, tensors)
    digest, awake = core.fingerprint(), torch.cuda.memory_allocated()
    core.sleep()
    given_back = awake - torch.cuda.memory_allocated()
    assert given_back >= sum(tensor.nbytes for tensor in tensors.values())
    assert core.fingerprint() == digest
    core.wake()
    assert core.fingerprint() == digest
    core.submit([_request("train/t/0/0/0", np.arange(20, dtype=np.int32))])
    answers = [answer for _ in range(200) if core.has_work for _, answer in core.step()]
    assert [answer.finish for answer in answers] == ["length"]


def test_decode_prefill_apply_and_training_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "engine_on_device.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(SCRIPT), "--json", str(out)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SCRIPT_S, check=False, env={**os.environ, "PYTHONPATH": path}
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail(
            f"cut short after {SCRIPT_S} s; measured: {out.read_text(encoding='utf-8') if out.exists() else None}"
        )
    cases = (
        {case["case"]: case for case in json.loads(out.read_text(encoding="utf-8"))["cases"]} if out.exists() else {}
    )
    sys.stdout.write(json.dumps(cases, indent=1))
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(cases) == {
        "decode_of_bandwidth", "prefill_of_flops", "train_hand_written_step_mfu", "stage_of_host_link",
        "rebuild_of_flops", "generate",
    }  # fmt: skip
    assert all(0.0 < case["ratio_min"] <= case["ratio_median"] <= case["ratio_max"] for case in cases.values())


def _request(traj: str, prompt: NDArray[np.int32]) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(traj), 0, 0, 0), model="policy", purpose="train", domain="t",
        context=Segment(pieces=(Tokens(n_tokens=len(prompt), payload=TokenPayload(ids=prompt)),)), max_tokens=24,
        sampling=Sampling(seed=sum(map(ord, traj))),
    )  # fmt: skip
