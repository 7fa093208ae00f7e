"""vLLM's own server with a gate in its scheduler. Run by path, by the interpreter of vLLM's environment.

While the gate of `fake_vllm` is shut (`HOLD`), a request that has its first tokens is not scheduled: it is under way, and stays
so however late those who watch it get to run. Nothing else differs from the server that `runtime.vllm` starts.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from fake_vllm import HOLD, SHOWN_TOKENS
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]


class Gated(Scheduler):  # type: ignore[misc]
    def schedule(self, *args: Any, **named: Any) -> Any:
        if Path(self.vllm_config.model_config.model, HOLD).exists():
            for request in self.running:
                if request.num_output_tokens >= SHOWN_TOKENS:
                    # of a later step than the one that is scheduled now
                    request.next_decode_eligible_step = self.current_step + 2
        return super().schedule(*args, **named)


if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
