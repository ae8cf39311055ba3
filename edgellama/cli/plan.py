"""`edgellama plan`: whether a model fits into memory, and what would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output, command
from edgellama.cli.engine_options import EngineChoice, engine_options, load_settings, to_engine_options
from edgellama.errors import MemoryShortageError, NotFoundError

if TYPE_CHECKING:
    from edgellama.engine.base import EngineOptions
    from edgellama.runtime.model import ModelSpec
    from edgellama.runtime.plan import Plan
    from edgellama.settings import Settings
    from edgellama.store import Entry

_CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)


@command(example="edgellama plan llama-3.2-3b --ctx 32768")
@click.argument("model")
@engine_options
def plan(out: Output, *, model: str, engine: EngineChoice) -> int:
    """Say whether MODEL fits into memory with these options, and how it would be loaded.

    Nothing is loaded or fetched; the figures come from the file's header (of a model that is not here, from the
    catalogue) and from the memory available now. The exit code is 5 when it does not fit; the JSON is printed all the
    same.
    """
    from edgellama.monitor import memory

    spec = _spec(model, load_settings(engine), engine, out)
    for notice in spec.notices:
        out.warn(notice)
    available = memory.available_bytes()
    chosen, shortage = _choose(spec, available)
    others = list(alternatives(spec, chosen, available))
    if out.json:
        out.object({**as_object(chosen, others), "estimated": not spec.path})
    else:
        _print(out, spec.name, chosen, others)
    if shortage is not None:
        raise shortage
    return 0


command = plan


def _spec(model: str, settings: Settings, engine: EngineChoice, out: Output) -> ModelSpec:
    """The model's file, or what the catalogue knows of one that is not here; never uses the network."""
    from edgellama.cli import wiring
    from edgellama.cli.store_output import StoreProgress, size_text
    from edgellama.store import Store, catalogue
    from edgellama.store.sources import is_source

    store = Store()
    stored = None if store.is_path(model) else store.find(model)
    if stored is None and not store.is_path(model):
        entry = catalogue.by_source(model) if is_source(model) else catalogue.find(model)
        if entry is not None:
            advice = f"`edgellama pull {entry.name}` ({size_text(entry.weight_bytes)}) fetches it"
            out.notice(f"{entry.name} is not here: estimated from the catalogue's figures; {advice}")
            return _estimated(entry, settings, engine)
        if is_source(model):
            raise NotFoundError(f"{model} is not here", f"`edgellama pull {model}` fetches it first")
    if stored is None:
        with StoreProgress(out) as progress:
            stored = store.resolve(model, offline=True, progress=progress)
    return wiring.make_spec(stored, settings, engine)


def _estimated(entry: Entry, settings: Settings, engine: EngineChoice) -> ModelSpec:
    """The spec of a model by its catalogue entry.

    The width that decides the compute buffers is not in the catalogue: a layer of a transformer has about 12 x width²
    parameters, its feed-forward block is about 4 widths.
    """
    from edgellama.cli.wiring import choose_engine
    from edgellama.engine.probe import FileMark
    from edgellama.runtime.model import ModelSpec
    from edgellama.runtime.plan import CacheShape, Layer

    width = math.isqrt(entry.parameters // max(1, 12 * entry.layers))
    row = entry.kv_heads * entry.head_size
    return ModelSpec(
        name=entry.name,
        path="",
        engine=choose_engine(settings)[0],
        options=to_engine_options(settings, engine),
        identity="",
        mark=FileMark(size_bytes=entry.weight_bytes, header_sha256=""),
        architecture=entry.family,
        shape=CacheShape((Layer(row, row),) * entry.layers, embedding=width, feed_forward=4 * width),
        weights_bytes=entry.weight_bytes,
        trained_context_tokens=entry.context_tokens,
    )


def _choose(spec: ModelSpec, available_bytes: int) -> tuple[Plan, MemoryShortageError | None]:
    from edgellama.runtime.plan import LEAST_CONTEXT_TOKENS, choose, predict

    try:
        return choose(spec, available_bytes), None
    except MemoryShortageError as error:
        options = spec.options if spec.options.context_tokens else _with(spec.options, LEAST_CONTEXT_TOKENS)
        return predict(spec, options, available_bytes), error


def _with(options: EngineOptions, context_tokens: int, **changes: Any) -> EngineOptions:
    import msgspec

    return msgspec.structs.replace(options, context_tokens=context_tokens, **changes)


def alternatives(spec: ModelSpec, chosen: Plan, available_bytes: int) -> Iterator[tuple[str, Plan]]:
    """Other ways to load it, in words and with their plans: longer contexts, a shorter one, a smaller cache."""
    from edgellama.runtime.plan import predict

    now = chosen.options.context_tokens
    trained = spec.trained_context_tokens
    lengths = {n for n in _CONTEXTS if not trained or n <= trained} | ({trained} if trained else set())
    longer = sorted(n for n in lengths if n > now)
    shorter = sorted(n for n in lengths if n < now)
    for tokens in [*shorter[-1:], *longer[:1], *longer[1:][-1:]]:
        yield f"--ctx {tokens}", predict(spec, _with(chosen.options, tokens), available_bytes)
    if chosen.options.kv_type_key in {"f16", "bf16", "f32"}:
        smaller = _with(chosen.options, now, kv_type_key="q8_0", kv_type_value="q8_0")
        yield "--kv-type q8_0", predict(spec, smaller, available_bytes)
    if chosen.options.sequences > 1:
        yield "--parallel 1", predict(spec, _with(chosen.options, now, sequences=1), available_bytes)


def as_object(chosen: Plan, others: list[tuple[str, Plan]]) -> dict[str, Any]:
    """The `--json` object."""
    return {
        "fits": chosen.fits,
        "limit_bytes": max(0, chosen.limit_bytes),
        "predicted_bytes": _bytes(chosen),
        "total_bytes": chosen.total_bytes,
        "reserve_bytes": chosen.reserve_bytes,
        "choice": _choice(chosen.options),
        "alternatives": [
            {
                "change": change,
                "fits": other.fits,
                "total_bytes": other.total_bytes,
                "predicted_bytes": _bytes(other),
                "choice": _choice(other.options),
            }
            for change, other in others
        ],
    }


def _bytes(of: Plan) -> dict[str, int]:
    return {"weights": of.weights_bytes, "kv": of.kv_bytes, "compute": of.compute_bytes, "other": of.other_bytes}


def _choice(options: EngineOptions) -> dict[str, Any]:
    return {
        "context_tokens": options.context_tokens,
        "parallel": options.sequences,
        "kv_type_key": options.kv_type_key,
        "kv_type_value": options.kv_type_value,
        "gpu_layers": options.gpu_layers,
        "threads": options.threads,
        "flash_attention": options.flash_attention,
    }


def _print(out: Output, name: str, chosen: Plan, others: list[tuple[str, Plan]]) -> None:
    options = chosen.options
    verdict = "fits" if chosen.fits else "does not fit"
    out.line(
        f"{name} {verdict}: {_mib(chosen.total_bytes)} needed, {_mib(max(0, chosen.limit_bytes))} may be used"
        f" ({_mib(chosen.reserve_bytes)} are left to the system)"
    )
    cache = ":".join(dict.fromkeys((options.kv_type_key, options.kv_type_value)))
    out.line(f"  with {options.context_tokens:,} tokens of context x {options.sequences}, KV cache {cache}")
    for part, size in _bytes(chosen).items():
        out.line(f"  {part:<8} {_mib(size):>12}")
    for change, other in others:
        mark = "fits" if other.fits else "does not fit"
        out.line(f"  {change:<16} {_mib(other.total_bytes):>12}  {mark}")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
