"""Who goes first where processes of one run have to share the cores of a machine.

Pure numbers, which the real engines and the simulated machine both go by. Engines stand back behind the trainer and the
environments: while they wait more turns gather, which they then decode in fewer and larger steps, so that a token costs less,
and the trainer's step is done sooner. With a core for each it changes nothing. Invariant: nobody is starved: this is a share of
busy cores, not an order.
"""

from __future__ import annotations

ENGINE_NICENESS = 4
"""Of an engine's steps above the other workers' (Ray gives all of them 15, and 19 is the highest there is)."""
NICE_STEP = 1.25
"""By so much one step of niceness changes a share (Linux, sched(7))."""
ENGINE_WEIGHT = NICE_STEP**-ENGINE_NICENESS
"""Of an engine's process where one of the others has 1."""
