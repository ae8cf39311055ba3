"""The doctor's checks of the native library, asked in a child process, and of the safety ladder's verdicts."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgellama import paths
from edgellama.cli.doctor_checks import Check, Status, installed, size
from edgellama.errors import EdgellamaError

if TYPE_CHECKING:
    from edgellama.engine.base import EngineOptions
    from edgellama.engine.verdicts import Attempt, Record

_FIRST_RUNG = "as asked"
_PACKAGE = "llama-cpp-python"
_TIMEOUT_SECONDS = 120
_INSTALL = "run scripts/chat, or install it with: pip install 'edgellama[llamacpp]' (needs a C++ compiler)"


def library() -> Iterator[Check]:
    """Whether the native library is the version it must be, loads, and what devices it has."""
    version, pinned = installed(_PACKAGE), pinned_version()
    if version is None:
        yield Check("native library", "fail", f"{_PACKAGE} is not installed", _INSTALL)
        return
    if pinned is not None and version != pinned:
        yield Check("native library", "fail", f"{_PACKAGE} {version}, but {pinned} is needed", _INSTALL)
    report = ask_child()
    if isinstance(report, str):
        yield Check("native library", "fail", f"{_PACKAGE} {version} {report}", f"build it again: {_INSTALL}")
        return
    yield Check("native library", "ok", f"{_PACKAGE} {report['version']}: {report['system_info']}")
    yield from _devices(report)


def pinned_version() -> str | None:
    """The version of the native library that this edgellama asks for; None where its metadata is not at hand."""
    try:
        requirements = importlib.metadata.requires("edgellama") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        if match := re.match(rf"{_PACKAGE}\s*==\s*([^\s;,]+)", requirement):
            return match[1]
    return None


def ask_child(command: list[str] | None = None) -> dict[str, Any] | str:
    """What the library says of itself, or in words how its process ended."""
    from edgellama.runtime.exits import describe

    argv = command or [sys.executable, "-P", "-m", "edgellama.cli.backend_report"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not load within {_TIMEOUT_SECONDS} s"
    except OSError as error:
        return f"could not be asked: {error.strerror or error}"
    if done.returncode == 0:
        try:
            report = json.loads(done.stdout)
        except ValueError:
            return "answered garbage"
        return report if isinstance(report, dict) else "answered garbage"
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()
    told = f": {last[-1].strip()}" if done.returncode == 1 and last else ""
    return f"{describe(done.returncode)} when it was loaded{told}"


def latest_by_rung(record: Record) -> list[Attempt]:
    """The last attempt at each rung, in the order they were first tried."""
    latest = {attempt.rung: attempt for attempt in record.attempts}
    return list(latest.values())


def _devices(report: dict[str, Any]) -> Iterator[Check]:
    devices = report.get("devices", [])
    accelerators = [device for device in devices if device.get("kind") != "cpu"]
    for device in accelerators:
        total, free = device.get("total_bytes") or 0, device.get("free_bytes") or 0
        room = f", {size(free)} free of {size(total)}" if total else ""
        yield Check(f"device {device['name']}", "ok", f"{device.get('description', '')}{room}")
    if accelerators:
        return
    seen = _present_accelerators()
    if seen:
        advice = "scripts/chat --backend auto builds the library for it"
        yield Check("devices", "warn", f"the library computes on the processor alone, though there is {seen}", advice)
    else:
        yield Check("devices", "ok", "the processor alone")


def _present_accelerators() -> str:
    import shutil
    from pathlib import Path

    found = []
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        found.append("an NVIDIA driver")
    if Path("/dev/kfd").exists():
        found.append("an AMD compute driver")
    if sys.platform == "darwin":
        found.append("Metal")
    return " and ".join(found)


def verdicts() -> Iterator[Check]:
    """What the safety ladder found on this machine with the model files that are still what they were."""
    from edgellama.engine.verdicts import Verdicts
    from edgellama.runtime.model import current_identity

    known = Verdicts(paths.cache_dir())
    records = [r for r in known.listing() if current_identity(r.model, r.engine) == r.identity]
    for notice in known.notices:
        yield Check("safety verdict", "warn", notice)
    if not records:
        yield Check("safety verdicts", "ok", "none yet: the first start of each model checks its numbers")
    usual = _usual_options()
    for record in records:
        yield _judge(record, usual)


def _judge(record: Record, usual: EngineOptions) -> Check:
    from edgellama.engine.verdicts import GOOD

    other = [field for field in usual.__struct_fields__ if getattr(record.asked, field) != getattr(usual, field)]
    name = f"safety verdict of {record.model}" + (f" with its own {', '.join(other)}" if other else "")
    serving = record.serving()
    above = [a for a in latest_by_rung(record) if a.outcome not in GOOD]
    bad = "; ".join(f"{a.rung}: {a.outcome} {a.detail}".strip() for a in above)
    if serving is None:
        if not record.attempts:
            return Check(name, "unknown", "not tried", "run it once to try")
        unfinished = record.attempts[-1].outcome in {"interrupted", "trying"}
        status: Status = "warn" if unfinished or other else "fail"
        return Check(name, status, bad, "run it once to try again; edgellama doctor --forget drops what is known")
    if bad and serving.rung != _FIRST_RUNG:
        value = f"serves with {serving.rung} ({serving.outcome}); before: {bad}"
        return Check(name, "warn", value, "it works; the settings it needs are remembered")
    return Check(name, "ok", f"{serving.rung}, {serving.outcome} {serving.detail}".strip())


def _usual_options() -> EngineOptions:
    """What a start without options asks of the engine, as the ladder's records hold it."""
    import msgspec

    from edgellama import settings
    from edgellama.cli.engine_options import EngineChoice, to_engine_options
    from edgellama.engine.base import EngineOptions

    try:
        asked = to_engine_options(settings.load(), EngineChoice())
    except EdgellamaError:  # the check of the settings tells it
        asked = EngineOptions()
    return msgspec.structs.replace(asked, context_tokens=0)
