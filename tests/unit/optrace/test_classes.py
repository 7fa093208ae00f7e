"""Rank classes: how many, whom each meets, and that lateness alone splits them."""

from __future__ import annotations

import pytest
from hand_made_traces import plain, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.optrace.classes import MOST_REPLICAS, RankClass, Straggler, rank_classes, stage_parts
from rollart.perf.train_plan import TrainingPlan


def _classes(plan: TrainingPlan, *late: Straggler, **more: object) -> tuple[RankClass, ...]:
    trace = plain(plan, layers=16, forward_s=1.0, backward_s=2.0)
    return rank_classes(trace, plan, stragglers=late, **more)  # type: ignore[arg-type]


def test_a_class_for_each_stage_whatever_the_number_of_ranks() -> None:
    for dp in (1, 32, 2048):
        classes = _classes(plan_of(tp=8, pp=4, dp=dp))
        assert [(one.name, one.special) for one in classes] == [
            ("stage 0", "first"), ("stage 1", "middle"), ("stage 2", "middle"), ("stage 3", "last"),
        ]  # fmt: skip
        assert {one.ranks for one in classes} == {8 * dp}
        assert classes[2].partners["pp"] == (0, 1, 2, 3)
        assert classes[2].partners["dp"] == (2,)
    assert _classes(plan_of(dp=4))[0].special == "only"


def test_a_late_rank_its_peers_its_replicas_and_the_rest_are_told_apart() -> None:
    plan = plan_of(tp=4, pp=2, dp=8)
    classes = _classes(plan, Straggler(rank=2, factor=1.3))
    first = [one for one in classes if one.stage == 0]
    assert sorted(one.ranks for one in first) == [1, 3, 7, 21]  # itself, tensor peers, replicas of it, of its peers
    late = next(one for one in first if one.ranks == 1)
    assert (late.representative, late.factor) == (2, 1.3)
    assert len(late.partners["tp"]) == len(late.partners["dp"]) == 2
    assert sum(one.ranks for one in classes) == plan.devices


def test_every_rank_alone_meets_its_own_group() -> None:
    classes = _classes(plan_of(tp=2, pp=2, dp=2, cp=2), every_rank=True)
    assert [one.representative for one in classes] == list(range(16))
    assert classes[5].partners == {
        "tp": (4, 5), "cp": (5, 7), "dp": (1, 3, 5, 7), "ep": (5,), "experts": tuple(range(8)), "pp": (5, 13),
    }  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(1, 1, 4, 1), (2, 2, 2, 2), (4, 2, 3, 1), (1, 3, 4, 2), (2, 1, 8, 1)]), st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([1.0, 1.5])), max_size=3),
)  # fmt: skip
def test_members_of_a_class_meet_the_same_classes(
    degrees: tuple[int, int, int, int], ep: int, late: list[tuple[int, float]]
) -> None:
    tp, pp, dp, cp = degrees
    if (dp * cp * tp) % ep:
        return
    plan = plan_of(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    stragglers = [Straggler(rank=rank % plan.devices, factor=factor) for rank, factor in late]
    classes = _classes(plan, *stragglers)
    alone = _classes(plan, *stragglers, every_rank=True)
    assert sum(one.ranks for one in classes) == plan.devices
    of_rank = _home(plan, classes, alone)
    for rank in alone:
        mine = classes[of_rank[rank.index]]
        for axis, group in rank.partners.items():
            met = tuple(of_rank[other] for other in group)
            assert (met if axis == "pp" else tuple(sorted(set(met)))) == mine.partners[axis]


def _home(plan: TrainingPlan, classes: tuple[RankClass, ...], alone: tuple[RankClass, ...]) -> list[int]:
    """The class of each rank, found by its factor and whom it meets, as the definition says."""
    colours = [(one.stage, one.factor, one.delay_s) for one in alone]
    for _ in range(plan.devices):
        said = [
            (colours[one.index], *(
                tuple(colours[other] if axis == "pp" else sorted(repr(colours[o]) for o in group)[at]
                      for at, other in enumerate(group))
                for axis, group in one.partners.items()
            ))
            for one in alone
        ]  # fmt: skip
        numbers = {what: at for at, what in enumerate(dict.fromkeys(said))}
        again = [(numbers[what], 0.0, 0.0) for what in said]
        if len(set(again)) == len(set(colours)):
            break
        colours = again
    first = {colours[one.representative]: one.index for one in classes}
    assert len(first) == len(classes)
    return [first[colour] for colour in colours]


def test_jitter_keeps_the_slowest_replicas_apart_and_is_drawn_from_the_seed() -> None:
    plan = plan_of(tp=8, pp=2, dp=64, micro_batches=4)
    classes = _classes(plan, jitter=0.05, seed=3)
    assert len(classes) == plan.pp * MOST_REPLICAS
    assert sum(one.ranks for one in classes) == plan.devices
    assert min(one.factor for one in classes) > 1.0  # the slowest of 8 tensor peers, of the slowest replicas
    assert classes == _classes(plan, jitter=0.05, seed=3)
    assert classes != _classes(plan, jitter=0.05, seed=4)
    assert len(_classes(plan, jitter=0.0)) == plan.pp


def test_layers_are_spread_and_the_ends_have_embedding_and_head() -> None:
    plan = plan_of(pp=2, micro_batches=4, schedule="interleaved", chunks=2)
    trace = plain(plan, layers=8, forward_s=1.0, backward_s=2.0)
    places = stage_parts(trace, plan)
    assert [len(names) for names in places] == [3, 2, 2, 3]
    assert (places[0][0], places[3][-1]) == ("embedding", "head")
    uneven = stage_parts(plain(plan, layers=9, forward_s=1.0, backward_s=2.0), plan, 2.0)
    assert [sum(name == "layer" for name in names) for names in uneven] == [3, 3, 2, 1]
    assert all(
        "layer" in names for names in stage_parts(plain(plan, layers=5, forward_s=1.0, backward_s=2.0), plan, 9.0)
    )


def test_senseless_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="nearest is 2"):
        _classes(plan_of(tp=2, dp=2, ep=3))
    with pytest.raises(ConfigError, match="ranks are 0 to 7"):
        _classes(plan_of(dp=8), Straggler(rank=8))
    with pytest.raises(ConfigError, match="below 1"):
        _classes(plan_of(dp=8), jitter=1.5)
    with pytest.raises(ConfigError, match="factor above 0"):
        Straggler(rank=0, factor=0.0)
    plan = plan_of(pp=32)
    shallow = plain(plan, layers=16, forward_s=1.0, backward_s=2.0)
    with pytest.raises(ConfigError, match="at most 16 in all"):
        stage_parts(shallow, plan)
