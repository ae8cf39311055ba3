"""Importance matrices: llama-imatrix as the oracle, resuming, merging, and what the text lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgellama.engine.base import EngineOptions
from edgellama.errors import UnsupportedError, UsageError
from edgellama.evaluate import coverage, partial
from edgellama.evaluate.importance_file import Entry, add_file, statistics, write
from edgellama.evaluate.jobs import ImportanceJob, Progress
from edgellama.evaluate.process import measure
from edgellama.gguf_io import GGMLType, specimen
from edgellama.quantize.imatrix import Sums, load, read_sums

CONTEXT = 64
MakeJob = Callable[..., ImportanceJob]


@pytest.fixture
def make_job(tiny_llama_gguf: Path, text_file: Path, options: EngineOptions, tmp_path: Path) -> MakeJob:
    alone = msgspec.structs.replace(options, sequences=1, batch_tokens=CONTEXT, logits_rows=CONTEXT)

    def make(output: str = "im.gguf", model: Path = tiny_llama_gguf, **fields: object) -> ImportanceJob:
        job = ImportanceJob(model=str(model), options=alone, text=str(text_file), output=str(tmp_path / output))
        return msgspec.structs.replace(job, **fields)

    return make


def assert_alike(ours: Sums, theirs: Sums) -> None:
    assert ours.entries.keys() == theirs.entries.keys()
    assert (ours.datasets, ours.chunks, ours.chunk_size) == (theirs.datasets, theirs.chunks, theirs.chunk_size)
    for name, (sums, counts) in theirs.entries.items():
        assert np.array_equal(ours.entries[name][1], counts), name
        assert ours.entries[name][0] == pytest.approx(sums, rel=1e-3, abs=1e-6 * float(sums.max())), name


@pytest.mark.llamacpp
def test_values_are_llama_imatrixs(
    run_tool: Callable[..., str], make_job: MakeJob, text_file: Path, tiny_llama_gguf: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.gguf"
    measured = measure(make_job(output_tensor=True))
    flags = ("-f", text_file, "-c", CONTEXT, "-b", CONTEXT, "-t", 2, "--process-output")
    run_tool("llama-imatrix", "-m", tiny_llama_gguf, "-o", theirs, *flags)
    ours = tmp_path / "im.gguf"
    assert_alike(read_sums(ours), read_sums(theirs))
    assert "output.weight" in read_sums(ours).entries
    assert len(measured.table) == len(read_sums(ours).entries)
    header_bytes = 1024  # keys and tensor names: the whole layout is the same, not only what we read of it
    assert ours.read_bytes()[:header_bytes].replace(b"ours", b"") == theirs.read_bytes()[:header_bytes]


@pytest.mark.llamacpp
def test_experts_are_counted_one_by_one(
    run_tool: Callable[..., str], make_job: MakeJob, text_file: Path, tmp_path: Path
) -> None:
    model, theirs = tmp_path / "experts.gguf", tmp_path / "theirs.gguf"
    specimen.build(model, "qwen3moe", tensor_type=GGMLType.F32)
    text = tmp_path / "a.txt"
    text.write_text("ab a b ab " * 200)
    measured = measure(make_job(model=model, text=str(text), chunks=4))
    flags = ("-f", text, "-c", CONTEXT, "-b", CONTEXT, "-t", 2, "--chunks", 4)
    run_tool("llama-imatrix", "-m", model, "-o", theirs, *flags)
    assert_alike(read_sums(tmp_path / "im.gguf"), read_sums(theirs))
    entry = read_sums(theirs).entries["blk.0.ffn_up_exps.weight"]
    assert entry[1].size == 4
    assert any("never active" in warning for warning in measured.warnings) == bool((entry[1] == 0).any())


@pytest.mark.llamacpp
def test_resuming_gives_the_same_values(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellama.evaluate import importance

    monkeypatch.setattr(importance, "SAVE_SECONDS", 0.0)
    whole = make_job("whole.gguf", chunks=6)
    importance.collect(whole, lambda _answer: None, lambda _fraction: None)
    job = make_job(chunks=6)

    def stop(answer: object) -> None:
        if isinstance(answer, Progress) and answer.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        importance.collect(job, stop, lambda _fraction: None)
    assert not Path(job.output).exists()
    assert partial.place(job.output).exists()
    seen: list[int] = []
    importance.collect(
        msgspec.structs.replace(job, resume=True),
        lambda answer: seen.append(answer.done) if isinstance(answer, Progress) else None,
        lambda _fraction: None,
    )
    assert seen == [4, 5, 6]
    assert Path(job.output).read_bytes() == Path(whole.output).read_bytes()
    assert not partial.place(job.output).exists()


@pytest.mark.llamacpp
def test_merging_adds_sums_and_names_both_texts(make_job: MakeJob, tmp_path: Path) -> None:
    measure(make_job("first.gguf", chunks=3))
    measure(make_job(chunks=2, merge=(str(tmp_path / "first.gguf"),)))
    first, both = read_sums(tmp_path / "first.gguf"), read_sums(tmp_path / "im.gguf")
    assert both.chunks == 5
    assert len(both.datasets) == 2
    name = "blk.1.ffn_down.weight"
    assert both.entries[name][1][0] == 5 * CONTEXT
    assert (both.entries[name][0] > first.entries[name][0]).all()


def test_another_engine_and_another_model_are_refused(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot show its graph"):
        measure(make_job(engine="fake"))
    path = tmp_path / "other.gguf"
    write(path, {"blk.0.attn_q.weight": Entry(np.ones((1, 8)), np.array([64]))}, ["t"], 1, CONTEXT)
    with pytest.raises(UsageError, match="merge matrices of one model only"):
        add_file({"blk.0.attn_q.weight": Entry(np.ones((1, 16)), np.array([64]))}, path, CONTEXT)


def test_what_is_written_averages_to_what_was_summed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sums, counts = rng.random((3, 32)) * 100, np.array([10, 0, 7])
    path = tmp_path / "im.gguf"
    write(path, {"blk.0.ffn_up_exps.weight": Entry(sums, counts)}, ["a text", "ü"], 3, CONTEXT)
    matrix = load(path)
    values = matrix.entries["blk.0.ffn_up_exps.weight"]
    assert values[0] == pytest.approx(sums[0] / 10, rel=1e-6)
    assert (values[1] == 1).all()
    assert matrix.datasets == ("a text", "ü")
    assert matrix.chunks == 3


def test_statistics_of_known_values() -> None:
    even, peaked = np.full((1, 16), 4.0), np.zeros((1, 16))
    peaked[0, 3] = 64.0
    entries = {
        "blk.0.attn_q.weight": Entry(even, np.array([2])),
        "blk.1.attn_q.weight": Entry(peaked, np.array([2])),
    }
    first, second = statistics(entries)
    assert (first["entropy_bits"], first["active"], first["mean"]) == (4.0, 1.0, 2.0)
    assert (second["entropy_bits"], second["active"], second["max"]) == (0.0, 1 / 16, 32.0)
    assert second["cosine"] == pytest.approx(0.25)
    assert "cosine" not in first


TEXTS = {
    "en": "It was the best of times, it was the worst of times, and that is what the story was about for us. " * 20,
    "de": "Es war einmal ein König, der hatte eine Tochter, und die war so schön, dass das ganze Land von ihr sprach. "
    * 20,
    "fr": "Il y avait dans la ville une maison que les voisins et le maire trouvaient trop grande pour elle. " * 20,
    "zh": "北京是中国的首都。今天天气很好我们去公园散步吧。" * 30,
    "ru": "Москва — столица России. Сегодня хорошая погода. " * 30,
    "code": "import os\n\ndef walk(folder):\n    for name in os.listdir(folder):\n        print(name)\n    return 1\n\n"
    * 30,
    "math": "We have $x^2 + 1 = 0$ and so \\frac{a}{b} = 2.\n3 + 4 = 7\n" * 30,
    "chat": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi, how can I help?<|im_end|>\n" * 30,
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_kind_of_text_is_known_from_the_others(name: str) -> None:
    assert not coverage.missing(TEXTS[name], [name])
    others = [other for other in ("en", "de", "fr", "zh", "ru", "code") if other != name]
    told = coverage.missing(TEXTS[name], others)
    allowed = {"en"} if name in {"code", "math", "chat"} else set()
    assert {warning.split(" ")[4].rstrip(":") for warning in told} >= set(others) - allowed
