"""TextWorld's games on disk: made and compiled once per user, then loaded by whichever process plays them.

Owns the games' folder. Invariants: equal parameters and seed give the same game in every process; making and loading are
done by one thread of a process at a time, because TextWorld's parser is shared; playing is not, for every loaded
game has an interpreter of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import threading
import warnings
from pathlib import Path
from typing import Any

from rollart.config.schema import TextWorldEnv
from rollart.core.errors import ConfigError
from rollart.runtime.made_once import made_once

GAME = "game.z8"
SHAPE = "game.json"
"""TextWorld's own description of a game, beside the compiled one."""
NOT_THE_GAMES = ("metadata", "KB")
"""Of that description: the options, with the file's path, and TextWorld's rules, with the path of its installation."""
INSTALL = 'pip install "rollart[textworld]"'
_ONE_AT_A_TIME = threading.Lock()


def game_file(config: TextWorldEnv, seed: int) -> Path:
    """The compiled game of `seed`, made if it is not there yet (seconds). Raises ConfigError when textworld is missing."""
    return _folder(config, seed) / GAME


def canonical_id(config: TextWorldEnv, seed: int) -> int:
    """Equal for equal games, whatever their seeds: 63 bits of a digest of map, things and quests."""
    told = json.dumps(described(_folder(config, seed)), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big") >> 1


def described(folder: Path) -> dict[str, Any]:
    """What TextWorld wrote about the game in `folder`, without what is not the game's own."""
    shape: dict[str, Any] = json.loads((folder / SHAPE).read_text(encoding="utf-8"))
    return {key: value for key, value in shape.items() if key not in NOT_THE_GAMES}


def loaded(path: Path) -> Any:
    """A TextWorld environment of the game, ready for `reset`. Close it."""
    textworld = import_textworld()
    infos = textworld.EnvInfos(
        objective=True, description=True, admissible_commands=True, policy_commands=True, possible_admissible_commands=True,
        verbs=True, score=True, max_score=True, won=True, lost=True,
    )  # fmt: skip
    from jericho.jericho import UnsupportedGameWarning

    with _ONE_AT_A_TIME, warnings.catch_warnings():
        # the interpreter knows published games only; of these TextWorld itself keeps score
        warnings.simplefilter("ignore", UnsupportedGameWarning)
        return textworld.start(str(path), infos)


def import_textworld() -> Any:
    """The textworld package, or a ConfigError with the line that installs it."""
    try:
        import textworld
    except ImportError:
        raise ConfigError(
            f"env.kind=textworld needs textworld, which is not installed; install it with: {INSTALL}"
        ) from None
    return textworld


def _folder(config: TextWorldEnv, seed: int) -> Path:
    try:
        version = importlib.metadata.version("textworld")
    except importlib.metadata.PackageNotFoundError:
        import_textworld()
        raise
    kind = f"{version}-rooms{config.rooms}-objects{config.objects}-quest{config.quest_length}"
    return made_once(f"textworld/{kind}/{seed}", functools.partial(make_game, config, seed))


def make_game(config: TextWorldEnv, seed: int, folder: Path) -> None:
    """Write and compile the game of `seed` into an empty folder."""
    textworld = import_textworld()
    options = textworld.GameOptions()
    options.path = str(folder / GAME)
    options.nb_rooms, options.nb_objects, options.quest_length = config.rooms, config.objects, config.quest_length
    options.seeds = seed
    with _ONE_AT_A_TIME:
        textworld.make(options)
    (folder / GAME).with_suffix(".ni").unlink(missing_ok=True)  # the source, which nobody reads again
