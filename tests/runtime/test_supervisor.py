from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from edgellama.chat.messages import TextPart
from edgellama.engine.base import EngineOptions
from edgellama.errors import EngineCrashError, InvalidFileError
from edgellama.runtime.messages import Finished, Generate, Load, Step
from edgellama.runtime.supervisor import Death, Worker, WorkerDiedError
from edgellama.runtime.watchdog import Limits, Watchdog
from edgellama.sampling.options import BUILT_IN

QUICK = Limits(hello=5.0, load=5.0, hang=0.4, silence=0.4, call=0.4, abort_grace=0.2, shutdown=0.3)
Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    workers: list[Worker] = []

    async def spawn(behaviour: str, limits: Limits = QUICK) -> Worker:
        script = Path(__file__).with_name("stand_in.py")
        workers.append(await Worker.spawn([sys.executable, "-P", str(script), behaviour], limits))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.kill()
        await worker.close()
        assert not psutil.pid_exists(worker.pid)


def load() -> Load:
    return Load(path="x", options=EngineOptions(), engine="fake")


def generate(request_id: str = "a") -> Generate:
    return Generate(request_id=request_id, prompt=(1, 2), sampling=BUILT_IN, max_tokens=5)


async def serve(worker: Worker, request_id: str = "a") -> Death | list[Step]:
    await worker.ready()
    await worker.load(load())
    queue = worker.open(request_id)
    worker.send(generate(request_id))
    steps: list[Step] = []
    while True:
        message = await asyncio.wait_for(queue.get(), 20)
        if isinstance(message, Step):
            steps.append(message)
        elif isinstance(message, Death):
            return message
        elif isinstance(message, Finished):
            return steps


async def test_a_good_worker_answers_calls_and_requests(start: Start) -> None:
    worker = await start("good")
    fractions: list[float] = []
    worker.on_load_progress = fractions.append
    steps = await serve(worker)
    assert isinstance(steps, list)
    assert [step.token for step in steps] == [0, 1, 2, 3, 4]
    assert fractions == [1.0]  # a fraction of 7 was claimed
    assert await worker.tokenize([TextPart("a")]) == (1, 2, 3)
    await asyncio.sleep(0.2)
    assert (worker.resident_bytes, worker.peak_bytes) == (1000, 2000)
    await worker.close()
    death = await worker.death
    assert (death.cause, death.returncode) == ("closed", 0)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("noise", "sent garbage"),
        ("huge", "sent garbage"),
        ("wrong-type", "sent garbage"),
        ("hang-up", "closed its pipe"),
        ("newer", "speaks protocol"),
        ("sleep", "no progress"),
        ("exit", "exit code 3"),
        ("mute", "sent nothing"),
        ("stall", "no progress"),
        ("obedient", "no progress"),
    ],
)
async def test_what_a_bad_worker_dies_of(start: Start, behaviour: str, words: str) -> None:
    limits = Limits(
        hello=1.5 if behaviour == "sleep" else 60.0, load=5, hang=0.4, silence=0.4, abort_grace=0.2, shutdown=0.3
    )
    worker = await start(behaviour, limits)
    try:
        outcome = await serve(worker)
    except WorkerDiedError as error:
        outcome = error.death
    assert isinstance(outcome, Death)
    assert words in outcome.words
    assert not worker.alive
    with pytest.raises(WorkerDiedError):
        await worker.tokenize([TextPart("a")])
    late = worker.open("late")
    assert late.get_nowait() is outcome


async def test_a_slow_worker_that_advances_is_left_alone(start: Start) -> None:
    assert isinstance(await serve(await start("slow")), list)


async def test_a_call_that_is_never_answered_ends_the_worker(start: Start) -> None:
    worker = await start("confused")
    await worker.ready()
    await worker.load(load())
    with pytest.raises(WorkerDiedError, match="tokenizing"):
        await worker.tokenize([TextPart("a")])


async def test_what_the_worker_reports_is_raised_as_its_class(start: Start) -> None:
    worker = await start("refuse")
    await worker.ready()
    with pytest.raises(InvalidFileError, match="not a model") as caught:
        await worker.load(load())
    assert caught.value.advice == "try another"
    assert (await worker.death).cause == "failed"


async def test_stderr_never_blocks_the_worker_and_its_end_is_kept(start: Start) -> None:
    worker = await start("flood")
    await worker.ready()
    for _ in range(100):
        if "the last line" in worker.log_lines():
            break
        await asyncio.sleep(0.05)
    assert worker.log_lines()[-1] == "the last line"
    assert sum(map(len, worker.log_lines(10_000))) <= 200_000


async def test_the_last_lines_are_in_the_death(start: Start) -> None:
    death = await (await start("exit")).death
    assert death.log == ("cannot go on",)


async def test_a_stubborn_worker_is_killed_at_close(start: Start) -> None:
    worker = await start("stubborn")
    await worker.ready()
    await worker.close()
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_a_killed_worker_is_told_from_one_that_refuses_an_instruction(start: Start) -> None:
    killed, refused = await start("good"), await start("good")
    for worker, number in ((killed, signal.SIGKILL), (refused, signal.SIGILL)):
        await worker.ready()
        os.kill(worker.pid, number)
    assert (await killed.death).killed
    assert not (await killed.death).illegal_instruction
    assert (await refused.death).illegal_instruction
    assert not (await refused.death).killed


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
async def test_ctrl_c_in_the_terminal_does_not_reach_the_worker(start: Start) -> None:
    worker = await start("good")
    await worker.ready()
    assert os.getpgid(worker.pid) != os.getpgid(0)


async def test_a_command_that_cannot_start_is_told() -> None:
    with pytest.raises(EngineCrashError, match="cannot start"):
        await Worker.spawn(["/nonexistent/worker"])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_a_stopped_host_does_not_take_its_own_absence_for_a_hang(start: Start) -> None:
    """The event loop stands still for longer than every limit, as in a suspend."""
    worker = await start("slow", Limits(hang=0.5, silence=0.5, abort_grace=0.1))
    await worker.ready()
    await worker.load(load())
    queue = worker.open("a")
    worker.send(generate())
    time.sleep(1.2)
    while not isinstance(message := await asyncio.wait_for(queue.get(), 10), Finished):
        assert not isinstance(message, Death)


# ---- the watchdog alone


def test_watchdog_counts_only_time_it_was_awake() -> None:
    limits = Limits(hang=10.0, silence=10.0)
    dog = Watchdog(limits)
    for _ in range(5):
        assert dog.look(3600.0, 10.0, expects_beats=True) == "fine"


def test_watchdog_aborts_before_it_kills() -> None:
    limits = Limits(hang=4.0, silence=100.0, abort_grace=1.0)
    dog = Watchdog(limits)
    findings = [dog.look(0.5, 4.0, expects_beats=True) for _ in range(12)]
    assert findings.index("abort") == 8
    assert findings.index("hang") > findings.index("abort") + 1


def test_watchdog_lets_a_slow_board_live() -> None:
    dog = Watchdog(Limits(hang=1.0, silence=100.0))
    for progress in range(1000):
        dog.heartbeat(progress)
        assert dog.look(0.25, 1.0, expects_beats=True) == "fine"


def test_watchdog_is_not_fooled_by_heartbeats_without_progress() -> None:
    dog = Watchdog(Limits(hang=1.0, silence=100.0, abort_grace=0.1))
    findings = []
    for _ in range(30):
        dog.heartbeat(7)
        findings.append(dog.look(0.1, 1.0, expects_beats=True))
    assert "hang" in findings


def test_watchdog_does_not_hurry_an_idle_worker() -> None:
    dog = Watchdog(Limits(hang=1.0, silence=100.0))
    for _ in range(100):
        assert dog.look(0.2, None, expects_beats=True) == "fine"
        dog.heartbeat(7)
