"""Sources as people write them, and addresses as servers want them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.errors import EdgellamaError, InvalidFileError, UsageError
from edgellama.store import sources
from edgellama.store.sources import address, is_source, parse

HF = "https://huggingface.co/"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("hf:org/repo/file.gguf", HF + "org/repo/resolve/main/file.gguf"),
        ("HF:org/repo/file.gguf", HF + "org/repo/resolve/main/file.gguf"),
        ("hf:org/repo@abc123/sub dir/a+b.gguf", HF + "org/repo/resolve/abc123/sub%20dir/a%2Bb.gguf"),
        ("hf:Org-1/Re.po_2/模型.gguf", HF + "Org-1/Re.po_2/resolve/main/%E6%A8%A1%E5%9E%8B.gguf"),
        ("ms:Qwen/X-GGUF/f.gguf", "https://modelscope.cn/models/Qwen/X-GGUF/resolve/master/f.gguf"),
        (HF + "org/repo/blob/main/f.gguf", HF + "org/repo/resolve/main/f.gguf"),
        (HF + "org/repo/resolve/v1/a/f.gguf?download=true", HF + "org/repo/resolve/v1/a/f.gguf"),
        ("https://h.example/a/f.gguf?x=1#top", "https://h.example/a/f.gguf?x=1"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert address(parse(text)) == url


@given(st.sampled_from(["hf:", "ms:", "https:", "https://", "file:", "file://", "pypi:"]), st.text(max_size=60))
def test_no_text_surprises_the_parser(prefix: str, rest: str) -> None:
    try:
        source = parse(prefix + rest)
        _ = str(source), source.file_name, address(source), source.sibling("x")
    except EdgellamaError as error:
        message = error.message
    else:
        message = ""
    assert not any(ord(letter) < 32 for letter in message)


def test_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.example/")
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "www.modelscope.cn")
    assert address(parse("hf:o/r/f.gguf")) == "https://hf-mirror.example/o/r/resolve/main/f.gguf"
    assert address(parse("ms:o/r/f.gguf")).startswith("https://www.modelscope.cn/models/o/r/")


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:org", "hf:org/", "hf:/repo/file", "hf:../../etc/passwd", "hf:org/repo/../../../x", "hf:o/r//x",
        "hf:org/re po/f.gguf", "hf:org/repo/a\\b.gguf", "hf:org/repo/a\nb.gguf", "hf:org/repo/./f.gguf", "hf:./repo/x",
        "ms:..", "https://", "https:///x", "https://[", "https://h:99999999/x",
        "https://h:x/", "file://[", "file:~nouser/x", "file:a\0b", "https://h/a b", "https://h/\x1b[2J",
        "pypi:name", "pypi:==1", "pypi:a==",
        "pypi:a==1/../x", "pypi:a==1//x", "pypi:na me==1", "file:", "file://otherhost/x",
    ],
)  # fmt: skip
def test_malformed_sources_are_told(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["hf:o/r/f.gguf", "hf:o/r@v/f.gguf", "ms:o/r/f.gguf", "pypi:a-b==1.0/x.gguf", "pypi:a==1"]
)
def test_sources_survive_writing(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_secrets_are_not_written() -> None:
    assert str(parse("https://user:pass@h.example/f.gguf?Signature=s")) == "https://h.example/f.gguf"


def test_files(tmp_path: Path) -> None:
    place = tmp_path / "a b.gguf"
    for text in (f"file:{place}", place.as_uri()):
        assert Path(parse(text).file) == place
        assert parse(text).file_name == "a b.gguf"


@pytest.mark.parametrize("url", ["https://h/%00.gguf", "https://h/a%5Cb.gguf", "https://h/con.gguf"])
def test_file_names_of_addresses_are_checked(url: str) -> None:
    with pytest.raises(InvalidFileError, match="not safe"):
        _ = parse(url).file_name


def test_siblings() -> None:
    assert str(parse("hf:o/r/sub/a-00001-of-00002.gguf").sibling("b")) == "hf:o/r/sub/b"
    assert str(parse("hf:o/r/a").sibling("b")) == "hf:o/r/b"
    assert parse("https://h/x/a?k=1").sibling("b c").file == "https://h/x/b%20c?k=1"


@pytest.mark.parametrize(("text", "is_one"), [("hf:x", True), ("https://x", True), ("PYPI:a", True), ("hfx", False)])
def test_what_counts_as_a_source(text: str, is_one: bool) -> None:
    assert is_source(text) is is_one


@pytest.mark.parametrize("text", ["C:\\models\\x.gguf", "ollama/llama3.2:1b", "models/x.gguf", "llama3.2:1b"])
def test_paths_and_names_are_no_sources(text: str) -> None:
    assert not is_source(text)


def test_not_a_source() -> None:
    with pytest.raises(EdgellamaError, match="not a source"):
        parse("s3:bucket/x")
    assert sources.without_secrets("https://a/b?c") == "https://a/b"
