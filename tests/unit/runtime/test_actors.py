"""What is kept of Ray's account of an error: the cause, and nothing that differs from run to run."""

from __future__ import annotations

import pytest

from rollart.runtime.actors import in_words

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 5d0c3a8f0f1e2d3c4b5a697801000000
\tpid: 12345
\tnamespace: rollart-smoke
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file."""
CAUSE = (
    "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
    "End of file."
)
UNBUILT = """The actor died because of an error raised in its creation task, \x1b[36mray::EngineActor.__init__()\x1b[39m \
(pid=12345, ip=10.0.0.1, actor_id=5d0c3a8f0f1e2d3c4b5a697801000000, repr=<x.EngineActor object at 0x7f8a12345678>)
  File "/somewhere/actor.py", line 3, in __init__
    raise ValueError("bad")
ValueError: 3 heads do not divide 32"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KILLED, CAUSE),
        (" ".join(KILLED.split()), CAUSE),
        (UNBUILT, "ValueError: 3 heads do not divide 32"),
        (
            "The actor 5d0c3a8f0f1e2d3c4b5a697801000000 is unavailable: no answer (10.1.2.3:6379).",
            "The actor is unavailable: no answer.",
        ),
        (
            "Memory on the node (IP: 10.0.0.1, ID: 5d0c3a8f) where the task (actor ID: 5d0c, name=E.__init__, pid=123, "
            "memory used=1GB) was running was 15GB / 16GB (0.95)",
            "Memory on the node where the task (memory used=1GB) was running was 15GB / 16GB (0.95)",
        ),
    ],
)
def test_processes_addresses_and_ids_are_left_out(text: str, words: str) -> None:
    assert in_words(text) == words
