"""The fake engine itself: real bookkeeping of cells, predictable logits."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Capabilities, EngineOptions, ModelInfo
from edgellama.engine.fake.faults import Faults, Step, spoil
from edgellama.engine.fake.script import Fault, Script, read_script
from edgellama.engine.fake.tokenizer import FakeTokenizer
from edgellama.errors import (
    AbortedError,
    ContextOverflowError,
    EdgellamaError,
    EngineError,
    InvalidFileError,
    UnsupportedError,
    UsageError,
)

_LOAD_STEPS = 10
_CERTAIN = np.float32(30.0)


class _State(msgspec.Struct, frozen=True, array_like=True, tag="edgellama-fake-1"):
    layout: str
    positions: list[int]
    tokens: list[int]
    digest: bytes

    def fingerprint(self) -> bytes:
        """Hash over the rest, to tell a damaged state."""
        return hashlib.blake2b(repr((self.layout, self.positions, self.tokens)).encode(), digest_size=16).digest()


class _Cell:
    """One cell of the KV cache: a token that several sequences may share."""

    __slots__ = ("token",)

    def __init__(self, token: int) -> None:
        self.token = token


class FakeEngine:
    """An `Engine` that follows a script."""

    def __init__(self, path: str, options: EngineOptions, on_progress: Callable[[float], None] | None = None) -> None:
        self._script: Script = read_script(path)
        self._options = options
        self._tokenizer = FakeTokenizer(self._script)
        self._faults = Faults(Path(path), self._script.faults, options)
        self._progress = 0
        self._running = False
        self._abort = threading.Event()
        self._closed = False
        self._calls: Counter[str] = Counter()
        self._context_tokens = options.context_tokens or self._script.trained_context_tokens
        self._sequences: list[dict[int, _Cell]] = [{} for _ in range(options.sequences)]
        self._threads = options.threads or 1
        self._load(on_progress)

    def _load(self, on_progress: Callable[[float], None] | None) -> None:
        for done in range(_LOAD_STEPS + 1):
            if on_progress is not None:
                on_progress(done / _LOAD_STEPS)
            if done == _LOAD_STEPS // 2:
                for fault, _ in self._faults.due(Step("load", 1, 1)):
                    self._faults.strike(fault, self._advance, self._abort.is_set)
            time.sleep(self._script.load_seconds / (_LOAD_STEPS + 1))
            self._advance()

    def _advance(self) -> None:
        self._progress += 1

    @property
    def info(self) -> ModelInfo:
        """What a real engine would say of its model."""
        script = self._script
        return ModelInfo(
            architecture="fake",
            description="scripted engine",
            parameters=0,
            size_bytes=script.size_bytes,
            layers=1,
            embedding_length=script.embedding_length,
            vocabulary_tokens=self._tokenizer.size,
            trained_context_tokens=script.trained_context_tokens,
            context_tokens=self._context_tokens,
            sequences=self._options.sequences,
            engine="fake",
            backend_build="fake 1",
            devices=("CPU",),
            threads=self._threads,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Everything; a part of a sequence is copied only in a unified cache, as in llama.cpp."""
        return Capabilities(copy_range=self._options.unified_kv, embeddings=self._options.embeddings)

    @property
    def tokenizer(self) -> FakeTokenizer:
        """The byte-level vocabulary."""
        return self._tokenizer

    # ---- computing

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """See `Engine.decode`."""
        self._check_open()
        self._abort.clear()
        self._running = True
        try:
            added = self._place(batch)
            try:
                return self._compute(batch)
            except EdgellamaError:
                self._take_back(added)
                raise
        finally:
            self._running = False

    def _place(self, batch: Batch) -> list[tuple[int, int]]:
        """Give every token a cell; changes nothing when one does not fit. Returns the (sequence, position) pairs."""
        if len(batch) > self._options.batch_tokens:
            raise UsageError(f"a batch of {len(batch)} tokens, at most {self._options.batch_tokens} are allowed")
        ends = {s: self.sequence_length(s) for s in set(batch.sequences.tolist())}
        triples = list(zip(batch.sequences.tolist(), batch.positions.tolist(), batch.tokens.tolist(), strict=True))
        for sequence, position, token in triples:
            if position != ends[sequence]:
                raise EngineError(f"sequence {sequence} goes on at position {ends[sequence]}, not {position}")
            if not 0 <= token < self._tokenizer.size:
                raise EngineError(f"token {token} is outside the vocabulary of {self._tokenizer.size}")
            ends[sequence] += 1
        longest = max(ends.values(), default=0)
        pool = self._context_tokens * self._options.sequences
        wanted = len({id(c) for cells in self._sequences for c in cells.values()}) + len(triples)
        if longest > self._context_tokens or (self._options.unified_kv and wanted > pool):
            raise ContextOverflowError(longest, self._context_tokens)
        for sequence, position, token in triples:
            self._sequences[sequence][position] = _Cell(token)
        return [(sequence, position) for sequence, position, _ in triples]

    def _take_back(self, added: list[tuple[int, int]]) -> None:
        for sequence, position in added:
            self._sequences[sequence].pop(position, None)

    def _compute(self, batch: Batch) -> NDArray[np.float32]:
        spoiled = self._suffer(batch)
        self._spend(self._script.step_seconds + self._script.token_seconds * len(batch))
        wanted = np.flatnonzero(batch.want_logits)
        logits = np.empty((len(wanted), self._tokenizer.size), np.float32)
        for row, i in zip(logits, wanted, strict=True):
            sequence = int(batch.sequences[i])
            row[:] = self._logits(self._history(sequence, int(batch.positions[i]) + 1))
            self._advance()
        for fault, sequences in spoiled:
            for k, i in enumerate(wanted):
                if int(batch.sequences[i]) in sequences:
                    spoil(fault, logits[k : k + 1])
        self._advance()
        return logits

    def _suffer(self, batch: Batch) -> list[tuple[Fault, list[int]]]:
        """Let the due faults strike; returns those that concern logits."""
        counts = Counter(batch.sequences.tolist())
        phase = "prefill" if any(n > 1 for n in counts.values()) else "decode"
        self._calls[phase] += 1
        step = Step(phase, self._calls[phase], self._calls.total(), set(batch.positions.tolist()))
        if self._script.faults:
            step.tokens = {s: self._history(s) for s in counts}
            step.texts = {s: self._tokenizer.render(tokens) for s, tokens in step.tokens.items()}
        due = self._faults.due(step)
        for fault, _ in due:
            self._faults.strike(fault, self._advance, self._abort.is_set)
            self._check_abort()
        return due

    def _spend(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while seconds and (left := end - time.monotonic()) > 0:
            self._check_abort()
            time.sleep(min(left, 0.005))
            self._advance()
        self._check_abort()

    def _history(self, sequence: int, stop: int | None = None) -> list[int]:
        cells = self._sequences[sequence]
        return [cells[p].token for p in sorted(cells) if stop is None or p < stop]

    def _logits(self, history: list[int]) -> NDArray[np.float32]:
        """float32[n_vocab], a pure function of the tokens before it."""
        data = np.asarray(history, np.int32).tobytes() + self._script.seed.to_bytes(8, "little", signed=True)
        draw = np.random.default_rng(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))
        row = draw.standard_normal(self._tokenizer.size, np.float32)
        following = self._scripted(history)
        if following is not None:
            row[following] = _CERTAIN
            return row
        row[:32] -= 20.0  # hashed text stays printable and never ends
        row[127 : 256 + len(self._script.control_tokens)] -= 20.0
        return row

    def _scripted(self, history: list[int]) -> int | None:
        """The script's next token, None where logits are hashed."""
        best: tuple[int, list[int], int] | None = None
        for answer in self._script.answers:
            ids = self._tokenizer.tokenize(answer.say)
            done = self._said(history, ids)
            prompt = self._tokenizer.render(history[: len(history) - done])
            place = prompt.rfind(answer.contains.encode())
            if place >= 0 and (best is None or place > best[0]):
                best = (place, ids, done)
        if best is None:
            if self._script.say is None:
                return None
            ids = self._tokenizer.tokenize(self._script.say)
            best = (0, ids, self._said(history, ids))
        _, ids, done = best
        return ids[done] if done < len(ids) else self._tokenizer.eos

    def _said(self, history: list[int], answer: list[int]) -> int:
        """How many tokens of `answer` the sequence ends with (or, behind the marker, holds)."""
        marker = self._tokenizer.tokenize(self._script.after, special=True)
        start = _last_place(history, marker) if marker else -1
        if start >= 0:
            return min(len(history) - start - len(marker), len(answer))
        return next((n for n in range(min(len(answer), len(history)), 0, -1) if history[-n:] == answer[:n]), 0)

    def embed(self, batch: Batch) -> NDArray[np.float32]:
        """See `Engine.embed`: a unit vector drawn from a hash of each sequence."""
        if not self._options.embeddings:
            raise UnsupportedError("the engine was loaded without embeddings")
        plain = Batch(batch.tokens, batch.positions, batch.sequences, np.zeros(len(batch), np.bool_))
        ids = sorted(set(batch.sequences.tolist()))
        if busy := [s for s in ids if self._sequences[s]]:
            raise UsageError(f"sequences {busy} are not empty")
        try:
            self.decode(plain)
            seeds = [hashlib.blake2b(self._tokenizer.render(self._history(s)), digest_size=8).digest() for s in ids]
        finally:
            for s in ids:
                self._sequences[s].clear()
        rows = [
            np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(self._script.embedding_length)
            for seed in seeds
        ]
        return np.asarray([row / np.linalg.norm(row) for row in rows], np.float32)

    # ---- sequences

    def copy_sequence(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """See `Engine.copy_sequence`. With separate caches only a whole sequence can be copied."""
        self._check_sequences(source, target)
        whole = start <= 0 and (stop < 0 or stop >= self.sequence_length(source))
        if not self._options.unified_kv and not whole:
            raise UnsupportedError("with separate caches only a whole sequence can be copied")
        if source == target:
            return
        taken = {p: c for p, c in self._sequences[source].items() if p >= start and (stop < 0 or p < stop)}
        if not self._options.unified_kv:
            self._sequences[target] = {p: _Cell(c.token) for p, c in taken.items()}
            return
        if clash := taken.keys() & self._sequences[target].keys():
            raise UsageError(f"sequence {target} already holds position {min(clash)}")
        self._sequences[target].update(taken)

    def remove_sequence(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """See `Engine.remove_sequence`; always possible."""
        self._check_sequences(sequence)
        cells = self._sequences[sequence]
        for position in [p for p in cells if p >= start and (stop < 0 or p < stop)]:
            del cells[position]
        return True

    def shift_sequence(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """See `Engine.shift_sequence`; as in llama.cpp, cells shared with another sequence move there as well."""
        self._check_sequences(sequence)
        moved = [p for p in self._sequences[sequence] if p >= start and (stop < 0 or p < stop)]
        if moved and not 0 <= min(moved) + delta <= max(moved) + delta < self._context_tokens:
            raise UsageError(
                f"positions {min(moved)} to {max(moved)} moved by {delta} leave 0 to {self._context_tokens}"
            )
        moving = {id(self._sequences[sequence][p]) for p in moved}
        for index, cells in enumerate(self._sequences):
            self._sequences[index] = {(p + delta if id(c) in moving else p): c for p, c in cells.items()}

    def sequence_length(self, sequence: int) -> int:
        """Largest position + 1."""
        self._check_sequences(sequence)
        return max(self._sequences[sequence], default=-1) + 1

    def _layout(self) -> str:
        return f"{self._options.kv_type_key}/{self._options.kv_type_value}/{self._options.flash_attention}"

    def save_sequence(self, sequence: int) -> bytes:
        """See `Engine.save_sequence`."""
        self._check_sequences(sequence)
        cells = self._sequences[sequence]
        order = sorted(cells)
        state = _State(self._layout(), order, [cells[p].token for p in order], b"")
        return msgspec.msgpack.encode(msgspec.structs.replace(state, digest=state.fingerprint()))

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """See `Engine.restore_sequence`; the KV types must be those of the saved state."""
        self._check_sequences(sequence)
        try:
            saved = msgspec.msgpack.decode(state, type=_State)
        except msgspec.DecodeError as error:
            raise InvalidFileError(f"not a state of the fake engine: {error}") from error
        if saved.layout != self._layout():
            raise InvalidFileError(f"the state was saved with {saved.layout}, this engine uses {self._layout()}")
        if saved.digest != saved.fingerprint() or any(not 0 <= t < self._tokenizer.size for t in saved.tokens):
            raise InvalidFileError("the state is damaged, or its tokens do not fit this vocabulary")
        if max(saved.positions, default=-1) >= self._context_tokens:
            raise InvalidFileError(f"the state needs more than {self._context_tokens} tokens of context")
        self._sequences[sequence] = {p: _Cell(t) for p, t in zip(saved.positions, saved.tokens, strict=True)}

    # ---- control

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """Noted, and without effect."""
        if threads < 1 or prefill_threads < 1:
            raise UsageError(f"{threads} and {prefill_threads} threads: at least 1 is needed")
        self._threads = threads

    def abort(self) -> None:
        """End a running `decode`."""
        if self._running:
            self._abort.set()

    def progress(self) -> int:
        """Grows with every step and slice of waiting."""
        return self._progress

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._sequences = [{} for _ in self._sequences]

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_sequences(self, *sequences: int) -> None:
        self._check_open()
        for sequence in sequences:
            if not 0 <= sequence < len(self._sequences):
                raise UsageError(f"sequence {sequence} is not one of the {len(self._sequences)} of this engine")

    def _check_abort(self) -> None:
        if self._abort.is_set():
            raise AbortedError("the step was aborted")


def _last_place(history: list[int], wanted: list[int]) -> int:
    n = len(wanted)
    return next((i for i in range(len(history) - n, -1, -1) if history[i : i + n] == wanted), -1)


def load(path: str, options: EngineOptions, on_progress: Callable[[float], None] | None = None) -> FakeEngine:
    """Load a script as if it were a model; an `EngineFactory`."""
    return FakeEngine(path, options, on_progress)
