"""Runs a job in the measuring process and reports; a death of that process becomes an error with its reason."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from edgellama.errors import EngineCrashError, EngineError, rebuild
from edgellama.evaluate.jobs import Answer, Failed, Job, Loading, Measured, PerplexityJob, Progress, decode_answer
from edgellama.files import sync_folder
from edgellama.runtime import parent
from edgellama.runtime.exits import OutOfMemoryKills, describe

_LOG_LINES = 5


def command() -> list[str]:
    """The command of the measuring process. `-P` keeps modules of the current folder out of it."""
    return [sys.executable, "-P", "-m", "edgellama.evaluate.child"]


OnProgress = Callable[[Loading | Progress], None]


def measure(job: Job, on_progress: OnProgress | None = None) -> Measured:
    """Run a job to its end. Raises what the engine raises, and EngineCrashError when its process dies."""
    if not isinstance(job, PerplexityJob) or job.save_logits is None:
        return _run(job, on_progress)
    target = Path(job.save_logits).absolute()
    # The process may be killed while it writes: what it leaves then must be ours to remove.
    with tempfile.TemporaryDirectory(prefix=".edgellama-", dir=target.parent) as folder:
        written = Path(folder) / "logits"
        measured = _run(msgspec.structs.replace(job, save_logits=str(written)), on_progress)
        written.replace(target)
    sync_folder(target.parent)
    return measured


def _run(job: Job, on_progress: OnProgress | None) -> Measured:
    # Its own session or group: Ctrl-C in the terminal is for us, not for the engine.
    apart: dict[str, Any] = (
        {"creationflags": 0x00000200 | 0x08000000} if sys.platform == "win32" else {"start_new_session": True}
    )
    kills = OutOfMemoryKills()
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONUTF8": "1"} | parent.child_environment()
        with subprocess.Popen(
            command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, **apart
        ) as child:
            keep = parent.bind(child.pid)
            try:
                return _listen(child, job, on_progress)
            except _EndedError:
                code = child.wait()
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()[-_LOG_LINES:]
                raise _crash(code, lines, out_of_memory=kills.grew()) from None
            finally:
                child.kill()
                del keep


class _EndedError(Exception):
    """The pipe ended before the last answer."""


def _listen(child: subprocess.Popen[bytes], job: Job, on_progress: OnProgress | None) -> Measured:
    if child.stdin is None or child.stdout is None:
        raise EngineError("the measuring process has no pipes")
    with contextlib.suppress(OSError):  # it died at once: the pipe from it tells
        child.stdin.write(msgspec.json.encode(job) + b"\n")
        child.stdin.close()
    for line in child.stdout:
        answer: Answer = decode_answer(line)
        if isinstance(answer, Measured):
            return answer
        if isinstance(answer, Failed):
            raise rebuild(answer.kind, answer.message, answer.advice)
        if on_progress is not None:
            on_progress(answer)
    raise _EndedError


def _crash(code: int, lines: list[str], *, out_of_memory: bool) -> EngineCrashError:
    message = f"the engine's process {describe(code, out_of_memory=out_of_memory)} while it was measured"
    return EngineCrashError(
        "\n".join([message, *(f"  {line}" for line in lines)]),
        "`edgellama run MODEL` finds settings this machine can compute with; try --gpu-layers 0",
    )
