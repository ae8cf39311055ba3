"""The measuring process: `python -m edgellama.evaluate.child`. One job on stdin, answers as JSON lines on stdout.

A crash of the engine ends this process and not the command; the process is confined as the worker is.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

# Before numpy is loaded: threads of its BLAS are of no use here, and would escape the confinement.
os.environ.update(GGML_NO_BACKTRACE="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import msgspec

from edgellama.errors import EdgellamaError, MemoryShortageError
from edgellama.evaluate.jobs import (
    Answer,
    DivergenceJob,
    Failed,
    ImportanceJob,
    Job,
    Loading,
    PerplexityJob,
    decode_job,
)
from edgellama.runtime import confine, parent, pipes
from edgellama.runtime.exits import EXIT_INTERNAL, EXIT_TOLD

Tell = Callable[[Answer], None]


def _files(job: Job) -> tuple[list[str], list[str]]:
    """Files that are read and files that are written, besides the model."""
    if isinstance(job, PerplexityJob):
        return [job.text], [job.save_logits] if job.save_logits else []
    if isinstance(job, DivergenceJob):
        return [job.base], []
    return [job.text, *job.merge], [job.output]


def _confine(job: Job) -> None:
    read, written = _files(job)
    model = confine.model_files(job.model, [lora.path for lora in job.options.loras])
    folders = tuple(Path(name).absolute().parent for name in written)
    if job.engine == "fake":  # it counts its faults beside the script
        folders += (Path(job.model).absolute().parent,)
    readable = tuple(Path(name).absolute() for name in read)
    confine.apply(confine.Needs((*model, *readable), folders, gpu=job.options.gpu_layers != 0))


def run(job: Job, tell: Tell) -> Answer:
    """Do a job; its last answer."""
    told = 0.0

    def loading(fraction: float) -> None:
        nonlocal told
        if fraction >= told + 0.02:
            told = fraction
            tell(Loading(fraction))

    if isinstance(job, ImportanceJob):
        from edgellama.evaluate.importance import collect

        return collect(job, tell, loading)
    from edgellama.evaluate.measure import divergence, perplexity

    return perplexity(job, tell, loading) if isinstance(job, PerplexityJob) else divergence(job, tell, loading)


def _end(outgoing: BinaryIO, last: Answer, code: int) -> NoReturn:
    try:
        outgoing.write(msgspec.json.encode(last) + b"\n")
        outgoing.flush()
        sys.stderr.flush()
    except OSError:
        pass
    os._exit(code)  # destructors of native libraries must not turn an end into a crash


def main() -> NoReturn:
    """Run one job on this process's stdin and stdout."""
    for name in ("SIGINT", "SIGHUP", "SIGBREAK"):  # the parent decides what Ctrl-C means
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    armed = parent.arm()
    faulthandler.enable()
    incoming, outgoing_descriptor = pipes.take_over()
    outgoing = os.fdopen(outgoing_descriptor, "wb")

    def tell(answer: Answer) -> None:
        outgoing.write(msgspec.json.encode(answer) + b"\n")
        outgoing.flush()

    try:
        with os.fdopen(incoming, "rb") as stream:
            job = decode_job(stream.readline())
        _confine(job)
        if not armed:
            parent.watch()
        last, code = run(job, tell), 0
    except EdgellamaError as error:
        last, code = Failed(type(error).__name__, error.message, error.advice), EXIT_TOLD
    except MemoryError:
        last, code = _short_of_memory(), EXIT_TOLD
    except BrokenPipeError:  # the parent is gone
        os._exit(0)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        last, code = Failed("EdgellamaError", f"{where}{error.strerror or error}"), EXIT_TOLD
    except Exception as error:  # noqa: BLE001 - the boundary of the process: whatever it is must be told
        sys.excepthook(type(error), error, error.__traceback__)
        last, code = Failed("EngineError", f"a defect in edgellama: {type(error).__name__}: {error}"), EXIT_INTERNAL
    _end(outgoing, last, code)


def _short_of_memory() -> Failed:
    return Failed(MemoryShortageError.__name__, "memory ran out while measuring", "use a smaller --ctx or model")


if __name__ == "__main__":
    main()
