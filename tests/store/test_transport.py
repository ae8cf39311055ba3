"""Who gets a token, who is asked through a proxy, and what each fault of the network says."""

from __future__ import annotations

import datetime
import email.utils
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgellama.errors import NetworkError, NotFoundError, UsageError
from edgellama.store import faults, hub, transport
from edgellama.store.transport import Ask, Transport


def get(url: str, **values: Any) -> tuple[int, bytes]:
    with Transport(read_seconds=5) as client, client.get(Ask(url, "the file", **values)) as reply:
        return reply.status, reply.response.read()


def test_a_token_stays_with_its_server(server: Any, other_server: Any) -> None:
    other_server.serve("/there", b"data")
    server.serve("/here", b"").script = [server.redirect("/again")]
    server.serve("/again", b"").script = [server.redirect(other_server.url + "/there")]
    assert get(server.url + "/here", authorization="Bearer secret") == (200, b"data")
    assert [seen.headers.get("authorization") for seen in server.seen] == ["Bearer secret"] * 2
    assert "authorization" not in other_server.seen[0].headers


def test_a_token_does_not_come_back(server: Any, other_server: Any) -> None:
    """A redirect chosen by another host must not be trusted with it."""
    server.serve("/here", b"data").script = [server.redirect(other_server.url + "/there")]
    other_server.serve("/there", b"").script = [other_server.redirect(server.url + "/here")]
    get(server.url + "/here", authorization="Bearer secret")
    assert "authorization" not in server.seen[1].headers


def test_redirects_end(server: Any) -> None:
    server.serve("/loop", b"").script = [server.redirect("/loop")] * 50
    with pytest.raises(faults.TransferFault, match="redirects"):
        get(server.url + "/loop")
    assert len(server.seen) <= 12


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "gopher://host/x", "http://["])
def test_redirects_leave_http_never(server: Any, target: str) -> None:
    server.serve("/x", b"").script = [server.redirect(target)]
    with pytest.raises(faults.TransferFault, match="not an encrypted"):
        get(server.url + "/x")


def test_what_redirects_say_of_the_file_is_kept(server: Any, other_server: Any) -> None:
    server.serve("/x", b"").script = [server.redirect(other_server.url + "/y", X_Linked_Etag='"abc"')]
    other_server.serve("/y", b"data")
    with Transport() as client, client.get(Ask(server.url + "/x", "x")) as reply:
        assert reply.header("X-Linked-Etag") == '"abc"'
        assert reply.header("etag") == '"v1"'


def test_small_files_are_tried_again_and_bounded(server: Any) -> None:
    server.serve("/x", b"data").script = [server.status(503), server.drop(1)]
    slept: list[float] = []
    with Transport() as client:
        assert client.fetch(Ask(server.url + "/x", "x"), 4, sleep=slept.append).content == b"data"
        assert len(slept) == 2
        with pytest.raises(faults.TransferFault, match="over 3 bytes"):
            client.fetch(Ask(server.url + "/x", "x"), 3)


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("https://huggingface.co/o/r/resolve/main/f", True),
        ("https://huggingface.co:443/o", True),
        ("https://HuggingFace.co/o", True),
        ("http://huggingface.co/o", False),
        ("https://huggingface.co:8443/o", False),
        ("https://hf-mirror.com/o", False),
        ("https://huggingface.co.evil.example/o", False),
        ("https://huggingface.co@evil.example/o", False),
        ("https://cdn-lfs.huggingface.co/o", False),
    ],
)
def test_hf_token_goes_to_hugging_face_alone(monkeypatch: pytest.MonkeyPatch, endpoint: str, sent: bool) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (hub.authorization(endpoint) == "Bearer hf_secret") is sent


def test_hf_token_comes_from_its_file_too_and_never_breaks_a_header(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://huggingface.co/x"
    assert hub.authorization(url) == ""
    token = home / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_file\n", encoding="ascii")
    assert hub.authorization(url) == "Bearer hf_file"
    monkeypatch.setenv("HF_TOKEN", "evil\r\nX-Header: 1")
    assert hub.authorization(url) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "[::1]", "x.localhost"])
def test_loopback_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    client = Transport()
    assert client.proxy_for(f"http://{host}:8080/x") == ""
    assert Transport(proxy="http://other:1").proxy_for(f"https://{host}/x") == ""
    if os.name != "nt":
        assert client.proxy_for("https://example.org/x") == "http://proxy.example:3128"


@pytest.mark.skipif(os.name == "nt", reason="Windows asks its registry as well")
def test_proxies_by_scheme_and_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "internal.example,.corp")
    client = Transport()
    assert client.proxy_for("https://example.org") == "http://proxy.example:3128"
    assert client.proxy_for("http://example.org") == ""
    assert client.proxy_for("https://internal.example") == ""
    assert client.proxy_for("https://a.corp") == ""


def test_a_proxy_is_used_and_named_in_errors(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    """The loopback server plays the proxy: an http proxy gets the whole address in the request line."""
    monkeypatch.setenv("HTTP_PROXY", server.url)
    server.serve("http://example.invalid/x", b"by proxy")
    assert get("http://example.invalid/x") == (200, b"by proxy")
    with socket.create_server(("127.0.0.1", 0)) as dead:
        port = dead.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(faults.TransferFault) as caught:
        get("http://example.invalid/x")
    assert f"through the proxy http://127.0.0.1:{port}" in caught.value.error.message
    assert "secret" not in str(caught.value.error)


def test_a_socks_proxy_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import socksio  # noqa: F401
    except ImportError:
        monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:1")
        with pytest.raises(UsageError, match="SOCKS"):
            get("http://example.invalid/x")


def test_a_refused_connection_and_an_unknown_name(server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead:
        port = dead.getsockname()[1]
    with pytest.raises(faults.TransferFault, match="no connection to 127") as caught:
        get(f"http://127.0.0.1:{port}/x")
    assert caught.value.transient
    unknown = faults.from_exception(httpx.ConnectError("x"), "https://huggingface.co/x", "m")
    assert isinstance(unknown.error, NetworkError)


@pytest.mark.parametrize(("number", "transient"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch, number: int, transient: bool) -> None:
    def fail(*_args: Any, **_values: Any) -> Any:
        raise socket.gaierror(number, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(faults.TransferFault, match=r"name example\.org could not be resolved") as caught:
        get("http://example.org/x")
    assert caught.value.transient is transient
    assert "edgellama import" in caught.value.error.advice


def test_a_silent_server_times_out(server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with Transport(read_seconds=0.2) as client, pytest.raises(faults.TransferFault, match="in time"):
            with client.get(Ask(url, "x")):
                pass


# ---- TLS


def make_certificate(folder: Path, *arguments: str) -> Path:
    """A self-signed certificate with its key, by the openssl program."""
    path = folder / "cert.pem"
    base = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    try:
        subprocess.run(
            [*base, "-keyout", str(path), "-out", str(folder / "c.pem"), "-subj", "/CN=localhost", *arguments],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("needs the openssl program")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this openssl cannot make the certificate: {error.stderr[-200:]!r}")
    path.write_bytes(path.read_bytes() + (folder / "c.pem").read_bytes())
    return path


class TLSServer:
    def __init__(self, certificate: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.context = context
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                plain, _ = self.socket.accept()
            except OSError:
                return
            try:
                with self.context.wrap_socket(plain, server_side=True) as secure:
                    secure.recv(65536)
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            except OSError:
                plain.close()


@pytest.fixture
def tls(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[TLSServer, Path]]:
    arguments = getattr(request, "param", ("-days", "2", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"))
    certificate = make_certificate(tmp_path, *arguments)
    running = TLSServer(certificate)
    yield running, tmp_path / "c.pem"
    running.socket.close()


def test_an_interceptor_is_told_and_its_certificate_can_be_trusted(
    tls: tuple[TLSServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, certificate = tls
    url = f"https://localhost:{running.port}/x"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with pytest.raises(faults.TransferFault, match="not trusted here") as caught:
        get(url)
    assert "SSL_CERT_FILE" in caught.value.error.advice
    assert not caught.value.transient
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert get(url) == (200, b"ok")


@pytest.mark.parametrize("tls", [("-days", "2", "-addext", "subjectAltName=DNS:portal.example")], indirect=True)
def test_a_certificate_of_another_host(tls: tuple[TLSServer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    running, certificate = tls
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(faults.TransferFault, match="not for localhost") as caught:
        get(f"https://localhost:{running.port}/x")
    assert "login page" in caught.value.error.advice


@pytest.mark.parametrize(("code", "words"), [(9, "not valid yet"), (10, "out of date")])
def test_a_certificate_outside_its_time_points_at_the_clock(code: int, words: str) -> None:
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_code = code
    wrapped = httpx.ConnectError("certificate verify failed")
    wrapped.__cause__ = error
    fault = faults.from_exception(wrapped, "https://h.example/x", "f")
    assert words in fault.error.message
    assert str(datetime.date.today().year) in fault.error.advice
    assert not fault.transient


def test_a_plain_server_behind_https(server: Any) -> None:
    with pytest.raises(faults.TransferFault, match="no encrypted connection"):
        get(server.url.replace("http:", "https:") + "/x")


def test_a_certificate_file_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/cert.pem")
    with pytest.raises(UsageError, match="certificate file"):
        get("https://localhost:1/x")


# ---- statuses of Hugging Face


@pytest.mark.parametrize(
    ("status", "headers", "sent", "kind", "words"),
    [
        (401, {"x-error-code": "GatedRepo"}, False, NetworkError, "then set HF_TOKEN"),
        (401, {}, True, NetworkError, "expired"),
        (403, {"x-error-code": "GatedRepo"}, True, NetworkError, "accept the terms"),
        (401, {"x-error-code": "RepoNotFound"}, False, NotFoundError, "HF_TOKEN"),
        (404, {"x-error-code": "EntryNotFound"}, False, NotFoundError, "spelling"),
    ],
)
def test_hugging_face_says_why(
    status: int, headers: dict[str, str], sent: bool, kind: type[Exception], words: str
) -> None:
    url = "https://huggingface.co/meta-llama/X/resolve/main/f.gguf"
    fault = faults.from_status(status, headers, url, "f.gguf", token_sent=sent)
    assert isinstance(fault.error, kind)
    assert words in fault.error.advice
    if kind is NetworkError and words != "expired":
        assert "https://huggingface.co/meta-llama/X" in fault.error.advice


def test_messages_of_servers_are_made_printable() -> None:
    fault = faults.from_status(500, {"x-error-message": "\x1b[31mred\n"}, "https://h/x", "f")
    assert "\x1b" not in fault.error.message


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("", None), ("soon", None), ("-1", None), ("1" * 50, 111111111.0)]
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert faults.retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
    seconds = faults.retry_after(email.utils.format_datetime(later, usegmt=True))
    assert seconds is not None
    assert 80 < seconds <= 90


def test_addresses_in_messages_hold_no_secrets() -> None:
    assert transport.without_secrets("https://u:p@h:1/a?X-Signature=s#f") == "https://h:1/a"
