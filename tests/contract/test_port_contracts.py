"""Every port of every world keeps the same contract: what control relies on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import engine_contract
import env_contract
import other_contracts
import pytest
import restart_contract
from inline_rigs import INLINE
from rigs import ClusterRig, EngineRig, EnvRig, PortWorld, ScorerRig, TrainerRig
from sim_rigs import SIM

R = TypeVar("R")
Contract = Callable[[R], Coroutine[Any, Any, None]]

WORLDS = [SIM, INLINE]


def name_of(thing: PortWorld | Contract[Any]) -> str:
    return thing.name if isinstance(thing, PortWorld) else thing.__name__


def keep(world: PortWorld, rig: Callable[[], AbstractAsyncContextManager[R]], contract: Contract[R]) -> None:
    async def main() -> None:
        async with rig() as port:
            await contract(port)

    world.run(main())


worlds = pytest.mark.parametrize("world", WORLDS, ids=name_of)


@worlds
@pytest.mark.parametrize("contract", engine_contract.CONTRACTS, ids=name_of)
def test_engine(world: PortWorld, contract: Contract[EngineRig]) -> None:
    keep(world, world.engine, contract)


@worlds
@pytest.mark.parametrize("contract", env_contract.CONTRACTS, ids=name_of)
def test_env(world: PortWorld, contract: Contract[EnvRig]) -> None:
    keep(world, world.env, contract)


@worlds
@pytest.mark.parametrize("contract", other_contracts.SCORER, ids=name_of)
def test_scorer(world: PortWorld, contract: Contract[ScorerRig]) -> None:
    keep(world, world.scorer, contract)


@worlds
@pytest.mark.parametrize("contract", other_contracts.TRAINER, ids=name_of)
def test_trainer(world: PortWorld, contract: Contract[TrainerRig]) -> None:
    keep(world, world.trainer, contract)


@worlds
@pytest.mark.parametrize("contract", other_contracts.CLUSTER, ids=name_of)
def test_cluster(world: PortWorld, contract: Contract[ClusterRig]) -> None:
    keep(world, world.cluster, contract)


@worlds
@pytest.mark.parametrize("contract", restart_contract.CONTRACTS, ids=name_of)
def test_restart(world: PortWorld, contract: Contract[ClusterRig]) -> None:
    keep(world, world.cluster, contract)
