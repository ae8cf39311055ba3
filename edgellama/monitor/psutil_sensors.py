"""Sensors that psutil can read: temperatures (Linux and FreeBSD only), processor clock and memory."""

from __future__ import annotations

from typing import Any

import psutil

from edgellama.monitor import memory
from edgellama.monitor.base import Reader, Reading, Unit

PLAUSIBLE_CELSIUS = (1.0, 127.0)
"""Outside (exclusive) a sensor is not connected or broken: 0, -128 and 127 are common fillers."""

_PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "x86_pkg_temp")
_READ_FAILURES = (OSError, psutil.Error, AttributeError, ValueError, RuntimeError, TypeError)
"""psutil lacks the function on some systems, and lets whatever the kernel's files cause through on others."""


def temperatures() -> list[Reading]:
    """Every temperature there is, implausible ones as unknown; empty where none can be read."""
    try:
        chips: dict[str, Any] = psutil.sensors_temperatures()
    except _READ_FAILURES:
        return []
    return [
        _temperature(f"{chip} {entry.label}".strip(), entry.current, entry.high, entry.critical)
        for chip, entries in chips.items()
        for entry in entries
    ]


def _temperature(source: str, current: Any, high: Any, critical: Any) -> Reading:
    limit = next((float(value) for value in (high, critical) if _plausible(value)), None)
    value = float(current) if _plausible(current) else None
    note = "" if value is not None else f"{current} °C is not plausible"
    return Reading(name="temperature", value=value, unit="celsius", source=source, limit=limit, note=note)


def _plausible(value: Any) -> bool:
    low, high = PLAUSIBLE_CELSIUS
    return isinstance(value, (int, float)) and low < value < high


def _is_processor(reading: Reading) -> bool:
    return reading.source.lower().startswith(_PROCESSOR_CHIPS)


class Temperature:
    """The hottest plausible sensor, of the processor where one is known to be its: a mean would hide a hot core."""

    def read(self) -> Reading:
        """The hottest now; unknown without a sensor."""
        found = temperatures()
        known = [reading for reading in found if reading.value is not None]
        of_processor = [reading for reading in known if _is_processor(reading)]
        if candidates := of_processor or known:
            return max(candidates, key=lambda reading: reading.value or 0.0)
        note = "no sensor gives a plausible value" if found else "no temperature sensor can be read here"
        return Reading(name="temperature", value=None, unit="celsius", source="psutil", note=note)


class AvailableMemory:
    """Memory that may still be used, limits of control groups included."""

    def read(self) -> Reading:
        """Bytes now."""
        return _guarded("memory available", "bytes", lambda: float(memory.available_bytes()))


class ResidentMemory:
    """Resident size of one process."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid

    def read(self) -> Reading:
        """Bytes now; unknown when the process is gone."""
        size = memory.resident_bytes(self._pid)
        note = "" if size is not None else "the process cannot be read"
        value = float(size) if size is not None else None
        return Reading(name="memory resident", value=value, unit="bytes", source="psutil", note=note)


class ProcessorClock:
    """Mean clock of the processor. On some boards it is the clock asked for, not the one running."""

    def read(self) -> Reading:
        """Megahertz now."""
        try:
            clock = psutil.cpu_freq()
        except (*_READ_FAILURES, NotImplementedError):
            clock = None
        if clock is None or not clock.current:
            return Reading(name="clock", value=None, unit="megahertz", source="psutil", note="not readable here")
        limit = float(clock.max) if clock.max else None
        return Reading(name="clock", value=float(clock.current), unit="megahertz", source="psutil", limit=limit)


def _guarded(name: str, unit: Unit, read: Any) -> Reading:
    try:
        return Reading(name=name, value=read(), unit=unit, source="psutil")
    except _READ_FAILURES as error:
        return Reading(name=name, value=None, unit=unit, source="psutil", note=str(error)[:200])


def readers() -> list[Reader]:
    """The readers of this machine."""
    return [Temperature(), AvailableMemory(), ProcessorClock()]
