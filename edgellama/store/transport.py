"""HTTP as a pull needs it: proxies from the environment, the system's certificates, redirects that leak no token.

Redirects are followed here and not by httpx, because a token may go to one origin only, and because Hugging Face puts
the file's SHA-256 and size into the headers of its redirect.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellama.errors import NetworkError, OfflineError, UsageError
from edgellama.store import faults
from edgellama.store.names import printable
from edgellama.store.sources import without_secrets

if TYPE_CHECKING:
    import httpx

_MAX_REDIRECTS = 10
_REDIRECTS = {301, 302, 303, 307, 308}
_CONNECT_SECONDS = 20.0
_READ_SECONDS = 60.0
_SMALL_ATTEMPTS = 3
_MAX_SMALL_WAIT_SECONDS = 20.0
_LINKED = ("x-linked-etag", "x-linked-size", "x-repo-commit", "x-error-code", "x-error-message")


@dataclass(frozen=True, slots=True)
class Ask:
    """One GET. `what` names the wanted file in messages; `authorization` goes to the origin of `url` alone."""

    url: str
    what: str
    headers: Mapping[str, str] = field(default_factory=dict)
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The last response, open for reading, and what the redirects before it said (`linked`, lower-case names)."""

    response: httpx.Response
    url: str
    linked: Mapping[str, str]

    @property
    def status(self) -> int:
        return self.response.status_code

    def headers(self) -> dict[str, str]:
        """All headers by lower-case name; what the redirects said about the file wins."""
        return {**{name.lower(): value for name, value in self.response.headers.items()}, **self.linked}

    def header(self, name: str) -> str:
        """The header `name` of the last response, else of a redirect before it, else ""."""
        value: str = self.response.headers.get(name, "") or self.linked.get(name.lower(), "")
        return value


@dataclass(frozen=True, slots=True)
class Body:
    """A small file in full, and the address it came from in the end."""

    content: bytes
    content_type: str
    url: str


@dataclass(slots=True)
class Transport:
    """Makes requests. `proxy` and `certificates` (a file) override the environment, as pip's settings do."""

    offline: bool = False
    proxy: str = ""
    certificates: str = ""
    read_seconds: float = _READ_SECONDS
    _clients: dict[tuple[str, bool], httpx.Client] = field(default_factory=dict)

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    @contextlib.contextmanager
    def get(self, ask: Ask) -> Iterator[Reply]:
        """GET, following redirects; the reply may have any status but a redirect's.

        Raises `OfflineError` when offline, and `faults.TransferFault` for every failure on the way.
        """
        if self.offline:
            raise offline_error(ask.what, ask.url)
        import httpx

        url, linked = ask.url, dict[str, str]()
        authorization = ask.authorization
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity", "User-Agent": _user_agent(), **ask.headers}
            if authorization:
                headers["Authorization"] = authorization
            with contextlib.ExitStack() as stack:
                try:
                    client = self._client(url)
                    response = stack.enter_context(client.stream("GET", url, headers=headers))
                except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                    raise faults.from_exception(error, url, ask.what, self.proxy_for(url)) from error
                linked.update({name: response.headers[name] for name in _LINKED if name in response.headers})
                if response.status_code not in _REDIRECTS or "location" not in response.headers:
                    yield Reply(response, url, linked)
                    return
                target = _redirect(url, response.headers["location"], ask.what)
            if origin(target) != origin(url):
                authorization = ""  # once it has left, a token does not come back either
            url = target
        raise faults.TransferFault(
            NetworkError(f"{ask.what}: more than {_MAX_REDIRECTS} redirects from {without_secrets(ask.url)}")
        )

    def fetch(self, ask: Ask, limit_bytes: int, *, sleep: Callable[[float], None] = time.sleep) -> Body:
        """The whole of a small file, tried again on passing faults.

        Raises `faults.TransferFault` for every failure, also for any status but 200 and for more than `limit_bytes`.
        """
        for attempt in range(_SMALL_ATTEMPTS):
            try:
                return self._fetch_once(ask, limit_bytes)
            except faults.TransferFault as fault:
                wait = 1.0 + attempt if fault.wait_seconds is None else fault.wait_seconds
                if not fault.transient or wait > _MAX_SMALL_WAIT_SECONDS or attempt == _SMALL_ATTEMPTS - 1:
                    raise
                sleep(wait)
        raise AssertionError("unreachable")

    def _fetch_once(self, ask: Ask, limit_bytes: int) -> Body:
        import httpx

        with self.get(ask) as reply:
            if reply.status != 200:
                raise faults.from_status(
                    reply.status, reply.headers(), reply.url, ask.what, token_sent=bool(ask.authorization)
                )
            content = bytearray()
            try:
                for chunk in reply.response.iter_bytes():
                    content += chunk
                    if len(content) > limit_bytes:
                        text = f"{ask.what}: {without_secrets(reply.url)} is over {limit_bytes:,} bytes"
                        raise faults.TransferFault(NetworkError(text))
            except httpx.HTTPError as error:
                raise faults.from_exception(error, reply.url, ask.what, self.proxy_for(reply.url)) from error
            return Body(bytes(content), reply.header("content-type"), reply.url)

    def _client(self, url: str) -> httpx.Client:
        import httpx

        proxy, secure = self.proxy_for(url), url.lower().startswith("https:")
        key = (proxy, secure)
        if key not in self._clients:
            # An empty context trusts nobody: right for http, and loading certificates takes a while.
            encrypts = secure or proxy.lower().startswith("https:")
            verify = self._tls() if encrypts else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            timeout = httpx.Timeout(self.read_seconds, connect=min(_CONNECT_SECONDS, self.read_seconds))
            try:
                self._clients[key] = httpx.Client(
                    verify=verify, proxy=proxy or None, trust_env=False, timeout=timeout, follow_redirects=False
                )
            except ImportError as error:
                raise UsageError(
                    f"the proxy {without_secrets(proxy)} is a SOCKS proxy, which needs one more package",
                    "run `python -m pip install socksio`, or set HTTPS_PROXY to an HTTP proxy",
                ) from error
            except ValueError as error:
                raise UsageError(f"the proxy setting {without_secrets(proxy)} is not usable: {error}") from error
        return self._clients[key]

    def proxy_for(self, url: str) -> str:
        """The proxy for `url`, "" for none. Loopback never goes through one."""
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        if is_loopback(host) or (not self.proxy and urllib.request.proxy_bypass(host)):
            return ""
        known = urllib.request.getproxies()
        proxy = self.proxy or known.get(parts.scheme) or known.get("all") or ""
        return proxy if not proxy or "://" in proxy else f"http://{proxy}"

    def _tls(self) -> ssl.SSLContext:
        named = self.certificates or os.environ.get("SSL_CERT_FILE", "")
        extra = os.environ.get("REQUESTS_CA_BUNDLE", "")
        try:
            context = ssl.create_default_context(cafile=self.certificates or None)
            if not named and not os.environ.get("SSL_CERT_DIR"):
                import certifi

                context.load_verify_locations(certifi.where())
            for path in filter(None, (named, extra)):
                context.load_verify_locations(**{"capath" if os.path.isdir(path) else "cafile": path})  # noqa: PTH112
        except OSError as error:
            raise UsageError(
                f"the certificate file {named or extra} cannot be used: {error}",
                "SSL_CERT_FILE must name a PEM file with the certificates to trust",
            ) from error
        return context


def offline_error(what: str, url: str) -> OfflineError:
    """The error for a file that only the network has."""
    return OfflineError(
        f"{what} is needed from {without_secrets(url)}, but offline mode is on",
        "fetch it where there is a network, carry the file here and run `edgellama import FILE`; "
        "or leave out --offline and unset EDGELLAMA_OFFLINE",
    )


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of `url`."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return "", url, -1  # equal to no other; the request itself will fail
    return parts.scheme.lower(), (parts.hostname or "").lower(), port


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by name or address."""
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _redirect(url: str, location: str, what: str) -> str:
    """Where a redirect leads; raises for what may not be followed."""
    try:
        target = urllib.parse.urljoin(url, location)
        scheme = urllib.parse.urlsplit(target).scheme.lower()
    except ValueError:
        target, scheme = "a malformed address", ""
    if scheme not in ("http", "https") or (scheme == "http" and url.lower().startswith("https:")):
        raise faults.TransferFault(
            NetworkError(
                f"{what}: {without_secrets(url)} redirects to {printable(without_secrets(target))}, "
                "which is not an encrypted address",
                "use another source or mirror",
            )
        )
    return target


def _user_agent() -> str:
    from edgellama import __version__

    return f"edgellama/{__version__}"
