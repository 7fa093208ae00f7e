"""Trained trajectories a second beside TRL's GRPOTrainer: the same model (0.92 M parameters, fp32), tasks, batch, optimiser.

    make trl-env
    python benchmarks/vs_trl.py --json FILE

Three arms: TRL in the best of a sweep of its settings, ours asynchronous (`rollart train`, a local Ray), ours synchronous
(max_staleness 0). All processes of an arm share the same cores. Each pair measures one side after the other, from the end of
the warm-up to the end of the last step, all of the process's time included; the ratio is that of the pair. A measurement is
long enough that what is sampled ahead is small beside it (`peers_figures.least_steps`), and its warm-up that nothing sampled
before the first steps is trained in it. Beside the ratio stand the bounds from rollout alone and training alone. A case is not
met whose sides sample more than 5 % apart in tokens per trajectory, or in which our arm trained 10 % more or less than it
sampled meanwhile. `--learning`: the rewards that both reach in equal wall time, and their difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers_figures import case, least_steps, spread, versions, warm_up_steps
from peers_run import (
    AT_ONCE,
    ONE_CORE_EACH,
    OURS_AROUND_S,
    TAKING_TURNS,
    TASKS,
    PeerFailed,
    Say,
    Setting,
    run,
    save_weights,
    window_s,
)
from vs_trl_sides import CACHES, SWEEP_S, Plan, Rewards, figures, last_reward, measure, over_time, peer, swept_peer

TARGETS = {"single": 1.3, "multi": 1.7, "latency": 2.5}
AIMS = {"single": 1.5, "multi": 2.5, "latency": 4.0}
DIFFERENCES = (
    "ours: engine and trainer are processes beside each other, one version apart at most (max_staleness 1; 3 in latency, "
    "so that more environments wait at once); TRL's rollout and training take turns in one process",
    "TRL's rollout_func as it is written here computes the whole context again in each turn (its batch is ragged); our engine "
    "keeps it (one prefill of the new tokens a turn)",
    "TRL pads a batch to its longest sequence and decodes until the last row has ended; our engine takes rows out as they end",
    "ours divides the loss by nothing but each trajectory's tokens (`normalize: trajectory`), as TRL's loss_type grpo; ours "
    "clips around the policy that sampled, up to one version old (`algorithm.correction.kind=clip`); TRL's sampling and "
    "training policy are the same, so that its clip, with the same bounds, never acts",
    "the prompt of a group is computed once in our training pass and once a completion in TRL's: the gradients are the same to "
    "rounding",
    "ours records log-probabilities while sampling; TRL needs none with one optimiser step a batch. Forward passes over whole "
    "sequences per batch: one on both sides, entropy included",
    "ours publishes weights to the engine and verifies their fingerprint each step, and writes an event log; TRL logs a line",
    "latency: TRL's batch waits once a turn for the slowest of its environments, slept through in one call, with no cost of "
    "threads; ours sleeps in the threads of its env host",
    "latency of one step: normal with mean and deviation 50 ms, cut off at 0 (mean of what is left: 54 ms)",
    "the learning rate of the speed cases is 1e-5, so that what is sampled stays as long as it is",
)
WARM_UP, PEER_WARM_UP_S, PEER_START_S = 2, 4.0, 14.0
"""Steps of warm-up on both sides, and for times that are worked out beforehand the seconds of the peer's, and of its start."""
TOKENS_APART = 0.05
"""Largest difference of the sides' sampled tokens per trajectory, as a share of TRL's; beyond it the work was not the same."""
SAMPLED_APART = 0.1
"""Largest difference of what our arm sampled in a measurement from what it trained in it; beyond it the rate is not that of
both."""
LEARNING_LR = 1e-3
EARLIER = (0.2, 0.4, 0.6, 0.8)
"""Shares of the wall time of a learning run after which its rewards are compared as well."""
LEARNING_TASKS = ("single", "multi")
"""In the first reward grows all the while; in the second policies that do not look at the map are a plateau, soon reached, and
the question is who leaves it."""
INITIAL_REWARD = {"single": 0.0018, "multi": 0.036, "latency": 0.036}
"""Mean reward of the initial policy, which is uniform over 512 ids but for its random weights. `single`: 1/512 of the tokens
is the letter, and some turns end early. `multi`: 1500 episodes of uniform ids."""
LEAST_REWARD = {task: 2 * reward for task, reward in INITIAL_REWARD.items()}
"""Below it nothing was learned, and a ratio of two such rewards says nothing. Twice the initial policy's: the mean over the
last 12 of 60 s (46 thousand tokens in `single`, 460 episodes in `multi`, at the peer's rate) is known to about a tenth."""


def seconds_for(options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """(seconds of each measurement of a pair by case, seconds of all): as `--minutes` allow for the pairs, and never less than
    the least windows. Learning comes on top."""
    sync_pairs = min(options.sync_pairs, options.pairs)
    sweeps = len(AT_ONCE) * options.sweep + len(TAKING_TURNS) * bool(sync_pairs)
    peer_sweep_s = PEER_START_S + len(options.peer_threads) * len(CACHES) * (PEER_WARM_UP_S + SWEEP_S)
    fixed_s = sum(
        peer_sweep_s + sweeps * (OURS_AROUND_S + SWEEP_S) + (sync_pairs + 1) * (OURS_AROUND_S + window_s(task, 0))
        + options.pairs * (OURS_AROUND_S + PEER_WARM_UP_S) for task in options.cases
    )  # fmt: skip
    least = {task: window_s(task, TASKS[task].staleness) for task in options.cases}
    pairs_s = 2 * options.pairs * sum(least.values())
    longer = max(1.0, (options.minutes * 60 - fixed_s) / pairs_s) if pairs_s else 1.0
    learning_s = len(options.learning_tasks) * (
        peer_sweep_s + options.learning * (2 * options.learning_s + OURS_AROUND_S + PEER_WARM_UP_S)
    )
    total_s = fixed_s + longer * pairs_s + (learning_s if options.learning else 0.0)
    return {task: longer * seconds for task, seconds in least.items()}, total_s


def time_told(options: argparse.Namespace, seconds: Mapping[str, float], total_s: float) -> str:
    """How long it will take, and why that is more than was asked for if it is."""
    windows = ", ".join(f"{task} {one:.1f} s" for task, one in seconds.items())
    words = f"about {total_s / 60:.1f} minutes; a measurement of {windows or 'rewards alone'}"
    if seconds and seconds == {task: window_s(task, TASKS[task].staleness) for task in seconds}:
        steps = ", ".join(f"{task} {least_steps(TASKS[task].staleness)}" for task in seconds)
        words += f"; --minutes {options.minutes:g} leaves no more than the least windows need (our steps: {steps})"
        words += ", which are never shortened: fewer --pairs, --sync-pairs or --cases take less"
    return words


def learn(task: str, options: argparse.Namespace, setting: Setting, say: Say) -> dict[str, Any]:
    """Reward in the last part of equal wall time, a pair a seed. The clock runs from the first served weights, or from the
    beginning of TRL's training: starting processes does not count."""
    setting, wall_s = replace(setting, lr=LEARNING_LR, warm_up=1), options.learning_s
    ours, theirs = list[Rewards](), list[Rewards]()
    with peer(options.peer, setting) as other:
        best, _ = swept_peer(other, task, options.peer_threads)
        for seed in range(options.learning):
            found = other.measure(task, [best], seed=seed, seconds=wall_s)
            theirs.append(found[0].rewards)
            ours.append(run(task, ONE_CORE_EACH, setting, staleness=1, seed=seed, seconds=wall_s).rewards)
            one, another = last_reward(ours[-1], wall_s), last_reward(theirs[-1], wall_s)
            say(f"learning {task}, seed {seed}: reward {one:.3f} to {another:.3f} after {wall_s:g} s")
    return learned(task, ours, theirs, best, wall_s=wall_s, lr=LEARNING_LR)


def learned(
    task: str, ours: Sequence[Rewards], theirs: Sequence[Rewards], peer_setting: Mapping[str, Any], *, wall_s: float,
    **more: object,
) -> dict[str, Any]:  # fmt: skip
    """The case of two runs a seed: met when the median difference of their last rewards is not against us, neither met nor
    missed (null) when neither side learned anything."""
    last = _last(ours, theirs, wall_s)
    apart = statistics.median(one - other for one, other in last)
    least = LEAST_REWARD[task]
    ratios = [one / other for one, other in last if other > least]
    nothing = all(statistics.median(pair[place] for pair in last) <= least for place in (0, 1))

    def side(runs: Sequence[Rewards], place: int) -> dict[str, Any]:
        found = [pair[place] for pair in last]
        curves = [over_time(one, wall_s) for one in runs]
        return {"reward": round(statistics.median(found), 4), "rewards": found, "curves": curves}

    earlier = {f"{share * wall_s:g}": _after(ours, theirs, share * wall_s) for share in EARLIER}
    return {
        "case": f"{task}_learning", "difference_median": round(apart, 4), "pairs": len(ours), "target": 0.0,
        "met": None if nothing else apart >= 0.0, "least_reward": least,
        **({"note": "nothing learned"} if nothing else {}), **(spread(ratios) if len(ratios) == len(ours) else {}),
        "ours": side(ours, 0), "theirs": {**side(theirs, 1), **peer_setting}, "wall_s": wall_s, "after_s": earlier, **more,
    }  # fmt: skip


def _last(ours: Sequence[Rewards], theirs: Sequence[Rewards], wall_s: float) -> list[tuple[float, float]]:
    """Both last rewards of each seed. Raises PeerFailed."""
    return [(last_reward(one, wall_s), last_reward(other, wall_s)) for one, other in zip(ours, theirs, strict=True)]


def _after(ours: Sequence[Rewards], theirs: Sequence[Rewards], wall_s: float) -> dict[str, float] | None:
    """The same comparison had it ended after `wall_s`; None where a run had no batch in the last part of that."""
    try:
        last = _last(ours, theirs, wall_s)
    except PeerFailed:
        return None
    return {
        "ours": round(statistics.median(one for one, _ in last), 4),
        "theirs": round(statistics.median(other for _, other in last), 4),
        "difference_median": round(statistics.median(one - other for one, other in last), 4),
        "above": sum(one > other for one, other in last),
    }


def judged(one: dict[str, Any]) -> dict[str, Any]:
    """The case, not met either when its sides did not sample alike, or when ours trained what it did not sample meanwhile."""
    ours, theirs = (one[side]["tokens_per_trajectory"] for side in ("ours", "theirs"))
    apart, sampled = abs(ours - theirs) / theirs, one["ours"]["sampled_over_trained"]
    met = one["met"] and apart <= TOKENS_APART and abs(sampled - 1) <= SAMPLED_APART
    return {**one, "tokens_apart": round(apart, 4), "sampled_over_trained": sampled, "met": met}


def report_of(options: argparse.Namespace, setting: Setting, seconds: Mapping[str, float], say: Say) -> dict[str, Any]:
    """All cases. `seconds`: of each measurement of a pair, by case."""
    plan = Plan(
        python=options.peer, pairs=options.pairs, sync_pairs=options.sync_pairs, sweep=options.sweep,
        peer_threads=options.peer_threads,
    )  # fmt: skip
    cases = []
    for task in options.cases:
        found = measure(task, plan, replace(setting, seconds=seconds[task]), say)
        ratios = [one.rate.per_s / other.rate.per_s for one, other in zip(found.ours, found.theirs, strict=True)]
        sides = figures(found)
        peer_versions = sides.pop("peer_versions")
        one = case(
            f"{task}_0.92M", ratios, target=TARGETS[task], aim=AIMS[task], **sides,
            versions={**versions(), **{f"peer {name}": text for name, text in peer_versions.items()}},
        )  # fmt: skip
        cases.append(judged(one))
    if options.learning:
        cases += [learn(task, options, setting, say) for task in options.learning_tasks]
    return {
        "name": "vs_trl", "cases": cases, "differences": list(DIFFERENCES),
        "provenance": {
            "command": ["python", "benchmarks/vs_trl.py", *sys.argv[1:]], "cores": list(setting.cores),
            "seconds": {task: round(one, 2) for task, one in seconds.items()}, "warm_up_steps": {
                "theirs": setting.warm_up,
                "ours": {task: warm_up_steps(TASKS[task].staleness) for task in options.cases},
            },
        },
    }  # fmt: skip


def show(report: dict[str, Any], say: Say) -> None:
    for one in report["cases"]:
        say(told(one))


def told(one: Mapping[str, Any]) -> str:
    """One case in a line."""
    words = [f"{one['case']:20}"]
    if "difference_median" in one:
        words.append(f"difference {one['difference_median']:+.3f}")
    if "ratio_median" in one:
        words.append(f"{one['ratio_median']:6.3f} ({one['ratio_min']:.3f} .. {one['ratio_max']:.3f})")
    words += [f" target {one['target']:g}", one.get("note", "met" if one["met"] else "MISSED")]
    if one.get("tokens_apart", 0.0) > TOKENS_APART:
        words.append(f" the sides sampled {one['tokens_apart']:.1%} more or fewer tokens a trajectory than each other")
    if abs(one.get("sampled_over_trained", 1.0) - 1) > SAMPLED_APART:
        words.append(f" our arm sampled {one['sampled_over_trained']:.1%} of what it trained meanwhile")
    if "bounds" in one:
        words.append(f" bound {one['bounds']}")
    return " ".join(words)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of all cases but learning (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs per case (default: %(default)s)")
    parser.add_argument("--sync-pairs", type=int, default=2, help="of these with the third arm (default: %(default)s)")
    parser.add_argument("--cases", nargs="*", default=list(TASKS), choices=list(TASKS), metavar="CASE")
    parser.add_argument("--sweep", action="store_true", help="sweep our asynchronous arm's workers too")
    parser.add_argument("--peer-threads", type=int, nargs="*", default=[1, 2], help="torch threads TRL is swept over")
    parser.add_argument(
        "--learning", type=int, default=0, metavar="SEEDS", help="compare rewards as well, with 5 seeds"
    )
    parser.add_argument(
        "--learning-tasks", nargs="*", default=list(LEARNING_TASKS), choices=list(TASKS), metavar="CASE"
    )
    parser.add_argument(
        "--learning-s", type=float, default=60, help="wall time of one learning run (default: %(default)s)"
    )
    parser.add_argument(
        "--peer", type=Path, default=Path(".venv-trl/bin/python"), help="python of the peer's environment"
    )
    parser.add_argument("--cores", type=int, nargs="*", help="cores of both sides (default: the first two there are)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay (default: a temporary one, removed)")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    if not options.peer.exists():
        say(f"FAILED --peer {options.peer} is not there; make it with: make trl-env")
        return 1
    options.peer = options.peer.absolute()
    scratch = (options.folder or Path(tempfile.mkdtemp(prefix="rollart-vs-trl-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    seconds, total_s = seconds_for(options)
    cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    say(f"{time_told(options, seconds, total_s)}; on cores {cores}, in {scratch}")
    setting = Setting(
        scratch=scratch, model=save_weights(scratch / "model"), cores=cores,
        seconds=max(seconds.values(), default=options.learning_s), warm_up=WARM_UP,
    )  # fmt: skip
    try:
        report = report_of(options, setting, seconds, say)
    except PeerFailed as error:
        say(f"FAILED {error}")
        return 1
    show(report, say)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.folder is None:
        shutil.rmtree(scratch)
    return 0 if all(one["met"] for one in report["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
