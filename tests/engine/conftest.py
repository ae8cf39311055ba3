"""One way to make every engine, for the contract test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellama.engine import factory, fake, jit
from edgellama.engine.base import Engine, EngineOptions

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["fake", pytest.param("llamacpp", marks=pytest.mark.llamacpp), "jit", "jit exact"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_engine(engine_name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """`make(**options)` loads a small model with `EngineOptions(**options)`; everything made is closed at the end."""
    if engine_name == "llamacpp":
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        path = request.getfixturevalue("tiny_llama_gguf")
    elif engine_name.startswith("jit"):
        path = request.getfixturevalue("tiny_llama_gguf")
    else:
        path = fake.write_script(tmp_path / "script.fake.json", fake.Script(token_seconds=2e-5))
    made: list[Engine] = []

    def make(on_progress: Callable[[float], None] | None = None, **options: Any) -> Engine:
        settings = {"context_tokens": 256, "sequences": 4, "threads": 2, "kv_type_key": "f32", "kv_type_value": "f32"}
        load = functools.partial(jit.load, exact=True) if engine_name == "jit exact" else factory(engine_name)
        made.append(load(str(path), EngineOptions(**(settings | options)), on_progress))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def tokens() -> list[int]:
    """Forty ids that every small vocabulary has."""
    return [int(t) for t in np.random.default_rng(7).integers(3, 250, 40)]
