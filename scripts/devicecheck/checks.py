"""The checks, one function each. Each runs in a process of its own, since a broken backend kills its process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from edgellama.engine import probe
from edgellama.engine.base import Batch, Engine, EngineFactory, EngineOptions, KVType
from edgellama.engine.ggml import Device
from edgellama.errors import EngineLoadError, UnsupportedError

Outcome = Literal["pass", "warn", "fail", "skip"]
KV_TYPES: tuple[KVType, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
FLOAT_TYPES = ("f32", "f16", "bf16")
SEQUENCES = (1, 8, 64)
PROMPT_TOKENS = 64
STEPS = 64
_CONTEXT_TOKENS = 256
_GPU_KINDS = ("gpu", "igpu")
_MARK = probe.FileMark(size_bytes=0, header_sha256="")


@dataclass(frozen=True)
class Verdict:
    """The answer of one check: `outcome`, one sentence, and the figures behind it."""

    check: str
    outcome: Outcome
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """One line."""
        return msgspec.json.encode(asdict(self)).decode()


@dataclass(frozen=True)
class Bench:
    """What a check works on. Tests put fakes here."""

    model: str
    reference: Path
    load: EngineFactory
    devices: Callable[[], Sequence[Device]]
    clock: Callable[[], float] = time.perf_counter

    def gpus(self) -> list[Device]:
        """The devices that are not the CPU."""
        return [device for device in self.devices() if device.kind in _GPU_KINDS]


def device(bench: Bench) -> Verdict:
    """Whether llama.cpp's library has a GPU at all."""
    gpus = bench.gpus()
    if not gpus:
        return Verdict("device", "skip", "llama.cpp's library has no GPU device", {"devices": _names(bench)})
    memory = {d.name: d.total_bytes for d in gpus}
    detail = ", ".join(f"{d.name} ({d.description})" for d in gpus)
    return Verdict("device", "pass", detail, {"devices": _names(bench), "total_bytes": memory})


def _names(bench: Bench) -> list[str]:
    return [d.name for d in bench.devices()]


def reference(bench: Bench) -> Verdict:
    """Compute the reference logits on the CPU at its plainest, and keep them for the other checks."""
    engine = bench.load(bench.model, probe.plainest(EngineOptions()))
    try:
        tokens, logits = _probe(engine)
    finally:
        engine.close()
    if not probe.finite(logits):
        return Verdict("reference", "fail", "the CPU's own numbers are not finite: the model file is broken")
    kept = probe.reference_of(_MARK, "llama.cpp on the CPU, plainest settings", tokens, logits)
    bench.reference.write_bytes(msgspec.json.encode(kept))
    return Verdict("reference", "pass", f"{len(tokens)} positions on the CPU", {"positions": len(tokens)})


def _probe(engine: Engine) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]]]:
    tokens = engine.tokenizer.tokenize(probe.PROBE_TEXT, add_bos=True)[: probe.PROBE_TOKENS]
    return tokens, np.array(engine.decode(Batch.one_sequence(tokens, 0, logits="all")))


def offload(bench: Bench) -> Verdict:
    """Whether the weights really go to the device: its free memory falls by most of the model's size."""
    before = {d.name: d.free_bytes or 0 for d in bench.gpus()}
    engine = bench.load(bench.model, EngineOptions(context_tokens=_CONTEXT_TOKENS, gpu_layers=-1))
    try:
        after = {d.name: d.free_bytes or 0 for d in bench.gpus()}
        size = engine.info.size_bytes
    finally:
        engine.close()
    taken = sum(before[name] - after.get(name, 0) for name in before)
    figures = {"model_bytes": size, "device_bytes": taken}
    share = f"the device took {taken / 1e6:,.0f} MB for a model of {size / 1e6:,.0f} MB"
    return Verdict("offload", "pass" if taken >= size // 2 else "fail", share, figures)


def logits(bench: Bench, flash: str, kv_type: str) -> Verdict:
    """Whether the device agrees with the CPU's plainest numbers, for one attention kernel and cache type."""
    name = f"logits flash_attention={flash} kv={kv_type}"
    options = logits_options(flash, kv_type)
    try:
        engine = bench.load(bench.model, options)
    except (EngineLoadError, UnsupportedError) as error:
        return Verdict(name, "warn", f"refused: {error.message}")
    try:
        _, found = _probe(engine)
    finally:
        engine.close()
    kept = probe.read_reference(bench.reference, _MARK)
    if kept is None:
        return Verdict(name, "fail", "there is no reference to compare with")
    comparison = probe.compare(found, kept, probe.tolerance(options))
    figures = {"kl_mean": comparison.kl_mean, "kl_max": comparison.kl_max, "positions": comparison.positions}
    return Verdict(name, "pass" if comparison.verdict == "agreed" else "fail", comparison.words, figures)


def logits_options(flash: str, kv_type: str) -> EngineOptions:
    """Settings of one cell of the table. Without flash attention llama.cpp takes no quantized value cache."""
    value = kv_type if flash == "on" or kv_type in FLOAT_TYPES else "f16"
    return msgspec.convert(
        {
            "context_tokens": _CONTEXT_TOKENS,
            "gpu_layers": -1,
            "flash_attention": flash,
            "kv_type_key": kv_type,
            "kv_type_value": value,
        },
        EngineOptions,
    )


def speed(bench: Bench, sequences: int) -> Verdict:
    """Tokens a second over all sequences on the device, and for one sequence also on the CPU."""
    name = f"speed sequences={sequences}"
    rates = _rates(bench, sequences, gpu_layers=-1)
    figures = {"prompt_tokens_per_second": round(rates[0], 1), "generation_tokens_per_second": round(rates[1], 1)}
    detail = f"prompts {rates[0]:,.0f}, answers {rates[1]:,.0f} tokens/s"
    if sequences > 1:
        return Verdict(name, "pass", detail, figures)
    cpu = _rates(bench, sequences, gpu_layers=0)
    figures |= {"cpu_generation_tokens_per_second": round(cpu[1], 1)}
    if cpu[1] > rates[1]:
        return Verdict(name, "warn", f"{detail}; the CPU alone makes {cpu[1]:,.0f}", figures)
    return Verdict(name, "pass", f"{detail}; the CPU alone {cpu[1]:,.0f}", figures)


def _rates(bench: Bench, sequences: int, *, gpu_layers: int) -> tuple[float, float]:
    options = EngineOptions(
        context_tokens=_CONTEXT_TOKENS, sequences=sequences, gpu_layers=gpu_layers, unified_kv=False
    )
    engine = bench.load(bench.model, options)
    try:
        words = engine.tokenizer.tokenize(probe.PROBE_TEXT, add_bos=True)
        prompt = (words * (1 + PROMPT_TOKENS // len(words)))[:PROMPT_TOKENS]
        start = bench.clock()
        for sequence in range(sequences):
            engine.decode(Batch.one_sequence(prompt, 0, sequence))
        prefilled = bench.clock()
        for step in range(STEPS):
            found = engine.decode(_step(prompt[step % len(prompt)], PROMPT_TOKENS + step, sequences))
            if not np.isfinite(found).all():
                raise EngineLoadError(f"numbers are not finite at step {step} with {sequences} sequences")
        done = bench.clock()
    finally:
        engine.close()
    return sequences * PROMPT_TOKENS / (prefilled - start), sequences * STEPS / (done - prefilled)


def _step(token: int, position: int, sequences: int) -> Batch:
    return Batch(
        np.full(sequences, token, np.int32),
        np.full(sequences, position, np.int32),
        np.arange(sequences, dtype=np.int32),
        np.ones(sequences, np.bool_),
    )


def names() -> list[str]:
    """Every check that runs in a child, in order. The reference comes before what needs it."""
    cells = [f"logits:{flash}:{kv_type}" for flash in ("off", "on") for kv_type in KV_TYPES]
    return ["device", "offload", "reference", *cells, *(f"speed:{n}" for n in SEQUENCES)]


def run(bench: Bench, name: str) -> Verdict:
    """Run one check by the name `names` gave it."""
    kind, *arguments = name.split(":")
    if kind == "logits":
        return logits(bench, arguments[0], arguments[1])
    if kind == "speed":
        return speed(bench, int(arguments[0]))
    return {"device": device, "offload": offload, "reference": reference}[kind](bench)
