"""One `llama_batch`, allocated once and filled in place through NumPy views."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edgellama.engine.base import Batch


class NativeBatch:
    """Room for `capacity` tokens, each in one sequence. `struct` is what `llama_decode` takes."""

    def __init__(self, library: Any, capacity: int) -> None:
        self.capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._counts = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._logits = np.zeros(capacity, np.int8)
        addresses = self._sequences.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)
        self._pointers = addresses  # seq_id[i] points at one element of _sequences
        self.struct = library.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._logits),
        ):
            kind = dict(self.struct._fields_)[name]
            setattr(self.struct, name, ctypes.cast(ctypes.c_void_p(array.ctypes.data), kind))

    def fill(self, batch: Batch, start: int, stop: int) -> None:
        """Take rows [start, stop) of `batch`; they must fit."""
        n = stop - start
        self._tokens[:n] = batch.tokens[start:stop]
        self._positions[:n] = batch.positions[start:stop]
        self._sequences[:n] = batch.sequences[start:stop]
        self._logits[:n] = batch.want_logits[start:stop]
        self.struct.n_tokens = n

    def want_all(self) -> None:
        """Make every token an output, as embeddings need it."""
        self._logits[: self.struct.n_tokens] = 1
