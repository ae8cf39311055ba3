"""The store's commands as a user types them: stdout, JSON and exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgellama.cli.main import main
from edgellama.store import catalogue, licences

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HTTP_PROXY", "http_proxy", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def files() -> Iterator[dict[str, bytes]]:
    """What a loopback Hugging Face mirror serves."""
    served: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = served.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    served["url"] = f"http://127.0.0.1:{http.server_port}".encode()
    yield served
    http.shutdown()
    http.server_close()


@pytest.fixture
def mirror(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tiny_llama_gguf: Path) -> dict[str, bytes]:
    monkeypatch.setenv("HF_ENDPOINT", files["url"].decode())
    files["/o/r/resolve/main/Tiny.gguf"] = tiny_llama_gguf.read_bytes()
    return files


def test_a_model_comes_is_seen_and_goes(run: Run, mirror: dict[str, bytes]) -> None:
    code, out, err = run("pull", "hf:o/r/Tiny.gguf")
    assert (code, out.split()[0]) == (0, "tiny")
    assert "not encrypted" in err
    code, out, _ = run("list")
    assert code == 0
    assert out.splitlines()[1].split()[0] == "tiny"
    code, out, _ = run("show", "TINY")
    assert code == 0
    assert "architecture  llama" in out
    assert "temperature 0.8 (built-in)" in out
    code, out, _ = run("remove", "tiny")
    assert (code, "removed" in out) == (0, True)
    code, out, err = run("list")
    assert (code, out) == (0, "")
    assert "edgellama recommend" in err


def test_damage_is_listed_as_such(run: Run, mirror: dict[str, bytes], tmp_path: Path) -> None:
    path = Path(json.loads(run("pull", "hf:o/r/Tiny.gguf", "--json")[1])["path"])
    path.write_bytes(path.read_bytes()[:1000])
    assert "damaged" in run("list")[1]
    path.unlink()
    assert "missing" in run("list")[1]


def test_a_damaged_record_does_not_keep_its_model(run: Run, mirror: dict[str, bytes]) -> None:
    path = Path(json.loads(run("pull", "hf:o/r/Tiny.gguf", "--json")[1])["path"])
    path.with_name("model.json").write_bytes(b"{")
    assert "Tiny.gguf" in run("list")[1]
    code, out, _ = run("remove", "tiny")
    assert (code, "tiny removed" in out) == (0, True)
    assert not path.exists()


def test_flipped_bytes_are_repaired_by_pull(run: Run, mirror: dict[str, bytes]) -> None:
    path = Path(json.loads(run("pull", "hf:o/r/Tiny.gguf", "--json")[1])["path"])
    sound = path.read_bytes()
    path.write_bytes(sound[:-8] + bytes(byte ^ 0xFF for byte in sound[-8:]))
    code, _, err = run("show", "tiny")
    assert code == 4
    assert "edgellama pull hf:o/r/Tiny.gguf" in err
    code, _, err = run("pull", "hf:o/r/Tiny.gguf")
    assert (code, "another SHA-256" in err) == (0, True)
    assert path.read_bytes() == sound


def test_json_everywhere(run: Run, mirror: dict[str, bytes]) -> None:
    code, out, _ = run("pull", "hf:o/r/Tiny.gguf", "--json")
    pulled = json.loads(out)
    assert code == 0
    assert pulled["bytes"] == len(mirror["/o/r/resolve/main/Tiny.gguf"])
    assert len(pulled["files"][0]["sha256"]) == 64
    assert json.loads(run("list", "--found", "--json")[1]) == {"models": [pulled], "found": []}
    shown = json.loads(run("show", "tiny", "--json", "--verbose")[1])
    assert shown["file"]["architecture"] == "llama"
    assert shown["file"]["parameters"] == sum(
        tensor["shape"][0] * (tensor["shape"][1] if len(tensor["shape"]) > 1 else 1) for tensor in shown["tensors"]
    )
    assert shown["file"]["tensor_types"]["F32"]["tensors"] == len(shown["tensors"])
    assert shown["sampling"]["top_k"] == {"value": 40, "source": "built-in"}
    assert shown["file"]["rope"]["freq_base"] == 10000.0
    assert shown["file"]["tokenizer"]["special_tokens"] == {"bos": 1, "eos": 2, "eot": 260, "unknown": 0}
    told = json.loads(run("licences", "--json")[1])
    assert [model["name"] for model in told["models"]] == ["tiny"]
    assert "click" in [package["name"] for package in told["packages"]]
    assert json.loads(run("remove", "tiny", "--json")[1])["files_deleted"] is True


def test_settings_and_catalogue_show_as_sources_of_defaults(run: Run, tiny_llama_gguf: Path) -> None:
    assert run("config", "set", "temperature", "0.3")[0] == 0
    shown = json.loads(run("show", tiny_llama_gguf, "--json")[1])
    assert shown["sampling"]["temperature"] == {"value": 0.3, "source": "settings"}


def test_a_catalogue_model_that_is_not_here(run: Run) -> None:
    code, out, err = run("show", "qwen3-4b")
    assert code == 0
    assert "hf:Qwen/Qwen3-4B-GGUF" in out
    assert "not here yet" in err
    assert json.loads(run("show", "qwen3-4b", "--json")[1])["here"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("pull", "nosuchmodel"), 3, "no model"),
        (("pull", "smolm2-135m"), 3, "smollm2-135m"),
        (("pull", "hf:o/r/none.gguf"), 3, "404"),
        (("pull", "hf:broken"), 2, "hf:ORG/REPO/FILE"),
        (("pull", "qwen3-4b", "--offline"), 7, "Qwen3-4B-Q4_K_M.gguf is needed"),
        (("pull", "llama-3.2-1b"), 8, "--accept-licence"),
        (("pull",), 2, "MODEL"),
        (("show", "hf:o/r/none.gguf"), 3, "edgellama pull"),
        (("show", "nosuch.gguf"), 3, "does not exist"),
        (("remove", "nosuch"), 3, "no model"),
        (("import", "/nowhere/x.gguf"), 3, "does not exist"),
        (("recommend", "--lang", "xx"), 2, "known languages"),
    ],
)
def test_exit_codes(run: Run, mirror: dict[str, bytes], arguments: tuple[str, ...], code: int, words: str) -> None:
    got, out, err = run(*arguments)
    assert got == code, err
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_a_file_that_is_no_gguf(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model")
    for command in ("show", "import"):
        code, out, err = run(command, path)
        assert (code, out) == (4, "")
        assert "magic" in err.lower() or "GGUF" in err


def test_accepting_a_licence(
    run: Run, mirror: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "catalogue"
    folder.mkdir()
    text = (catalogue.folder() / "llama-3.2-1b-instruct.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("sources", "file", "sha256", "size_bytes"))]
    own = ['sources = ["hf:o/r/Tiny.gguf"]', 'file = "Tiny.gguf"', 'sha256 = ""', "approximate_bytes = 5"]
    (folder / "x.toml").write_text("\n".join(own + lines), encoding="utf-8")
    monkeypatch.setattr(catalogue, "folder", lambda: folder)
    catalogue.load.cache_clear()
    try:
        assert run("pull", "llama-3.2-1b")[0] == 8
        code, _, err = run("pull", "llama-3.2-1b", "--accept-licence")
        assert code == 0
        assert "Built with Llama" in err
        assert run("remove", "llama-3.2-1b")[0] == 0
        assert run("pull", "llama-3.2-1b")[0] == 0, "accepted once is enough"
        assert [a.by for a in licences.acceptances()] == ["--accept-licence"]
        assert "llama3.2 of 2024-09-25" in run("licences")[1]
    finally:
        catalogue.load.cache_clear()


def test_imports(run: Run, tmp_path: Path, tiny_llama_gguf: Path) -> None:
    folder = tmp_path / "stick"
    folder.mkdir()
    for name in ("A.gguf", "B.gguf"):
        (folder / name).write_bytes(tiny_llama_gguf.read_bytes())
    (folder / "C.gguf").write_bytes(b"broken")
    code, out, err = run("import", folder)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["a", "b"]
    assert "C.gguf" in err
    assert "1 of 3" in err
    code, out, _ = run("import", "--copy", "--json", folder / "A.gguf")
    assert code == 0
    assert json.loads(out)["how"] == "copied"


def test_recommendations(run: Run) -> None:
    told = json.loads(run("recommend", "--json", "--all")[1])
    assert {model["name"] for model in told["models"]} == set(catalogue.load())
    assert told["available_bytes"] > 0
    code, out, _ = run("recommend", "--lang", "zh", "--all")
    assert code == 0
    assert "qwen3-4b" in out
    assert "smollm2" not in out


def test_other_programs_are_listed(run: Run, tmp_path: Path) -> None:
    place = tmp_path / ".lmstudio" / "models" / "p" / "模型.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF")
    code, out, _ = run("list", "--found")
    assert code == 0
    assert "lmstudio/p/模型.gguf" in out
    assert run("list")[1] == ""
    assert run("remove", "lmstudio/p/模型.gguf")[0] == 2
    assert place.is_file()


@pytest.mark.parametrize("name", ["pull", "list", "show", "remove", "import", "recommend", "licences"])
def test_help_has_an_example(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"Example: edgellama {name}" in out
