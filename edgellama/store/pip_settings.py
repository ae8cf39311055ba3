"""Where pip is told to look for packages: its environment variables and configuration files, read as pip reads them."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

PYPI = "https://pypi.org/simple"


@dataclass(frozen=True, slots=True)
class PipSettings:
    """The settings that say where packages are, and how to reach them."""

    indexes: tuple[str, ...] = (PYPI,)
    find_links: tuple[str, ...] = ()
    proxy: str = ""
    certificates: str = ""


def load(environment: Mapping[str, str] | None = None, files: list[Path] | None = None) -> PipSettings:
    """Later files win over earlier ones, `[download]` over `[global]`, the environment over all."""
    values = os.environ if environment is None else environment
    found: dict[str, str] = {}
    for path in _files(values) if files is None else files:
        found.update(_read(path))
    for name in ("index-url", "extra-index-url", "find-links", "no-index", "proxy", "cert"):
        given = values.get("PIP_" + name.upper().replace("-", "_"))
        if given is not None:
            found[name] = given
    indexes = [found.get("index-url") or PYPI, *found.get("extra-index-url", "").split()]
    if found.get("no-index", "").strip().lower() in ("1", "true", "yes", "on", "t", "y"):
        indexes = []
    return PipSettings(
        indexes=tuple(address.rstrip("/") for address in indexes),
        find_links=tuple(found.get("find-links", "").split()),
        proxy=found.get("proxy", ""),
        certificates=found.get("cert", ""),
    )


def _files(environment: Mapping[str, str]) -> list[Path]:
    """Global, user and environment-wide files, in pip's order; PIP_CONFIG_FILE comes last, or silences all."""
    named = environment.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    name = "pip.ini" if os.name == "nt" else "pip.conf"
    shared = platformdirs.site_config_dir("pip", appauthor=False, multipath=True).split(os.pathsep)
    found = [Path(folder) / name for folder in shared]
    if os.name != "nt":
        found.append(Path("/etc/pip.conf"))
    if not (named and Path(named).exists()):  # pip leaves the user's files out then
        found += _user_files(name)
    found.append(Path(sys.prefix) / name)
    return [*found, Path(named)] if named else found


def _user_files(name: str) -> list[Path]:
    home = Path.home()
    user = Path(platformdirs.user_config_dir("pip", appauthor=False, roaming=True))
    if sys.platform == "darwin" and not user.is_dir():
        user = home / ".config" / "pip"
    return [home / ("pip" if os.name == "nt" else ".pip") / name, user / name]


def _read(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            parser.read_file(stream)
    except (OSError, configparser.Error):
        return {}  # pip itself will tell; a pull goes on with what the others say
    found: dict[str, str] = {}
    for section in ("global", "download"):
        if parser.has_section(section):
            found.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    return found
