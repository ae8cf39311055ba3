"""One worker process: start it, talk to it, notice that it died or hangs, and say how."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from edgellama import errors
from edgellama.chat.messages import PromptPart
from edgellama.errors import EngineCrashError
from edgellama.runtime import exits, parent
from edgellama.runtime.messages import (
    PROTOCOL,
    Abort,
    CallFailed,
    Embedded,
    EmbedTexts,
    Finished,
    FromWorker,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Prefilled,
    Probe,
    Probed,
    RequestFailed,
    Shutdown,
    Step,
    Tokenize,
    Tokens,
    ToWorker,
    WorkerFailed,
    decode_from_worker,
    frame,
    frame_length,
)
from edgellama.runtime.watchdog import Limits, Watchdog

RequestMessage = Prefilled | Step | Finished | RequestFailed
Phase = Literal["start", "load", "probe", "serve", "idle"]
Cause = Literal["exit", "hang", "silent", "garbage", "failed", "closed"]
_T = TypeVar("_T")
_LOG_BYTES = 64 << 10
_LOG_LINES = 40
_ILLEGAL = frozenset({-4, 0xC000001D, 0xC000001D - (1 << 32)})
"""SIGILL, and STATUS_ILLEGAL_INSTRUCTION as Windows or a signed reading of it gives it."""
_KILLED = frozenset({-9, 137, 0xC0000017, 0xC0000017 - (1 << 32), 0xC000012D, 0xC000012D - (1 << 32)})
"""SIGKILL, and Windows' two ways to say that there is no memory."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a worker is gone."""

    phase: Phase
    cause: Cause
    returncode: int | None
    words: str
    log: tuple[str, ...] = ()
    failure: WorkerFailed | None = None
    """What it reported before it left."""

    @property
    def killed(self) -> bool:
        """Whether someone else killed it, most likely the system for want of memory."""
        if self.failure is not None:
            return self.failure.kind == "MemoryShortageError"
        return self.cause == "exit" and self.returncode in _KILLED

    @property
    def illegal_instruction(self) -> bool:
        """Whether the processor refused an instruction: trying again at the same settings is useless."""
        return self.cause == "exit" and self.returncode in _ILLEGAL


class WorkerDiedError(EngineCrashError):
    """The worker is gone; `death` says why."""

    def __init__(self, death: Death) -> None:
        super().__init__(f"the engine's process {death.words}", "")
        self.death = death


def worker_command() -> list[str]:
    """The command of a worker. `-P` keeps modules of the current folder out of it."""
    return [sys.executable, "-P", "-m", "edgellama.runtime.worker"]


def _environment() -> dict[str, str]:
    # An assert of ggml would attach a debugger to print a backtrace, and stop the process for seconds.
    return os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONUTF8": "1"} | parent.child_environment()


class Worker:
    """A running worker. Made by `spawn`; every call raises `WorkerDiedError` once the process is gone."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: Limits, kills: exits.OutOfMemoryKills | None = None
    ) -> None:
        self._process = process
        self._limits = limits
        self._kills = kills or exits.OutOfMemoryKills()
        self._job = parent.bind(process.pid)
        self._phase: Phase = "start"
        self._calls: dict[object, asyncio.Future[FromWorker]] = {}
        self._requests: dict[str, asyncio.Queue[RequestMessage | Death]] = {}
        self._ids = itertools.count(1)
        self._cause: Cause | None = None
        self._cause_words = ""
        self._failure: WorkerFailed | None = None
        self._log: deque[bytes] = deque()
        self._log_bytes = 0
        self._watchdog = Watchdog(limits)
        self.hello: Hello | None = None
        self.loaded: Loaded | None = None
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.on_load_progress: Callable[[float], None] | None = None
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        pipes = (process.stdin, process.stdout, process.stderr)
        if pipes[0] is None or pipes[1] is None or pipes[2] is None:
            raise ValueError("a worker's three streams must be pipes")
        self._stdin = pipes[0]
        tasks = (self._read(pipes[1]), self._read_log(pipes[2]), self._watch())
        self._tasks = [asyncio.create_task(task) for task in tasks]
        self._reaper = asyncio.create_task(self._reap())

    @classmethod
    async def spawn(cls, command: Sequence[str] | None = None, limits: Limits | None = None) -> Worker:
        """Start the process; it says hello later. Raises `EngineCrashError` when the system refuses to start one."""
        # Its own session or group: Ctrl-C in the terminal is for us, not for the worker.
        apart: dict[str, Any] = (
            {"creationflags": 0x00000200 | 0x08000000}  # CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW
            if sys.platform == "win32"
            else {"start_new_session": True}
        )
        kills = exits.OutOfMemoryKills()
        try:
            process = await asyncio.create_subprocess_exec(
                *(command or worker_command()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                **apart,
            )
        except OSError as error:
            raise EngineCrashError(
                f"cannot start the engine's process: {error.strerror or error}",
                "too many processes or too little memory; close something and try again",
            ) from error
        return cls(process, limits or Limits(), kills)

    # ---- what it can be asked

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it may still be used."""
        return not self.death.done() and self._cause is None

    async def ready(self) -> Hello:
        """Wait for its hello."""
        hello = self.hello if self.hello is not None else await self._call(Hello, None)
        if hello.protocol != PROTOCOL:
            self.condemn("garbage", f"speaks protocol {hello.protocol}, this version speaks {PROTOCOL}")
            raise WorkerDiedError(await self.death)
        return hello

    async def load(self, message: Load) -> Loaded:
        """Load a model. Raises what the worker reports (`EngineLoadError`, `InvalidFileError`, …)."""
        self._phase = "load"
        self.loaded = await self._call(Loaded, message)
        self._phase = "idle"
        return self.loaded

    async def probe(self, message: Probe) -> Probed:
        """Decode a probe prompt and return its logits."""
        self._phase = "probe"
        probed = await self._call(Probed, message)
        self._phase = "idle"
        return probed

    async def tokenize(self, parts: Sequence[PromptPart], *, add_bos: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt; answered also while a step runs."""
        call_id = next(self._ids)
        message = Tokenize(call_id=call_id, parts=tuple(parts), add_bos=add_bos)
        try:
            async with asyncio.timeout(self._limits.call):
                return (await self._call(Tokens, message, call_id)).tokens
        except TimeoutError:
            self.condemn("hang", f"did not finish tokenizing in {self._limits.call:g} s and was killed")
            raise WorkerDiedError(await self.death) from None

    async def embed(self, texts: Sequence[str]) -> Embedded:
        """Embedding vectors of texts."""
        call_id = next(self._ids)
        return await self._call(Embedded, EmbedTexts(call_id=call_id, texts=tuple(texts)), call_id)

    def open(self, request_id: str) -> asyncio.Queue[RequestMessage | Death]:
        """The messages of a request to come; its death ends them."""
        queue: asyncio.Queue[RequestMessage | Death] = asyncio.Queue()
        if self.death.done():
            queue.put_nowait(self.death.result())
        else:
            self._requests[request_id] = queue
            self._watchdog.message()
        return queue

    def forget(self, request_id: str) -> None:
        """Messages of this request are of no interest any more."""
        self._requests.pop(request_id, None)

    def send(self, message: ToWorker) -> None:
        """Queue a message for the pipe. A broken pipe is told by the worker's death, not here."""
        if not self._stdin.is_closing():
            self._stdin.write(frame(message))

    def log_lines(self, count: int = _LOG_LINES) -> tuple[str, ...]:
        """The last lines of its stderr."""
        lines = b"".join(self._log).decode("utf-8", "replace").splitlines()
        return tuple(line for line in lines if line.strip())[-count:]

    async def close(self) -> None:
        """End it: politely, then by force. Returns when the process is gone."""
        if not self.death.done():
            self._cause = self._cause or "closed"
            with contextlib.suppress(OSError, RuntimeError):
                self.send(Shutdown())
                self._stdin.close()
            await asyncio.wait([self.death], timeout=self._limits.shutdown)
        self.kill()
        await asyncio.shield(self._reaper)

    def kill(self) -> None:
        """End it by force, now."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _call(self, kind: type[_T], message: ToWorker | None, call_id: int | None = None) -> _T:
        key: object = kind if call_id is None else call_id
        if self.death.done():
            raise WorkerDiedError(self.death.result())
        future: asyncio.Future[FromWorker] = asyncio.get_running_loop().create_future()
        self._calls[key] = future
        self._watchdog.message()
        try:
            if message is not None:
                self.send(message)
            answer = await future
        finally:
            self._calls.pop(key, None)
        if isinstance(answer, CallFailed | WorkerFailed):
            raise errors.rebuild(answer.kind, answer.message, answer.advice)
        if not isinstance(answer, kind):
            self.condemn("garbage", f"answered with {type(answer).__name__} and was killed")
            raise WorkerDiedError(await self.death)
        return answer

    # ---- what it says

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(4)
                body = await reader.readexactly(frame_length(header))
                self._take(decode_from_worker(body))
        except (asyncio.IncompleteReadError, OSError):
            if self._cause is None:
                # An exit closes the pipe a moment before it can be reaped; a living process must not close it.
                done, _ = await asyncio.wait([self._exit()], timeout=self._limits.abort_grace)
                if not done:
                    self.condemn("garbage", "closed its pipe and was killed")
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self.condemn("garbage", f"sent garbage ({str(error)[:200]}) and was killed")

    def _exit(self) -> asyncio.Task[int]:
        return asyncio.create_task(self._process.wait())

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            self.resident_bytes = max(0, message.resident_bytes)
            self.peak_bytes = max(self.peak_bytes, message.peak_bytes, message.resident_bytes)
            self._watchdog.heartbeat(message.progress)
            return
        self._watchdog.message()
        match message:
            case Hello():
                self.hello = message
                self._resolve(Hello, message)
            case LoadProgress(fraction=fraction):
                if self.on_load_progress is not None:
                    self.on_load_progress(min(max(fraction, 0.0), 1.0))
            case Loaded() | Probed():
                self._resolve(type(message), message)
            case Tokens() | Embedded() | CallFailed():
                self._resolve(message.call_id, message)
            case WorkerFailed():
                self._failure = message
            case RequestFailed(kind="AbortedError"):
                # It heeded the watchdog's abort. What hung once is not trusted to be in order afterwards.
                self.condemn("hang", f"made no progress for {self._limits.hang:g} s and was stopped")
            case _:
                if (queue := self._requests.get(message.request_id)) is not None:
                    queue.put_nowait(message)

    def _resolve(self, key: object, message: FromWorker) -> None:
        future = self._calls.get(key)
        if future is not None and not future.done():
            future.set_result(message)

    async def _read_log(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                self._log.append(chunk)
                self._log_bytes += len(chunk)
                while self._log_bytes > _LOG_BYTES and len(self._log) > 1:
                    self._log_bytes -= len(self._log.popleft())

    # ---- the watchdog

    def _allowed(self) -> float | None:
        """Seconds without progress that are normal now; None when nothing is due."""
        if self._phase == "load":
            return self._limits.load
        if self._phase == "start":
            return self._limits.hello
        return self._limits.hang if self._requests or Probed in self._calls or self._embedding() else None

    def _embedding(self) -> bool:
        return any(isinstance(key, int) for key in self._calls)

    async def _watch(self) -> None:
        before = time.monotonic()
        while self._cause is None:
            await asyncio.sleep(self._limits.tick)
            now = time.monotonic()
            allowed = self._allowed()
            finding = self._watchdog.look(now - before, allowed, expects_beats=self._phase != "start")
            before = now
            if finding == "silent":
                self.condemn("silent", f"sent nothing for {self._limits.silence:g} s and was killed")
            elif finding == "abort" and self.hello is not None:
                self.send(Abort())
            elif finding in {"abort", "hang"}:
                self.condemn("hang", f"made no progress for {allowed or 0:g} s and was killed")

    # ---- its end

    def condemn(self, cause: Cause, words: str) -> None:
        """Kill it, for the reason told; `words` follow "the engine's process"."""
        if self._cause is None:
            self._cause, self._cause_words = cause, words
        self.kill()

    async def _reap(self) -> None:
        returncode = await self._process.wait()
        # What it wrote before it died is still in the pipes.
        await asyncio.wait(self._tasks[:2], timeout=self._limits.abort_grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_pipes()
        death = self._describe(returncode)
        self.death.set_result(death)
        failure = death.failure
        for future in self._calls.values():
            if future.done():
                continue
            if failure is not None:
                future.set_result(failure)
            else:
                future.set_exception(WorkerDiedError(death))
        for queue in self._requests.values():
            queue.put_nowait(death)

    def _describe(self, returncode: int) -> Death:
        cause: Cause = self._cause or ("failed" if self._failure is not None else "exit")
        starved = cause == "exit" and self._kills.grew()
        words = self._cause_words or exits.describe(returncode, out_of_memory=starved)
        if self._failure is not None:
            words = f"failed: {self._failure.message}"
        return Death(self._phase_now(), cause, returncode, words, self.log_lines(), self._failure)

    def _phase_now(self) -> Phase:
        return "serve" if self._requests and self._phase == "idle" else self._phase

    def _close_pipes(self) -> None:
        self._stdin.close()
        if self._job is not None:
            self._job.close()
        transport = getattr(self._process, "_transport", None)
        if transport is not None:  # asyncio has no public way to drop pipes that a grandchild may still hold
            transport.close()
