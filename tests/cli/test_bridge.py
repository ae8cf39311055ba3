"""The bridge between the main thread and the runtime's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edgellama.chat.messages import Message
from edgellama.cli.bridge import Bridge
from edgellama.errors import EngineLoadError
from edgellama.runtime.base import Done, GenerateRequest, TextDelta


def made(runtime: Any) -> Callable[[], Awaitable[Any]]:
    async def make() -> Any:
        return runtime

    return make


def request(request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=request_id, messages=(Message(role="user", content="x"),))


def test_events_come_in_order_and_end(scripted: Any) -> None:
    scripted.say("a", "b")
    with Bridge(made(scripted)) as bridge:
        events = list(bridge.generate(request()))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a", "b"]
    assert isinstance(events[-1], Done)
    assert scripted.closed


def test_cancel_reaches_a_request_the_runtime_has_not_seen_yet(scripted: Any) -> None:
    """The runtime ignores unknown ids, so one single early cancel would be lost."""
    seen: list[str] = []
    original = scripted.cancel

    async def ignores_the_first(request_id: str) -> None:
        seen.append(request_id)
        if len(seen) > 1:
            await original(request_id)

    scripted.cancel = ignores_the_first
    scripted.say("a", "b")
    scripted.hold_after = 1
    with Bridge(made(scripted)) as bridge:
        events = bridge.generate(request())
        assert next(events) == TextDelta("a")
        bridge.cancel("r")
        end = list(events)[-1]
    assert isinstance(end, Done)
    assert end.finish_reason == "cancelled"


def test_a_start_that_fails_is_raised_and_closed(scripted: Any) -> None:
    scripted.start_error = EngineLoadError("no")
    with Bridge(made(scripted)) as bridge, pytest.raises(EngineLoadError, match="no"):
        bridge.wait_started()
    assert scripted.closed


def test_a_start_that_takes_long_can_be_given_up(scripted: Any) -> None:
    begun = threading.Event()

    async def start() -> None:
        begun.set()
        await asyncio.sleep(3600)

    scripted.start = start
    bridge = Bridge(made(scripted))
    assert begun.wait(10)
    bridge.close()
    bridge.close()
    assert scripted.closed


def test_no_thread_is_left(scripted: Any) -> None:
    scripted.say("a")
    before = threading.active_count()
    with Bridge(made(scripted)) as bridge:
        list(bridge.generate(request()))
    assert threading.active_count() == before


def test_an_exception_of_the_runtime_comes_out(scripted: Any) -> None:
    scripted.answers = [[TextDelta("a"), ZeroDivisionError("x")]]
    with Bridge(made(scripted)) as bridge, pytest.raises(ZeroDivisionError):
        list(bridge.generate(request()))
