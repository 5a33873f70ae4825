"""The command `offloadzero` (floor 7)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from offloadzero import __version__
from offloadzero.cli import bench_adam, bench_copy, bench_nvme, report
from offloadzero.errors import ConfigError, OffloadError

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offloadzero", description="Offload training states; measure storage; show runs."
    )
    parser.add_argument("--version", action="version", version=f"offloadzero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure the drive, the memory or the optimizer")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    bench_nvme.add_parser(benches)
    bench_copy.add_parser(benches)
    bench_adam.add_parser(benches)
    report.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 0, 2 for a mistake of the user, 1 for a failure."""
    args = make_parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except ConfigError as error:
        return _fail(error, USER_ERROR)
    except OffloadError as error:
        return _fail(error, FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    return status


def _fail(why: object, status: int) -> int:
    print(f"offloadzero: {why}", file=sys.stderr)
    return status
