"""Whole measurements in their own process: llama.cpp's tools as the oracle, and every way an engine can fail."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgellama.cli.main import main
from edgellama.engine.base import EngineOptions
from edgellama.engine.fake.script import Fault, Script, write_script
from edgellama.errors import (
    EngineCrashError,
    EngineLoadError,
    InvalidFileError,
    NotFoundError,
    NumericError,
    UsageError,
)
from edgellama.evaluate.jobs import DivergenceJob, Loading, PerplexityJob, Progress
from edgellama.evaluate.logits_file import LogitsFile
from edgellama.evaluate.process import measure

CONTEXT = 64


@pytest.fixture(scope="module")
def other_llama(write_tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a little noise: what quantizing does."""
    rng = np.random.default_rng(9)
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    return write_tiny_llama(
        path, change=lambda _name, w: (w * (1 + 0.02 * rng.standard_normal(w.shape))).astype(np.float32)
    )


@pytest.mark.llamacpp
def test_figures_are_llama_perplexitys(
    run_tool: Callable[..., str],
    tiny_llama_gguf: Path,
    other_llama: Path,
    text_file: Path,
    options: EngineOptions,
    tmp_path: Path,
) -> None:
    theirs, ours = tmp_path / "theirs.logits", tmp_path / "ours.logits"
    common = ("-c", CONTEXT, "-b", 4 * CONTEXT, "-ub", 4 * CONTEXT, "-t", 2)
    said = run_tool(
        "llama-perplexity",
        "-m",
        tiny_llama_gguf,
        "-f",
        text_file,
        *common,
        "--save-all-logits",
        theirs,
        until="Final estimate",
    )
    final = re.search(r"PPL = ([0-9.]+) \+/- ([0-9.]+)", said)
    assert final is not None
    job = PerplexityJob(model=str(tiny_llama_gguf), options=options, text=str(text_file), save_logits=str(ours))
    measured = measure(job)
    assert measured.figures["ppl"] == pytest.approx(float(final[1]), rel=1e-6)
    assert measured.figures["stderr"] == pytest.approx(float(final[2]), rel=1e-5)
    with (a := LogitsFile.open(ours)).stream, (b := LogitsFile.open(theirs)).stream:
        assert (a.context, a.vocabulary, a.chunks) == (b.context, b.vocabulary, b.chunks)
        assert np.array_equal(a.tokens, b.tokens)
        rows = a.chunks * (CONTEXT // 2 - 1)
        assert a.rows(rows) == pytest.approx(b.rows(rows), abs=1e-3)
    said = run_tool(
        "llama-perplexity",
        "-m",
        other_llama,
        *common,
        "--kl-divergence",
        "--kl-divergence-base",
        ours,
        until="Same top p:",
    )
    figures = measure(DivergenceJob(model=str(other_llama), options=options, base=str(theirs))).figures
    for words, name, unit in (
        (r"Mean    KLD:", "kld_mean", 1.0),
        (r"Maximum KLD:", "kld_max", 1.0),
        (r"99\.0%   KLD:", "kld_99", 1.0),
        (r"Median  KLD:", "kld_median", 1.0),
        (r"Mean PPL\(Q\) +:", "ppl", 1.0),
        (r"Mean PPL\(base\) +:", "ppl_base", 1.0),
        (r"Mean ln\(PPL\(Q\)/PPL\(base\)\) +:", "ln_ppl_ratio", 1.0),
        (r"RMS Δp +:", "p_diff_rms", 0.01),
        (r"Same top p:", "top_agreement", 0.01),
    ):
        found = re.search(words + r" +(-?[0-9.]+)", said)
        assert found is not None, words
        assert figures[name] == pytest.approx(float(found[1]) * unit, rel=1e-4, abs=2e-5), name
    assert figures["kld_mean"] > 1e-4


@pytest.mark.llamacpp
def test_a_model_does_not_diverge_from_itself(
    tiny_llama_gguf: Path, text_file: Path, options: EngineOptions, tmp_path: Path
) -> None:
    base = tmp_path / "base.logits"
    job = PerplexityJob(
        model=str(tiny_llama_gguf), options=options, text=str(text_file), save_logits=str(base), chunks=3
    )
    seen: list[object] = []
    first = measure(job, seen.append)
    assert [answer.done for answer in seen if isinstance(answer, Progress)] == [1, 2, 3]
    assert any(isinstance(answer, Loading) for answer in seen)
    alone = msgspec.structs.replace(options, sequences=1, batch_tokens=CONTEXT)
    second = measure(DivergenceJob(model=str(tiny_llama_gguf), options=alone, base=str(base)))
    assert second.figures["kld_mean"] < 1e-5
    assert second.figures["top_agreement"] > 0.98
    assert second.figures["ppl"] == pytest.approx(first.figures["ppl"], rel=1e-5)
    assert first.tokens == second.tokens == 3 * (CONTEXT // 2 - 1)


def test_long_chunks_are_decoded_in_parts(
    text_file: Path, options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake's logits depend on the whole sequence, so a wrong position or target shows."""
    from edgellama.engine import fake
    from edgellama.evaluate import chunks
    from edgellama.evaluate.statistics import Perplexity

    script = write_script(tmp_path / "a.fake.json", Script(adds_bos=True))
    found = []
    for batch, sequences in ((CONTEXT, 1), (4 * CONTEXT, 4), (24, 1)):
        monkeypatch.setattr(chunks, "BATCH_TOKENS", batch)
        engine = fake.load(
            str(script), msgspec.structs.replace(options, sequences=sequences, batch_tokens=batch, unified_kv=True)
        )
        tokens = chunks.cut(engine.tokenizer, text_file.read_text(), CONTEXT, 6, "it")
        sums = Perplexity()
        for part in chunks.decode(engine, tokens, CONTEXT):
            sums.add(part.logits, part.targets)
        found.append((sums.count, sums.nll))
        engine.close()
    assert found[0][0] == 6 * (CONTEXT // 2 - 1)
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_crash_of_the_engine_is_an_error_with_its_reason(
    text_file: Path, options: EngineOptions, tmp_path: Path
) -> None:
    def job(**fault: object) -> PerplexityJob:
        script = write_script(tmp_path / "a.fake.json", Script(faults=(Fault(**fault),)))  # type: ignore[arg-type]
        return PerplexityJob(
            model=str(script),
            engine="fake",
            options=msgspec.structs.replace(options, unified_kv=True),
            text=str(text_file),
        )

    target = tmp_path / "x.logits"
    with pytest.raises(EngineCrashError, match="SIGSEGV"):
        measure(msgspec.structs.replace(job(kind="signal", step=2), save_logits=str(target)))
    assert not list(tmp_path.glob("*.logits")) + list(tmp_path.glob(".*"))
    with pytest.raises(NumericError, match="not finite"):
        measure(job(kind="nan", step=1))
    with pytest.raises(EngineLoadError, match="the script says so"):
        measure(job(kind="error", phase="load"))


def test_what_is_missing_or_too_short_is_told(text_file: Path, options: EngineOptions, tmp_path: Path) -> None:
    script = str(write_script(tmp_path / "a.fake.json", Script()))
    job = PerplexityJob(model=script, engine="fake", options=options, text=str(tmp_path / "none.txt"))
    with pytest.raises(NotFoundError, match=r"none\.txt"):
        measure(job)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match="one chunk needs 64"):
        measure(msgspec.structs.replace(job, text=str(short)))
    short.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        measure(msgspec.structs.replace(job, text=str(short)))
    with pytest.raises(InvalidFileError, match="no file of log-probabilities"):
        measure(DivergenceJob(model=script, engine="fake", options=options, base=str(text_file)))


def test_the_commands_answer_in_json(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(write_script(tmp_path / "a.fake.json", Script()))
    base = tmp_path / "new folder" / "base.logits"
    words = ["eval", "ppl", script, "--text", str(text_file), "--ctx", "64", "--chunks", "4", "--json"]
    assert main([*words, "--save-logits", str(base)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["chunks"] == 4
    assert said["ppl"] > 1
    assert {"ppl", "stderr", "model", "ctx", "seconds"} <= said.keys()
    assert main(["eval", "kld", script, "--base", str(base), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kld_mean"] == pytest.approx(0, abs=1e-4)
    assert {"kld_mean", "kld_99", "kld_max", "top_agreement"} <= said.keys()
    assert main(["eval", "kld", script, "--base", str(base), "--ctx", "32"]) == 2
    assert "have 64 tokens" in capsys.readouterr().err
    assert main([*words[:2], script, *words[2:], "--save-logits", str(base)]) == 2
