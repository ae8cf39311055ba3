"""Hosts on the fake engine with real worker processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgellama.chat.messages import Message
from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Fault, Script, write_script
from edgellama.runtime.base import Done, Event, Failed, GenerateRequest, Notice, ReasoningDelta, TextDelta
from edgellama.runtime.host import Host
from edgellama.runtime.ladder import Start
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.watchdog import Limits

SAY = "The answer: naïve façade, 北京, ☃ and 👩‍🚀 — all in one piece, then a long tail of words."
QUICK = Limits(hello=10.0, load=2.0, hang=0.6, silence=1.5, abort_grace=0.2, shutdown=2.0)
_ids = itertools.count()


@dataclass
class Outcome:
    """What a consumer saw of one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ReasoningDelta))

    @property
    def end(self) -> Done | Failed:
        ends = [e for e in self.events if isinstance(e, Done | Failed)]
        assert len(ends) == 1, f"{len(ends)} terminal events"
        assert self.events[-1] is ends[0]
        return ends[0]

    @property
    def done(self) -> Done:
        assert isinstance(self.end, Done), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end

    def notices(self, kind: str) -> list[str]:
        return [e.text for e in self.events if isinstance(e, Notice) and e.kind == kind]


@dataclass
class Lab:
    """Makes hosts on scripts in one folder, and sees to it that nothing of them stays."""

    folder: Path
    hosts: list[Host] = field(default_factory=list)

    def script(self, *faults: Fault, name: str = "model", **fields: Any) -> Path:
        fields = {"say": SAY, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}|"} | fields
        return write_script(self.folder / f"{name}.fake.json", Script(faults=faults, **fields))

    def make(self, script: Path, options: EngineOptions | None = None, **fields: Any) -> Host:
        start_fields = {"limits": QUICK, "writable": (str(self.folder),), "probe_seconds": 0.0}
        start_fields |= {k: fields.pop(k) for k in list(fields) if k in {"limits", "probe_seconds", "command"}}
        spec = ModelSpec.from_file(script, engine="fake", options=options)
        host = Host(spec, start=Start(**start_fields), cache_folder=self.folder / "cache", **fields)
        self.hosts.append(host)
        return host

    async def host(self, *faults: Fault, options: EngineOptions | None = None, **fields: Any) -> Host:
        """A started host; `fields` are those of the script."""
        host = self.make(self.script(*faults, **fields), options)
        await host.start()
        return host


async def ask(
    host: Host, text: str = "hello", *, on_text: Callable[[int], object] | None = None, **fields: Any
) -> Outcome:
    """Everything a request gives; `on_text` is called with the number of text events so far."""
    request = request_for(text, **fields)
    outcome = Outcome()
    pieces = 0
    async with asyncio.timeout(60):
        async for event in host.generate(request):
            outcome.events.append(event)
            if isinstance(event, TextDelta) and on_text is not None:
                pieces += 1
                on_text(pieces)
    return outcome


def request_for(text: str = "hello", **fields: Any) -> GenerateRequest:
    messages: Iterable[Message] = fields.pop("messages", (Message(role="user", content=text),))
    fields.setdefault("request_id", f"r{next(_ids)}")
    if "prompt" in fields or "tokens" in fields:
        messages = ()
    return GenerateRequest(messages=tuple(messages), **fields)


Ask = Callable[..., Awaitable[Outcome]]


@pytest.fixture(name="ask")
def ask_fixture() -> Ask:
    return ask


@pytest.fixture
def make_request() -> Callable[..., GenerateRequest]:
    return request_for


@pytest.fixture
def make_lab() -> type[Lab]:
    return Lab


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for host in made.hosts:
        await host.close()
    left = [p for p in psutil.Process().children(recursive=True) if "edgellama.runtime.worker" in " ".join(p.cmdline())]
    assert not left, "worker processes were left behind"
