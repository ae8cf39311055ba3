"""The step: admit -> build the batch -> decode -> sample -> emit -> retire. Knows engines only by their protocol.

`submit`, `cancel`, `interrupt`, `remind` and `busy` may be called from any thread, everything else from the one that
owns the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Engine, EngineOptions
from edgellama.errors import AbortedError, ContextOverflowError, EdgellamaError
from edgellama.runtime.ends import EndTokens
from edgellama.runtime.messages import FromWorker, Generate, Prefilled, RequestFailed, Step
from edgellama.runtime.sequence import Reason, Running, Slot, check, unstarted
from edgellama.sampling.chain import Sampler


@dataclass(slots=True)
class _Share:
    """What one request computes in this step: its next `count` tokens."""

    running: Running
    count: int

    @property
    def completes(self) -> bool:
        """Whether its next token can be sampled afterwards."""
        return self.count == self.running.pending


class Scheduler:
    """Steps at most `parallel` requests at a time, the others wait in order."""

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        emit: Callable[[FromWorker], None],
        ends: EndTokens,
        *,
        parallel: int = 1,
    ) -> None:
        """`options` are those the engine was loaded with; `emit` may block while the host does not read."""
        self._engine = engine
        self._emit = emit
        self._ends = ends
        self._parallel = parallel
        # A chunk as large as the engine computes at once: the same numbers as larger ones, with progress in between.
        self._chunk_tokens = max(1, min(options.batch_tokens, options.micro_batch_tokens))
        self._slots = [Slot(i) for i in range(engine.info.sequences)]
        self._running: list[Running] = []
        self._lock = threading.Lock()
        self._waiting: deque[Generate] = deque()
        self._cancelled: set[str] = set()
        self._decoding: frozenset[str] = frozenset()
        self._interrupted = False

    # ---- from any thread

    def submit(self, request: Generate) -> None:
        """Queue a request."""
        with self._lock:
            self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """End a request with `Finished("cancelled")`, also in the middle of a decode; unknown ids are ignored."""
        with self._lock:
            self._cancelled.add(request_id)
        self.remind()

    def interrupt(self) -> None:
        """Fail what is being decoded with `AbortedError` (the watchdog saw no progress)."""
        with self._lock:
            self._interrupted = bool(self._decoding)
        self.remind()

    def remind(self) -> None:
        """Abort the running decode if a cancel or interrupt waits for it; an abort just before it began is lost."""
        with self._lock:
            wanted = self._interrupted or not self._cancelled.isdisjoint(self._decoding)
        if wanted:
            self._engine.abort()

    @property
    def busy(self) -> tuple[str, ...]:
        """Ids of the requests that run."""
        return tuple(running.request.request_id for running in list(self._running))

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self._running or self._waiting)

    # ---- the step

    def step(self) -> None:
        """Advance every running request by one token, or one chunk of its prompt."""
        self._retire_cancelled()
        self._admit()
        plan = self._plan()
        if not plan or not self._enter(plan):
            return
        try:
            logits = self._engine.decode(_batch(plan))
        except EdgellamaError as error:
            self._recover(plan, error)
            return
        finally:
            self._leave()
        self._advance(plan, logits)

    def _admit(self) -> None:
        while len(self._running) < self._parallel:
            with self._lock:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
            try:
                self._start(request)
            except EdgellamaError as error:
                self._emit_failure(request.request_id, error)

    def _start(self, request: Generate) -> None:
        info, tokenizer = self._engine.info, self._engine.tokenizer
        check(request, info.vocabulary_tokens)
        if len(request.prompt) > info.context_tokens:
            raise ContextOverflowError(len(request.prompt), info.context_tokens)
        ends = self._ends.ids if request.sampling.ignore_eos else ()
        sampler = Sampler(request.sampling, info.vocabulary_tokens, end_tokens=ends)
        running = Running(request, sampler, tokenizer, self._choose_slot([*request.prompt, *request.resume]))
        if reason := self._end_of(running):  # it had ended when the worker before this one died
            self._emit(running.finished(reason))
            return
        self._reuse(running)
        running.slot.taken = True
        self._running.append(running)
        self._emit_progress(running)

    def _plan(self) -> list[_Share]:
        room = self._chunk_tokens
        plan: list[_Share] = []
        for running in sorted(self._running, key=lambda running: running.pending):  # one-token steps first
            count = min(running.pending, room)
            if count:
                plan.append(_Share(running, count))
                room -= count
        return plan

    def _enter(self, plan: Sequence[_Share]) -> bool:
        """From here on a cancel aborts the decode; False when one came since they were retired."""
        ids = frozenset(share.running.request.request_id for share in plan)
        with self._lock:
            if not self._cancelled.isdisjoint(ids):
                return False
            self._decoding = ids
            self._interrupted = False
        return True

    def _leave(self) -> None:
        with self._lock:
            self._decoding = frozenset()

    def _advance(self, plan: Sequence[_Share], logits: NDArray[np.float32]) -> None:
        rows = iter(logits)
        for share in plan:
            running, completes = share.running, share.completes
            running.computed += share.count
            if running.prefilling:
                self._emit_progress(running)
            if completes:
                running.mark_first()
                self._sample(running, next(rows))

    def _sample(self, running: Running, logits: NDArray[np.float32]) -> None:
        try:
            token = running.sampler.sample(logits)
        except EdgellamaError as error:  # not a number, or nothing may be chosen
            self._fail(running, error)
            return
        if token in self._ends:
            self._finish(running, "stop")
            return
        text = running.take(token)
        request_id = running.request.request_id
        self._emit(Step(request_id=request_id, token=token, text=text, state=running.sampler.state()))
        if reason := self._end_of(running):
            self._finish(running, reason)

    def _end_of(self, running: Running) -> Reason | None:
        if running.stopped:
            return "stop"
        full = len(running.tokens) > self._engine.info.context_tokens  # the last token has no cell to be computed in
        return "length" if running.complete or full else None

    # ---- the end of a request

    def _retire_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [request for request in self._waiting if request.request_id in cancelled]
            self._waiting = deque(request for request in self._waiting if request.request_id not in cancelled)
        for request in dropped:
            self._emit(unstarted(request, self._engine.tokenizer))
        for running in [r for r in self._running if r.request.request_id in cancelled]:
            self._finish(running, "cancelled")

    def _finish(self, running: Running, reason: Reason) -> None:
        self._release(running)
        self._emit(running.finished(reason))

    def _fail(self, running: Running, error: EdgellamaError) -> None:
        """End a request for a fault, and forget all the engine holds of it: it may be what is wrong."""
        self._release(running)
        self._forget(running.slot)
        self._emit_failure(running.request.request_id, error, running.held_back())

    def _release(self, running: Running) -> None:
        self._running.remove(running)
        slot = running.slot
        slot.tokens = running.tokens[: running.computed]
        slot.taken = False
        slot.used_at = time.monotonic()

    def _recover(self, plan: Sequence[_Share], error: EdgellamaError) -> None:
        """A decode failed and computed nothing that counts: decide what becomes of the requests in it."""
        for share in plan:
            self._roll_back(share.running)
        if isinstance(error, AbortedError) and not self._interrupted:
            return  # the cancelled ones retire in the next step, the others try again
        if isinstance(error, ContextOverflowError):
            self._make_room(plan, error)
            return
        for share in plan:
            self._fail(share.running, error)

    def _make_room(self, plan: Sequence[_Share], error: ContextOverflowError) -> None:
        cached = [slot for slot in self._slots if slot.tokens and not slot.taken]
        for slot in cached:
            self._forget(slot)
        if cached:
            return  # try again without what was kept from earlier requests
        for share in plan:
            if share.running.answered:
                self._finish(share.running, "length")
            else:
                self._fail(share.running, error)

    # ---- what the engine holds

    def _choose_slot(self, tokens: Sequence[int]) -> Slot:
        """The free slot that holds most of these tokens, unless that would throw away more than it saves."""
        free = [slot for slot in self._slots if not slot.taken]
        best = max(free, key=lambda slot: slot.shared(tokens))
        if best.shared(tokens) * 2 > len(best.tokens):
            return best
        return min(free, key=lambda slot: (bool(slot.tokens), slot.used_at))

    def _reuse(self, running: Running) -> None:
        """Keep the common beginning; the last token is always computed again, for its logits."""
        slot, tokens = running.slot, running.tokens
        keep = min(slot.shared(tokens), len(tokens) - 1)
        if keep < len(slot.tokens):
            kept = keep > 0 and self._engine.remove_sequence(slot.id, keep)
            if not kept:
                self._forget(slot)
                keep = 0
        if self._engine.sequence_length(slot.id) != keep:
            self._forget(slot)
            keep = 0
        running.computed = running.cached = keep

    def _roll_back(self, running: Running) -> None:
        slot, computed = running.slot, running.computed
        kept = computed > 0 and self._engine.remove_sequence(slot.id, computed)
        if kept and self._engine.sequence_length(slot.id) == computed:
            return
        self._forget(slot)
        running.computed = 0

    def _forget(self, slot: Slot) -> None:
        self._engine.remove_sequence(slot.id)
        slot.tokens = []

    def forget_all(self) -> None:
        """Empty every sequence of the engine; running requests are computed again from their tokens."""
        for slot in self._slots:
            self._forget(slot)
        for running in self._running:
            running.computed = 0

    # ---- messages

    def _emit_progress(self, running: Running) -> None:
        done, total = running.computed, len(running.tokens)
        self._emit(Prefilled(request_id=running.request.request_id, done=done, total=total, cached=running.cached))

    def _emit_failure(self, request_id: str, error: EdgellamaError, text: str = "") -> None:
        kind = type(error).__name__
        failed = RequestFailed(request_id=request_id, kind=kind, message=error.message, advice=error.advice, text=text)
        self._emit(failed)


def _batch(plan: Sequence[_Share]) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    want: list[bool] = []
    for share in plan:
        running, count = share.running, share.count
        start = running.computed
        tokens += running.tokens[start : start + count]
        positions += range(start, start + count)
        sequences += [running.slot.id] * count
        want += [False] * (count - 1) + [share.completes]
    return Batch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(sequences, np.int32),
        np.array(want, np.bool_),
    )
