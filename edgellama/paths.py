"""Where edgellama keeps its files. Each folder has one environment variable that moves it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_DIRS = platformdirs.PlatformDirs("edgellama", appauthor=False)


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser().absolute()


def config_dir() -> Path:
    """Settings (`config.toml`) and licence acceptances."""
    return _folder("EDGELLAMA_CONFIG_DIR", _DIRS.user_config_dir)


def data_dir() -> Path:
    """What must not be lost: conversations, the store's index."""
    return _folder("EDGELLAMA_DATA_DIR", _DIRS.user_data_dir)


def models_dir() -> Path:
    """Pulled model files."""
    return _folder("EDGELLAMA_MODELS_DIR", str(data_dir() / "models"))


def cache_dir() -> Path:
    """What can be made again: ladder verdicts, reference logits, compiled kernels."""
    return _folder("EDGELLAMA_CACHE_DIR", _DIRS.user_cache_dir)


def state_dir() -> Path:
    """Logs and input history."""
    return _folder("EDGELLAMA_STATE_DIR", _DIRS.user_state_dir)


def settings_file() -> Path:
    """The user's settings."""
    return config_dir() / "config.toml"
