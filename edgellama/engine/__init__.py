"""Tokens in, logits out. Engines are chosen by the worker; nothing here imports one before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.engine.base import EngineFactory

ENGINES = ("llamacpp", "jit", "fake")


def factory(name: str) -> EngineFactory:
    """The engine called `name`, imported now. Raises `EngineLoadError` when its library is missing or does not fit."""
    if name == "llamacpp":
        from edgellama.engine import llamacpp

        return llamacpp.load
    if name == "fake":
        from edgellama.engine import fake

        return fake.load
    if name == "jit":
        from edgellama.engine import jit

        jit.prepare()
        return jit.load
    raise UsageError(f"unknown engine {name!r}", f"engines are {', '.join(ENGINES)}")
