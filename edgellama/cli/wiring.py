"""Wires the rooms together: a model by name, its spec, and a runtime that serves it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from edgellama.cli.bridge import Bridge
from edgellama.cli.common import Output
from edgellama.cli.engine_options import EngineChoice, settings_sampling, to_engine_options
from edgellama.errors import EdgellamaError, NotFoundError, NumericError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from edgellama.runtime.base import ModelStatus, Runtime
    from edgellama.runtime.model import EngineName, ModelSpec
    from edgellama.settings import Settings
    from edgellama.store import StoredModel

_CPU_RUNG = "CPU only"
"""The safety ladder's name for the rung without a device."""
FAKE_SUFFIX = ".fake.json"
"""A script of the fake engine in place of a model: tests and demonstrations."""


def find_model(model: str | None, settings: Settings, out: Output) -> StoredModel:
    """The file behind a name, path or source, fetched first if need be; None means the user's or the proving model."""
    from edgellama.cli.store_output import StoreProgress, ask_licence
    from edgellama.store import Store, default_model

    name = model or settings.default_model or default_model().name
    try:
        with StoreProgress(out) as progress:
            return Store().resolve(name, offline=settings.offline, progress=progress, accept_licence=ask_licence(out))
    except (NotFoundError, UsageError) as error:
        if model or not settings.default_model:
            raise
        raise type(error)(
            f"{error.message} (the setting default_model, from {settings.source('default_model')})",
            "; ".join(filter(None, (error.advice, "`edgellama config set default_model MODEL` changes the setting"))),
        ) from error


def choose_engine(settings: Settings) -> tuple[EngineName, tuple[str, ...]]:
    """The engine asked for and what to say of it; `auto` is llama.cpp, the JIT engine where that is not installed."""
    if settings.engine != "auto":
        return settings.engine, ()
    if importlib.util.find_spec("llama_cpp") is not None:
        return "llamacpp", ()
    return "jit", ("llama.cpp is not installed: the JIT engine is used (pip install 'edgellama[llamacpp]')",)


def make_spec(stored: StoredModel, settings: Settings, engine: EngineChoice) -> ModelSpec:
    """Everything a host needs to know of a model."""
    import msgspec

    from edgellama.runtime.model import ModelSpec
    from edgellama.sampling.options import SamplingOptions

    chosen, words = choose_engine(settings)
    spec = ModelSpec.from_file(
        stored.path,
        name=stored.name,
        options=to_engine_options(settings, engine),
        engine="fake" if stored.path.name.endswith(FAKE_SUFFIX) else chosen,
        catalogue_sampling=msgspec.convert(stored.entry.sampling if stored.entry else {}, SamplingOptions),
        settings_sampling=settings_sampling(settings),
    )
    return dataclasses.replace(spec, notices=(*spec.notices, *words)) if words else spec


async def make_runtime(
    spec: Callable[[], ModelSpec],
    settings: Settings,
    on_load_progress: Callable[[float], None],
    writable: tuple[str, ...] = (),
) -> Runtime:
    """The host that will serve it; not started. Its first worker starts here, before our own imports are through."""
    from edgellama.runtime.supervisor import Worker

    worker = await Worker.spawn()
    try:
        from edgellama.cli.early_start import EarlyStart
        from edgellama.monitor.psutil_sensors import Temperature
        from edgellama.runtime.host import Host
    except BaseException:
        worker.kill()
        await worker.close()
        raise
    return Host(
        spec,
        start=EarlyStart(probe_seconds=settings.probe_seconds, writable=writable, first=[worker]),
        read_temperature=lambda: Temperature().read().value,
        on_load_progress=on_load_progress,
    )


class ModelSession:
    """One served model: opened in the background, changed, described."""

    def __init__(
        self, model: str | None, settings: Settings, engine: EngineChoice, out: Output, *, plain: bool = False
    ) -> None:
        self._plain = plain
        self._settings = settings
        self._engine = engine
        self._out = out
        self._wanted = model
        self._bridge: Bridge | None = None
        self._stored: StoredModel | None = None
        self._loaded_fraction = 0.0

    def __enter__(self) -> ModelSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bridge is not None:
            self._bridge.close()

    @property
    def bridge(self) -> Bridge:
        """The runtime; `begin` has made it."""
        if self._bridge is None:
            raise RuntimeError("no model is open")
        return self._bridge

    @property
    def name(self) -> str:
        """The model's name in the store, or its file's."""
        return self._stored.name if self._stored is not None else self._wanted or ""

    @property
    def is_proving_model(self) -> bool:
        """Whether it is the catalogue's smallest, which only shows that the machine works."""
        entry = self._stored.entry if self._stored is not None else None
        return entry is not None and entry.default

    def begin(self) -> None:
        """Start the engine's process and find the model meanwhile; raises when there is no such model."""
        if self._engine.require_device:
            _require_device(self._settings)
        found: concurrent.futures.Future[StoredModel] = concurrent.futures.Future()
        self._bridge = self._start(found)
        try:
            self._stored = find_model(self._wanted, self._settings, self._out)
        except BaseException:
            found.cancel()
            raise
        found.set_result(self._stored)

    def _start(self, found: concurrent.futures.Future[StoredModel]) -> Bridge:
        self._loaded_fraction = 0.0

        def loaded(fraction: float) -> None:
            self._loaded_fraction = fraction

        def spec() -> ModelSpec:
            return make_spec(found.result(), self._settings, self._engine)

        # The fake engine counts its faults in a file beside the script.
        fake = (self._wanted or "").endswith(FAKE_SUFFIX)
        writable = (str(Path(self._wanted or "").absolute().parent),) if fake else ()
        return Bridge(lambda: make_runtime(spec, self._settings, loaded, writable))

    def ready(self) -> None:
        """Wait until it serves; raises what kept it from that."""
        with self._out.progress("loading the model", plain=self._plain) as progress:

            def show() -> None:
                if self._loaded_fraction < 1:
                    progress.update(self._loaded_fraction, 1.0, "loading the model")
                else:  # what follows is the safety ladder, whose length is not known
                    progress.update(0, None, "checking the model's numbers, once for this file and machine")

            self.bridge.wait_started(show)
        status = self.status() if self._engine.require_device else None
        if status is not None and _CPU_RUNG in status.settings:
            raise NumericError(
                f"--require-device: {status.name} is safe on the processor alone here",
                "`edgellama doctor` shows what its device did wrong",
            )

    def change(self, model: str) -> None:
        """Serve another model; on failure the one before serves again, and the failure is raised."""
        before, wanted = self._stored, self._wanted
        stored = find_model(model, self._settings, self._out)
        make_spec(stored, self._settings, self._engine)  # a bad file is told before the present model goes
        try:
            self._reopen(stored, model)
        except (EdgellamaError, KeyboardInterrupt):
            if before is not None:
                self._reopen(before, wanted)
            raise

    def _reopen(self, stored: StoredModel, wanted: str | None) -> None:
        self.bridge.close()  # first, for both may not fit
        found: concurrent.futures.Future[StoredModel] = concurrent.futures.Future()
        found.set_result(stored)
        self._stored, self._wanted = stored, wanted
        self._bridge = self._start(found)
        self.ready()

    def status(self) -> ModelStatus | None:
        """The model now."""
        status = self.bridge.call(self.bridge.wait_started().status())
        return status.models[0] if status.models else None

    def describe(self) -> str:
        """The model in a few words."""
        status = self.status()
        if status is None:
            return "no model"
        changed = f", {status.settings}" if status.settings else ""
        return f"{status.name} ({status.context_tokens:,} tokens of context{changed})"

    def status_lines(self) -> list[str]:
        """The model's state for `/stats`."""
        status = self.status()
        if status is None:
            return []
        lines = [f"model: {status.name}, {status.path}", f"engine: {status.engine}, {status.bytes:,} bytes resident"]
        if status.settings:
            lines.append(f"settings changed for safety: {status.settings}")
        if status.restarts:
            lines.append(f"engine restarts: {status.restarts}")
        return lines


def _require_device(settings: Settings) -> None:
    """`--require-device`: refuse before anything is loaded when the library has no device to compute on."""
    from edgellama.cli.doctor_backend import ask_child

    advice = "`edgellama doctor` says what is missing; scripts/chat --backend builds the library for a device"
    if settings.gpu_layers == 0:
        raise UnsupportedError("--require-device and --gpu-layers 0 contradict each other")
    report = ask_child()
    if isinstance(report, str):
        raise UnsupportedError(f"--require-device: the native library {report}", advice)
    if not any(device["kind"] in {"gpu", "igpu"} for device in report["devices"]):
        raise UnsupportedError("--require-device: the native library has no device but the processor", advice)
