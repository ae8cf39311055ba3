"""Settings: layers, sources, and files that are wrong."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama import settings
from edgellama.errors import InvalidFileError, UsageError
from edgellama.sampling.options import SamplingOptions


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_without_anything_all_is_built_in(tmp_path: Path) -> None:
    loaded = settings.load(path=tmp_path / "none.toml", environment={})
    assert loaded == settings.Settings()
    assert {loaded.source(name) for name in settings.NAMES} == {"built-in"}


def test_precedence_and_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", 'threads = 1\ncontext = 100\ntop_k = 10\nkv_type = "q8_0"\n')
    environment = {"EDGELLAMA_CONTEXT": "200", "EDGELLAMA_TOP_K": "20", "EDGELLAMA_THREADS": ""}
    loaded = settings.load({"top_k": 30, "seed_free": None}, path=path, environment=environment)
    assert (loaded.threads, loaded.context, loaded.top_k, loaded.kv_type) == (1, 200, 30, "q8_0")
    assert loaded.source("threads") == str(path)
    assert loaded.source("context") == "EDGELLAMA_CONTEXT"
    assert loaded.source("top_k") == "option --top-k"
    assert loaded.source("min_p") == "built-in"
    assert loaded.is_set("threads")
    assert not loaded.is_set("min_p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 1", "no setting 'temprature'"),
        ("temperature = -1", "allowed is a number from 0 to 100"),
        ("temperature = nan", "allowed is a number"),
        ('temperature = "warm"', "allowed is a number"),
        ("temperature = true", "allowed is a number"),
        ("threads = 1.5", "allowed is a whole number"),
        ("threads = 99999999999999", "allowed is a whole number"),
        ("offline = 3", "allowed is true or false"),
        ("engine = 'cuda'", "allowed is one of auto, llamacpp, jit"),
        ("[threads]\nx = 1", "allowed is a whole number"),
        ("hf_endpoint = 'ftp://x'", "an address such as"),
        ("profile = 'cool'", "later version"),
        ("schema_version = 99", "newer edgellama"),
        ("schema_version = 'x'", "schema_version is 'x'"),
        ("threads = ", "not valid TOML"),
        ("threads = 1\nthreads = 2", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidFileError, match=message) as caught:
        settings.load(path=write(tmp_path / "c.toml", text), environment={})
    assert str(tmp_path / "c.toml") in caught.value.message
    assert caught.value.exit_code == 4


def test_close_names_are_offered(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError) as caught:
        settings.load(path=write(tmp_path / "c.toml", "Top-K = 3"), environment={})
    assert "top_k" in caught.value.advice


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"system = '\xff\xfe'")
    with pytest.raises(InvalidFileError, match="not valid TOML"):
        settings.load(path=path, environment={})


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbfthreads = 3\r\n")
    assert settings.load(path=path, environment={}).threads == 3


def test_a_wrong_variable_names_itself() -> None:
    with pytest.raises(UsageError, match=r"EDGELLAMA_CONTEXT: context is 'big'") as caught:
        settings.load(path=Path("/nonexistent/c.toml"), environment={"EDGELLAMA_CONTEXT": "big"})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("word", "value"), [("1", True), ("Yes", True), ("off", False), ("FALSE", False)])
def test_switches_in_the_environment(word: str, value: bool) -> None:
    loaded = settings.load(path=Path("/nonexistent/c.toml"), environment={"EDGELLAMA_OFFLINE": word})
    assert loaded.offline is value


def test_a_switch_in_the_file_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('offline = "no"')
    with pytest.raises(InvalidFileError, match=r"offline is the text 'no', allowed is true or false"):
        settings.load(path=path, environment={})


def test_every_variable_the_package_reads_is_known() -> None:
    package = Path(settings.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"EDGELLAMA_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert "EDGELLAMA_CONFIG_DIR" in named
    assert settings.unknown_variables(dict.fromkeys(named, "1")) == []


def test_gpu_layers_take_auto() -> None:
    assert settings.parse("gpu_layers", "auto") == -1
    assert settings.parse("gpu_layers", "0") == 0
    with pytest.raises(UsageError, match="auto or a number"):
        settings.parse("gpu_layers", "all")


def test_sampling_ranges_agree_with_the_sampler() -> None:
    """A value the settings accept is accepted by SamplingOptions, at both ends of every range."""
    for name in settings.SAMPLING_NAMES:
        for value in (-101, -2, -1, -0.5, 0, 0.005, 0.01, 0.5, 1, 2, 100, 101, 2**31 - 1, 2**31):
            try:
                parsed = settings.parse(name, value)
            except UsageError:
                continue
            SamplingOptions(**{name: parsed})  # type: ignore[arg-type]


def test_every_setting_is_documented() -> None:
    from edgellama.cli.config import descriptions

    about = descriptions()
    for item in fields(settings.Settings):
        assert about.get(item.name), item.name


@given(st.sampled_from(settings.NAMES), st.text() | st.integers() | st.floats() | st.booleans())
def test_any_value_is_taken_or_refused_in_words(name: str, value: settings.Value) -> None:
    refused: UsageError | None = None
    try:
        settings.parse(name, value)
    except UsageError as error:
        refused = error
    assert refused is None or refused.message.startswith(name)
