"""What the commands share: `--config.a.b=value` overrides and errors of one sentence."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from fastweights.errors import UserError, check


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parses known arguments; what starts with `--config.` comes back as overrides `a.b=value`.

    Both `--config.a.b=value` and `--config.a.b value` are read; a bare `--config.a.b` means true.
    """
    args, rest = parser.parse_known_args(argv)
    overrides: list[str] = []
    while rest:
        item = rest.pop(0)
        check(
            item.startswith("--config."),
            f"argument '{item}' is not known; see --help (config fields are --config.a.b=value).",
        )
        name, separator, value = item.removeprefix("--config.").partition("=")
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides.append(f"{name}={value}")
    return args, overrides


def run(main: Callable[[], int | None]) -> None:
    """Runs a command; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        code = main() or 0
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (such as `head`) has gone; that is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        # A full disk or a folder that went away under a run; what was saved before is whole.
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror}{where}; see to that and start again.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
