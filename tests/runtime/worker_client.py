"""A host of the simplest kind for tests: starts a worker with real pipes and reads its messages on a thread."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Script, write_script
from edgellama.runtime import parent
from edgellama.runtime.messages import (
    Finished,
    FromWorker,
    Generate,
    Hello,
    Load,
    Loaded,
    Step,
    ToWorker,
    decode_from_worker,
    frame,
    frame_length,
)
from edgellama.sampling.options import SamplingOptions

T = TypeVar("T")
PATIENCE = 30.0


class Client:
    """A worker and its pipes."""

    def __init__(self, *, read: bool = True, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgellama.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | parent.child_environment() | (environment or {}),
        )
        self.messages: queue.Queue[FromWorker | None] = queue.Queue()
        self.seen: list[FromWorker] = []
        self._gate = threading.Event()
        if read:
            self._gate.set()
        self._stderr: list[bytes] = []
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_stderr)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        self._gate.wait()
        stream = self.process.stdout
        assert stream is not None
        while len(header := stream.read(4)) == 4:
            length = frame_length(header)
            body = stream.read(length)
            if len(body) < length:  # it left while the pipe was full
                break
            self.messages.put(decode_from_worker(body))
        self.messages.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        while chunk := self.process.stderr.read1(1 << 16):  # type: ignore[attr-defined]
            self._stderr.append(chunk)

    @property
    def stderr(self) -> str:
        return b"".join(self._stderr).decode("utf-8", "replace")

    def read_from_now_on(self) -> None:
        self._gate.set()

    def send(self, *messages: ToWorker) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(map(frame, messages)))
        self.process.stdin.flush()

    def until(self, kind: type[T], wanted: Callable[[T], bool] = lambda _: True) -> T:
        """The next message of a kind; fails when the worker ends first, or says only other things for too long."""
        end = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < end, f"no {kind.__name__}: {self.stderr[-2000:]}"
            message = self.messages.get(timeout=PATIENCE)
            assert message is not None, f"the worker ended with {self.process.wait(PATIENCE)}: {self.stderr[-2000:]}"
            self.seen.append(message)
            if isinstance(message, kind) and wanted(message):
                return message

    def load(self, path: Path, options: EngineOptions | None = None, **more: Any) -> Loaded:
        self.until(Hello)
        more.setdefault("confine", False)
        self.send(Load(path=str(path), options=options or EngineOptions(), engine=more.pop("engine", "fake"), **more))
        return self.until(Loaded)

    def answer(self, request: Generate) -> tuple[str, list[Step], Finished]:
        self.send(request)
        end = self.until(Finished, lambda m: m.request_id == request.request_id)
        steps = [m for m in self.seen if isinstance(m, Step) and m.request_id == request.request_id]
        return "".join(step.text for step in steps) + end.text, steps, end

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait(PATIENCE)
        self._gate.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def worker(**arguments: Any) -> Iterator[Client]:
    client = Client(**arguments)
    try:
        yield client
    finally:
        client.close()


def script(folder: Path, **fields: Any) -> Path:
    return write_script(folder / "model.fake.json", Script(**fields))


def generate(request_id: str = "a", prompt: str = "Hello?", **fields: Any) -> Generate:
    fields.setdefault("sampling", SamplingOptions(temperature=0.0))
    fields.setdefault("max_tokens", 1000)
    return Generate(request_id=request_id, prompt=tuple(prompt.encode()), **fields)


def gone(pid: int, within_seconds: float = 10.0) -> bool:
    """Whether a process that is not our child is gone (or a zombie) in time."""
    end = time.monotonic() + within_seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in {"Z", "X"}:
                time.sleep(0.05)
                continue
        return True
    return False
