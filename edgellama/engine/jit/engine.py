"""The engine around the forward pass: batches, sequences, states, threads, abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Capabilities, EngineOptions, ModelInfo, Tokenizer
from edgellama.engine.jit import options as limits
from edgellama.engine.jit import state as envelope
from edgellama.engine.jit.cells import Cells, Step
from edgellama.engine.jit.model import Model
from edgellama.engine.jit.storage import Storage
from edgellama.errors import AbortedError, ContextOverflowError, EngineError, UnsupportedError, UsageError

Rows = NDArray[np.float32]
CONTROL_WORDS = 32


class Control:
    """What other threads may touch while a pass runs. int64: stop, ticks, then what kernels need (`layout.py`)."""

    def __init__(self) -> None:
        self.memory = np.zeros(CONTROL_WORDS, np.int64)

    def tick(self) -> None:
        """Count a step of progress; raises `AbortedError` after `abort`."""
        self.memory[1] += 1
        if self.memory[0]:
            raise AbortedError("the step was aborted")


class Compute(Protocol):
    """A way to run the forward pass."""

    @property
    def name(self) -> str:
        """Identity of the code, for verdicts."""

    def run(self, step: Step, logits: Rows | None) -> NDArray[np.floating]:
        """Hidden states of the wanted rows behind the last norm, [wanted, embedding length], valid until the next call.

        Their logits go to `logits`, float32[wanted, vocabulary], unless it is None. Raises `AbortedError`.
        """

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """Threads for passes of one token per sequence, and for others."""

    def close(self) -> None:
        """Free threads and memory."""


class JitEngine:
    """An `Engine` without native libraries. Used from one thread, except `abort` and `progress`."""

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        tokenizer: Callable[[], Tokenizer],
        make_compute: Callable[[Model, Cells, Storage, Control, EngineOptions], Compute],
        control: Control,
    ) -> None:
        self._model, self._options, self._control = model, options, control
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._cells = Cells(options.sequences, model.context_tokens)
        self._storage = Storage(model, self._cells.count, options.kv_type_key, options.kv_type_value)
        self._pooling = limits.pooling(options, model)
        self._threads = limits.threads(options)
        self._compute = make_compute(model, self._cells, self._storage, control, options)
        self._compute.set_threads(*self._threads)
        self._rows = np.empty((0, model.vocabulary_tokens), np.float32)
        self._running = self._closed = False
        self._layout = envelope.layout(
            model.identity,
            options.kv_type_key,
            options.kv_type_value,
            *(f"{adapter.path}*{adapter.scale}" for adapter in options.loras),
            *(f"{rope.rule} {rope.frequencies.tobytes().hex()} {rope.attention_factor}" for rope in model.ropes),
        )

    @property
    def info(self) -> ModelInfo:
        """Facts of this load."""
        header = self._model.header
        types = header.type_counts
        largest = next(iter(types)).name if types else "?"
        return ModelInfo(
            architecture=header.architecture,
            description=f"{header.architecture} {header.parameters / 1e6:.2f} M {largest}",
            parameters=header.parameters,
            size_bytes=header.weights_bytes,
            layers=header.layers,
            embedding_length=header.embedding_length,
            vocabulary_tokens=self._model.vocabulary_tokens,
            trained_context_tokens=header.context_tokens,
            context_tokens=self._model.context_tokens,
            sequences=self._options.sequences,
            engine="jit",
            backend_build=self._compute.name,
            devices=("CPU",),
            threads=self._threads[0],
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this model can do under these options."""
        return Capabilities(
            copy_range=self._options.unified_kv,
            embeddings=self._options.embeddings and self._pooling != "none",
            lora=True,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, made at its first use."""
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    # ---- computing

    def decode(self, batch: Batch) -> Rows:
        """See `Engine.decode`."""
        self._check_open()
        vocabulary = self._model.vocabulary_tokens
        if len(batch) == 0:
            return np.empty((0, vocabulary), np.float32)
        self._check_batch(batch)
        wanted = int(np.count_nonzero(batch.want_logits))
        if len(self._rows) < wanted:
            self._rows = np.empty((wanted, vocabulary), np.float32)
        out = self._rows[:wanted]
        done = 0
        with self._rolling_back(batch):
            for start in range(0, len(batch), self._options.micro_batch_tokens):
                stop = min(start + self._options.micro_batch_tokens, len(batch))
                step = self._cells.place(batch, start, stop)
                self._compute.run(step, out[done : done + len(step.wanted)])
                done += len(step.wanted)
        return out

    def _rolling_back(self, batch: Batch) -> _Undo:
        return _Undo(self, batch)

    def _check_batch(self, batch: Batch) -> None:
        options = self._options
        if len(batch) > options.batch_tokens:
            raise UsageError(f"a batch of {len(batch)} tokens, at most {options.batch_tokens} are allowed")
        for sequence in np.unique(batch.sequences).tolist():
            self._check_sequence(sequence)
        low, high = int(batch.tokens.min()), int(batch.tokens.max())
        if low < 0 or high >= self._model.vocabulary_tokens:
            wrong = low if low < 0 else high
            raise EngineError(f"token {wrong} is not one of the {self._model.vocabulary_tokens:,} of this model")
        last = int(batch.positions.max()) + 1
        if last > self._model.context_tokens:
            raise ContextOverflowError(last, self._model.context_tokens)
        self._cells.check(batch)

    def embed(self, batch: Batch) -> Rows:
        """See `Engine.embed`."""
        self._check_open()
        if not self._options.embeddings:
            raise UnsupportedError("the engine was loaded without embeddings")
        if self._pooling == "none":
            raise UnsupportedError("pooling none gives no vector per sequence", "choose mean, cls or last")
        ids = np.unique(batch.sequences).tolist()
        result = np.empty((len(ids), self._model.embedding_length), np.float32)
        if not ids:
            return result
        self._check_batch(batch)
        if busy := [sequence for sequence in ids if self.sequence_length(sequence)]:
            raise UsageError(f"sequences {busy} are not empty")
        for row, sequence in enumerate(ids):
            chosen = batch.sequences == sequence
            result[row] = self._pooled(batch.tokens[chosen], sequence)
        return result

    def _pooled(self, tokens: NDArray[np.int32], sequence: int) -> NDArray[np.floating]:
        """One sequence's vector; the sequence is empty before and after."""
        n, size = len(tokens), self._options.micro_batch_tokens
        want = {"mean": "all", "last": "last", "cls": "all"}[self._pooling]
        whole = Batch.one_sequence(tokens.tolist(), 0, sequence, want)
        if self._pooling == "cls":
            whole.want_logits[1:] = False
        total = np.zeros(self._model.embedding_length)
        with self._rolling_back(whole):
            for start in range(0, n, size):
                hidden = self._compute.run(self._cells.place(whole, start, min(start + size, n)), None)
                total += hidden.astype(np.float64).sum(0)
        self._cells.remove(sequence, 0, n)
        return total / (n if self._pooling == "mean" else 1)

    # ---- sequences

    def copy_sequence(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """See `Engine.copy_sequence`."""
        self._check_sequences(source, target)
        length = self._cells.length(source)
        start, stop = max(0, start), length if stop < 0 else min(stop, length)
        if not self._options.unified_kv:
            if start > 0 or stop < length:
                raise UnsupportedError("only a whole sequence can be copied with separate caches")
            if source != target:
                self._cells.remove(target, 0, self._model.context_tokens)
        if source == target or start >= stop:
            return
        held = self._cells.held(target)
        if len(held) and held[0] < stop and held[-1] >= start:
            raise UsageError(f"sequence {target} already holds positions {held[0]} to {held[-1]}")
        self._cells.copy(source, target, start, stop)

    def remove_sequence(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """See `Engine.remove_sequence`."""
        self._check_sequences(sequence)
        end = self._cells.length(sequence)
        start, stop = max(0, start), end if stop < 0 else min(stop, end)
        if start < stop:
            self._cells.remove(sequence, start, stop)
        return True

    def shift_sequence(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """See `Engine.shift_sequence`. Cells shared with other sequences become own ones first."""
        self._check_sequences(sequence)
        start, length = max(0, start), self._cells.length(sequence)
        stop = length if stop < 0 else min(stop, length)
        if start >= stop or delta == 0:
            return
        if start + delta < 0 or stop + delta > self._model.context_tokens:
            raise UsageError(f"positions {start} to {stop} moved by {delta} leave 0 to {self._model.context_tokens}")
        after, before = self._cells.move(sequence, start, stop, delta)
        self._storage.relocate(after, before, delta)

    def sequence_length(self, sequence: int) -> int:
        """See `Engine.sequence_length`."""
        self._check_sequences(sequence)
        return self._cells.length(sequence)

    def save_sequence(self, sequence: int) -> bytes:
        """See `Engine.save_sequence`."""
        self._check_sequences(sequence)
        positions = self._cells.held(sequence)
        content = self._storage.gather(self._cells.table[sequence, positions])
        return envelope.seal(positions, content, self._layout)

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """See `Engine.restore_sequence`."""
        self._check_sequences(sequence)
        positions, content = envelope.unseal(state, self._layout, self._model.context_tokens)
        if len(content) != self._storage.gathered_bytes(len(positions)):
            raise limits.misfit(len(content), self._storage.gathered_bytes(len(positions)))
        self._cells.remove(sequence, 0, self._model.context_tokens)
        self._storage.scatter(self._cells.fill(sequence, positions), content)

    # ---- control

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """See `Engine.set_threads`."""
        self._check_open()
        limits.check_threads(threads, prefill_threads)
        self._threads = (threads, prefill_threads)
        self._compute.set_threads(threads, prefill_threads)

    def abort(self) -> None:
        """See `Engine.abort`."""
        if self._running:
            self._control.memory[0] = 1

    def progress(self) -> int:
        """See `Engine.progress`: operations begun, and tensors mapped while loading."""
        return int(self._control.memory[1])

    def close(self) -> None:
        """Free everything. Idempotent; refused while `decode` runs on another thread."""
        if self._closed:
            return
        if self._running:
            raise EngineError("the engine is computing: abort first, close then")
        self._closed = True
        self._compute.close()
        del self._compute, self._storage, self._cells
        self._rows = np.empty((0, 0), np.float32)

    def __enter__(self) -> JitEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self._options.sequences:
            raise UsageError(f"sequence {sequence} is not one of the {self._options.sequences} of this engine")

    def _check_sequences(self, *sequences: int) -> None:
        self._check_open()
        for sequence in sequences:
            self._check_sequence(sequence)


class _Undo:
    """While a batch is computed: `abort` works, and a failure takes back the batch's cells."""

    def __init__(self, engine: JitEngine, batch: Batch) -> None:
        self._engine, self._batch = engine, batch

    def __enter__(self) -> None:
        self._engine._control.memory[0] = 0
        self._engine._running = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._engine._running = False
        if kind is None:
            return
        cells, batch = self._engine._cells, self._batch
        for sequence in np.unique(batch.sequences).tolist():
            first = int(batch.positions[batch.sequences == sequence].min())
            cells.remove(sequence, first, cells.context)
