"""A text with words the tiny model knows, engine options as the commands set them, and llama.cpp's own tools."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellama.engine.base import EngineOptions

CONTEXT = 64
RunTool = Callable[..., str]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(4)
    words = ["the", "cat", "hello", "world", "é", "日本", "or", "x1"]
    path = tmp_path_factory.mktemp("texts") / "a text é.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(600)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def options() -> EngineOptions:
    return EngineOptions(
        context_tokens=CONTEXT,
        sequences=4,
        batch_tokens=4 * CONTEXT,
        micro_batch_tokens=4 * CONTEXT,
        logits_rows=4 * CONTEXT,
        unified_kv=False,
        threads=2,
    )


@pytest.fixture(scope="session")
def run_tool() -> RunTool:
    """`run_tool(name, *arguments, until=pattern)` runs a tool of EDGELLAMA_PEER and returns what it printed.

    Its log is written by a thread and may lose its end, so it runs again until the pattern is there.
    """
    peer = os.environ.get("EDGELLAMA_PEER")
    if not peer:
        pytest.skip("EDGELLAMA_PEER is not set: no llama.cpp tools to compare with")

    def run(name: str, *arguments: object, until: str = "") -> str:
        argv = [str(Path(peer) / "bin" / name), *map(str, arguments)]
        for _ in range(20):
            done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
            said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
            if re.search(until, said):
                return said
        raise AssertionError(f"{name} never said {until}")

    return run
