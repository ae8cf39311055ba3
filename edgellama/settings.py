"""The user's settings: one documented dataclass, filled from built-in values, `config.toml`, environment and options.

A later layer wins. `Settings.sources` says which layer gave each value, which is what `edgellama config show` prints.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from edgellama import paths
from edgellama.errors import EdgellamaError, InvalidFileError, UsageError

SCHEMA_VERSION = 1
PREFIX = "EDGELLAMA_"
BUILT_IN = "built-in"

Value = str | int | float | bool | None
Parser = Callable[[Value], Value]


class _BadValueError(ValueError):
    """What was expected; the caller knows the name and the place."""


def _text(value: Value) -> Value:
    if not isinstance(value, str) or not value.strip():
        raise _BadValueError("text")
    return value


def _switch(value: Value) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in {"1", "true", "yes", "on"}:
            return True
        if word in {"0", "false", "no", "off"}:
            return False
    raise _BadValueError("true or false")


def _integer(low: int, high: int = 2**31 - 1) -> Parser:
    def parse(value: Value) -> Value:
        expected = f"a whole number from {low} to {high}"
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,12}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _BadValueError(expected)
        return value

    return parse


def _number(low: float, high: float) -> Parser:
    def parse(value: Value) -> Value:
        expected = f"a number from {low:g} to {high:g}"
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _BadValueError(expected) from None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise _BadValueError(expected)
        return float(value)

    return parse


def _one_of(*words: str) -> Parser:
    def parse(value: Value) -> Value:
        if value not in words:
            raise _BadValueError("one of " + ", ".join(words))
        return value

    return parse


def _gpu_layers(value: Value) -> Value:
    if value == "auto":
        return -1
    try:
        return _integer(-1)(value)
    except _BadValueError:
        raise _BadValueError("auto or a number of layers") from None


def _address(value: Value) -> Value:
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/]+\S*", value):
        raise _BadValueError("an address such as https://mirror.example")
    return value.rstrip("/")


def _setting(default: Value, parser: Parser) -> Any:
    return field(default=default, metadata={"parse": parser})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting. `config.toml` holds them by these names, the environment as EDGELLAMA_<NAME>."""

    default_model: str | None = _setting(None, _text)
    """Model that plain `edgellama` opens; unset means the catalogue's small default."""
    models_dir: str | None = _setting(None, _text)
    """Folder of pulled models; unset means the platform's data folder."""
    offline: bool = _setting(False, _switch)
    """Any use of the network is an error."""
    hf_endpoint: str | None = _setting(None, _address)
    """Mirror of huggingface.co for `hf:` sources (HF_ENDPOINT is honoured too); it never gets HF_TOKEN."""
    language: str | None = _setting(None, _text)
    """Language you chat in (such as en or zh); `recommend` prefers models that know it."""
    engine: Literal["auto", "llamacpp", "jit"] = _setting("auto", _one_of("auto", "llamacpp", "jit"))
    """Engine that computes."""
    context: int = _setting(0, _integer(0))
    """Tokens per sequence; 0 lets the plan choose."""
    parallel: int = _setting(1, _integer(1, 256))
    """Sequences at the same time."""
    threads: int = _setting(0, _integer(0, 4096))
    """Processor threads; 0 lets the engine choose."""
    gpu_layers: int = _setting(-1, _gpu_layers)
    """Layers on the device: auto (-1), or a number; 0 is the processor alone."""
    kv_type: str = _setting("f16", _text)
    """Type of the KV cache, K or K:V (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl)."""
    probe_seconds: float = _setting(10.0, _number(0, 3600))
    """Longest time the safety ladder may take to compare numbers at a first start."""
    context_policy: Literal["refuse", "drop-oldest"] = _setting("refuse", _one_of("refuse", "drop-oldest"))
    """What happens to a conversation that no longer fits the context."""
    system: str | None = _setting(None, _text)
    """System prompt where none is given."""
    max_tokens: int | None = _setting(None, _integer(1))
    """Longest answer in tokens; unset means up to the end of the context."""
    temperature: float | None = _setting(None, _number(0, 100))
    """Sampling temperature; 0 is greedy. Sampling settings left unset come from the catalogue or the model file."""
    top_k: int | None = _setting(None, _integer(0))
    """Most likely tokens kept; 0 keeps all."""
    top_p: float | None = _setting(None, _number(0, 1))
    """Probability mass kept."""
    min_p: float | None = _setting(None, _number(0, 1))
    """Smallest probability kept, relative to the most likely token."""
    repeat_penalty: float | None = _setting(None, _number(0.01, 100))
    """Penalty on tokens that occurred lately; 1 is none."""
    repeat_last_n: int | None = _setting(None, _integer(-1))
    """Tokens the penalties look back on; 0 is none, -1 the whole context."""
    frequency_penalty: float | None = _setting(None, _number(-100, 100))
    """Penalty growing with each occurrence."""
    presence_penalty: float | None = _setting(None, _number(-100, 100))
    """Penalty on any token that occurred."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Setting name to where its value came from: `built-in`, the file's path, the variable, or the option."""

    def source(self, name: str) -> str:
        """Where the value of `name` came from."""
        return self.sources.get(name, BUILT_IN)

    def is_set(self, name: str) -> bool:
        """Whether the user gave `name` a value."""
        return name in self.sources


SAMPLING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
)
"""Settings that are sampling defaults, by the names of `SamplingOptions`."""

LATER_NAMES = ("profile", "max_celsius", "idle_unload_seconds", "history", "draft", "deterministic")
"""Settings of later versions: refused by name rather than stored without effect."""

_PARSERS: Mapping[str, Parser] = MappingProxyType(
    {item.name: item.metadata["parse"] for item in fields(Settings) if "parse" in item.metadata}
)
NAMES: tuple[str, ...] = tuple(_PARSERS)
"""Every setting, in the order of the dataclass."""


def variable(name: str) -> str:
    """Environment variable of a setting."""
    return PREFIX + name.upper()


_OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "CONFIG_DIR",
        "DATA_DIR",
        "CACHE_DIR",
        "STATE_DIR",
        "ACCEPT_LICENCE",
        "PARENT",
        "VENV",
        "SCRIPT_PYTHON",
        "PEER",
        "PEER_LINES",
        "TEST_MODEL",
    )
)
"""Variables of this program, its scripts and its tests that are no settings."""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """What to say of variables that begin like ours and mean nothing."""
    known = {variable(name) for name in NAMES} | _OTHER_VARIABLES
    texts = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in known:
            continue
        close = difflib.get_close_matches(
            name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in sorted(known)], n=1
        )
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
        texts.append(f"the variable {name} has no effect{hint}")
    return texts


def parse(name: str, value: Value) -> Value:
    """A value of the setting `name`, checked; raises `UsageError` that says what is allowed."""
    parser = _PARSERS.get(name)
    if parser is None:
        raise unknown(name)
    try:
        return parser(value)
    except _BadValueError as error:
        raise UsageError(f"{name} is {value!r}, allowed is {error}") from None


def unknown(name: str) -> UsageError:
    """The error for a setting that does not exist, with the names close to it."""
    if name in LATER_NAMES:
        return UsageError(f"the setting {name} comes in a later version of edgellama", "remove it for now")
    close = difflib.get_close_matches(name.lower().replace("-", "_"), NAMES, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "`edgellama config show` lists all of them"
    return UsageError(f"there is no setting {name!r}", hint)


def read_file(path: Path) -> dict[str, Value]:
    """The settings in a file, checked; empty when there is no file.

    Raises `InvalidFileError` for what is not TOML, not a setting, out of range, or written by a newer edgellama.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise EdgellamaError(f"{path}: {error.strerror or error}", "the settings could not be read") from error
    return read_bytes(data, path)


def read_bytes(data: bytes, path: Path) -> dict[str, Value]:
    """The settings in the bytes of a file; `path` is for messages."""
    import tomllib

    try:
        table = tomllib.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidFileError(f"{path} is not valid TOML: {error}", "correct it, or move it away") from error
    version = table.pop("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidFileError(f"{path}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise InvalidFileError(
            f"{path} was written by a newer edgellama: schema_version {version}, this one knows {SCHEMA_VERSION}",
            "update edgellama, or set EDGELLAMA_CONFIG_DIR to another folder",
        )
    values: dict[str, Value] = {}
    for name, value in table.items():
        try:
            values[name] = _parse_stored(name, value)
        except UsageError as error:
            raise InvalidFileError(f"{path}: {error.message}", error.advice) from error
    return values


def _parse_stored(name: str, value: Value) -> Value:
    """`parse` for a file, whose format has switches of its own; elsewhere all values are text."""
    if _PARSERS.get(name) is _switch and isinstance(value, str):
        raise UsageError(f"{name} is the text {value!r}, allowed is true or false", "write it without quotes")
    return parse(name, value)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    for name in NAMES:
        value = environment.get(variable(name), "")
        if not value:  # an empty variable counts as unset, as everywhere
            continue
        try:
            yield name, parse(name, value)
        except UsageError as error:
            raise UsageError(f"{variable(name)}: {error.message}", error.advice) from error


def load(
    overrides: Mapping[str, Value] | None = None,
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """All layers merged: built-in < file < environment < `overrides` (options; None means not given)."""
    file = path or paths.settings_file()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in read_file(file).items():
        values[name], sources[name] = value, str(file)
    for name, value in _from_environment(os.environ if environment is None else environment):
        values[name], sources[name] = value, variable(name)
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name], sources[name] = parse(name, value), f"option --{name.replace('_', '-')}"
    return Settings(**values, sources=MappingProxyType(sources))
