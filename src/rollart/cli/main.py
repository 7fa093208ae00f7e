"""`rollart COMMAND ..`. Exit codes: 0 done, 1 the run failed, 2 the user's request cannot be met, 130 interrupted.

Invariant: an error that this package raises on purpose ends in its message as the last lines of stderr, without a
traceback; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from rollart import __version__
from rollart.cli import (
    calibrate,
    compare,
    doctor,
    envs,
    evaluate,
    explain,
    extras,
    profile_device,
    report,
    resume,
    resume_check,
    simulate,
    torture,
    trace,
    train,
)
from rollart.cli.work import REAL, Work
from rollart.core.errors import ConfigError, RollartError

COMMANDS: Mapping[str, ModuleType] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "report": report,
    "explain": explain,
    "doctor": doctor,
    "envs": envs,
    "resume-check": resume_check,
    "torture": torture,
    "simulate": simulate,
    "compare": compare,
    "calibrate": calibrate,
    "trace": trace,
    "profile-device": profile_device,
}
FAILED, REFUSED, INTERRUPTED, NO_READER = 1, 2, 130, 141
"""Exit codes; the last two are what a shell reports for SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None, *, work: Work = REAL) -> int:
    """Run one command; returns the exit code. argparse itself exits with 2 for unknown options."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = int(COMMANDS[arguments.command].run(arguments, work))
        sys.stdout.flush()
        return code
    except RollartError as error:
        return _failed(arguments, error, str(error), REFUSED if isinstance(error, ConfigError) else FAILED)
    except ModuleNotFoundError as error:
        message = extras.missing_module(error.name or "")
        if message is None:
            raise
        return _failed(arguments, error, message, REFUSED)
    except KeyboardInterrupt:
        sys.stderr.write("rollart: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of stdout is gone; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER


def _failed(arguments: argparse.Namespace, error: Exception, message: str, code: int) -> int:
    if arguments.traceback:
        raise error
    sys.stderr.write(f"rollart {arguments.command}: {message}\n")
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command. Options and `key=value` words may come in any order."""
    parser, commands = _parsers()
    arguments, rest = parser.parse_known_args(argv)
    command = commands[arguments.command]
    options = [word for word in rest if word.startswith("-")]
    if options:
        near = difflib.get_close_matches(options[0], command._option_string_actions, n=1)
        command.error(f"unknown option {options[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    if rest and not hasattr(arguments, "words"):
        command.error(f"unexpected argument {rest[0]}")
    if rest:  # argparse stops taking words at the first option between them
        arguments.words = [*arguments.words, *rest]
    return arguments


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="rollart", description="Reinforcement learning of LLM agents.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"rollart {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, module in COMMANDS.items():
        command = subparsers.add_parser(name, help=module.SUMMARY, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="show where an error was raised")
        commands[name] = command
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
