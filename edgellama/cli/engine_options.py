"""The engine and sampling options of the contract, and how they join the settings."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import later_option
from edgellama.errors import NotFoundError, UnsupportedError, UsageError
from edgellama.settings import SAMPLING_NAMES

if TYPE_CHECKING:
    from edgellama.engine.base import EngineOptions
    from edgellama.runtime.base import ContextPolicy
    from edgellama.sampling.options import SamplingOptions
    from edgellama.settings import Settings

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Names of `engine.base.KVType`, here again because that module loads NumPy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine options as given; None means not given."""

    engine: str | None = None
    ctx: int | None = None
    parallel: int | None = None
    threads: int | None = None
    gpu_layers: str | None = None
    require_device: bool = False
    kv_type: str | None = None
    loras: tuple[tuple[str, float], ...] = ()
    offline: bool = False
    probe_seconds: float | None = None
    context_policy: str | None = None
    own: bool = False

    def overrides(self) -> dict[str, Any]:
        """The options as a layer over the settings."""
        return {
            "engine": self.engine,
            "context": self.ctx,
            "parallel": self.parallel,
            "threads": self.threads,
            "gpu_layers": self.gpu_layers,
            "kv_type": self.kv_type,
            "probe_seconds": self.probe_seconds,
            "context_policy": self.context_policy,
            "offline": True if self.offline else None,
        }


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the contract's engine options; the function gets them as `engine: EngineChoice`."""

    @functools.wraps(function)
    def collected(out: Any, **values: Any) -> Any:
        own = {name: values.pop(name) for name in EngineChoice.__dataclass_fields__ if name in values}
        own["loras"] = pair_loras(values.pop("lora"), values.pop("lora_scale"))
        values.pop("no_history")  # nothing is kept yet, so there is nothing to leave out
        return function(out, engine=EngineChoice(**own), **values)

    decorated: Any = collected
    for add in reversed(_ENGINE_OPTIONS):
        decorated = add(decorated)
    decorated.__doc__ = function.__doc__
    result: Callable[..., Any] = decorated
    return result


def _refuse_other_engines(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is None or value in {"auto", "llamacpp", "jit"}:
        return value
    if re.match(r"https?://", value):
        raise UnsupportedError(f"--engine {value} comes in a later version of edgellama", "use auto, llamacpp or jit")
    raise UsageError(f"--engine is {value!r}, allowed is auto, llamacpp or jit")


_ENGINE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--engine", metavar="NAME", callback=_refuse_other_engines, help="auto, llamacpp or jit."),
    click.option("--ctx", "-c", type=int, metavar="TOKENS", help="Context of a sequence; 0 lets the plan choose."),
    click.option("--parallel", type=int, metavar="N", help="Sequences at the same time."),
    click.option("--threads", "-t", type=int, metavar="N", help="Processor threads; 0 lets the engine choose."),
    click.option("--gpu-layers", metavar="auto|N", help="Layers on the device; 0 is the processor alone."),
    click.option("--require-device", is_flag=True, help="Fail rather than compute without a device."),
    click.option("--kv-type", metavar="K[:V]", help="Type of the KV cache: " + ", ".join(KV_TYPES) + "."),
    click.option("--lora", multiple=True, metavar="FILE", help="LoRA adapter; repeatable."),
    click.option("--lora-scale", multiple=True, type=float, metavar="S", help="Scale of the adapter at that place."),
    click.option("--offline", is_flag=True, help="Any use of the network is an error."),
    click.option("--no-history", is_flag=True, help="Keep nothing of this conversation."),
    click.option("--probe-seconds", type=float, metavar="S", help="Longest numeric comparison at a first start."),
    click.option("--context-policy", metavar="POLICY", help="refuse or drop-oldest, when the context is full."),
    click.option("--own", is_flag=True, help="Host the model in this process (always so in this version)."),
    later_option("--rope-scaling", metavar="RULE"),
    later_option("--rope-factor", type=float),
    later_option("--deterministic", is_flag=True),
    later_option("--profile"),
    later_option("--max-celsius", type=float),
    later_option("--idle-unload", type=float),
    later_option("--draft", allow=("off",)),
    later_option("--control-vector"),
)


def pair_loras(files: tuple[str, ...], scales: tuple[float, ...]) -> tuple[tuple[str, float], ...]:
    """Each adapter with the scale at its place; a missing scale is 1."""
    if len(scales) > len(files):
        raise UsageError(f"--lora-scale is given {len(scales)} times, --lora {len(files)} times")
    for scale in scales:
        if not math.isfinite(scale):
            raise UsageError(f"--lora-scale is {scale}, it must be a finite number")
    for file in files:
        if not Path(file).is_file():
            raise NotFoundError(f"{file}: there is no such LoRA adapter")
    return tuple(zip(files, scales + (1.0,) * (len(files) - len(scales)), strict=True))


def parse_kv_type(text: str) -> tuple[str, str]:
    """Key and value type of `K[:V]`."""
    key, _, value = text.partition(":")
    for name in (key, value or key):
        if name not in KV_TYPES:
            raise UsageError(f"the KV cache type is {name!r}, allowed is {', '.join(KV_TYPES)}")
    return key, value or key


def load_settings(choice: EngineChoice) -> Settings:
    """File, environment and these options, in one."""
    from edgellama import settings

    if choice.context_policy in {"shift", "summarize"}:
        raise UnsupportedError(
            f"--context-policy {choice.context_policy} comes in a later version of edgellama",
            "use refuse or drop-oldest",
        )
    loaded = settings.load(choice.overrides())
    parse_kv_type(loaded.kv_type)
    return loaded


def to_engine_options(settings: Settings, choice: EngineChoice) -> EngineOptions:
    """How the engine is to load the model."""
    from edgellama.engine.base import EngineOptions, LoraAdapter

    key, value = parse_kv_type(settings.kv_type)
    return EngineOptions(
        context_tokens=settings.context,
        sequences=settings.parallel,
        threads=settings.threads,
        gpu_layers=settings.gpu_layers,
        kv_type_key=key,  # type: ignore[arg-type]  # checked by parse_kv_type
        kv_type_value=value,  # type: ignore[arg-type]
        loras=tuple(LoraAdapter(str(Path(path).absolute()), scale) for path, scale in choice.loras),
    )


def context_policy(settings: Settings) -> ContextPolicy:
    """What happens to a conversation that does not fit."""
    return settings.context_policy


def settings_sampling(settings: Settings) -> SamplingOptions:
    """The user's sampling defaults."""
    from edgellama.sampling.options import SamplingOptions

    return SamplingOptions(**{name: getattr(settings, name) for name in SAMPLING_NAMES})


# ---- sampling


def _bias(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for text in values:
        match = re.fullmatch(r"([0-9]{1,9})([+-](?:[0-9]+(?:\.[0-9]+)?|inf))", text)
        if match is None:
            raise UsageError(f"--logit-bias is {text!r}, expected TOKEN+BIAS or TOKEN-BIAS, such as 15043+1.5")
        biases[int(match[1])] = float(match[2])
    return biases or None


_SAMPLING_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--temperature", "--temp", type=float, metavar="T", help="0 is greedy."),
    click.option("--top-k", type=int, metavar="N", help="Most likely tokens kept; 0 keeps all."),
    click.option("--top-p", type=float, metavar="P", help="Probability mass kept."),
    click.option("--min-p", type=float, metavar="P", help="Smallest share of the top probability kept."),
    click.option("--repeat-penalty", type=float, metavar="X", help="Penalty on recent tokens; 1 is none."),
    click.option("--repeat-last-n", type=int, metavar="N", help="Tokens the penalties look back on; -1 is all."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Penalty growing with each occurrence."),
    click.option("--presence-penalty", type=float, metavar="X", help="Penalty on any token that occurred."),
    click.option("--seed", "-s", type=int, metavar="N", help="Seed of the sampler; -1 draws one."),
    click.option("--logit-bias", multiple=True, metavar="TOKEN±BIAS", callback=_bias, help="Favour a token id."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of the answer."),
)
_SAMPLING_NAMES = (*SAMPLING_NAMES, "seed", "logit_bias", "ignore_eos")


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options; the function gets the given ones as `sampling: dict`, for `to_sampling`."""

    @functools.wraps(function)
    def collected(out: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in _SAMPLING_NAMES}
        return function(out, sampling={n: v for n, v in given.items() if v is not None}, **values)

    decorated: Any = collected
    for add in reversed(_SAMPLING_OPTIONS):
        decorated = add(decorated)
    result: Callable[..., Any] = decorated
    return result


def to_sampling(given: Mapping[str, Any]) -> SamplingOptions:
    """The request's own sampling options, ranges checked."""
    from edgellama.sampling.options import SamplingOptions

    values = dict(given)
    if values.get("seed") == -1:  # llama.cpp's way to ask for a random one
        del values["seed"]
    try:
        return SamplingOptions(**values)
    except UsageError as error:
        name, _, rest = error.message.partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from error
