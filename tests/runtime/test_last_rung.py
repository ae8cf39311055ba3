"""Where llama.cpp dies at every setting, the JIT engine serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgellama.engine.base import EngineOptions
from edgellama.runtime.base import Done, Failed, GenerateRequest, Notice, TextDelta
from edgellama.runtime.host import Host
from edgellama.runtime.ladder import Start
from edgellama.runtime.model import ModelSpec
from edgellama.sampling.options import SamplingOptions

_WORKER = """
import os, signal
from edgellama import engine

real = engine.factory

def broken(name):
    if name == "llamacpp":
        os.kill(os.getpid(), signal.SIGILL)
    return real(name)

engine.factory = broken
from edgellama.runtime.worker import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_the_jit_engine_takes_over(tiny_llama_gguf: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_file(tiny_llama_gguf, options=EngineOptions(context_tokens=128))
    start = Start(command=[sys.executable, "-c", _WORKER], probe_seconds=0)
    async with Host(spec, start=start, cache_folder=tmp_path) as host:
        request = GenerateRequest(
            request_id="a", prompt="hello", max_tokens=5, sampling=SamplingOptions(temperature=0.0, ignore_eos=True)
        )
        events = [event async for event in host.generate(request)]
        (model,) = (await host.status()).models
    assert model.engine == "jit"
    assert "JIT engine" in model.settings
    assert not [event for event in events if isinstance(event, Failed)]
    assert isinstance(events[-1], Done)
    assert events[-1].usage.completion_tokens == 5
    assert any(isinstance(event, TextDelta) for event in events)
    told = [event.text for event in events if isinstance(event, Notice) and event.kind == "engine-settings"]
    assert any("illegal instruction" in text.lower() or "SIGILL" in text for text in told)
