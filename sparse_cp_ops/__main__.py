"""``python -m sparse_cp_ops``: what is built and what can run; ``bench`` and ``bench-layer``: measure the ops and the
whole attention layer; ``cache``: look into a store."""

import argparse
import sys

from sparse_cp_ops.bench import cli
from sparse_cp_ops.bench.layer import cli as layer_cli
from sparse_cp_ops.cache_store import inspection


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m sparse_cp_ops", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("status", help="what is built, what can run here, and why not (the default)")
    bench = commands.add_parser("bench", help="measure the ops beside the ceilings of this machine")
    bench_layer = commands.add_parser("bench-layer", help="measure the whole attention layer")
    cache = commands.add_parser("cache", help="look into a cache store")
    cli.add_arguments(bench)
    layer_cli.add_arguments(bench_layer)
    inspection.add_arguments(cache)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    if arguments.command == "bench":
        return cli.run(arguments)
    if arguments.command == "bench-layer":
        return layer_cli.run(arguments)
    if arguments.command == "cache":
        return inspection.run(arguments)
    from sparse_cp_ops._status import status_report

    print(status_report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
