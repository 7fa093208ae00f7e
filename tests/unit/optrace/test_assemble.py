"""A whole step: the oracles of the composer, on traces whose times are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hand_made_traces import BLOCKING, OVERLAPPING, by_hand, computes, nothing_but, plain, plan_of, rich, talks
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError, InvariantBroken
from rollart.optrace.assemble import compose_step
from rollart.optrace.classes import Straggler
from rollart.optrace.ops import Op, Priced, Trace
from rollart.optrace.slowdown import Factors
from rollart.optrace.step_timeline import StepTimeline
from rollart.perf.pipeline import Schedule
from rollart.perf.train_plan import Framework, TrainingPlan

TICK_S = 1e-12


def _step(trace: Trace, framework: Framework = BLOCKING, **more: object) -> StepTimeline:
    given_s = {"level": 0, **more}
    return compose_step(trace, trace.plan, by_hand, framework=framework, **given_s)  # type: ignore[arg-type]


def _sums(timeline: StepTimeline) -> None:
    """The seconds of a class are its step, and none is below 0."""
    for one in timeline.classes:
        parts = [one.busy_s, one.optimizer_s, one.host_s, one.bubble_s, *one.exposed_s.values()]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timeline.step_s, rel=1e-12)
        assert one.slowed_s <= one.busy_s


# ---- known times


def test_one_rank_without_communication_takes_the_sum_of_its_operators() -> None:
    trace = rich(plan_of(micro_batches=3))
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    once = sum(op.flops for part in parts for op in (*part.forward, *part.backward)) / 1e12
    update = sum(op.flops for part in parts for op in part.optimizer) / 1e12 + sum(op.flops for op in trace.step) / 1e12
    timeline = _step(trace)
    assert timeline.step_s == pytest.approx(3 * once + update, rel=1e-12)
    (only,) = timeline.classes
    assert only.bubble_s == 0
    assert only.optimizer_s == pytest.approx(update, rel=1e-12)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 8)])
def test_1f1b_takes_m_plus_p_minus_1_slots(stages: int, micro_batches: int) -> None:
    trace = plain(plan_of(pp=stages, micro_batches=micro_batches), layers=stages, forward_s=0.25, backward_s=0.5)
    # the ends compute a tick each way; no operator takes nothing
    ends = 4 * micro_batches * TICK_S
    assert 0 <= _step(trace).step_s - (micro_batches + stages - 1) * 0.75 <= ends + 1e-15
    assert _step(trace, OVERLAPPING).step_s == _step(trace).step_s


@pytest.mark.parametrize("framework", [BLOCKING, OVERLAPPING])
@pytest.mark.parametrize("shards", [0, 1, 2, 3])
def test_free_collectives_make_the_step_independent_of_the_ranks(framework: Framework, shards: int) -> None:
    def free(op: Op) -> Priced:
        return replace(by_hand(op), seconds=TICK_S) if op.stream == "comm" else by_hand(op)

    found = set()
    for dp in (2, 16, 512):
        trace = rich(plan_of(dp=dp, micro_batches=2, shards=shards))
        found.add(compose_step(trace, trace.plan, free, framework=framework, level=0).step_s)
    assert len(found) == 1
    alone = _step(rich(plan_of(micro_batches=2)), framework).step_s
    assert alone <= found.pop() <= alone + 100 * TICK_S


def test_gradients_are_reduced_beside_the_last_backward_only_and_the_rest_is_exposed() -> None:
    backward = [computes(0, 2.0), computes(1, 2.0, 0, weight=True), talks(2, 3.0, "dp", "all_reduce", 1)]
    trace = nothing_but(plan_of(dp=4, micro_batches=2), [computes(0, 1.0)], backward, layers=3)
    timeline = _step(trace)
    # two micro-batches of 3 x 5 s; the last layer's reduction ends 3 s after its backward, the others' are hidden
    assert timeline.step_s == pytest.approx(30.0 + 3.0, abs=1e-9)
    (only,) = timeline.classes
    assert only.exposed_s == {"dp": pytest.approx(3.0, abs=1e-9)}
    assert only.comm_s == {"dp": pytest.approx(9.0)}
    late_framework = replace(BLOCKING, overlap_dp=False)
    late = _step(trace, late_framework)
    assert late.step_s == pytest.approx(30.0 + 9.0, abs=1e-9)
    gather = [talks(0, 1.5, "dp", "all_gather"), computes(1, 1.0, 0)]
    waits = _step(nothing_but(plan_of(dp=4, micro_batches=2, shards=1), gather, backward, layers=3), late_framework)
    assert waits.step_s == pytest.approx(30.0 + 9.0 + 3 * 1.5, abs=1e-9)  # no gather a layer ahead either
    every = _step(nothing_but(plan_of(dp=4, micro_batches=2, shards=2), [computes(0, 1.0)], backward, layers=3))
    assert every.classes[0].comm_s == {"dp": pytest.approx(18.0)}


def test_sharded_weights_are_gathered_one_layer_ahead() -> None:
    gather = talks(0, 1.5, "dp", "all_gather")
    forward, backward = [gather, computes(1, 2.0, 0)], [gather, computes(1, 4.0, 0)]
    trace = nothing_but(plan_of(dp=4, shards=3), forward, backward, layers=3)
    # the first gather each way has nothing to hide behind, the rest are under way while the layer before computes
    assert _step(trace).step_s == pytest.approx(2 * 1.5 + 3 * 6.0, abs=1e-9)
    slow = nothing_but(
        plan_of(dp=4, shards=3), [talks(0, 5.0, "dp", "all_gather"), computes(1, 2.0, 0)], [computes(0, 4.0)], layers=3
    )
    starts = [one.start_s for one in _step(slow).slices("ops") if one.stream == "comm dp"]
    assert starts == pytest.approx([0.0, 5.0, 10.0], abs=1e-9)


def test_a_blocking_collective_stops_computation_and_a_hidden_share_of_it_does_not() -> None:
    forward = [computes(0, 1.0), talks(1, 2.0, "tp", "all_reduce", 0), computes(2, 1.0)]
    trace = nothing_but(plan_of(tp=2), forward, [computes(0, 1.0)])
    assert _step(trace).step_s == pytest.approx(1 + 2 + 1 + 1, abs=1e-9)
    hidden = _step(trace, OVERLAPPING, hidden=lambda op: 0.75 if op.axis == "tp" else 0.0)
    # three quarters of it run inside the products, the rest beside what needs nothing of it
    assert hidden.step_s == pytest.approx(1 + 1 + 1, abs=1e-9)
    assert hidden.classes[0].comm_s == {"tp": pytest.approx(2.0)}
    assert sum(use.seconds for use in hidden.classes[0].usage if use.axis == "tp") == pytest.approx(2.0)
    needed = [computes(0, 1.0), talks(1, 2.0, "tp", "all_reduce", 0), computes(2, 5.0, 1)]
    trace = nothing_but(plan_of(tp=2), needed, [computes(0, 1.0)])
    assert _step(trace, OVERLAPPING, hidden=lambda _: 0.75).step_s == pytest.approx(1 + 0.5 + 5 + 1, abs=1e-9)


def test_transfers_are_exposed_where_the_framework_waits_for_them() -> None:
    plan = plan_of(pp=2, micro_batches=4)
    trace = plain(plan, layers=2, forward_s=1.0, backward_s=2.0, boundary_s=0.1)
    waiting, beside = _step(trace), _step(trace, OVERLAPPING)
    assert waiting.step_s > beside.step_s > 15.0
    assert waiting.classes[0].exposed_s["pp"] > beside.classes[0].exposed_s.get("pp", 0.0)
    assert waiting.classes[0].comm_s["pp"] == pytest.approx(0.8)  # four sent, four received
    assert all(one.exposed_s["pp"] <= one.comm_s["pp"] for one in waiting.classes)
    for timeline in (waiting, beside):
        _sums(timeline)


# ---- rank classes and blocks against everything composed


def _all_slices(timeline: StepTimeline) -> dict[int, bytes]:
    """The timeline of each representative rank, as bytes."""
    found = {}
    for one in timeline.classes:
        rows = [
            (piece.stream, piece.name, piece.start_s.hex(), piece.end_s.hex(), piece.micro_batch, piece.chunk)
            for piece in timeline.slices("ops", rank_classes=[one.name])
        ]
        found[one.rank_class.representative] = repr(sorted(rows)).encode()
    return found


CASES = [
    (plan_of(tp=2, pp=2, dp=2, micro_batches=3), BLOCKING, ()),
    (plan_of(tp=2, pp=2, dp=2, micro_batches=4, shards=3), OVERLAPPING, ()),
    (plan_of(tp=2, pp=2, dp=2, micro_batches=4, shards=2, schedule="interleaved", chunks=2), OVERLAPPING, ()),
    (plan_of(tp=2, pp=2, dp=3, micro_batches=3, shards=1), BLOCKING, (Straggler(rank=1, factor=1.5, delay_s=2e-3),)),
    (plan_of(tp=2, pp=2, dp=4, micro_batches=2, shards=3), BLOCKING, (Straggler(rank=5, factor=1.2),)),
    (plan_of(tp=2, pp=3, dp=3, micro_batches=4, schedule="zero_bubble"), OVERLAPPING, (Straggler(rank=0, delay_s=1e-3),)),
    (plan_of(tp=1, pp=2, dp=8, ep=2, micro_batches=2, shards=1), BLOCKING, (Straggler(rank=3, factor=1.1),)),
    (plan_of(tp=2, dp=2, cp=2, ep=2), replace(BLOCKING, overlap_dp=False), (Straggler(rank=0, factor=2.0),)),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "framework", "late"), CASES)
@pytest.mark.parametrize("level", [0, 1])
def test_classes_and_blocks_give_the_bytes_of_every_rank_and_operator(
    plan: TrainingPlan, framework: Framework, late: tuple[Straggler, ...], level: int
) -> None:
    trace = rich(plan, layers=6)
    options: dict[str, object] = {
        "stragglers": late,
        "level": level,
        "hidden": lambda op: 0.4 if op.axis == "tp" else 0.0,
    }
    short = _step(trace, framework, **options)
    whole = _step(trace, framework, **options, every_rank=True, detail="ops")
    assert len(whole.classes) == plan.devices > len(short.classes)
    assert short.step_s == whole.step_s
    rank_by_rank = _all_slices(whole)
    for representative, rows in _all_slices(short).items():
        assert rows == rank_by_rank[representative]
    for one in short.classes:  # and a class stands for as many timelines as it says
        same = sum(rows == rank_by_rank[one.rank_class.representative] for rows in rank_by_rank.values())
        assert same >= one.ranks
    for timeline in (short, whole):
        _sums(timeline)


@pytest.mark.parametrize(("plan", "framework", "late"), CASES)
def test_a_row_of_the_timeline_does_one_thing_at_a_time(
    plan: TrainingPlan, framework: Framework, late: tuple[Straggler, ...]
) -> None:
    timeline = _step(rich(plan), framework, stragglers=late, hidden=lambda op: 0.4 if op.axis == "tp" else 0.0, level=1)
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for piece in timeline.slices("ops"):
        rows.setdefault((piece.rank_class, piece.stream), []).append((piece.start_s, piece.end_s))
    for spans in rows.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert 0 <= spans[0][0] < spans[-1][1] <= timeline.step_s


def test_a_late_class_delays_a_step_that_waits_for_it_by_as_much() -> None:
    trace = rich(plan_of(tp=2, dp=2, pp=2, micro_batches=2))
    late = _step(trace, delays={"stage 0": 0.5})
    assert late.step_s == pytest.approx(_step(trace).step_s + 0.5, rel=1e-12)
    assert late.classes[1].bubble_s >= 0.5
    with pytest.raises(ConfigError, match="no rank class called stage 9"):
        list(late.slices(rank_classes=["stage 9"]))


def test_the_work_of_composing_does_not_grow_with_the_ranks() -> None:
    small, large = (_step(rich(plan_of(tp=2, pp=2, dp=dp, micro_batches=2))) for dp in (2, 8192))
    assert len(small.placed) == len(large.placed)
    assert [one.ranks * 4096 for one in small.classes] == [one.ranks for one in large.classes]


def test_jitter_of_the_slowest_replicas_is_that_of_all() -> None:
    trace = rich(plan_of(pp=2, dp=12, micro_batches=3))
    short = _step(trace, jitter=0.1, seed=5)
    assert short.step_s > _step(trace).step_s
    assert short.step_s == _step(trace, jitter=0.1, seed=5).step_s != _step(trace, jitter=0.1, seed=6).step_s
    _sums(short)


# ---- lateness and speed


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "zero_bubble"]), st.integers(0, 2), st.integers(0, 7),
    st.floats(1e-6, 0.1), st.booleans(),
)  # fmt: skip
def test_a_late_rank_delays_nothing_by_more_and_makes_nothing_earlier(
    schedule: Schedule, shards: int, rank: int, late_s: float, overlapping: bool
) -> None:
    trace = rich(plan_of(tp=2, pp=2, dp=2, micro_batches=2, schedule=schedule, shards=shards), layers=2)
    framework = OVERLAPPING if overlapping else BLOCKING
    usual = _step(trace, framework, every_rank=True)
    delayed = _step(trace, framework, every_rank=True, stragglers=(Straggler(rank=rank, delay_s=late_s),))
    for before, after in zip(usual.slices("ops"), delayed.slices("ops"), strict=True):
        assert -1e-12 <= after.end_s - before.end_s <= late_s + 2e-12


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(1, 4, 1), (2, 2, 2), (2, 1, 4)]), st.sampled_from([0, 1, 3]), st.booleans(),
    st.floats(0.25, 1.0), st.floats(0.25, 1.0),
)  # fmt: skip
def test_a_faster_device_or_faster_links_never_slow_a_step(
    degrees: tuple[int, int, int], shards: int, overlapping: bool, compute: float, comm: float
) -> None:
    tp, pp, dp = degrees
    trace = rich(plan_of(tp=tp, pp=pp, dp=dp, micro_batches=3, shards=shards))

    def faster(op: Op) -> Priced:
        priced = by_hand(op)
        return replace(priced, seconds=priced.seconds * (comm if op.stream == "comm" else compute))

    framework = OVERLAPPING if overlapping else BLOCKING
    quick = compose_step(trace, trace.plan, faster, framework=framework, level=0).step_s
    assert quick <= _step(trace, framework).step_s + 1e-9 * quick


def test_twice_the_device_and_links_halve_the_step_with_the_cost_of_overlap_too() -> None:
    trace = rich(plan_of(tp=2, pp=2, dp=2, micro_batches=3, shards=3))
    usual = _step(trace, level=1)
    twice = compose_step(
        trace, trace.plan, lambda op: replace(by_hand(op), seconds=by_hand(op).seconds / 2), framework=BLOCKING, level=1
    )
    assert twice.step_s == pytest.approx(usual.step_s / 2, rel=1e-6)


# ---- running beside each other


def test_levels_of_overlap_cost_what_they_say() -> None:
    backward = [computes(0, 2.0), talks(1, 1.0, "dp", "all_reduce", 0), computes(2, 4.0, 0)]
    trace = nothing_but(plan_of(dp=4), [computes(0, 1.0)], backward)
    none = _step(trace)
    assert none.step_s == pytest.approx(7.0, abs=1e-9)
    assert none.classes[0].slowed_s == 0
    beside = _step(trace, level=1, overlap=Factors(compute=0.5, comm=0.0))
    # 1 s of the last product is overlapped: T = T0 (1 + s r), r the share of what it then takes
    assert beside.classes[0].slowed_s == pytest.approx(0.5, abs=0.06)
    assert beside.passes <= 5
    physical = _step(trace, level=1)
    assert none.step_s < physical.step_s < beside.step_s
    both = _step(trace, level=1, overlap=Factors(compute=0.5, comm=2.0))
    assert both.classes[0].comm_s["dp"] == pytest.approx(3.0, rel=1e-6)


def test_the_same_inputs_give_the_same_bytes() -> None:
    trace = rich(plan_of(tp=2, pp=2, dp=2, micro_batches=3, shards=2))
    assert _all_slices(_step(trace, level=2)) == _all_slices(_step(trace, level=2))


def test_a_host_that_cannot_keep_up_is_felt_and_said() -> None:
    class Slow:
        def host_s(self, parts: object, direction: str, recomputed: float = 0.0, ends: object = ()) -> float:
            assert recomputed == 0.0
            return 0.5 if direction != "optimizer" else 0.0

        def lack_s(self, busy_s: float, host_s: float) -> float:
            return max(0.0, host_s - busy_s)

    trace = plain(plan_of(micro_batches=2), layers=2, forward_s=0.1, backward_s=0.2)
    timeline = _step(trace, host=Slow())
    assert timeline.step_s == pytest.approx(2 * (0.5 + 0.5), abs=1e-6)
    assert timeline.classes[0].host_s == pytest.approx(2 * (0.3 + 0.1), abs=1e-6)
    _sums(timeline)


# ---- refusals


def test_a_result_that_is_none_and_a_plan_that_is_not_the_traces_are_refused() -> None:
    trace = rich(plan_of(tp=2, dp=2))
    with pytest.raises(ConfigError, match="derive the trace for the plan first"):
        compose_step(trace, plan_of(tp=4), by_hand, framework=BLOCKING)
    with pytest.raises(ConfigError, match="there are stage 0"):
        _step(trace, delays={"stage 7": 1.0})
    unmarked = nothing_but(plan_of(pp=1, schedule="zero_bubble"), [computes(0, 1.0)], [computes(0, 1.0)])
    with pytest.raises(ConfigError, match="take 1f1b"):
        _step(unmarked)
    copies = (replace(computes(0, 1.0), stream="copy"),)
    bare = nothing_but(plan_of(), copies, copies)
    bare = replace(
        bare, parts={name: replace(part, forward=copies, backward=copies) for name, part in bare.parts.items()}
    )
    with pytest.raises(InvariantBroken, match="all bubble"):
        _step(bare)
    idle = replace(bare, parts={name: replace(part, forward=(), backward=()) for name, part in bare.parts.items()})
    with pytest.raises(InvariantBroken, match="no length"):
        _step(idle)
