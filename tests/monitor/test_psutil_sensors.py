"""psutil's sensors: hostile values are unknown, a missing function is no fault."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import psutil
import pytest

from edgellama.monitor import memory
from edgellama.monitor.base import FakeReader
from edgellama.monitor.psutil_sensors import AvailableMemory, ProcessorClock, ResidentMemory, Temperature, readers

Sensor = namedtuple("Sensor", "label current high critical")


def sensors(monkeypatch: pytest.MonkeyPatch, found: dict[str, list[Sensor]]) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)


def test_the_hottest_processor_sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors(
        monkeypatch,
        {
            "nvme": [Sensor("Composite", 71.0, 84.8, 84.8)],
            "coretemp": [Sensor("Core 0", 52.0, 100.0, 105.0), Sensor("Core 1", 61.0, 100.0, 105.0)],
        },
    )
    reading = Temperature().read()
    assert (reading.value, reading.source, reading.limit) == (61.0, "coretemp Core 1", 100.0)


@pytest.mark.parametrize("value", [0.0, -128.0, 127.0, 255.0, 65261.85, None, float("nan")])
def test_implausible_is_unknown(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    sensors(monkeypatch, {"acpitz": [Sensor("", value, None, 0.0)]})
    reading = Temperature().read()
    assert reading.value is None
    assert reading.limit is None
    assert "plausible" in reading.note


def test_no_sensor_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors(monkeypatch, {})
    assert Temperature().read().value is None


def test_no_function_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    assert Temperature().read().value is None


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("x"), psutil.AccessDenied(), ValueError("bad")])
def test_a_failing_sensor_never_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "sensors_temperatures", fail, raising=False)
    monkeypatch.setattr(psutil, "cpu_freq", fail, raising=False)
    monkeypatch.setattr(memory, "available_bytes", fail)
    for reader in (Temperature(), ProcessorClock(), AvailableMemory()):
        assert reader.read().value is None


def test_a_process_that_is_gone() -> None:
    reading = ResidentMemory(2**22 + 1).read()
    assert reading.value is None
    assert reading.note


def test_every_reader_reads_here() -> None:
    for reader in readers():
        reading = reader.read()
        assert reading.name
        assert reading.value is None or reading.value >= 0


def test_the_fake_plays_back_and_stays_at_its_end() -> None:
    fake = FakeReader([50.0, None, 60.0])
    assert [fake.read().value for _ in range(4)] == [50.0, None, 60.0, 60.0]
    assert FakeReader([]).read().value is None
