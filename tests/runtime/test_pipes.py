"""The bounded queue to the host, on real pipes."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator

import pytest

from edgellama.runtime import pipes
from edgellama.runtime.messages import (
    MAX_FRAME_BYTES,
    FromWorker,
    Heartbeat,
    LoadProgress,
    Step,
    decode_from_worker,
    frame,
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for descriptor in ends:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _read(descriptor: int, count: int) -> list[FromWorker]:
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        return [decode_from_worker(pipes.read_frame(stream) or b"") for _ in range(count)]


def _beat(progress: int) -> Heartbeat:
    return Heartbeat(busy=(), progress=progress, resident_bytes=1, peak_bytes=2)


def test_messages_arrive_in_order(pipe: tuple[int, int]) -> None:
    outbox = pipes.Outbox(pipe[1])
    outbox.send(LoadProgress(0.0))  # before the thread runs: written at once
    outbox.start()
    for i in range(1, 50):
        outbox.send(LoadProgress(i / 50))
    assert _read(pipe[0], 50) == [LoadProgress(i / 50) for i in range(50)]
    assert outbox.drain(5)


def test_a_full_pipe_makes_senders_wait_and_loses_nothing(pipe: tuple[int, int]) -> None:
    outbox = pipes.Outbox(pipe[1], limit_bytes=1000)
    outbox.start()
    sent: list[int] = []

    def send() -> None:
        for i in range(400):
            outbox.send(Step(request_id="a", token=i, text="x" * 1000))
            sent.append(i)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.3)
    stuck_at = len(sent)
    assert stuck_at < 200  # pipe, one write in flight, and the queue
    for i in range(20):
        outbox.beat(_beat(i))
    assert not outbox.drain(0.05)
    received = _read(pipe[0], 401)
    sender.join(10)
    assert [m.token for m in received if isinstance(m, Step)] == list(range(400))
    assert [m.progress for m in received if isinstance(m, Heartbeat)] == [19]


def test_a_host_that_is_gone_holds_nobody_up(pipe: tuple[int, int]) -> None:
    outbox = pipes.Outbox(pipe[1], limit_bytes=100)
    outbox.start()
    sender = threading.Thread(
        target=lambda: [outbox.send(Step(request_id="a", token=1, text="x" * 5000)) for _ in range(100)]
    )
    sender.start()
    time.sleep(0.2)
    assert sender.is_alive()
    os.close(pipe[0])
    sender.join(10)
    assert not sender.is_alive()
    assert not outbox.drain(5)


def test_the_last_message_does_not_wait_for_room(pipe: tuple[int, int]) -> None:
    outbox = pipes.Outbox(pipe[1], limit_bytes=10)
    outbox.start()
    for _ in range(80):
        outbox._send(frame(Step(request_id="a", token=1, text="x" * 2000)), wait=False)
    outbox.send_last(LoadProgress(1.0), 0.05)
    assert _read(pipe[0], 81)[-1] == LoadProgress(1.0)


def test_frames_cut_short_and_impossible_lengths() -> None:
    whole = frame(LoadProgress(0.5))
    for n in range(len(whole)):
        assert pipes.read_frame(io.BytesIO(whole[:n])) is None
    assert pipes.read_frame(io.BytesIO(whole)) == whole[4:]
    with pytest.raises(ValueError, match="frame"):
        pipes.read_frame(io.BytesIO((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
