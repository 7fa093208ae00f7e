"""What each field of `summary.json` means: the definitions that the page of metrics prints.

Invariant: `SummaryFold` gives exactly these fields.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELDS: Mapping[str, str] = {
    "run, world, recipe": "which run this is; world: local, fake, virtual or cluster",
    "figures": "`measured` (a real clock) or `simulated` (virtual time); holds for every figure here",
    "basis": "of a simulated run, a line for each model and calibration that its figures rest on",
    "status, why": "`run_finished`'s; `unfinished` when the log ends without it",
    "steps": "batches trained: number of `step_finished`",
    "wall_s": "s; from the run's beginning to its end (or last event), with baselines, warm start and evaluations; neither "
    "the time between an end and its resume nor what a resume took back",
    "interruptions": "per role that was interrupted (run: resumed; trainer, engine, host: lost): count; recovered; recover_s: "
    "mean and max of the seconds from there to the first turn, the weights of another trainer, the next engine or host; "
    "unserved: engines that were lost before they served, which are no part of count",
    "window_s": "s; from the start of the first step to the end of the last",
    "trajectories": "trained: scored members of the released groups of finished steps",
    "trajectories_by": "trained; dropped by reason; failed: failed attempts by type; eval: ended evaluation episodes",
    "tokens": "the ledger at the end: sampled = trained + sum of dropped + buffered + in_flight + eval",
    "staleness": "versions; trainer's version when a trajectory is trained minus that of its oldest sampled token: mean "
    "and max over trained trajectories; bound: `max_staleness`; holds: false where it is checked at admission only. Weights "
    "that are published again count once",
    "success": "share of successes per task: random, constant: the baselines; warm: evaluation `before` (after the warm "
    "start), sampled; after: evaluation `after`, sampled; held_back: the same, on instances never trained on; greedy: "
    "evaluation `after`, greedy. warm, after and greedy are of the held-back instances where the evaluation has no others",
    "success_episodes": "how many episodes each share rests on",
    "constant_answer": "the best constant answer per task",
    "engine_idle_frac": "engine time without a live request over engine time, in the window; live: from `turn_routed` to "
    "`turn_done`; summed over engines",
    "trainer_idle_frac": "time without a train step or a publish over wall time, in the window",
    "sync_exposed_s": "s; sum of `applied.exposed_s`: engines held live requests and did not step because of an apply",
    "throughput": "trained trajectories and trained tokens per second of the window",
    "mix": "per task: wanted and trained share of the trained trajectories",
    "waits": "s; where trainer and engines (in the window) and a trajectory that ended done (mean, per task) spent time; "
    "wait_for_engine: for an engine that has room and serves a version young enough; other: closing the environment",
}
