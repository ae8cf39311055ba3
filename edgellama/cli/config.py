"""`edgellama config`: show, change and find the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgellama import files, paths, settings
from edgellama.cli.common import Output
from edgellama.cli.common import command as subcommand
from edgellama.errors import InvalidFileError, UsageError
from edgellama.settings import NAMES, Settings, Value

_FOLDERS: dict[str, tuple[str, Callable[[], Path]]] = {
    "settings": ("EDGELLAMA_CONFIG_DIR", paths.settings_file),
    "config": ("EDGELLAMA_CONFIG_DIR", paths.config_dir),
    "models": ("EDGELLAMA_MODELS_DIR", paths.models_dir),
    "data": ("EDGELLAMA_DATA_DIR", paths.data_dir),
    "cache": ("EDGELLAMA_CACHE_DIR", paths.cache_dir),
    "state": ("EDGELLAMA_STATE_DIR", paths.state_dir),
}
_HEADER = "edgellama settings; `edgellama config show` explains them"


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: edgellama config set temperature 0.7",
)
def command() -> None:
    """Show and change the settings.

    A value comes from the first of: an option, the environment (EDGELLAMA_<NAME>), the settings file, a built-in value.
    """


def descriptions() -> dict[str, str]:
    """What each setting means, from the docstrings in `settings.py`; empty where the source is not at hand."""
    import ast
    import inspect
    import itertools

    try:
        tree = ast.parse(inspect.getsource(Settings))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for before, node in itertools.pairwise(body):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
        ):
            found[before.target.id] = str(node.value.value)
    return found


def _shown(name: str, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return str(_stored(name, value))


def _stored(name: str, value: Value) -> Value:
    """The value as a person writes it."""
    return "auto" if name == "gpu_layers" and value == -1 else value


@subcommand(name="show", uses_settings=False, example="edgellama config show --json")
def show(out: Output) -> None:
    """Show every setting with where its value comes from."""
    loaded = settings.load()
    about = descriptions()
    if out.json:
        values = {
            name: {
                "value": _stored(name, getattr(loaded, name)),
                "source": loaded.source(name),
                "variable": settings.variable(name),
                "description": about.get(name, ""),
            }
            for name in NAMES
        }
        out.object({"file": str(paths.settings_file()), "settings": values})
        return
    width = max(map(len, NAMES))
    for name in NAMES:
        out.line(f"{name:<{width}}  {_shown(name, getattr(loaded, name)):<12}  ({loaded.source(name)})")
        if out.verbose and name in about:
            out.line(f"{'':<{width}}  {about[name]}")


@subcommand(name="set", uses_settings=False, example="edgellama config set default_model qwen3-1.7b")
@click.argument("key")
@click.argument("value")
def set_(out: Output, key: str, value: str) -> None:
    """Store VALUE for the setting KEY in the settings file."""
    name = _known(key)
    parsed = _check(name, value)
    path = _edit(lambda table: table.__setitem__(name, _stored(name, parsed)))
    if out.json:
        out.object({"name": name, "value": _stored(name, parsed), "source": str(path)})
    else:
        out.notice(f"{name} = {_shown(name, parsed)} ({path})")
    effective = settings.load()
    if effective.source(name) == settings.variable(name):
        out.warn(f"{settings.variable(name)} is set and goes before the file")


@subcommand(name="unset", uses_settings=False, example="edgellama config unset temperature")
@click.argument("key")
def unset(out: Output, key: str) -> None:
    """Remove the setting KEY from the settings file."""
    name = key.replace("-", "_")
    removed: list[Any] = []

    def remove(table: Any) -> None:
        if name in table:
            removed.append(table.pop(name))
        elif name not in NAMES:
            raise settings.unknown(name)

    path = _edit(remove)
    if out.json:
        out.object({"name": name, "removed": bool(removed)})
    else:
        out.notice(f"{name} {'is removed from' if removed else 'was not in'} {path}")


@subcommand(name="path", uses_settings=False, example="edgellama config path models")
@click.argument("which", required=False, default="settings", metavar="[WHICH]")
def path_(out: Output, which: str) -> None:
    """Print where the settings file is, or another folder.

    WHICH is settings, config, models, data, cache or state. The folders are moved by EDGELLAMA_CONFIG_DIR and its
    siblings; --json prints all of them with their variables.
    """
    if which not in _FOLDERS:
        raise UsageError(f"there is no folder {which!r}", "choose from " + ", ".join(_FOLDERS))
    if out.json:
        out.object({name: {"path": str(find()), "variable": variable} for name, (variable, find) in _FOLDERS.items()})
    else:
        out.line(str(_FOLDERS[which][1]()))


for _sub in (show, set_, unset, path_):
    command.add_command(_sub)
set_.context_settings["ignore_unknown_options"] = True  # so that a value may be -1


def _known(key: str) -> str:
    name = key.replace("-", "_")
    if name not in NAMES:
        raise settings.unknown(name)
    return name


def _check(name: str, value: str) -> Value:
    parsed = settings.parse(name, value)
    if name == "kv_type":
        from edgellama.cli.engine_options import parse_kv_type

        parse_kv_type(str(parsed))
    return parsed


def _edit(change: Callable[[Any], object]) -> Path:
    """Apply `change` to the settings file, keeping its comments; returns the file.

    The new content is checked as a whole before it replaces the old, so that a wrong value can be repaired but a broken
    file is never made.
    """
    import tomlkit
    from filelock import FileLock
    from tomlkit.exceptions import TOMLKitError

    path = paths.settings_file().resolve()  # a link to a file elsewhere stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=30):
        old = path.read_bytes() if path.exists() else b""
        try:
            table = tomlkit.parse(old.decode("utf-8-sig"))
        except (TOMLKitError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidFileError(f"{path} is not valid TOML: {error}", "correct it, or move it away") from error
        if not old:
            table.add(tomlkit.comment(_HEADER))
            table["schema_version"] = settings.SCHEMA_VERSION
        version = table.get("schema_version")
        if isinstance(version, int) and version > settings.SCHEMA_VERSION:
            settings.read_bytes(old, path)  # says so
        change(table)
        new = tomlkit.dumps(table).encode()
        settings.read_bytes(new, path)
        if new != old:
            files.write_bytes(path, new)
    return path
