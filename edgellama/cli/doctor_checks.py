"""The checks of `edgellama doctor`. Each looks at one thing, never raises, and knows what to advise."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgellama import __version__, files, paths, settings
from edgellama.errors import EdgellamaError
from edgellama.monitor import memory, processor, psutil_sensors

Status = Literal["ok", "warn", "fail", "unknown"]

_LEAST_MEMORY_BYTES = 512 << 20
_LEAST_DISK_BYTES = 1 << 30
_REMOVABLE_MESSAGE = "models can be moved with EDGELLAMA_MODELS_DIR or `edgellama config set models_dir FOLDER`"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    value: str
    advice: str = ""


def all_checks() -> Iterator[Check]:
    """Every check in reading order; one that fails unexpectedly is reported as such and the others go on."""
    from edgellama.cli import doctor_backend

    groups: tuple[Callable[[], Iterator[Check]], ...] = (
        _versions,
        _settings,
        _processor,
        _memory,
        _disk,
        doctor_backend.library,
        doctor_backend.verdicts,
        _sensors,
        _network,
        _terminal,
    )
    for group in groups:
        try:
            yield from group()
        except EdgellamaError as error:
            yield Check(group.__name__.strip("_"), "fail", error.message, error.advice)
        except Exception as error:  # noqa: BLE001 - a boundary: the doctor must report a broken machine, not break on it
            yield Check(group.__name__.strip("_"), "fail", f"{type(error).__name__}: {error}", "please report this")


def size(count: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def _versions() -> Iterator[Check]:
    yield Check("edgellama", "ok", f"{__version__}, {Path(__file__).parents[1]}")
    system = platform.platform()
    if sys.platform == "linux":
        with_name = platform.freedesktop_os_release().get("PRETTY_NAME", "") if _has_os_release() else ""
        system = f"{with_name}, {system}" if with_name else system
    yield Check("system", "ok", system)
    bits = struct.calcsize("P") * 8
    python = f"{platform.python_implementation()} {platform.python_version()}, {bits} bits, {sys.executable}"
    if bits < 64:
        yield Check("python", "fail", python, "models need a 64-bit Python on a 64-bit system")
    else:
        yield Check("python", "ok", python)


def _has_os_release() -> bool:
    return Path("/etc/os-release").exists() or Path("/usr/lib/os-release").exists()


def _settings() -> Iterator[Check]:
    path = paths.settings_file()
    try:
        loaded = settings.load()
    except EdgellamaError as error:
        yield Check("settings", "fail", error.message, error.advice)
        return
    if loaded.sources:
        changed = ", ".join(f"{name} = {getattr(loaded, name)}" for name in loaded.sources)
        yield Check("settings", "ok", changed)
    else:
        yield Check("settings", "ok", f"all built-in ({path} {'is there' if path.exists() else 'does not exist'})")


def _processor() -> Iterator[Check]:
    found = processor.read()
    cores = f"{found.physical_cores or '?'} cores, {found.logical_cores} threads"
    if found.usable_cores < found.logical_cores:
        cores += f", {found.usable_cores} of them usable here"
    yield Check("processor", "ok", f"{found.name} ({found.architecture}), {cores}")
    if found.features is None:
        yield Check("instruction sets", "unknown", "this system does not tell")
        return
    advice = ""
    if found.architecture.lower() in {"x86_64", "amd64"} and "avx2" not in found.features:
        advice = "without AVX2 it works, slowly; use small models"
    yield Check("instruction sets", "warn" if advice else "ok", ", ".join(found.features) or "none known", advice)


def _memory() -> Iterator[Check]:
    ceilings = memory.limits()
    available, total = memory.available_bytes(), memory.total_bytes()
    tightest = min(ceilings, key=lambda ceiling: ceiling.available_bytes)
    value = f"{size(available)} available of {size(total)}"
    if tightest.source != "system":
        value += f", limited by {tightest.source}"
    if available < _LEAST_MEMORY_BYTES:
        advice = "close other programs" if tightest.source == "system" else "raise that limit"
        yield Check("memory", "warn", value, f"{advice}; the smallest models need about {size(_LEAST_MEMORY_BYTES)}")
    else:
        yield Check("memory", "ok", value)
    if (swap := memory.swap_bytes()) is not None and swap[0]:
        yield Check("swap", "ok", f"{size(swap[1])} free of {size(swap[0])}; it is never counted for models")


def _disk() -> Iterator[Check]:
    folder = _models_dir()
    free = files.free_bytes(folder)
    value = f"{folder}, {size(free)} free"
    if not _writable(folder):
        yield Check(
            "model store", "warn", f"{value}, read-only", f"pulling needs a writable folder; {_REMOVABLE_MESSAGE}"
        )
    elif free < _LEAST_DISK_BYTES:
        yield Check("model store", "warn", value, f"free some space; {_REMOVABLE_MESSAGE}")
    else:
        yield Check("model store", "ok", value)
    for name, place in (("data", paths.data_dir()), ("cache", paths.cache_dir()), ("settings", paths.config_dir())):
        if not _writable(place):
            yield Check(f"{name} folder", "warn", f"{place} cannot be written", "change its permissions or move it")


def _models_dir() -> Path:
    try:
        configured = settings.load().models_dir
    except EdgellamaError:
        configured = None
    return Path(configured).expanduser() if configured else paths.models_dir()


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _sensors() -> Iterator[Check]:
    for name, reading in (
        ("temperature", psutil_sensors.Temperature().read()),
        ("clock", psutil_sensors.ProcessorClock().read()),
    ):
        if reading.value is None:
            yield Check(name, "unknown", reading.note)
            continue
        value = f"{reading.value:,.0f} {'°C' if reading.unit == 'celsius' else 'MHz'} ({reading.source})"
        if reading.limit is not None:
            value += f", limit {reading.limit:,.0f}"
        hot = reading.unit == "celsius" and reading.limit is not None and reading.value >= reading.limit - 5
        yield Check(
            name, "warn" if hot else "ok", value, "the machine is hot; let it cool, clean its fan" if hot else ""
        )


def _network() -> Iterator[Check]:
    from edgellama.store import is_offline

    try:
        offline = settings.load().offline or is_offline()
    except EdgellamaError:
        offline = is_offline()
    yield Check("offline mode", "ok", "on: any use of the network is an error" if offline else "off")
    names = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
    found = {name: os.environ.get(name) or os.environ.get(name.lower()) for name in names}
    shown = [f"{name}={_without_password(value)}" for name, value in found.items() if value]
    yield Check("proxy", "ok", ", ".join(shown) or "none")
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and not Path(certificates).is_file():
        yield Check(
            "certificates", "fail", f"SSL_CERT_FILE names {certificates}, which is not a file", "correct or unset it"
        )
    if endpoint := os.environ.get("HF_ENDPOINT"):
        yield Check("Hugging Face mirror", "ok", _without_password(endpoint))


def _without_password(address: str) -> str:
    scheme, separator, rest = address.rpartition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else address


def _terminal() -> Iterator[Check]:
    encoding = (sys.stdout.encoding or "unknown").lower()
    columns = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and encoding.replace("-", "") != "utf8":
        advice = "set a UTF-8 locale (LANG=C.UTF-8; on Windows: chcp 65001)"
        yield Check("terminal", "warn", f"{encoding}, {columns} columns: some characters cannot be shown", advice)
    else:
        yield Check("terminal", "ok", f"{encoding}, {columns} columns")


def installed(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
