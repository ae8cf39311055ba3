"""The fake engine's script: what it says, how long it takes, and which faults strike when.

A script is one JSON object; every field has a default, `{}` is a valid script. Example:

    {
      "say": "I do not know.",
      "answers": [{"contains": "capital of France", "say": "Paris."}],
      "step_seconds": 0.001,
      "faults": [
        {"kind": "signal", "signal": "SIGILL", "phase": "prefill", "when": {"repack_weights": [true]}},
        {"kind": "signal", "signal": "SIGKILL", "phase": "decode", "step": 5, "times": 1},
        {"kind": "nan", "contains": "poison"}
      ]
    }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from edgellama import files
from edgellama.engine.base import EngineOptions
from edgellama.errors import InvalidFileError, NotFoundError

FaultKind = Literal["signal", "exit", "hang", "freeze", "slow", "nan", "wrong", "memory", "error", "overflow"]
Phase = Literal["load", "any", "prefill", "decode"]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to say when the prompt contains a text; the rule whose text stands last in the prompt wins."""

    contains: str
    say: str


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. It strikes when its phase, step, position, text, token and options all match.

    kind      what happens
    signal    the process raises `signal` on itself (Windows: the matching exception)
    exit      the process exits at once with code `code`
    hang      the step stands still for `seconds` (0: for ever); `advancing` lets the progress counter go on
    freeze    as `hang`, and Python stands still too (the GIL is held): no heartbeat leaves the process
    slow      the step takes `seconds` longer; progress advances and abort is heeded
    nan       the logits of matching sequences become NaN
    wrong     the logits of matching sequences get noise of size `scale`
    memory    the process takes `bytes` more memory and keeps it; `MemoryShortageError` when refused
    error     `EngineError` (phase load: `EngineLoadError`) with `message`
    overflow  `ContextOverflowError`, as if no cell were free
    """

    kind: FaultKind
    phase: Phase = "any"
    """`prefill`: a sequence has several tokens in the batch; `decode`: none has; `any`: both; `load`: while loading."""
    step: int = 0
    """Strikes at this decode call of its phase, counted from 1 since loading; 0: at every one."""
    position: int = -1
    """Strikes when the batch holds this position; -1: any."""
    contains: str = ""
    """Strikes when a sequence of the batch contains this text."""
    token: int = -1
    """Strikes when a sequence of the batch contains this token; -1: any."""
    when: dict[str, tuple[Any, ...]] = {}
    """Strikes only if each named field of `EngineOptions` has one of the listed values."""
    unless: dict[str, tuple[Any, ...]] = {}
    """Strikes not if a named field of `EngineOptions` has one of the listed values."""
    times: int = 0
    """Strikes so often in all, counted over restarts in `SCRIPT.fault-N` beside the script; 0: without end."""
    signal: str = "SIGSEGV"
    code: int = 1
    seconds: float = 0.0
    advancing: bool = False
    heeds_abort: bool = False
    """`hang`: whether `Engine.abort` ends it."""
    scale: float = 1.0
    bytes: int = 0
    message: str = "the script says so"


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A whole script. Without `say` and `answers`, logits are a hash of the sequence and never end an answer."""

    say: str | None = None
    """The answer to everything that no rule of `answers` matches; the end token follows."""
    answers: tuple[Answer, ...] = ()
    after: str = "<|im_start|>assistant\n"
    """The last place of this text in a sequence is where its answer begins. Where it is missing, the answer begins
    where the sequence ends, or where its longest tail that begins the answer does."""
    seed: int = 0
    """Changes the hashed logits."""
    pieces: tuple[str, ...] = ()
    """More vocabulary: texts that become one token, longest first."""
    control_tokens: tuple[str, ...] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    """Ids follow the 256 bytes in this order; `pieces` follow these."""
    bos: str = "<s>"
    eos: str = "<|im_end|>"
    ends: tuple[str, ...] = ("</s>", "<|im_end|>", "<|endoftext|>")
    adds_bos: bool = False
    chat_template: str = ""
    trained_context_tokens: int = 4096
    embedding_length: int = 16
    size_bytes: int = 1 << 20
    load_seconds: float = 0.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    """Added to a step for every token of its batch."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        known = set(EngineOptions.__struct_fields__)
        for fault in self.faults:
            if unknown := (fault.when.keys() | fault.unless.keys()) - known:
                raise ValueError(f"unknown engine options {sorted(unknown)}")
        if missing := {self.bos, self.eos, *self.ends} - {*self.control_tokens, ""}:
            raise ValueError(f"{sorted(missing)} are not in control_tokens")
        if len({*self.control_tokens, *self.pieces}) != len(self.control_tokens) + len(self.pieces):
            raise ValueError("control_tokens and pieces repeat a text")


def read_script(path: str | Path) -> Script:
    """Read and check a script. Raises `NotFoundError`, or `InvalidFileError` with the place of the fault."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Script)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidFileError(f"{path}: not a script of the fake engine: {error}") from error


def write_script(path: str | Path, script: Script) -> Path:
    """Write a script; returns its path."""
    files.write_bytes(Path(path), msgspec.json.format(msgspec.json.encode(script), indent=2))
    return Path(path)
