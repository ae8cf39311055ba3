"""A download ends with exactly the server's bytes, whatever the server does on the way, or says why it cannot."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest

from edgellama import files
from edgellama.errors import DiskFullError, EdgellamaError, InvalidFileError, NetworkError, NotFoundError, OfflineError
from edgellama.store import partial
from edgellama.store.download import Wanted, download
from edgellama.store.progress import Progress
from edgellama.store.transport import Transport

DATA = random.Random(7).randbytes(3_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Fetch:
    """Runs downloads of `/file` into one folder and keeps what they told."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server = server
        self.target = folder / "model.bin"
        self.told: list[Progress] = []
        self.slept: list[float] = []

    def __call__(self, *, offline: bool = False, path: str = "/file", **values: Any) -> tuple[int, str]:
        with Transport(offline=offline, read_seconds=5) as transport:
            wanted = Wanted(self.server.url + path, "model.bin", self.target, **values)
            return download(wanted, transport, self.told.append, sleep=self.slept.append)

    @property
    def notices(self) -> str:
        return "\n".join(told.text for told in self.told if told.stage == "notice")

    def starts(self) -> list[str]:
        return [seen.headers.get("range", "whole") for seen in self.server.seen]


@pytest.fixture
def fetch(server: Any, tmp_path: Path) -> Fetch:
    server.serve("/file", DATA)
    return Fetch(server, tmp_path)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".part" in path.name)


def test_whole_file(fetch: Fetch) -> None:
    assert fetch(sha256=SHA256, size_bytes=len(DATA)) == (len(DATA), SHA256)
    assert fetch.target.read_bytes() == DATA
    assert leftovers(fetch.target.parent) == []
    assert fetch.slept == []


@pytest.mark.parametrize("known", ["", SHA256])
def test_goes_on_after_broken_connections(fetch: Fetch, known: str) -> None:
    fetch.server.files["/file"].script = [
        fetch.server.drop(1_000_000),
        fetch.server.drop(1),
        fetch.server.drop(500_000),
    ]
    fetch(sha256=known)
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts() == ["whole", "bytes=1000000-", "bytes=1000001-", "bytes=1500001-"]


def test_a_second_run_goes_on_where_the_first_stopped(fetch: Fetch) -> None:
    fetch.server.files["/file"].script = [fetch.server.drop(1_234_567)] + [fetch.server.status(503)] * 6
    with pytest.raises(NetworkError, match="503") as caught:
        fetch()
    assert "kept" in caught.value.advice
    assert leftovers(fetch.target.parent) == ["model.bin.part", "model.bin.part.json"]
    fetch.server.files["/file"].script.clear()
    fetch.server.seen.clear()
    fetch()
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts() == ["bytes=1234567-"]
    assert fetch.server.seen[0].headers["if-range"] == '"v1"'


def test_a_server_that_ignores_ranges_starts_again(fetch: Fetch) -> None:
    fetch.server.files["/file"].ranges = False
    fetch.server.files["/file"].script = [fetch.server.drop(1_000_000)]
    fetch()
    assert fetch.target.read_bytes() == DATA
    assert "starting from the beginning" in fetch.notices


def test_a_server_that_ignores_ranges_and_always_breaks_is_given_up(fetch: Fetch) -> None:
    fetch.server.files["/file"].ranges = False
    fetch.server.files["/file"].script = [fetch.server.drop(2_000_000)] * 50
    with pytest.raises(NetworkError, match="broke off"):
        fetch()
    assert len(fetch.server.seen) < 15


@pytest.mark.parametrize("honest", [True, False])
def test_a_file_that_changes_in_between_is_fetched_anew(fetch: Fetch, honest: bool) -> None:
    """Also from a server that sends the range although the validator no longer holds."""
    other = random.Random(8).randbytes(3_000_000)
    served = fetch.server.files["/file"]

    def swap(request: Any) -> bool:
        served.data, served.etag = other, '"v2"'
        if not honest:
            request.headers.replace_header("if-range", '"v2"')
        return False

    served.script = [fetch.server.drop(1_000_000), swap]
    fetch()
    assert fetch.target.read_bytes() == other


def test_without_a_validator_the_hash_decides(fetch: Fetch) -> None:
    served = fetch.server.files["/file"]
    served.etag = ""
    served.script = [fetch.server.drop(1_000_000), fetch.server.drop(1_000_000)]
    fetch(sha256=SHA256)
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts()[1] == "bytes=1000000-"


def test_without_a_validator_and_hash_it_starts_again(fetch: Fetch) -> None:
    served = fetch.server.files["/file"]
    served.etag = ""
    served.script = [fetch.server.drop(1_000_000)]
    fetch()
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts() == ["whole", "whole"]


def test_a_complete_part_needs_no_network(fetch: Fetch) -> None:
    """The machine died after the last byte and before the rename."""
    fetch()
    fetch.target.rename(fetch.target.with_name("model.bin.part"))
    state = partial.State(address=fetch.server.url + "/file", etag='"v1"', total_bytes=len(DATA), boot=partial._boot())
    files.write_bytes(fetch.target.with_name("model.bin.part.json"), partial.msgspec.json.encode(state))
    fetch(offline=True)
    assert fetch.target.read_bytes() == DATA


def test_after_a_power_cut_only_synced_bytes_are_trusted(fetch: Fetch) -> None:
    fetch.target.with_name("model.bin.part").write_bytes(DATA[:500_000] + bytes(500_000))
    state = partial.State(
        address=fetch.server.url + "/file", etag='"v1"', total_bytes=len(DATA), durable_bytes=500_000, boot="another"
    )
    files.write_bytes(fetch.target.with_name("model.bin.part.json"), partial.msgspec.json.encode(state))
    fetch()
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts() == ["bytes=500000-"]


def test_a_damaged_part_is_noticed_by_the_hash_and_fetched_anew(fetch: Fetch) -> None:
    fetch.target.with_name("model.bin.part").write_bytes(bytes(1_000_000))
    state = partial.State(
        address=fetch.server.url + "/file", etag='"v1"', total_bytes=len(DATA), durable_bytes=1_000_000, boot=""
    )
    files.write_bytes(fetch.target.with_name("model.bin.part.json"), partial.msgspec.json.encode(state))
    fetch(sha256=SHA256)
    assert fetch.target.read_bytes() == DATA
    assert "wrong SHA-256" in fetch.notices


@pytest.mark.parametrize("sidecar", [b"", b"{", b"\xff" * 100, b"[1]", b'{"schema": 99, "etag": "x"}'])
def test_a_broken_sidecar_costs_only_the_bytes(fetch: Fetch, sidecar: bytes) -> None:
    fetch.target.with_name("model.bin.part").write_bytes(bytes(1_000_000))
    fetch.target.with_name("model.bin.part.json").write_bytes(sidecar)
    fetch()
    assert fetch.target.read_bytes() == DATA


def test_wrong_hash_leaves_nothing(fetch: Fetch) -> None:
    with pytest.raises(InvalidFileError, match=f"{SHA256}, expected {'0' * 64}"):
        fetch(sha256="0" * 64)
    assert list(fetch.target.parent.iterdir()) == []


def test_a_hash_announced_by_the_server_is_checked(fetch: Fetch) -> None:
    fetch.server.files["/file"].headers["X-Linked-Etag"] = f'"{"1" * 64}"'
    with pytest.raises(InvalidFileError, match="expected 1111"):
        fetch()


def test_an_announced_hash_that_contradicts_the_catalogue_ends_it_before_the_transfer(fetch: Fetch) -> None:
    fetch.server.files["/file"].headers["X-Linked-Etag"] = f'"{"1" * 64}"'
    with pytest.raises(InvalidFileError, match="is expected"):
        fetch(sha256=SHA256)
    assert not any(told.stage == "download" for told in fetch.told)


def test_another_length_than_the_catalogue_says_ends_it_before_the_transfer(fetch: Fetch) -> None:
    with pytest.raises(InvalidFileError, match="3,000,000 bytes, 2,999,999 are expected"):
        fetch(size_bytes=len(DATA) - 1)
    assert not any(told.stage == "download" for told in fetch.told)


def test_a_server_without_a_length_cannot_send_forever(fetch: Fetch) -> None:
    def endless(request: Any) -> bool:
        request.send_response(200)
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        for _ in range(100):
            request.wfile.write(bytes(1_000_000))
        return True

    fetch.server.files["/file"].script = [endless]
    with pytest.raises(InvalidFileError, match="bytes came"):
        fetch(size_bytes=2_000_000)
    assert leftovers(fetch.target.parent) == []


def test_an_empty_file_is_refused(fetch: Fetch) -> None:
    fetch.server.files["/file"].data = b""
    with pytest.raises(InvalidFileError, match="empty"):
        fetch()


def test_a_login_page_is_told_apart(fetch: Fetch) -> None:
    served = fetch.server.files["/file"]
    served.data, served.headers["Content-Type"] = b"<html>log in</html>", "text/html"
    with pytest.raises(NetworkError, match="web page") as caught:
        fetch(magic=b"GGUF")
    assert "log in" in caught.value.advice


def test_compressed_content_is_refused(fetch: Fetch) -> None:
    fetch.server.files["/file"].headers["Content-Encoding"] = "gzip"
    with pytest.raises(NetworkError, match="compressed"):
        fetch()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (401, NetworkError, "login"),
        (403, NetworkError, "login"),
        (404, NotFoundError, "spelling"),
        (407, NetworkError, "HTTPS_PROXY"),
        (410, NotFoundError, "spelling"),
    ],
)
def test_final_statuses_are_not_tried_again(fetch: Fetch, code: int, kind: type[EdgellamaError], words: str) -> None:
    fetch.server.files["/file"].script = [fetch.server.status(code)]
    with pytest.raises(kind, match=str(code)) as caught:
        fetch()
    assert words in caught.value.advice
    assert len(fetch.server.seen) == 1


def test_passing_faults_are_tried_again_with_growing_pauses(fetch: Fetch) -> None:
    fetch.server.files["/file"].script = [fetch.server.status(code) for code in (500, 502, 503, 504)]
    fetch()
    assert len(fetch.slept) == 4
    assert fetch.slept == sorted(fetch.slept)


def test_retry_after_is_obeyed_and_a_long_one_is_told(fetch: Fetch) -> None:
    fetch.server.files["/file"].script = [fetch.server.status(429, Retry_After="7")]
    fetch()
    assert fetch.slept == [7.0]
    fetch.target.unlink()
    fetch.server.files["/file"].script = [fetch.server.status(429, Retry_After="3600")]
    with pytest.raises(NetworkError, match="429") as caught:
        fetch()
    assert "3600 s" in caught.value.advice


def test_offline_names_the_file(fetch: Fetch) -> None:
    with pytest.raises(OfflineError, match=r"model\.bin is needed from http"):
        fetch(offline=True)
    assert fetch.server.seen == []


def test_too_small_a_disk_is_told_before_the_transfer(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda _folder: 1_000_000)
    with pytest.raises(DiskFullError, match="needs 3,000,000 more bytes"):
        fetch()
    assert not any(told.stage == "download" for told in fetch.told)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_disk_that_fills_up_loses_nothing(fetch: Fetch, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = partial.FileIO.write

    class Full(partial.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() >= 1_000_000:
                raise OSError(number, os.strerror(number))
            return real(self, data[:100_000])  # short writes happen before the end

    with monkeypatch.context() as patch:
        patch.setattr(partial, "FileIO", Full)
        with pytest.raises(EdgellamaError) as caught:
            fetch()
    assert ("4 GiB" in caught.value.advice) == (number == errno.EFBIG)
    assert (caught.value.exit_code == 5) == (number != errno.EIO)
    kept = fetch.target.with_name("model.bin.part").stat().st_size
    assert kept >= 1_000_000
    fetch.server.seen.clear()
    fetch()
    assert fetch.target.read_bytes() == DATA
    assert fetch.starts() == [f"bytes={kept}-"]


def test_interrupting_keeps_what_came(fetch: Fetch) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage == "download" and progress.done_bytes > 1_000_000:
            raise KeyboardInterrupt

    with Transport() as transport, pytest.raises(KeyboardInterrupt):
        download(Wanted(fetch.server.url + "/file", "model.bin", fetch.target), transport, interrupt)
    kept = fetch.target.with_name("model.bin.part").stat().st_size
    assert kept > 1_000_000
    fetch.server.seen.clear()
    fetch()
    assert fetch.starts() == [f"bytes={kept}-"]
    assert fetch.target.read_bytes() == DATA


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a folder that is not writable")
def test_a_folder_that_may_not_be_written_is_told(fetch: Fetch) -> None:
    fetch.target.parent.chmod(0o500)
    try:
        with pytest.raises(EdgellamaError, match="cannot be written") as caught:
            fetch()
    finally:
        fetch.target.parent.chmod(0o700)
    assert "EDGELLAMA_MODELS_DIR" in caught.value.advice


def test_nothing_stays_when_nothing_came(fetch: Fetch) -> None:
    fetch.server.files["/file"].script = [fetch.server.status(404)]
    with pytest.raises(NotFoundError):
        fetch()
    assert list(fetch.target.parent.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_in_the_place_of_the_part_is_not_followed(
    fetch: Fetch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_bytes(b"do not touch")
    fetch.target.with_name("model.bin.part").symlink_to(precious)
    fetch.target.with_name("model.bin.part.json").symlink_to(precious)
    fetch()
    assert precious.read_bytes() == b"do not touch"
    assert fetch.target.read_bytes() == DATA
