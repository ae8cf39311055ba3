"""A home of its own for every test, and a scripted Runtime in place of the host."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellama.errors import UnsupportedError
from edgellama.runtime.base import (
    Done,
    Event,
    GenerateRequest,
    ModelStatus,
    RuntimeCapabilities,
    Status,
    TextDelta,
    Timings,
    Usage,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders in a temporary place, and an environment that is put back afterwards."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("EDGELLAMA_", "HF_")):
            del os.environ[name]
    root = tmp_path / "home"
    for folder in ("config", "data", "models", "cache", "state"):
        os.environ[f"EDGELLAMA_{folder.upper()}_DIR"] = str(root / folder)
    yield root
    monkeypatch.undo()  # its values go back first: some were set after ours
    os.environ.clear()
    os.environ.update(before)


class ScriptedRuntime:
    """A Runtime that plays events back; `answers` are played one per request, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[list[Event | BaseException]] = []
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.start_error: BaseException | None = None
        self.hold_after: int | None = None
        """Events after which a request waits until it is cancelled."""
        self.closed = False

    def say(self, *pieces: str, **end: Any) -> None:
        """Add an answer of text pieces."""
        usage = Usage(prompt_tokens=3, completion_tokens=len(pieces))
        done = Done(
            **{"finish_reason": "stop", "usage": usage, "timings": Timings(), "tokens": (7, 8), "seed": 1} | end
        )
        self.answers.append([*(TextDelta(piece) for piece in pieces), done])

    @property
    def capabilities(self) -> RuntimeCapabilities:
        return RuntimeCapabilities()

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        for number, event in enumerate(answer):
            if number == self.hold_after:
                while request.request_id not in self.cancelled:
                    await asyncio.sleep(0.005)
                yield Done(finish_reason="cancelled", usage=Usage(completion_tokens=number), timings=Timings())
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        raise UnsupportedError("no embeddings")

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    async def count(self, request: GenerateRequest) -> int:
        return 0

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def status(self) -> Status:
        model = ModelStatus(
            name="scripted",
            path="/models/scripted.gguf",
            engine="fake",
            worker_pid=1,
            bytes=1000,
            requests=len(self.requests),
            context_tokens=4096,
        )
        return Status(host_pid=os.getpid(), models=(model,))

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedRuntime:
    """Commands talk to this Runtime, whatever model they name."""
    from edgellama.cli import wiring

    runtime = ScriptedRuntime()
    stored = SimpleNamespace(entry=None, name="scripted")
    monkeypatch.setattr(wiring, "find_model", lambda *_arguments: stored)
    monkeypatch.setattr(wiring, "make_spec", lambda *_arguments: None)

    async def make_runtime(*_arguments: object) -> ScriptedRuntime:
        return runtime

    monkeypatch.setattr(wiring, "make_runtime", make_runtime)
    return runtime


class Result:
    """What a call of the command line came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `edgellama WORDS…` in this process with `stdin` as its standard input."""
    from edgellama.cli.main import main

    def run(*words: str, stdin: str | bytes = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run
