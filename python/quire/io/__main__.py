"""python -m quire.io: checkpoints from a command line."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.io.converting import convert
from quire.io.dialects import DIALECTS
from quire.io.inspection import diff, inspect, run, verify
from quire.io.reading import MISSING
from quire.loading import command_line

_CODES = "Exit codes: 0 nothing found, 1 findings or an error in the checkpoint, 2 wrong arguments."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        found, code = options.call(options)
    except (ValueError, OSError, RuntimeError, ImportError, TypeError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"quire.io: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.state(), indent=2) if options.json else found)
    return code


def _inspect(options: argparse.Namespace) -> tuple[Any, int]:
    found = inspect(options.path)
    return found, int(bool(found.problems))


def _verify(options: argparse.Namespace) -> tuple[Any, int]:
    found = verify(options.path, options.like)
    return found, int(not found)


def _diff(options: argparse.Namespace) -> tuple[Any, int]:
    found = diff(options.a, options.b)
    return found, int(bool(found))


def _convert(options: argparse.Namespace) -> tuple[Any, int]:
    patterns = options.filter
    chosen = None if not patterns else lambda name: any(fnmatch.fnmatchcase(name, one) for one in patterns)
    found = convert(
        options.src,
        options.dst,
        to=options.to,
        filter=chosen,
        exact=not options.allow_ulp,
        requantize=options.requantize,
        missing_input_scale=options.missing_input_scale,
        scale=options.scale,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    return found, 0


def _run(options: argparse.Namespace) -> tuple[Any, int]:
    if options.prompt is not None:
        # Integrations stand above quire.io: only this command knows both.
        transformers = importlib.import_module("quire.integrations.transformers")
        return transformers.generate(options.path, options.prompt, options.new_tokens), 0
    found = run(options.path, options.tokens)
    return found, int(not found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m quire.io", description=__doc__, epilog=_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], tuple[Any, int]], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text, epilog=_CODES)
        found.set_defaults(call=call)
        found.add_argument("--json", action="store_true", help="print JSON")
        return found

    one = command("inspect", _inspect, "describe a checkpoint by its headers")
    one.add_argument("path")
    one = command("verify", _verify, "check every rule, values included")
    one.add_argument("path")
    one.add_argument("--like", metavar="PATH", help="the model in high precision, for a noise ratio of each layer")
    one = command("diff", _diff, "compare two checkpoints, of one dialect or of two")
    one.add_argument("a")
    one.add_argument("b")
    one = command("run", _run, "compute each quantized layer with random inputs, or continue a prompt")
    one.add_argument("path")
    one.add_argument("--tokens", type=int, default=4, help="rows of random inputs")
    one.add_argument("--prompt", metavar="TEXT", help="continue this text by the whole model (needs transformers)")
    one.add_argument("--new-tokens", type=int, default=32, metavar="N", help="the most tokens behind the prompt")
    one = command("convert", _convert, "write a checkpoint as another dialect, exactly unless --allow-ulp is given")
    one.add_argument("src")
    one.add_argument("dst")
    one.add_argument("--to", required=True, choices=[one.name for one in DIALECTS if not one.read_only])
    one.add_argument(
        "--filter",
        action="append",
        metavar="GLOB",
        help="write only these entries; with --requantize, quantize only these weights; can be repeated",
    )
    one.add_argument("--allow-ulp", action="store_true", help="accept scales that do not convert back exactly")
    one.add_argument("--requantize", metavar="SPEC", help="quantize the decoded values again")
    one.add_argument("--missing-input-scale", choices=MISSING[:2], default="raise")
    one.add_argument("--scale", type=float, choices=[1], help="1: codes without a scale are values")
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE")
    one.add_argument("--overwrite", action="store_true", help="replace a checkpoint in DST")
    return parser


if __name__ == "__main__":
    command_line.run(main)
