"""The worker process: `python -m edgellama.runtime.worker`. Owns one engine; speaks frames on stdin and stdout.

Threads: the main one steps the engine; `reader` takes messages and turns cancel, abort and shutdown into an abort of
the running decode at once; `tokenizer` answers `Tokenize` while a step runs; `heartbeat` tells that we live; `writer`
writes. They start after the confinement, which binds only the thread that asks for it and those it starts.
stderr is for diagnostics: what native code prints, and Python's faults. No prompt or answer is written there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

# Before numpy is loaded: its BLAS would start threads that are of no use here and escape the confinement.
os.environ.update(GGML_NO_BACKTRACE="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

from edgellama.engine import factory
from edgellama.engine.base import Engine
from edgellama.errors import AbortedError, EdgellamaError, MemoryShortageError, UsageError
from edgellama.runtime import confine, heartbeat, jobs, parent, pipes
from edgellama.runtime.ends import EndTokens
from edgellama.runtime.exits import EXIT_INTERNAL, EXIT_TOLD
from edgellama.runtime.messages import (
    PROTOCOL,
    Abort,
    CallFailed,
    Cancel,
    EmbedTexts,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Probe,
    Shutdown,
    Tokenize,
    Tokens,
    ToWorker,
    WorkerFailed,
    decode_to_worker,
)
from edgellama.runtime.scheduler import Scheduler
from edgellama.runtime.tokenizing import PromptTokenizer

_GRACE_SECONDS = 1.0
"""For the main thread to leave a decode after the host has gone or said goodbye."""
_FLUSH_SECONDS = 5.0
"""For the host to read our last message."""
_PROGRESS_STEP = 0.01


class Worker:
    """One process, one engine."""

    def __init__(self, incoming: BinaryIO, outbox: pipes.Outbox, *, watch_parent: bool) -> None:
        self._incoming = incoming
        self._watch_parent = watch_parent
        self._outbox = outbox
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._loaded = threading.Event()
        self._taking = threading.Lock()
        self._early: list[ToWorker] = []
        """What came while the model was loading."""
        self._jobs: deque[Probe | EmbedTexts] = deque()
        self._in_job = False
        self._calls: queue.SimpleQueue[Tokenize] = queue.SimpleQueue()
        self._tokenizer: PromptTokenizer | None = None
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None
        self._load: Load | None = None
        self._load_ticks = 0
        self._load_told = 0.0
        self._load_aborted = False

    def run(self) -> None:
        """Say hello, load, serve until told to stop."""
        self._outbox.send(Hello(protocol=PROTOCOL, pid=os.getpid()))
        body = pipes.read_frame(self._incoming)
        first = Shutdown() if body is None else decode_to_worker(body)
        if isinstance(first, Shutdown):
            return
        if not isinstance(first, Load):
            raise UsageError(f"the first message is {type(first).__name__}, not Load")
        try:
            self._load_model(first)
        except AbortedError:
            if not self._stopping.is_set():
                raise
        self._serve()
        if self._engine is not None:
            self._engine.close()
        self._outbox.drain(_FLUSH_SECONDS)

    # ---- loading

    def _load_model(self, load: Load) -> None:
        begun = time.perf_counter()
        self._load = load
        make = factory(load.engine)
        confinement = self._confine(load)
        self._start_threads()
        engine = make(load.path, load.options, self._on_load_progress)
        control_texts = tuple(engine.tokenizer.control_texts())
        ends = EndTokens(engine.tokenizer, control_texts)
        self._tokenizer = PromptTokenizer(engine.tokenizer, control_texts)
        self._engine = engine
        self._loaded.set()
        tokenizer = engine.tokenizer
        message = Loaded(
            info=engine.info,
            capabilities=engine.capabilities,
            seconds=time.perf_counter() - begun,
            control_texts=control_texts,
            end_tokens=tuple(sorted(ends.ids)),
            bos=tokenizer.bos,
            bos_text=tokenizer.text_of(tokenizer.bos),
            eos_text=tokenizer.text_of(tokenizer.eos),
            adds_bos=tokenizer.adds_bos,
            confinement=confinement,
        )
        self._outbox.send(message)
        with self._taking:
            self._scheduler = Scheduler(engine, load.options, self._outbox.send, ends)
            for early in self._early:
                self._take(early)

    def _confine(self, load: Load) -> tuple[str, ...]:
        if not load.confine:
            return ()
        readable = confine.model_files(load.path, [lora.path for lora in load.options.loras])
        writable = tuple(map(Path, load.writable))
        return confine.apply(confine.Needs(readable, writable, gpu=load.options.gpu_layers != 0))

    def _start_threads(self) -> None:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the thread that waits for it
            self._start("signals", self._wait_for_term)
        if self._watch_parent:
            parent.watch()
        self._outbox.start()
        self._start("reader", self._read)
        self._start("tokenizer", self._answer_calls)
        heartbeat.start(self._beat, self._stopping)

    def _on_load_progress(self, fraction: float) -> None:
        if self._stopping.is_set() or self._load_aborted:
            raise AbortedError("loading was told to stop")
        before, self._load_ticks = self._load_ticks, self._load_ticks + 1
        if before == 0 or fraction >= self._load_told + _PROGRESS_STEP or fraction >= 1.0 > self._load_told:
            self._load_told = fraction
            self._outbox.send(LoadProgress(fraction))

    # ---- main thread

    def _serve(self) -> None:
        scheduler = self._scheduler
        while scheduler is not None and not self._stopping.is_set():
            self._work.clear()
            while self._jobs:
                self._run_job(self._jobs.popleft())
            if scheduler.idle:
                self._work.wait()
            else:
                scheduler.step()

    def _run_job(self, job: Probe | EmbedTexts) -> None:
        if self._engine is None or self._scheduler is None or self._load is None:
            return
        self._scheduler.forget_all()
        self._in_job = True
        try:
            work = jobs.probe if isinstance(job, Probe) else jobs.embed
            self._outbox.send(work(self._engine, self._load.options, job))  # type: ignore[arg-type]
        except EdgellamaError as error:
            if isinstance(job, Probe):
                raise
            self._outbox.send(_failed_call(job.call_id, error))
        finally:
            self._in_job = False

    # ---- other threads

    def _start(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            with boundary(self._outbox):
                target()

        threading.Thread(target=run, name=name, daemon=True).start()

    def _read(self) -> None:
        while (body := pipes.read_frame(self._incoming)) is not None:
            message = decode_to_worker(body)
            if isinstance(message, Shutdown):
                break
            with self._taking:
                self._take(message)
        self._leave()

    def _take(self, message: ToWorker) -> None:
        match message:
            case Tokenize():
                self._calls.put(message)
            case Abort():
                self._abort()
            case Load():
                raise UsageError("a worker loads one model only")
            case _ if self._scheduler is None:
                self._early.append(message)
            case Generate():
                self._scheduler.submit(message)
            case Cancel(request_id=request_id):
                self._scheduler.cancel(request_id)
            case Probe() | EmbedTexts():
                self._jobs.append(message)
        self._work.set()

    def _abort(self) -> None:
        self._load_aborted = not self._loaded.is_set()
        if self._scheduler is not None:
            self._scheduler.interrupt()
        if self._in_job and self._engine is not None:
            self._engine.abort()

    def _leave(self) -> NoReturn:
        """Let the main thread end in order; if it is stuck, end without it."""
        self._stopping.set()
        self._work.set()
        if self._engine is not None:
            self._engine.abort()
        time.sleep(_GRACE_SECONDS)
        os._exit(0)

    def _wait_for_term(self) -> None:
        if sys.platform != "win32":
            signal.sigwait({signal.SIGTERM})
            self._leave()

    def _answer_calls(self) -> None:
        self._loaded.wait()
        while self._tokenizer is not None:
            call = self._calls.get()
            try:
                tokens = self._tokenizer.tokenize(call.parts, add_bos=call.add_bos)
                self._outbox.send(Tokens(call_id=call.call_id, tokens=tuple(tokens)))
            except EdgellamaError as error:
                self._outbox.send(_failed_call(call.call_id, error))

    def _beat(self) -> None:
        engine, scheduler = self._engine, self._scheduler
        resident_bytes, peak_bytes = heartbeat.memory_bytes()
        beat = Heartbeat(
            busy=scheduler.busy if scheduler is not None else (),
            progress=self._load_ticks + (engine.progress() if engine is not None else 0),
            resident_bytes=resident_bytes,
            peak_bytes=peak_bytes,
        )
        self._outbox.beat(beat)
        if scheduler is not None:
            scheduler.remind()


def _failed_call(call_id: int, error: EdgellamaError) -> CallFailed:
    return CallFailed(call_id=call_id, kind=type(error).__name__, message=error.message, advice=error.advice)


@contextlib.contextmanager
def boundary(outbox: pipes.Outbox) -> Iterator[None]:
    """The edge of the process: whatever goes wrong inside is told to the host, and ends the process."""
    try:
        yield
    except EdgellamaError as error:
        _give_up(outbox, error, EXIT_TOLD)
    except MemoryError:
        short = MemoryShortageError(
            "the engine's process got no more memory", "close programs, or take a smaller context"
        )
        _give_up(outbox, short, EXIT_TOLD)
    except Exception as error:  # noqa: BLE001
        # Only places and types: a message may quote a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        sys.stderr.write(f"{frames}{type(error).__name__}\n")
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}"
        _give_up(outbox, EdgellamaError(f"internal fault of the engine's process: {cause}"), EXIT_INTERNAL)


def _give_up(outbox: pipes.Outbox, error: EdgellamaError, code: int) -> NoReturn:
    outbox.send_last(
        WorkerFailed(kind=type(error).__name__, message=error.message, advice=error.advice), _FLUSH_SECONDS
    )
    _end(code)


def _end(code: int) -> NoReturn:
    # Not sys.exit: destructors of native libraries and daemon threads must not turn an end into a crash.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run the worker on this process's stdin and stdout."""
    for name in ("SIGINT", "SIGHUP", "SIGBREAK"):  # the host decides what Ctrl-C and a closed terminal mean
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    watched = parent.arm()
    faulthandler.enable()
    try:
        incoming, outgoing = pipes.take_over()
    except OSError as error:
        sys.stderr.write(f"edgellama's host starts this program and talks to it by pipes: {error}\n")
        _end(EXIT_TOLD)
    outbox = pipes.Outbox(outgoing)
    stream = os.fdopen(incoming, "rb")  # never closed: that would wait for the thread that reads it
    with boundary(outbox):
        Worker(stream, outbox, watch_parent=not watched).run()
    _end(0)


if __name__ == "__main__":
    main()
