"""TextWorld's games on disk: made and compiled once per user, then loaded by whichever process plays them.

Owns the games' folder. Invariants: equal parameters and seed give the same game in every process of an installation (another
one may list TextWorld's grammars in another order), so games are made in processes of their own with a fixed hash seed, for
TextWorld walks sets of words; loading is done by one thread of a process at a time, because TextWorld's parser is shared;
playing is not, for every loaded game has an interpreter of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from rollart.config.schema import TextWorldEnv
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.made_once import made_once

GAME = "game.z8"
SHAPE = "game.json"
"""TextWorld's own description of a game, beside the compiled one."""
INSTALL = 'pip install "rollart[textworld]"'
MADE = 2
"""Counted up whenever games come to be made in another way, so that those in users' caches are not mixed with new ones."""
SAID_CHARS = 500
MAKE_S = 300.0
"""The longest that making one game may take; a second or two are usual."""
_ONE_AT_A_TIME = threading.Lock()


def game_file(config: TextWorldEnv, seed: int) -> Path:
    """The compiled game of `seed`, made if it is not there yet (seconds). Raises ConfigError when textworld is missing."""
    return _folder(config, seed) / GAME


def canonical_id(config: TextWorldEnv, seed: int) -> int:
    """Equal for equal games, whatever their seeds: 63 bits of a digest of map, things and quests."""
    shape = json.loads((_folder(config, seed) / SHAPE).read_text(encoding="utf-8"))
    told = {key: value for key, value in shape.items() if key != "metadata"}
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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
    kind = f"{version}-{MADE}-rooms{config.rooms}-objects{config.objects}-quest{config.quest_length}"
    return made_once(f"textworld/{kind}/{seed}", functools.partial(make_game, config, seed))


def make_game(config: TextWorldEnv, seed: int, folder: Path) -> None:
    """Write and compile the game of `seed` into an empty folder. Raises EnvError with the end of what was said."""
    import_textworld()
    numbers = (config.rooms, config.objects, config.quest_length, seed)
    command = [sys.executable, "-m", __name__, str(folder / GAME), *map(str, numbers)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        made = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise EnvError(f"TextWorld did not make the game of seed {seed} within {MAKE_S:g} s; use fewer rooms") from None
    if made.returncode != 0:
        raise EnvError(f"TextWorld could not make the game of seed {seed}: {made.stderr.strip()[-SAID_CHARS:]}")
    (folder / GAME).with_suffix(".ni").unlink(missing_ok=True)  # the source, which nobody reads again


def _make(path: str, rooms: int, objects: int, quest_length: int, seed: int) -> None:
    """What the process that makes a game does."""
    textworld = import_textworld()
    options = textworld.GameOptions()
    options.path = path
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
    options.seeds = seed
    textworld.make(options)


if __name__ == "__main__":
    _make(sys.argv[1], *map(int, sys.argv[2:]))
