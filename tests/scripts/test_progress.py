"""Progress: silent for short waits, one line written over on a terminal, separate lines elsewhere."""

from __future__ import annotations

import io

import pytest
from bootstrap import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress, "time", fake)
    monkeypatch.setenv("TERM", "xterm")
    return fake


def test_a_short_wait_says_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    with progress.Activity("making", stream=stream) as activity:
        clock.now += 0.9
        activity.update("something")
    assert stream.getvalue() == ""


def test_a_file_gets_a_line_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    with progress.Activity("making", stream=stream) as activity:
        for _ in range(60):
            clock.now += 0.5
            activity.update("a part")
    lines = stream.getvalue().splitlines()
    assert lines == ["making: a part (1 s)", "making: a part (13 s)", "making: a part (25 s)", "making: done (30 s)"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_live_line_that_fits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with progress.Activity("making", stream=stream) as activity:
        clock.now += 70
        activity.update("x" * 100)
        activity.update("short")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert all(len(part) <= 40 for part in text.split("\r"))
    assert "making: short (1 min 10 s)" in text
    assert text.endswith("making: done (1 min 10 s)\n")


def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress.Activity("making", stream=stream) as activity:
        clock.now += 2
        activity.update("a part")
    assert "\r" not in stream.getvalue()


def test_a_failure_does_not_claim_to_be_done(clock: Clock) -> None:
    stream = io.StringIO()

    def fail() -> None:
        with progress.Activity("making", stream=stream) as activity:
            clock.now += 2
            activity.tick()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert "done" not in stream.getvalue()


def test_a_closed_stderr_is_survived(clock: Clock) -> None:
    stream = io.StringIO()
    stream.close()
    progress.say("hello", stream)
