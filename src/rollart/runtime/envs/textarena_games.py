"""Which games of textarena can be played here, why others cannot, and what a move looks like.

Invariant: a game that would fetch something, or ask a model over the network, is refused before its code is imported (the
import alone starts the download); every refusal says why and names games that work.
"""

from __future__ import annotations

import ast
import functools
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollart.config.schema import TextArenaEnv
from rollart.core.errors import ConfigError

NLTK_DATA: Mapping[str, tuple[str, ...]] = {
    "Hangman": ("corpora/words",),
    "WordLadder": ("corpora/words",),
    "WordSearch": ("corpora/words",),
    "Wordle": ("corpora/words", "taggers/averaged_perceptron_tagger_eng"),
}
"""Games that read word lists which nltk downloads."""
ASKS_A_MODEL = frozenset({"GuessWho", "TwentyQuestions"})
"""Games whose other side is a model behind a network service that needs a key."""
EXAMPLES = ("FrozenLake-v0", "GuessTheNumber-v0", "TowerOfHanoi-v0", "2048-v0", "Mastermind-v0", "Minesweeper-v0")
REFUSES = (ValueError, TypeError, LookupError, AssertionError, AttributeError, ImportError, SyntaxError)
"""What a game raises on arguments that it does not take."""

Move = Callable[[random.Random, Any], str]
"""(draw, game) -> what stands between the brackets of a well-formed move."""


def _word(*words: str) -> Move:
    return lambda rng, env: rng.choice(words)


def _numbers(n: int, first: int, last: Callable[[Any], int]) -> Move:
    """`n` whole numbers from `first` to `last(game)`."""
    return lambda rng, env: " ".join(str(rng.randint(first, last(env))) for _ in range(n))


MOVES: Mapping[str, Move] = {
    "2048": _word("Up", "Down", "Left", "Right"),
    "Bandit": lambda rng, env: rng.choice(list(env.buttons)),
    "Blackjack": _word("Hit", "Stand"),
    "FifteenPuzzle": _word("up", "down", "left", "right"),
    "FrozenLake": _word("up", "down", "left", "right"),
    "GuessTheNumber": lambda rng, env: str(rng.randint(env.min_number, env.max_number)),
    "LightsOut": _numbers(2, 0, lambda env: int(env.size) - 1),
    "Mastermind": lambda rng, env: " ".join(
        map(str, rng.choices(range(1, env.num_numbers + 1), k=env.code_length))
        if env.duplicate_numbers
        else map(str, rng.sample(range(1, env.num_numbers + 1), env.code_length))
    ),
    "Minesweeper": lambda rng, env: f"{rng.randrange(env.rows)} {rng.randrange(env.cols)}",
    "Secretary": _word("accept", "continue"),
    "Sokoban": _word("up", "down", "left", "right"),
    "Sudoku": _numbers(3, 1, lambda env: 9),
    "TowerOfHanoi": lambda rng, env: " ".join(rng.sample("ABC", 2)),
}
"""By game: blind to the state, which is why some of these moves may not be possible at the moment."""


def game_of(game_id: str) -> str:
    """The game without version and variant: of `FrozenLake-v0-hardcore` it is FrozenLake."""
    return game_id.split("-v", maxsplit=1)[0]


def make(config: TextArenaEnv) -> Any:
    """The raw form of the game. Raises ConfigError with the reason and games that work."""
    registry = import_textarena()
    raw = config.id.removesuffix("-raw") + "-raw"
    if raw not in registry:
        raise _refused(
            config.id, "textarena has no such game (variants that end in -train repeat the context: leave it off)"
        )
    reason = why_not(config.id, registry[raw].entry_point)
    if reason is not None:
        raise _refused(config.id, reason)
    import textarena

    try:
        made = textarena.make(raw, **config.kwargs)
    except REFUSES as error:
        raise _refused(config.id, f"{type(error).__name__}: {error} (env.kwargs is {config.kwargs})") from error
    return made


def why_not(game_id: str, entry_point: str) -> str | None:
    """Why the game cannot be played alone, here and now; None: it can. Imports nothing of it."""
    game = game_of(game_id)
    missing = [name for name in NLTK_DATA.get(game, ()) if not _has_nltk(name)]
    if missing:
        names = ", ".join(name.rpartition("/")[2] for name in missing)
        return (
            f"it reads word lists that are not here; get them with: python -m nltk.downloader {names.replace(',', '')}"
        )
    if game in ASKS_A_MODEL:
        return "its other side is a model that is asked over the network"
    return _why_not_alone(entry_point)


def games() -> dict[str, str | None]:
    """Every game's id, with the reason if it cannot be played here. Raises ConfigError when textarena is not installed."""
    registry = import_textarena()
    ids = [name for name in registry if name + "-raw" in registry]
    return {name: why_not(name, registry[name].entry_point) for name in ids}


def import_textarena() -> Mapping[str, Any]:
    """textarena's registry, by id; or a ConfigError with the line that installs the package."""
    try:
        import textarena  # noqa: F401
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            f'this task needs textarena, which cannot be imported ({error}); install it with: pip install "rollart[textarena]"'
        ) from None
    registry: Mapping[str, Any] = ENV_REGISTRY
    return registry


def _refused(game_id: str, reason: str) -> ConfigError:
    return ConfigError(
        f"env.id={game_id!r} cannot be played: {reason}; games that work: {', '.join(EXAMPLES)} "
        "(all: rollart envs list textarena)"
    )


@functools.cache
def _why_not_alone(entry_point: str) -> str | None:
    """Whether the game's code keeps the state of a single player; read from its file, as an import may download."""
    import textarena

    module = entry_point.split(":", maxsplit=1)[0].split(".")[1:]
    try:
        source = Path(textarena.__file__).parent.joinpath(*module).with_suffix(".py").read_text(encoding="utf-8")
    except OSError:
        return "its code is not in this version of textarena"
    if "SinglePlayerState" not in source:
        return "it is for two or more players"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in its texts
            ast.parse(source)
    except SyntaxError:
        return f"its code is no valid Python {sys.version_info.major}.{sys.version_info.minor}"
    return None


def _has_nltk(name: str) -> bool:
    from nltk.data import find

    try:
        find(name)
    except LookupError:
        return False
    return True
