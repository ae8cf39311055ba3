"""From nothing to a working environment: every step can be interrupted and run again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from bootstrap import backends, lock, stamp, venv
from bootstrap.backends import Build
from bootstrap.children import Runner, signals_end_children
from bootstrap.errors import ENGINE, INTERRUPTED, NO_SPACE, OFFLINE, SetupError
from bootstrap.native import Loaded, Native
from bootstrap.options import Options
from bootstrap.pip import Pip, environment
from bootstrap.probe import Probe, ThisMachine
from bootstrap.progress import say
from bootstrap.wheelhouse import Wheelhouse, write

NATIVE_EXTRA = "llamacpp"


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """The packages that pyproject.toml asks for: base and extras."""
    project = tomllib.loads((Path(stamp.ROOT) / "pyproject.toml").read_text("utf-8"))["project"]
    return project["dependencies"], project["optional-dependencies"]


@contextlib.contextmanager
def told() -> Iterator[list[int]]:
    """Turn a SetupError or Ctrl-C into its message; the list yielded then holds the exit code."""
    codes: list[int] = []
    try:
        with signals_end_children():
            yield codes
    except SetupError as error:
        say(error.text())
        codes.append(error.code)
    except KeyboardInterrupt:
        say("stopped; run the same command again, it goes on from here")
        codes.append(INTERRUPTED)


class Setup:
    """Makes the environment ready. `extras` are pyproject's; the native engine is always among them unless left out."""

    def __init__(self, options: Options, extras: set[str], *, with_model: bool, probe: Probe | None = None) -> None:
        self.options = options
        self.folder = Path(stamp.venv_folder())
        self.python = stamp.venv_python(str(self.folder))
        self.extras = extras
        self._with_model = with_model
        self._probe: Probe = probe or ThisMachine()
        self.wheelhouse = Wheelhouse(Path(options.wheelhouse)) if options.wheelhouse else None

    def is_ready(self) -> bool:
        """Whether nothing is to be done."""
        has_model = bool(stamp.read(str(self.folder)).get("model"))
        return self._has_packages() and (has_model or not self._with_model) and not self.options.make_wheelhouse

    def _has_packages(self) -> bool:
        if self.options.rebuild:
            return False
        digest = self.wheelhouse.digest if self.wheelhouse else ""
        fields, backend = stamp.read(str(self.folder)), self.options.backend
        return stamp.is_ready(str(self.folder), fields, extras=self.extras, backend=backend, wheelhouse=digest)

    def make(self) -> dict[str, str]:
        """Bring everything that is missing; returns the stamp's fields."""
        venv.check_interpreter(self._probe)
        venv.check_folder(self.folder)
        try:
            with lock.held(self.folder, quiet=self.options.quiet) as descriptor:
                runner = Runner(
                    self.folder / venv.LOG_NAME,
                    quiet=self.options.quiet,
                    verbose=self.options.verbose,
                    lock_descriptor=descriptor,
                )
                pip = Pip(self.python, runner, self.wheelhouse.folder if self.wheelhouse else None)
                if not self._has_packages():
                    self._make_packages(pip, runner)
                if self._with_model and not stamp.read(str(self.folder)).get("model"):
                    self.fetch_model()
                if self.options.make_wheelhouse:
                    self._write_wheelhouse(pip, runner)
        except PermissionError as error:
            raise SetupError(
                f"{error.filename or self.folder} cannot be written",
                ["Set EDGELLAMA_VENV to a folder you own, for example:",
                 '    EDGELLAMA_VENV="$HOME/.edgellama-env" ./scripts/chat'],
            ) from error  # fmt: skip
        except OSError as error:
            raise SetupError(f"{error.filename or self.folder}: {error.strerror}", code=_code_of(error)) from error
        return stamp.read(str(self.folder))

    def _make_packages(self, pip: Pip, runner: Runner) -> None:
        old = stamp.read(str(self.folder))
        self.extras |= set(filter(None, old.get("extras", "").split(",")))
        options = self.options
        runner.log.write_bytes(b"")
        self._refuse_offline()
        if self.wheelhouse:
            self.wheelhouse.check(quiet=options.quiet)
        stamp.write_as_is(str(self.folder), {**old, "source": ""})
        say(f"setting up edgellama in {self.folder} (log: {runner.log.name})")
        venv.make(self.folder, runner)
        packages = ",".join(sorted(self.extras - {NATIVE_EXTRA}))
        try:
            pip.install("installing packages", ["--editable", f"{stamp.ROOT}[{packages}]" if packages else stamp.ROOT])
        except SetupError as error:
            if error.code == OFFLINE and old.get("source"):  # nothing was changed: what worked goes on working
                stamp.write_as_is(str(self.folder), old)
            raise
        venv.verify_import(self.folder, runner)
        asked = options.backend or old.get("backend_asked") or "auto"
        fields = {"backend_asked": asked, "wheelhouse": self.wheelhouse.digest if self.wheelhouse else ""}
        if NATIVE_EXTRA in self.extras:
            fields |= self._native(pip, runner, asked)
        fields |= {"model": old.get("model", ""), "extras": ",".join(sorted(self.extras))}
        stamp.write(str(self.folder), fields)

    def _refuse_offline(self) -> None:
        if self.wheelhouse or not (self.options.offline or _is_set("EDGELLAMA_OFFLINE")):
            return
        raise SetupError(
            "the environment is not complete and offline mode is on",
            ["Run it once with a network, or carry the packages here: ./scripts/chat --help (--wheelhouse)."],
            code=OFFLINE,
        )

    def _native(self, pip: Pip, runner: Runner, asked: str) -> dict[str, str]:
        requirement = declared()[1][NATIVE_EXTRA][0]
        native = Native(pip, runner, self._probe, requirement)
        decision = backends.decide(self._probe, asked)
        for line in decision.lines:
            say(line)
        if decision.build is None:
            raise SetupError(
                f"llama.cpp cannot be built for {asked} here",
                ["Install what is missing and run the same command again, or use --backend auto."],
            )
        native.avoid_wheel = self._carried_wheel_is_foreign()
        build, loaded = self._bring(native, decision.build, asked)
        say(f"llama.cpp {loaded.version} is ready; devices: {', '.join(loaded.devices) or 'CPU'}")
        return {"backend": build.backend, "devices": ",".join(loaded.devices)}

    def _bring(self, native: Native, build: Build, asked: str) -> tuple[Build, Loaded]:
        """Build; where `auto` chose a GPU and that fails, say why and take the CPU."""
        try:
            loaded = native.bring(build, rebuild=self.options.rebuild)
        except SetupError as error:
            if asked != "auto" or build.backend == "cpu" or error.code in {NO_SPACE, OFFLINE}:
                raise
            say(error.text())
            say(f"going on without {build.backend}, on the CPU")
            build = Build("cpu")
            loaded = native.bring(build, rebuild=False)
        if not loaded.has(build.backend):
            said = f"llama.cpp was built for {build.backend}, but its library finds no such device"
            if asked != "auto":
                raise SetupError(said, ["./scripts/device_check tells more."], code=ENGINE)
            say(f"warning: {said}: models will run on the CPU")
        return build, loaded

    def _carried_wheel_is_foreign(self) -> bool:
        absent = self.wheelhouse.needs_build() if self.wheelhouse else []
        if absent:
            say(f"this processor lacks {', '.join(absent[:6])}, which the carried llama.cpp may use: compiling it here")
        return bool(absent)

    def fetch_model(self) -> None:
        """Fetch the default model and note it in the stamp; edgellama shows its own progress on stderr."""
        name = default_model(self.python)
        offline = ["--offline"] if self.options.offline and not self.wheelhouse else []
        quiet = ["--quiet"] if self.options.quiet else []
        command = [self.python, "-m", "edgellama", "pull", name, *offline, *quiet]
        where = self.wheelhouse.folder if self.wheelhouse else None
        status = subprocess.call(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno() if sys.stderr else subprocess.DEVNULL,
            env={**environment(where), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        if status != 0:
            raise SetupError(
                f"the default model {name} could not be fetched", ["The lines above say why."], code=status
            )
        fields = stamp.read(str(self.folder))
        stamp.write(str(self.folder), {**fields, "model": name})

    def _write_wheelhouse(self, pip: Pip, runner: Runner) -> None:
        base, extras = declared()
        wanted = [*base, *(spec for name in sorted(self.extras | {"dev"}) for spec in extras.get(name, []))]
        folder = Path(self.options.make_wheelhouse).absolute()
        write(folder, wanted, extras[NATIVE_EXTRA][0], default_source(self.python), pip, runner)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in {"1", "true", "yes", "on"}


def _code_of(error: OSError) -> int:
    import errno

    return NO_SPACE if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", -1)} else 1


def _ask_store(python: str, code: str) -> str:
    done = subprocess.run(
        [python, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise SetupError("the model catalogue cannot be read", tail=done.stderr)
    return done.stdout.strip()


def default_model(python: str) -> str:
    """The catalogue's default model, by name."""
    return _ask_store(python, "from edgellama.store import default_model; print(default_model().name)")


def default_source(python: str) -> str:
    """Where the default model comes from as a Python package, or an empty text."""
    code = "from edgellama.store import default_model; print(*default_model().sources)"
    return next((source for source in _ask_store(python, code).split() if source.startswith("pypi:")), "")
