"""`scripts/device_check`: set up once, then run the checks of `scripts/devicecheck` inside the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bootstrap import options as own
from bootstrap.setup import Setup, told

HELP = """\
Check on a machine with a GPU what no other machine can show: that weights go to the device, that its numbers agree with
the CPU's for every attention kernel and cache type, that the safety ladder holds, how fast 1, 8 and 64 sequences run.

  ./scripts/device_check                      with the default model
  ./scripts/device_check --model FILE.gguf    with a larger one
  ./scripts/device_check --json               one JSON object per check: check, outcome, detail, figures

Options of the set-up: --backend, --wheelhouse DIR, --rebuild, as in ./scripts/chat --help.
Exit code: 0 all checks passed, or there is no GPU here; 1 a check failed, or the GPU here is not used.
--require-device makes a missing GPU a failure.
"""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    with told() as codes:
        options = own.parse(arguments)
        if options.help:
            sys.stdout.write(HELP)
            return 0
        setup = Setup(options, {"llamacpp"}, with_model=True)
        if not setup.is_ready():
            setup.make()
    if codes:
        return codes[0]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PYTHONSAFEPATH": "1"}
    try:
        return subprocess.call([setup.python, "-m", "devicecheck", *options.rest], env=environ)
    except KeyboardInterrupt:
        return 130
