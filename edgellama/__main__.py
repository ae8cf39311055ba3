"""The `edgellama` command: answers `--version` before anything else is imported, hands all other words to the cli."""

from __future__ import annotations

import sys

from edgellama import __version__

_INTERRUPTED = 130


def _print_version() -> int:
    if sys.stdout is None:
        return 0
    try:
        sys.stdout.write(f"edgellama {__version__}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None
        return 0
    except OSError as error:
        sys.stdout = None
        sys.stderr.write(f"error: standard output: {error.strerror}\n")
        return 1
    return 0


def main() -> int:
    """Run the command line; returns its exit code."""
    if sys.argv[1:] == ["--version"]:
        return _print_version()
    try:
        from edgellama.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while still importing: the cli handles all later ones
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
