"""Wires the rooms together: a model by name, its spec, and a runtime that serves it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from edgellama.cli.bridge import Bridge
from edgellama.cli.common import Output
from edgellama.cli.engine_options import EngineChoice, settings_sampling, to_engine_options
from edgellama.errors import EdgellamaError

if TYPE_CHECKING:
    from edgellama.runtime.base import ModelStatus, Runtime
    from edgellama.runtime.model import ModelSpec
    from edgellama.settings import Settings
    from edgellama.store import StoredModel


def find_model(model: str | None, settings: Settings, out: Output) -> StoredModel:  # noqa: ARG001
    """The file behind a name, path or source, fetched first if need be; None means the user's or the proving model."""
    from edgellama.store import Store, default_model

    name = model or settings.default_model or default_model().name
    return Store().resolve(name, offline=settings.offline)


def make_spec(stored: StoredModel, settings: Settings, engine: EngineChoice) -> ModelSpec:
    """Everything a host needs to know of a model."""
    import msgspec

    from edgellama.runtime.model import ModelSpec
    from edgellama.sampling.options import SamplingOptions

    return ModelSpec.from_file(
        stored.path,
        name=stored.name,
        options=to_engine_options(settings, engine),
        engine="fake" if stored.path.name.endswith(".fake.json") else "llamacpp",
        catalogue_sampling=msgspec.convert(stored.entry.sampling if stored.entry else {}, SamplingOptions),
        settings_sampling=settings_sampling(settings),
    )


def make_runtime(spec: ModelSpec) -> Runtime:
    """The host that serves it; not started."""
    from edgellama.runtime.host import Host

    return Host(spec)


class ModelSession:
    """One served model: opened in the background, changed, described."""

    def __init__(self, model: str | None, settings: Settings, engine: EngineChoice, out: Output) -> None:
        self._settings = settings
        self._engine = engine
        self._out = out
        self._bridge: Bridge | None = None
        self._spec: ModelSpec | None = None
        self._wanted = model

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

    def begin(self) -> None:
        """Find the model and start loading it; raises what is wrong with the file."""
        self._spec = make_spec(find_model(self._wanted, self._settings, self._out), self._settings, self._engine)
        self._bridge = self._start(self._spec)

    @staticmethod
    def _start(spec: ModelSpec) -> Bridge:
        return Bridge(lambda: make_runtime(spec))

    def ready(self) -> None:
        """Wait until it serves; raises what kept it from that."""
        with self._out.progress("loading the model") as progress:
            self.bridge.wait_started(lambda: progress.update(0))

    def change(self, model: str) -> None:
        """Serve another model; on failure the one before serves again, and the failure is raised."""
        before = self._spec
        spec = make_spec(find_model(model, self._settings, self._out), self._settings, self._engine)
        self.bridge.close()  # first, for both may not fit
        try:
            self._spec, self._bridge = spec, self._start(spec)
            self.ready()
        except (EdgellamaError, KeyboardInterrupt):
            self.bridge.close()
            if before is not None:
                self._spec, self._bridge = before, self._start(before)
                self.ready()
            raise

    def _status(self) -> ModelStatus | None:
        status = self.bridge.call(self.bridge.wait_started().status())
        return status.models[0] if status.models else None

    def describe(self) -> str:
        """The model in a few words."""
        status = self._status()
        if status is None:
            return "no model"
        changed = f", {status.settings}" if status.settings else ""
        return f"{status.name} ({status.context_tokens:,} tokens of context{changed})"

    def status_lines(self) -> list[str]:
        """The model's state for `/stats`."""
        status = self._status()
        if status is None:
            return []
        lines = [f"model: {status.name}, {status.path}", f"engine: {status.engine}, {status.bytes:,} bytes"]
        if status.settings:
            lines.append(f"settings changed for safety: {status.settings}")
        if status.restarts:
            lines.append(f"engine restarts: {status.restarts}")
        return lines
