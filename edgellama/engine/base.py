"""The Engine seam: arrays of tokens in, logits out. llama.cpp, the JIT engine and the fake pass one contract test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:  # the front ends read the options here, and NumPy would delay their first token
    import numpy as np
    from numpy.typing import NDArray

KVType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Switch = Literal["auto", "on", "off"]
Pooling = Literal["model", "none", "mean", "cls", "last", "rank"]


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter file and its strength."""

    path: str
    scale: float = 1.0


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model: everything that changes numbers, memory or speed. Part of every verdict and cache key."""

    context_tokens: int = 0
    """Tokens per sequence; 0 takes the model's trained context."""
    sequences: int = 1
    """Sequences that exist at the same time, running or cached."""
    batch_tokens: int = 2048
    """Most tokens one `decode` call takes."""
    micro_batch_tokens: int = 512
    """Most tokens computed at once inside it; changes rounding."""
    logits_rows: int = 0
    """Most rows of logits computed at once (memory: rows x vocabulary x 4 bytes); 0 lets the engine choose.
    A batch that wants more is computed in parts."""
    threads: int = 0
    """Threads for one-token steps; 0 lets the engine choose."""
    prefill_threads: int = 0
    """Threads for prompts; 0 means `threads`."""
    gpu_layers: int = -1
    """Layers on the device; -1 means all that the engine wants to put there, 0 means CPU."""
    kv_type_key: KVType = "f16"
    kv_type_value: KVType = "f16"
    flash_attention: Switch = "auto"
    repack_weights: bool = True
    """Allow weight layouts of the CPU's special instructions (llama.cpp: `use_extra_bufts`)."""
    unified_kv: bool = True
    """One KV buffer for all sequences, so that ranges can be copied between them. An engine that would compute other
    numbers in one buffer uses separate ones: ask its `Capabilities`."""
    use_mmap: bool = True
    use_mlock: bool = False
    embeddings: bool = False
    pooling: Pooling = "model"
    loras: tuple[LoraAdapter, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine says about its model and itself."""

    architecture: str
    description: str
    parameters: int
    size_bytes: int
    layers: int
    embedding_length: int
    vocabulary_tokens: int
    trained_context_tokens: int
    context_tokens: int
    """Tokens one sequence holds in this load."""
    sequences: int
    engine: str
    """`llamacpp`, `jit` or `fake`."""
    backend_build: str
    """Identity of the engine's code: version, system info, devices. Part of verdict keys."""
    devices: tuple[str, ...] = ()
    threads: int = 1


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine can do with this model; callers ask before they call."""

    copy_range: bool = True
    """`copy_sequence` takes a part of a sequence, not only the whole."""
    remove_range: bool = True
    """`remove_sequence` can remove a tail or a middle (recurrent models cannot)."""
    shift: bool = True
    save_state: bool = True
    embeddings: bool = False
    abort: bool = True
    lora: bool = False


@dataclass(slots=True)
class Batch:
    """One decode call: parallel arrays of length n. Rows of the result follow `want_logits` in order."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    want_logits: NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @classmethod
    def one_sequence(cls, tokens: Sequence[int], start: int, sequence: int = 0, logits: str = "last") -> Batch:
        """`tokens` of one sequence from position `start`; logits of `last`, `all` or `none`."""
        import numpy as np

        n = len(tokens)
        want = np.zeros(n, np.bool_)
        if logits == "all":
            want[:] = True
        elif logits == "last" and n:
            want[-1] = True
        return cls(
            np.asarray(tokens, np.int32),
            np.arange(start, start + n, dtype=np.int32),
            np.full(n, sequence, np.int32),
            want,
        )


class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe, and answered outside the step."""

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of `text`; `special` also parses the texts of control tokens, `add_bos` follows the model's own rule."""

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for in an answer; control tokens give b""."""

    def text_of(self, token: int) -> str:
        """The vocabulary's own text of a token, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends a turn or the text."""

    @property
    def size(self) -> int:
        """Number of ids."""

    @property
    def bos(self) -> int:
        """Id of the token that begins a text, -1 if none."""

    @property
    def eos(self) -> int:
        """Id of the token that ends an answer by the file's own word, -1 if none; chat templates name its text."""

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants `bos` in front of a prompt."""

    def control_texts(self) -> list[str]:
        """Texts that `tokenize(special=True)` turns into a control token."""


class Engine(Protocol):
    """One loaded model. Used from one thread, except `abort` and `progress`."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Compute a batch and return its logits, float32[n_wanted, n_vocab].

        The view is zero-copy and valid until the next call. Positions of a sequence go on where it ends. Raises
        `ContextOverflowError` when no cell is free or a sequence would outgrow its context, `AbortedError` after
        `abort`, `EngineError` otherwise. After an error the sequences are as before the call, except that a model which
        cannot `remove_range` forgets those of the batch.
        """

    def embed(self, batch: Batch) -> NDArray[np.float32]:
        """Pooled embeddings of the batch's sequences in ascending id order, float32[n_seq, n_embd], not normalized.

        Pooling `rank` gives scores instead, float32[n_seq, n_classes]. The sequences must be empty, and are afterwards.
        Raises `UnsupportedError` unless loaded with `embeddings`.
        """

    def copy_sequence(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Let `target` share positions [start, stop) of `source`; -1 means to the end.

        `target` must hold none of them. With separate caches (`unified_kv` off) a copy is whole and replaces `target`.
        """

    def remove_sequence(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """Forget positions [start, stop); False where the model cannot and nothing changed."""

    def shift_sequence(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """Add `delta` to the positions [start, stop). The caller owns every cell involved."""

    def sequence_length(self, sequence: int) -> int:
        """Positions held by `sequence` (its largest position + 1)."""

    def save_sequence(self, sequence: int) -> bytes:
        """State of a sequence in the engine's own format."""

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """Load what `save_sequence` returned; raises `InvalidFileError` and changes nothing if it does not fit."""

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """Change the thread counts from the next `decode` on."""

    def abort(self) -> None:
        """Make a running `decode` return soon; callable from any thread, also a no-op between calls."""

    def progress(self) -> int:
        """A counter that grows while `decode` or loading advances; read by the watchdog from any thread."""

    def close(self) -> None:
        """Free everything; further calls are errors."""


class EngineFactory(Protocol):
    """Loads a model; `on_progress(fraction)` is called while it loads and may raise to stop it."""

    def __call__(
        self, path: str, options: EngineOptions, on_progress: Callable[[float], None] | None = None
    ) -> Engine: ...
