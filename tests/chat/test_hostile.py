"""Hostile templates, each batch in a process of its own with little memory: no failure takes the tests along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_BYTES = 400 << 20
"""Address space beyond what the interpreter has after its imports."""
RENDER_SECONDS = 0.2
LIMIT_CPU_SECONDS = 2.0
"""Of one attack: compiling it, `RENDER_SECONDS`, and what is left of the operation in which those end."""

CHILD = """
import json, runpy, sys, time
from edgellama.chat.limits import Limits
from edgellama.chat.messages import Message
from edgellama.chat.templates import ChatTemplate
from edgellama.errors import EdgellamaError
attacks = runpy.run_path(sys.argv[1])[sys.argv[2]]
if sys.platform == "linux":
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[3]),) * 2)
talk = [Message(role="user", content="secret of the user")]
for name in sys.argv[5:]:
    print(json.dumps({"begin": name}), flush=True)
    start = time.process_time()
    try:
        result = {"text": ChatTemplate(attacks[name], limits=Limits(seconds=float(sys.argv[4]))).render(talk)[:2000]}
    except EdgellamaError as error:
        result = {"error": type(error).__name__, "message": error.message, "advice": error.advice}
    result["seconds"] = time.process_time() - start
    print(json.dumps({"name": name} | result), flush=True)
"""


def outcomes(table: str, names: list[str]) -> dict[str, dict[str, object]]:
    """Run attacks in a child; one that kills or breaks it is reported by name."""
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(HERE / "hostile.py"),
        table,
        str(LIMIT_BYTES),
        str(RENDER_SECONDS),
        *names,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, encoding="utf-8")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    last = lines[-1] if lines else {}
    assert done.returncode == 0, f"{last} came last, then exit code {done.returncode}:\n{done.stderr[-2000:]}"
    return {line["name"]: line for line in lines if "name" in line}


def attacks(table: str) -> list[str]:
    import runpy

    return list(runpy.run_path(str(HERE / "hostile.py"))[table])


SECRETS = (
    "<class",
    "<function",
    "<built-in",
    "<bound",
    "<frame",
    "<module",
    "object at 0x",
    "uid=",
    "root:",
    "__main__",
)


def test_nothing_leaves_the_sandbox() -> None:
    names = attacks("ESCAPES")
    for name, outcome in outcomes("ESCAPES", names).items():
        if "error" in outcome:
            assert outcome["error"] == "TemplateError", (name, outcome)
            assert outcome["advice"], name
        said: str = str(outcome.get("text", "")) + str(outcome.get("message", ""))
        assert not any(secret in said for secret in SECRETS), (name, outcome)


BATCHES = 3


@pytest.mark.parametrize("batch", range(BATCHES))
def test_nothing_takes_long_or_much_memory(batch: int) -> None:
    names = attacks("BOMBS")[batch::BATCHES]
    found = outcomes("BOMBS", names)
    assert found.keys() == set(names)
    for name, outcome in found.items():
        if "error" in outcome:
            assert outcome["error"] in {"TemplateError", "RefusedError"}, (name, outcome)
            assert outcome["advice"], name
        assert float(str(outcome["seconds"])) < LIMIT_CPU_SECONDS, (name, outcome)
