"""The catalogue's own promises, and what is recommended from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellama import gguf_io
from edgellama.errors import InvalidFileError
from edgellama.sampling.options import SamplingOptions
from edgellama.store import catalogue, licences, sources
from edgellama.store.catalogue import Entry
from edgellama.store.recommend import languages, recommend

ENTRIES = list(catalogue.load().values())


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    found: Entry = request.param
    return found


def test_every_entry_holds_together(entry: Entry) -> None:
    assert (catalogue.folder() / f"{entry.name}.toml").is_file()
    assert entry.name == entry.name.lower()
    assert re.fullmatch(r"([0-9a-f]{64})?", entry.sha256)
    assert entry.sources
    for source in entry.sources:
        parsed = sources.parse(source)
        assert str(parsed) == source
        assert parsed.kind in ("pypi", "hf", "ms")
        assert parsed.kind == "pypi" or parsed.file_name == entry.file
    assert entry.licence in licences.TERMS
    assert msgspec.convert(entry.sampling, SamplingOptions)
    assert entry.weight_bytes > 0
    assert entry.min_memory_bytes >= entry.weight_bytes + entry.kv_bytes(4096)
    assert all(re.fullmatch("[a-z]{2}", code) for code in entry.languages)
    assert 3.0 < entry.weight_bytes * 8 / entry.parameters < 9.5, "bits per weight of a quantized file"


def test_names_are_unique_and_one_is_the_default() -> None:
    every = [name for entry in ENTRIES for name in (entry.name, *entry.aliases)]
    assert len({name.casefold() for name in every}) == len(every)
    assert [entry.name for entry in ENTRIES if entry.default] == ["smollm2-135m-instruct"]


def test_the_default_entry_describes_the_real_file(default_model_path: Path) -> None:
    entry, header = catalogue.default(), gguf_io.read(default_model_path)
    assert (entry.parameters, entry.layers, entry.context_tokens) == (
        header.parameters, header.layers, header.context_tokens,
    )  # fmt: skip
    assert (entry.kv_heads, entry.head_size) == (header.head_counts_kv[0], header.key_length)
    assert entry.size_bytes == default_model_path.stat().st_size


@pytest.mark.parametrize("text", ["", "name = 1", "x = [", 'name = "x"\nunknown = 1'])
def test_a_broken_entry_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidFileError, match=r"broken\.toml"):
        catalogue.load(tmp_path)


def test_kv_bytes_of_a_known_model() -> None:
    """Llama 3.1 8B: 128 KiB per token in F16, as llama.cpp prints it (4,096 tokens: 512 MiB)."""
    assert catalogue.load()["llama-3.1-8b-instruct"].kv_bytes(4096) == 512 << 20


@pytest.mark.parametrize("gigabytes", [0.4, 1, 2, 4, 8, 24])
def test_what_is_recommended_fits(gigabytes: float) -> None:
    available = int(gigabytes * 1e9)
    judged = recommend(available)
    assert {r.entry.name for r in judged} == set(catalogue.load())
    fitting = [r for r in judged if r.fits]
    assert judged[: len(fitting)] == fitting
    assert all(r.weight_bytes + r.kv_bytes <= available for r in fitting)
    ranks = [r.entry.rank for r in fitting if not r.entry.default]
    assert ranks == sorted(ranks, reverse=True)


def test_more_memory_never_recommends_less() -> None:
    best = [recommend(int(g * 1e9))[0].entry.rank for g in (1, 2, 4, 8, 16)]
    assert best == sorted(best)


@pytest.mark.parametrize("code", ["zh", "ZH", "zh-CN", "zh_TW"])
def test_languages(code: str) -> None:
    judged = recommend(10**12, None, code)
    assert judged
    assert all("zh" in r.entry.languages for r in judged)
    assert recommend(10**12, None, "xx") == []
    assert {"en", "zh", "de"} <= set(languages())


def test_a_full_disk_is_considered() -> None:
    judged = recommend(10**12, 1_000_000_000)
    assert all(r.weight_bytes < 1_000_000_000 for r in judged if r.fits_disk)
    assert judged[0].fits_disk


def test_terms_say_what_matters() -> None:
    asking: list[Any] = [terms for terms in licences.TERMS.values() if terms.asks]
    assert {terms.id for terms in asking} == {"llama3.1", "llama3.2", "gemma", "qwen-research"}
    for terms in asking:
        assert terms.version
        assert terms.url.startswith("https://")
        assert terms.points
    assert "Built with Llama" in licences.TERMS["llama3.2"].attribution
