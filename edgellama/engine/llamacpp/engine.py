"""The engine on llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgellama.engine import ggml
from edgellama.engine.base import Batch, Capabilities, EngineOptions, ModelInfo
from edgellama.engine.llamacpp import options as translate
from edgellama.engine.llamacpp import state as envelope
from edgellama.engine.llamacpp.batch import NativeBatch
from edgellama.engine.llamacpp.bindings import PINNED, bindings, uses_openmp
from edgellama.engine.llamacpp.info import describe
from edgellama.engine.llamacpp.loading import OnNode, close_pools, load
from edgellama.engine.llamacpp.log import RING
from edgellama.engine.llamacpp.tokenizer import LlamaTokenizer
from edgellama.errors import (
    AbortedError,
    ContextOverflowError,
    EngineError,
    InvalidFileError,
    UnsupportedError,
    UsageError,
)

_RANK = 4  # LLAMA_POOLING_TYPE_RANK
_NO_SLOT, _ABORTED, _INVALID = 1, 2, -1  # results of llama_decode
_MAX_POSITION = 2**31 - 1


class LlamaEngine:
    """An `Engine` on llama.cpp's low-level functions. Used from one thread, except `abort` and `progress`."""

    def __init__(
        self,
        path: str,
        options: EngineOptions,
        on_progress: Callable[[float], None] | None = None,
        on_node: OnNode | None = None,
    ) -> None:
        """`on_node(tensor, ask)` gets the address of each node of a graph before it is computed; where it answers
        True it gets it once more, computed, with `ask` False, and True lets the graph go on. It must not raise."""
        self._load_ticks = [0]
        self._c = bindings()
        self._options = options
        self._handles = load(self._c, path, options, on_progress, self._load_ticks, on_node)
        try:
            self._prepare()
        except BaseException:
            self._handles.stack.close()
            raise

    def _prepare(self) -> None:
        c, handles = self._c, self._handles
        self._context, self._memory = handles.context, handles.memory
        self._ticker = handles.ticker
        self._closed = False
        self._running = False
        self._calls = 0
        self._unsettled: int | None = None
        self._context_tokens = handles.context_tokens
        self._batch_tokens = int(c.llama_n_batch(self._context))
        self._rows = self._batch_tokens if self._options.embeddings else translate.logits_rows(self._options)
        self._batch = NativeBatch(c, self._batch_tokens)
        self._tokenizer = LlamaTokenizer(c, handles.model, whole_rule=self._options.embeddings)
        self._vocabulary = self._tokenizer.size
        self._fixed_state = bool(c.llama_model_is_recurrent(handles.model) or c.llama_model_is_hybrid(handles.model))
        self._logits_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", c._lib))
        self._view: tuple[int | None, int, NDArray[np.float32]] = (None, 0, np.empty((0, self._vocabulary), np.float32))
        self._info = describe(c, handles, self._options)
        self._layout = envelope.layout(
            self._options, f"{self._info.description} {self._info.parameters} {self._info.size_bytes}", PINNED
        )

    @property
    def info(self) -> ModelInfo:
        """Facts of this load."""
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        """What this model can do under these options."""
        stateful = self._memory is not None
        return Capabilities(
            copy_range=stateful and self._handles.unified and not self._fixed_state,
            remove_range=stateful and not self._fixed_state,
            shift=stateful and bool(self._c.llama_memory_can_shift(self._memory)),
            save_state=stateful,
            embeddings=self._options.embeddings,
            abort=True,
            lora=True,
        )

    @property
    def tokenizer(self) -> LlamaTokenizer:
        """The file's tokenizer."""
        return self._tokenizer

    # ---- computing

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """See `Engine.decode`."""
        self._check_open()
        if self._memory is None:
            raise UnsupportedError(f"{self._info.description}: the model makes embeddings and generates no text")
        n = len(batch)
        if n == 0:
            return np.empty((0, self._vocabulary), np.float32)
        self._check_batch(batch, n)
        wanted = int(np.count_nonzero(batch.want_logits))
        if wanted > self._rows:
            return self._decode_in_parts(batch, wanted)
        self._compute(batch, 0, n)
        return self._logits(wanted)

    def _check_batch(self, batch: Batch, n: int) -> None:
        """Refuse what would trip an assertion in llama.cpp, which ends the process."""
        if n > self._options.batch_tokens:
            raise UsageError(f"a batch of {n} tokens, at most {self._options.batch_tokens} are allowed")
        last = int(batch.positions.max())
        if last >= self._context_tokens or n > self._batch_tokens:
            raise ContextOverflowError(max(last + 1, n), self._context_tokens)
        self._check_sequence(int(batch.sequences.max()))
        self._check_sequence(int(batch.sequences.min()))

    def _compute(self, batch: Batch, start: int, stop: int) -> None:
        """Run rows [start, stop) of `batch`; on failure its sequences are left as they were."""
        native = self._batch
        native.fill(batch, start, stop)
        mark = RING.mark()
        self._running = True
        self._ticker.begin()
        try:
            result = self._c.llama_decode(self._context, native.struct)
        finally:
            self._ticker.end()
            self._running = False
            self._calls += 1
        if result != 0:
            self._fail(result, batch, start, stop, mark)
        self._unsettled = None

    def _fail(self, result: int, batch: Batch, start: int, stop: int, mark: int) -> NoReturn:
        if result == _NO_SLOT:
            last = int(batch.positions[start:stop].max()) + 1
            raise ContextOverflowError(last, self._context_tokens, "no cell of the KV cache is free")
        if result != _INVALID:
            self._take_back(batch, start, stop)
        if result == _ABORTED:
            raise AbortedError("the step was aborted")
        reason = RING.reason(mark)
        raise EngineError(f"llama.cpp failed with {result} on a batch of {stop - start} tokens\n{reason}".rstrip())

    def _take_back(self, batch: Batch, start: int, stop: int) -> None:
        """Remove what a failed call had already computed. A model that cannot go back forgets the whole sequence."""
        for sequence in np.unique(batch.sequences[start:stop]).tolist():
            first = int(batch.positions[start:stop][batch.sequences[start:stop] == sequence].min())
            if not self._c.llama_memory_seq_rm(self._memory, sequence, first, -1):
                self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _decode_in_parts(self, batch: Batch, wanted: int) -> NDArray[np.float32]:
        """More rows of logits than one call may compute: several calls, their rows copied together."""
        rows = np.empty((wanted, self._vocabulary), np.float32)
        places = np.flatnonzero(batch.want_logits)
        done, start = 0, 0
        while start < len(batch):
            some = min(self._rows, wanted - done)
            stop = int(places[done + some]) if done + some < wanted else len(batch)
            try:
                self._compute(batch, start, stop)
            except (EngineError, ContextOverflowError):
                if start:
                    self._take_back(batch, 0, start)
                raise
            rows[done : done + some] = self._logits(some)
            done, start = done + some, stop
        return rows

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """llama.cpp's own buffer as float32[rows, n_vocab]; the view is kept while buffer and shape stay."""
        address = self._logits_of(self._context)
        if (address, rows) != self._view[:2]:
            if not address:
                raise EngineError("llama.cpp returned no logits")
            memory = (ctypes.c_float * (rows * self._vocabulary)).from_address(address)
            view = np.ctypeslib.as_array(memory).reshape(rows, self._vocabulary)
            self._view = (address, rows, view)
        return self._view[2]

    def embed(self, batch: Batch) -> NDArray[np.float32]:
        """See `Engine.embed`. Sequences are computed in groups that fit one micro-batch."""
        self._check_open()
        if not self._options.embeddings:
            raise UnsupportedError("the engine was loaded without embeddings")
        if self._handles.pooling == 0:
            raise UnsupportedError("pooling none gives no vector per sequence", "choose mean, cls, last or rank")
        ids, sizes = np.unique(batch.sequences, return_counts=True)
        self._check_embed_batch(batch, ids, sizes)
        width = self._info.embedding_length
        if self._handles.pooling == _RANK:
            width = int(self._c.llama_model_n_cls_out(self._handles.model))
        result = np.empty((len(ids), width), np.float32)
        self._c.llama_set_embeddings(self._context, True)
        try:
            for row, sequence in enumerate(ids.tolist()):
                chosen = np.flatnonzero(batch.sequences == sequence)
                self._embed_one(batch, chosen, sequence, result[row])
        finally:
            self._c.llama_set_embeddings(self._context, self._memory is None)
        return result

    def _check_embed_batch(self, batch: Batch, ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> None:
        if len(batch) == 0:
            return
        self._check_sequence(int(ids[0]))
        self._check_sequence(int(ids[-1]))
        limit = min(self._batch_tokens, self._context_tokens)
        if int(sizes.max()) > limit or int(batch.positions.max()) >= limit:
            raise ContextOverflowError(max(int(sizes.max()), int(batch.positions.max()) + 1), limit)
        if busy := [s for s in ids.tolist() if self.sequence_length(s)]:
            raise UsageError(f"sequences {busy} are not empty")

    def _embed_one(self, batch: Batch, chosen: NDArray[np.intp], sequence: int, target: NDArray[np.float32]) -> None:
        part = Batch(
            batch.tokens[chosen], batch.positions[chosen], batch.sequences[chosen], np.ones(len(chosen), np.bool_)
        )
        try:
            self._compute(part, 0, len(part))
            pointer = self._c.llama_get_embeddings_seq(self._context, sequence)
            if not pointer:
                raise EngineError(f"llama.cpp returned no embedding for sequence {sequence}")
            target[:] = np.ctypeslib.as_array(pointer, target.shape)
        finally:
            if self._memory is not None:
                self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    # ---- sequences

    def copy_sequence(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """See `Engine.copy_sequence`. With separate caches only a whole sequence can be copied, replacing `target`."""
        self._check_stateful(source, target)
        length = self.sequence_length(source)
        start, stop = max(0, start), length if stop < 0 else min(stop, length)
        whole = start == 0 and stop == length
        if not whole and not self.capabilities.copy_range:
            raise UnsupportedError("only a whole sequence can be copied with this model and separate caches")
        if source == target or start >= stop:
            return
        c = self._c
        if self._handles.unified:
            first = int(c.llama_memory_seq_pos_min(self._memory, target))
            last = int(c.llama_memory_seq_pos_max(self._memory, target))
            if last >= 0 and first < stop and last >= start:
                raise UsageError(f"sequence {target} already holds positions {first} to {last}")
            c.llama_memory_seq_cp(self._memory, source, target, start, stop)
        else:
            c.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            self._unsettled = target

    def remove_sequence(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """See `Engine.remove_sequence`."""
        self._check_stateful(sequence)
        start = min(max(0, start), _MAX_POSITION)
        if 0 <= stop <= start:
            return True
        whole = start == 0 and (stop < 0 or stop >= self.sequence_length(sequence))
        first, last = (-1, -1) if whole else (start, min(stop, _MAX_POSITION))
        return bool(self._c.llama_memory_seq_rm(self._memory, sequence, first, last))

    def shift_sequence(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """See `Engine.shift_sequence`."""
        self._check_stateful(sequence)
        if not self.capabilities.shift:
            raise UnsupportedError(f"{self._info.description}: positions cannot be shifted")
        start, length = max(0, start), self.sequence_length(sequence)
        stop = length if stop < 0 else min(stop, length)
        if start >= stop or delta == 0:
            return
        if start + delta < 0 or stop + delta > self._context_tokens:
            raise UsageError(f"positions {start} to {stop} moved by {delta} leave 0 to {self._context_tokens}")
        self._c.llama_memory_seq_add(self._memory, sequence, start, stop, delta)
        self._unsettled = sequence

    def sequence_length(self, sequence: int) -> int:
        """See `Engine.sequence_length`; 0 for models without state."""
        self._check_open()
        self._check_sequence(sequence)
        if self._memory is None:
            return 0
        return int(self._c.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def save_sequence(self, sequence: int) -> bytes:
        """See `Engine.save_sequence`."""
        self._check_stateful(sequence)
        self._settle()
        size = int(self._c.llama_state_seq_get_size(self._context, sequence))
        buffer = bytearray(envelope.HEADER_BYTES + size)
        target = (ctypes.c_uint8 * size).from_buffer(buffer, envelope.HEADER_BYTES)
        mark = RING.mark()
        written = self._c.llama_state_seq_get_data(self._context, target, size, sequence)
        del target
        if written != size:
            raise EngineError(f"llama.cpp saved {written} of {size} bytes\n{RING.reason(mark)}".rstrip())
        return envelope.seal(buffer, self.sequence_length(sequence), self._layout)

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """See `Engine.restore_sequence`."""
        self._check_stateful(sequence)
        positions, payload = envelope.unseal(state, self._layout)
        if positions > self._context_tokens:
            raise InvalidFileError(
                f"the saved sequence has {positions} tokens, the context holds {self._context_tokens}"
            )
        self._settle()
        before = self.save_sequence(sequence) if self.sequence_length(sequence) else None
        mark = RING.mark()
        if self._restore(sequence, payload) and self.sequence_length(sequence) == positions:
            return
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        if before is not None:
            self._restore(sequence, memoryview(before)[envelope.HEADER_BYTES :])
        raise InvalidFileError(f"llama.cpp refused the saved sequence\n{RING.reason(mark)}".rstrip())

    def _restore(self, sequence: int, payload: memoryview) -> bool:
        source = np.frombuffer(payload, np.uint8)
        pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(self._c.llama_state_seq_set_data(self._context, pointer, len(payload), sequence))

    def _settle(self) -> None:
        """Carry out a shift or copy that llama.cpp has only noted: it does so at the next decode, and would save or
        overwrite the old data until then."""
        if self._unsettled is None:
            return
        sequence = self._unsettled
        position = self.sequence_length(sequence)
        self._compute(Batch.one_sequence([0], position, sequence, logits="none"), 0, 1)
        self._c.llama_memory_seq_rm(self._memory, sequence, position, -1)

    # ---- control

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """See `Engine.set_threads`."""
        self._check_open()
        if not (1 <= threads <= ggml.MAX_THREADS and 1 <= prefill_threads <= ggml.MAX_THREADS):
            raise UsageError(f"{threads} and {prefill_threads} threads: 1 to {ggml.MAX_THREADS} are possible")
        if (threads, prefill_threads) == self._handles.threads:
            return
        if self._handles.pools or not uses_openmp():
            close_pools(self._handles.pools)
            self._handles.pools.append(ggml.ThreadPools(self._context, threads, prefill_threads))
        self._c.llama_set_n_threads(self._context, threads, prefill_threads)
        self._handles.threads = (threads, prefill_threads)

    def abort(self) -> None:
        """See `Engine.abort`. Only the CPU heeds it; work on a device runs to its end."""
        self._ticker.abort()

    def progress(self) -> int:
        """See `Engine.progress`: nodes of the graph begun on the CPU, calls, and steps of loading."""
        return self._load_ticks[0] + self._calls + self._ticker.count()

    def close(self) -> None:
        """Free context and model. Idempotent; refused while `decode` runs on another thread."""
        if self._closed:
            return
        if self._running:
            raise EngineError("the engine is computing: abort first, close then")
        self._closed = True
        self._tokenizer.close()
        self._view = (None, 0, np.empty((0, self._vocabulary), np.float32))
        self._handles.stack.close()

    def __enter__(self) -> LlamaEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self._options.sequences:
            raise UsageError(f"sequence {sequence} is not one of the {self._options.sequences} of this engine")

    def _check_stateful(self, *sequences: int) -> None:
        self._check_open()
        if self._memory is None:
            raise UnsupportedError(f"{self._info.description}: the model keeps no sequences")
        for sequence in sequences:
            self._check_sequence(sequence)
