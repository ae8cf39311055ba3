"""Brings a worker up at the highest rung of the safety ladder that holds, and remembers which one that was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgellama.chat.messages import TextPart
from edgellama.engine import probe
from edgellama.engine.base import EngineOptions
from edgellama.engine.probe import Comparison, Reference
from edgellama.engine.verdicts import Outcome, Verdicts
from edgellama.errors import (
    EdgellamaError,
    EngineCrashError,
    EngineError,
    EngineLoadError,
    InvalidFileError,
    MemoryShortageError,
    NotFoundError,
    NumericError,
    UsageError,
)
from edgellama.runtime.base import Notice
from edgellama.runtime.messages import Load, Loaded, Probe, Probed
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.plan import LEAST_CONTEXT_TOKENS
from edgellama.runtime.supervisor import Death, Worker, WorkerDiedError
from edgellama.runtime.watchdog import Limits

_LEAN: tuple[dict[str, int], ...] = (
    {},
    {"batch_tokens": 256, "micro_batch_tokens": 128},
    {"batch_tokens": 128, "micro_batch_tokens": 32},
)
"""Smaller and smaller scratch memory, for when the system kills the worker."""
_FIRST_TOKENS = 8
_SHARE = 0.8
_DOCTOR = "edgellama doctor shows what this machine has; a rebuild for it may help"


@dataclass(frozen=True, slots=True)
class Start:
    """How a worker process is started and watched."""

    command: Sequence[str] | None = None
    limits: Limits | None = None
    confine: bool = True
    writable: tuple[str, ...] = ()
    """Folders a confined worker may write to."""
    probe_seconds: float = 10.0
    """Most time for computing reference logits; 0 only checks that numbers are finite."""

    async def spawn(self) -> Worker:
        """A new process."""
        return await Worker.spawn(self.command, self.limits)


class Ladder:
    """Where a model stands on the ladder, for as long as the host lives."""

    def __init__(self, spec: ModelSpec, options: EngineOptions, verdicts: Verdicts, start: Start) -> None:
        self._spec = spec
        self._verdicts = verdicts
        self._start = start
        self.rungs = probe.ladder(options, len(spec.shape.layers), spec.engine)
        # The context length follows the free memory of the moment, and changes no numbers.
        asked = msgspec.structs.replace(spec.options, context_tokens=0)
        self._record = verdicts.find(spec.path, spec.identity, spec.engine, asked)
        self.rung = verdicts.first_rung(self._record, self.rungs)
        self.lean = 0
        self._halvings = 0
        """How often the context was halved for want of memory; never when its length was asked for."""
        self._reference: Reference | None = None
        self._reference_known = False
        self.notices: list[Notice] = []
        self.on_load_progress: Callable[[float], None] | None = None

    # ---- where it stands

    @property
    def options(self) -> EngineOptions:
        """The options of the present rung."""
        options = self.rungs[self.rung].options
        lean = {name: min(value, getattr(options, name)) for name, value in _LEAN[self.lean].items()}
        context = max(LEAST_CONTEXT_TOKENS, options.context_tokens >> self._halvings)
        return msgspec.structs.replace(options, **lean, context_tokens=min(options.context_tokens, context))

    @property
    def words(self) -> str:
        """What differs from what was asked; empty when nothing does."""
        changed = [rung.name for rung in self.rungs[1 : self.rung + 1]]
        if self.lean:
            changed.append(f"micro batch {self.options.micro_batch_tokens}")
        if self._halvings:
            changed.append(f"context {self.options.context_tokens}")
        return ", ".join(changed)

    def step_down(self, reason: str, outcome: Outcome | None = None) -> bool:
        """Leave the present rung; False when it is the last. `outcome` is remembered for later starts."""
        if outcome is not None:
            self._record = self._verdicts.add(self._record, self.rungs[self.rung].name, outcome, reason)
        if self.rung + 1 >= len(self.rungs):
            return False
        self.rung += 1
        return True

    def go_plainest(self, *, only_memory: bool = False) -> None:
        """Use the least scratch memory and, unless memory is all that is short, the last rung."""
        self.lean = len(_LEAN) - 1
        if not only_memory:
            self.rung = len(self.rungs) - 1

    def step_leaner(self) -> bool:
        """Use less scratch memory; False when it cannot be less."""
        if self.lean + 1 >= len(_LEAN):
            return False
        self.lean += 1
        return True

    def _halve_context(self) -> bool:
        if self._spec.options.context_tokens or self.options.context_tokens <= LEAST_CONTEXT_TOKENS:
            return False
        self._halvings += 1
        return True

    # ---- bringing a worker up

    async def bring_up(self, first: Worker | None = None) -> Worker:
        """A loaded worker whose numbers are trusted. `first` is a fresh process to use.

        Raises what keeps every rung from working; it then names the rungs tried.
        """
        tried: list[tuple[str, str]] = []
        kills = 0
        while True:
            name = self.rungs[self.rung].name
            try:
                return await self._attempt(first)
            except _StaleError:
                first = None
                self._forget()
            except _RungError as error:
                first = None
                kills += error.killed
                tried.append((name, str(error)))
                if not self._go_on(error, kills):
                    raise self._give_up(error, tried) from error
            except BaseException:
                if self._record.attempts and self._record.attempts[-1].outcome == "trying":
                    self._record = self._verdicts.add(self._record, name, "interrupted")
                raise

    def _go_on(self, error: _RungError, kills: int) -> bool:
        """Choose what to try next after a rung failed; False when there is nothing left."""
        before = self.words
        if error.killed:
            self._record = self._verdicts.add(self._record, self.rungs[self.rung].name, "failed", str(error))
            # Memory may be free again the second time; only then is it worth changing anything.
            moved = (kills == 1 and error.cause is None) or self.step_leaner() or self._halve_context()
        else:
            moved = self.step_down(str(error), error.outcome)
        if moved:
            change = f"it goes on with {self.words}" if self.words != before else "it is started again"
            self.notices.append(Notice("engine-settings", f"{error}; {change}"))
        return moved

    def _give_up(self, error: _RungError, tried: Sequence[tuple[str, str]]) -> EdgellamaError:
        self.rung = self.lean = self._halvings = 0
        log = "\n".join(error.log[-12:])
        story = f"{self._spec.name} does not run here. Tried {_story(tried)}"
        message = f"{story}\nLast lines of the engine:\n{log}" if log else story
        if error.killed:
            return MemoryShortageError(message, "close other programs, use a shorter --ctx, or a smaller model")
        if error.outcome in {"disagreed", "non-finite"}:
            return NumericError(
                message,
                "the file may be damaged: fetch it again (edgellama pull NAME); if it is not, ask edgellama doctor",
            )
        if isinstance(error.cause, EngineLoadError):
            return EngineLoadError(message, error.cause.advice or _DOCTOR)
        return EngineCrashError(message, _DOCTOR)

    async def _attempt(self, worker: Worker | None) -> Worker:
        """Load and check at the present rung. Raises `_RungError` when the rung is to blame."""
        name = self.rungs[self.rung].name
        serving = self._record.serving()
        known = serving is not None and serving.rung == name and self._is_settled(serving.outcome)
        try:
            reference = None if known else await self._find_reference()
            if not known:
                self._record = self._verdicts.add(self._record, name, "trying")
            worker = worker if worker is not None else await self._start.spawn()
            loaded = await self._load_guarded(worker)
            if known and not self._same_build(loaded):
                raise _StaleError  # noqa: TRY301
            if not known:
                self._keep(loaded, name, await self._judge(worker, loaded, reference))
        except BaseException:
            if worker is not None:
                worker.kill()
                await worker.close()
            raise
        return worker

    async def _load_guarded(self, worker: Worker) -> Loaded:
        try:
            return await self._load(worker, self.options, self.rungs[self.rung].engine)
        except WorkerDiedError as error:
            raise self._crash(error.death) from error
        except (InvalidFileError, NotFoundError, UsageError):
            raise  # the file or the wish is to blame, not the settings
        except EdgellamaError as error:
            short = isinstance(error, MemoryShortageError)
            raise _RungError(error.message, "failed", killed=short, log=worker.log_lines(), cause=error) from error

    async def _judge(self, worker: Worker, loaded: Loaded, reference: Reference | None) -> Comparison:
        """Decode the probe and compare; raises `_RungError` unless the numbers may be served."""
        try:
            room = max(1, loaded.info.context_tokens - 1)
            if reference is not None and len(reference.tokens) > room:
                reference = None
            tokens = reference.tokens if reference is not None else (await _probe_tokens(worker))[:room]
            probed = await worker.probe(Probe(tokens=tokens))
            logits = _logits(probed, loaded.info.vocabulary_tokens)
        except WorkerDiedError as error:
            raise self._crash(error.death) from error
        except EdgellamaError as error:
            raise _RungError(error.message, "failed", log=worker.log_lines(), cause=error) from error
        allowed = probe.tolerance(self.options, reference.noise if reference is not None else None)
        comparison = probe.compare(logits, reference, allowed)
        if comparison.verdict not in {"agreed", "finite-only"}:
            raise _RungError(comparison.words, comparison.verdict, log=worker.log_lines())
        return comparison

    def _crash(self, death: Death) -> _RungError:
        where = {"load": "while loading", "probe": "in the check before serving"}.get(death.phase, "while starting")
        words = f"the engine's process {death.words} {where}"
        return _RungError(words, "failed" if death.killed else "crashed", killed=death.killed, log=death.log)

    def _is_settled(self, outcome: Outcome) -> bool:
        """Whether a verdict is final: without a reference it is not, once there is more time to compute one."""
        return outcome == "agreed" or self._record.probe_seconds >= self._start.probe_seconds

    def _same_build(self, loaded: Loaded) -> bool:
        info = loaded.info
        return (info.backend_build, info.devices) == (self._record.backend_build, self._record.devices)

    def _forget(self) -> None:
        self._record = msgspec.structs.replace(
            self._record, attempts=(), backend_build="", devices=(), probe_seconds=0.0
        )
        self._reference_known = False
        self.rung = 0

    def _keep(self, loaded: Loaded, rung: str, comparison: Comparison) -> None:
        self._record = msgspec.structs.replace(
            self._record,
            backend_build=loaded.info.backend_build,
            devices=loaded.info.devices,
            probe_seconds=self._start.probe_seconds,
        )
        outcome: Outcome = "agreed" if comparison.verdict == "agreed" else "finite-only"
        self._record = self._verdicts.add(self._record, rung, outcome, comparison.words)

    async def _load(self, worker: Worker, options: EngineOptions, engine: str) -> Loaded:
        worker.on_load_progress = self.on_load_progress
        await worker.ready()
        message = Load(
            path=self._spec.path,
            options=options,
            engine=engine,  # type: ignore[arg-type]
            confine=self._start.confine,
            writable=self._start.writable,
        )
        return await worker.load(message)

    # ---- the reference

    async def _find_reference(self) -> Reference | None:
        """Sidecar, else cache, else computed at the plainest settings in a worker of its own. None when too slow."""
        if not self._reference_known:
            self._reference = self._read_sidecar() or self._verdicts.reference(self._spec.mark)
            if self._reference is None and self._start.probe_seconds > 0:
                self._reference = await self._compute_reference()
            self._reference_known = True
        return self._reference

    def _read_sidecar(self) -> Reference | None:
        try:
            return probe.read_reference(Path(self._spec.sidecar), self._spec.mark)
        except InvalidFileError as error:
            self.notices.append(Notice("sidecar-ignored", f"reference logits are ignored: {error.message}"))
            return None

    async def _compute_reference(self) -> Reference | None:
        plain = probe.plainest(self._spec.options)
        begun = time.monotonic()
        deadline = begun + self._start.probe_seconds
        found = await self._probe_apart(plain, deadline, None)
        if found is None:
            return None  # the candidate's own attempt tells what is wrong, if anything is
        loaded, probed = found
        logits = _logits(probed, loaded.info.vocabulary_tokens)
        if not probe.finite(logits):
            raise NumericError(
                f"{self._spec.name}: the numbers are not finite even at the engine's plainest settings",
                "the file is damaged or was made wrongly: pull or convert it again",
            )
        words = f"{loaded.info.engine} {loaded.info.backend_build}, plainest settings"
        reference = probe.reference_of(self._spec.mark, words, probed.tokens, logits)
        if time.monotonic() - begun < _SHARE * (deadline - time.monotonic()):
            rounded = msgspec.structs.replace(plain, kv_type_key="f16", kv_type_value="f16")
            again = await self._probe_apart(rounded, deadline, probed.tokens)
            if again is not None:
                noise = probe.noise_of(_logits(again[1], loaded.info.vocabulary_tokens), reference)
                reference = msgspec.structs.replace(reference, noise=noise)
        self._verdicts.keep_reference(reference)
        return reference

    async def _probe_apart(
        self, options: EngineOptions, deadline: float, tokens: tuple[int, ...] | None
    ) -> tuple[Loaded, Probed] | None:
        """Probe in a worker that is thrown away; None when it fails or takes too long."""
        worker: Worker | None = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                worker = await self._start.spawn()
                loaded = await self._load(worker, options, self._spec.engine)
                if tokens is not None:
                    return loaded, await worker.probe(Probe(tokens=tokens))
                return loaded, await self._probe_within(worker, deadline)
        except (TimeoutError, EngineError, MemoryShortageError):
            return None
        finally:
            if worker is not None:
                worker.kill()
                await worker.close()

    async def _probe_within(self, worker: Worker, deadline: float) -> Probed:
        """The longest probe that ends in time: a short one first, to learn the speed."""
        tokens = (await _probe_tokens(worker))[: probe.PROBE_TOKENS]
        short = await worker.probe(Probe(tokens=tokens[:_FIRST_TOKENS]))
        expected = short.seconds / max(1, len(short.tokens)) * len(tokens)
        if expected > _SHARE * (deadline - time.monotonic()):
            return short
        return await worker.probe(Probe(tokens=tokens))


async def _probe_tokens(worker: Worker) -> tuple[int, ...]:
    return (await worker.tokenize([TextPart(probe.PROBE_TEXT, special=False)], add_bos=True))[: probe.PROBE_TOKENS]


def _logits(probed: Probed, vocabulary: int) -> NDArray[np.float32]:
    """float32[positions, vocabulary] of what the worker sent; it is checked like everything it sends."""
    row_bytes = 4 * vocabulary
    if vocabulary <= 0 or not probed.logits or len(probed.logits) % row_bytes:
        raise NumericError(f"the probe returned {len(probed.logits)} bytes for a vocabulary of {vocabulary} tokens")
    return np.frombuffer(probed.logits, "<f4").reshape(-1, vocabulary).astype(np.float32, copy=False)


def _story(tried: Sequence[tuple[str, str]]) -> str:
    """Rungs and why each failed, every reason once."""
    rungs: dict[str, dict[str, None]] = {}
    for rung, reason in tried:
        rungs.setdefault(reason, {})[rung] = None
    told = [f"{', '.join(names)}: {'all: ' if len(names) > 2 else ''}{reason}" for reason, names in rungs.items()]
    return "; ".join(told)


class _StaleError(Exception):
    """What was known of this rung came from another build of the engine or another device."""


class _RungError(Exception):
    """One rung does not hold."""

    def __init__(
        self,
        message: str,
        outcome: Outcome,
        *,
        killed: bool = False,
        log: tuple[str, ...] = (),
        cause: EdgellamaError | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.killed = killed
        self.log = log
        self.cause = cause
