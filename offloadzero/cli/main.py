"""The command `offloadzero`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from offloadzero import __version__
from offloadzero.cli import convert, doctor, report
from offloadzero.cli.bench import adam, nvme
from offloadzero.cli.demo import command as demo
from offloadzero.cli.plan import command as plan
from offloadzero.errors import ConfigError, OffloadError

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
UNREAD = 141


class _Parser(argparse.ArgumentParser):
    """A parser that raises an error when its help could not be written: argparse would ignore it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offloadzero",
        description="Offload training states: try it, plan and show runs, measure storage, convert checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"offloadzero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure the drive or the optimizer")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    nvme.add_parser(benches)
    adam.add_parser(benches)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    plan.add_parser(commands)
    report.add_parser(commands)
    convert.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 2 for a mistake of the user, 1 for a failure.

    130 after Ctrl-C and 141 when the output is no longer read, as a shell counts SIGINT and SIGPIPE.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may be any bytes; a terminal's encoding may not.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            # Flushed here, and not at the interpreter's end, where the error could not be reported.
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout, sys.stderr)
        return UNREAD
    except OSError as error:
        # An error without a file is of a standard stream: a file that is opened by name is named.
        _discard(sys.stdout)
        return _fail(error if error.filename else f"standard output: {error.strerror}", FAILURE)


def _run(arguments: Sequence[str] | None) -> int:
    args = make_parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except ConfigError as error:
        return _fail(error, USER_ERROR)
    except OffloadError as error:
        return _fail(error, FAILURE)
    except MemoryError as error:
        return _fail(f"out of memory: {error}", FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    return status


def _discard(*streams: TextIO) -> None:
    """Drop the buffered output: the interpreter would write it at its end, and fail again."""
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _fail(why: object, status: int) -> int:
    """Print one line, whatever the message."""
    print(f"offloadzero: {' '.join(str(why).split())}", file=sys.stderr)
    return status
