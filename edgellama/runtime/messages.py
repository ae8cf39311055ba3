"""What host and worker say to each other: msgpack frames over a pipe, each a tagged struct.

A frame is its length as a little-endian u32, then the msgpack bytes. The worker parses hostile model files, so the host
treats every frame as hostile too: bounded length, typed decoding, unknown request ids ignored.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from edgellama.chat.messages import PromptPart
from edgellama.engine.base import Capabilities, EngineOptions, ModelInfo
from edgellama.sampling.options import SamplingOptions

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


# ---- host -> worker


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """First message: load `path` with `engine`, answer `Loaded` or `WorkerFailed` (and exit)."""

    path: str
    options: EngineOptions
    engine: Literal["llamacpp", "jit", "fake"] = "llamacpp"
    confine: bool = True
    writable: tuple[str, ...] = ()
    """Folders the worker may write to (kernel caches)."""


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Decode a fixed prompt and answer `Probed`."""

    tokens: tuple[int, ...]
    """Empty: the worker tokenizes its built-in probe text."""
    one_by_one: int = 4
    """How many of the last tokens are decoded one at a time, so that the kernels of single steps are tried as well."""


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, tag="tokenize"):
    """Answered by `Tokens`, also while a step runs."""

    call_id: int
    parts: tuple[PromptPart, ...]
    add_bos: bool = False


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Run a request; `resume` are ids it had already emitted before a restart: they are prefilled, never sent again."""

    request_id: str
    prompt: tuple[int, ...]
    resume: tuple[int, ...] = ()
    state: bytes = b""
    """`Step.state` of the last resumed token."""
    sampling: SamplingOptions
    max_tokens: int
    """Of the whole answer, `resume` included."""
    stop: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    """Texts of control tokens that the answer shows, since they mark its parts (thinking, channels)."""


class EmbedTexts(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Answered by `Embedded`."""

    call_id: int
    texts: tuple[str, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request with `Finished("cancelled")`."""

    request_id: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Leave a `decode` that makes no progress (watchdog, before the kill)."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Free everything and exit 0."""


ToWorker = Load | Probe | Tokenize | Generate | EmbedTexts | Cancel | Abort | Shutdown


# ---- worker -> host


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Sent once, before `Load` is read."""

    protocol: int
    pid: int
    confinement: tuple[str, ...] = ()
    """What holds already; `Loaded.confinement` is the whole list, since it depends on what is loaded."""


class LoadProgress(msgspec.Struct, frozen=True, tag="loading"):
    """Fraction of the weights loaded."""

    fraction: float


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The engine is ready."""

    info: ModelInfo
    capabilities: Capabilities
    seconds: float
    control_texts: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] = ()
    bos: int = -1
    bos_text: str = ""
    eos_text: str = ""
    adds_bos: bool = False
    confinement: tuple[str, ...] = ()
    """What held before the model file was opened: `no-new-privileges`, `no-network`, `landlock`, …"""


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """Logits of the probe's last positions (at most 16): float32 little-endian, row-major [positions, vocabulary]."""

    tokens: tuple[int, ...]
    logits: bytes
    seconds: float


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Answer to `Tokenize`."""

    call_id: int
    tokens: tuple[int, ...]


class Embedded(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """Answer to `EmbedTexts`: float32 little-endian, row-major [texts, embedding_length], L2-normalized."""

    call_id: int
    vectors: bytes
    tokens: int


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag="call_failed"):
    """`Tokenize` or `EmbedTexts` failed; the worker lives on."""

    call_id: int
    kind: str
    message: str
    advice: str = ""


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """Prompt progress of a request."""

    request_id: str
    done: int
    total: int
    cached: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One token of an answer and the text it released (may be empty: half a character, or a possible stop string).

    `state` is what the sampler needs beyond the token ids to go on after a restart.
    """

    request_id: str
    token: int
    text: str
    state: bytes = b""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """A request ended. `text` is what was still held back."""

    request_id: str
    reason: Literal["stop", "length", "cancelled"]
    text: str = ""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_seconds: float
    generation_seconds: float
    seed: int


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="request_failed"):
    """A request failed; the worker lives on. `text` is what was still held back."""

    request_id: str
    kind: str
    message: str
    advice: str = ""
    text: str = ""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Twice a second: `busy` with which requests, and the engine's progress counter."""

    busy: tuple[str, ...]
    progress: int
    resident_bytes: int
    peak_bytes: int


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="worker_failed"):
    """Loading failed or an invariant broke: the worker exits after this."""

    kind: str
    message: str
    advice: str = ""


FromWorker = (
    Hello
    | LoadProgress
    | Loaded
    | Probed
    | Tokens
    | Embedded
    | CallFailed
    | Prefilled
    | Step
    | Finished
    | RequestFailed
    | Heartbeat
    | WorkerFailed
)

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: ToWorker | FromWorker) -> bytes:
    """One message as the bytes that go over the pipe. Raises ValueError when it is larger than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} message has {len(body)} bytes, a frame holds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Body length from the 4 header bytes; raises ValueError when it is out of range."""
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame claims {length} bytes, {MAX_FRAME_BYTES} is the most")
    return length
