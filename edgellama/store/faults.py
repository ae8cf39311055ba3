"""What can go wrong between here and a server, each with what happened and what to do about it."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from edgellama.errors import DiskFullError, EdgellamaError, NetworkError, NotFoundError
from edgellama.files import disk_full, free_bytes
from edgellama.store.names import printable
from edgellama.store.sources import without_secrets

_CARRY = "without a network: fetch the file elsewhere, carry it here and run `edgellama import FILE`"
_KEPT = "what was fetched so far is kept; run the same command again to go on"
_TOKENS = "https://huggingface.co/settings/tokens"
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
# OpenSSL's verification results (x509_vfy.h)
_NOT_YET_VALID, _EXPIRED, _HOST_MISMATCH = 9, 10, 62
_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}


class TransferFault(Exception):  # noqa: N818 - internal: carries the error that is shown when trying again is of no use
    """A failed transfer: `error` to show, whether trying again may help, and how long the server asks to wait."""

    def __init__(self, error: EdgellamaError, *, transient: bool = False, wait_seconds: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.transient = transient
        self.wait_seconds = wait_seconds


def from_exception(error: Exception, url: str, what: str, proxy: str = "") -> TransferFault:
    """The fault behind an exception of httpx or of the operating system."""
    host = urllib.parse.urlsplit(url).hostname or "the server"
    if proxy:
        host += f" (through the proxy {without_secrets(proxy)})"
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLError):
            return _tls_fault(cause, host, what)
        if isinstance(cause, socket.gaierror):
            return _dns_fault(cause, host, what)
    return _http_fault(error, url, host, what)


def _http_fault(error: Exception, url: str, host: str, what: str) -> TransferFault:
    import httpx

    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return TransferFault(
            NetworkError(f"{what}: {without_secrets(url)} is not an address that can be fetched ({error})")
        )
    if isinstance(error, httpx.ProxyError):
        return _proxy_fault(error, what)
    if isinstance(error, httpx.TimeoutException):
        text = f"{what}: {host} did not answer in time"
        advice = f"{_mirror(host)}behind a proxy set HTTPS_PROXY; {_KEPT}"
        return TransferFault(NetworkError(text, advice), transient=True)
    if isinstance(error, httpx.ConnectError):
        text = f"{what}: no connection to {host} ({_reason(error)})"
        advice = f"check the network, a firewall, and HTTPS_PROXY if a proxy is needed; {_mirror(host)}{_CARRY}"
        return TransferFault(NetworkError(text, advice), transient=True)
    return TransferFault(
        NetworkError(f"{what}: the transfer from {host} broke off ({_reason(error)})", _KEPT), transient=True
    )


def _mirror(host: str) -> str:
    return "where huggingface.co is blocked, HF_ENDPOINT names a mirror; " if host.startswith("huggingface.co") else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _reason(error: BaseException) -> str:
    return printable(str(error)) or type(error).__name__


def _tls_fault(error: ssl.SSLError, host: str, what: str) -> TransferFault:
    code = getattr(error, "verify_code", 0)
    if code in (_NOT_YET_VALID, _EXPIRED):
        text = f"{what}: the certificate of {host} is {'not valid yet' if code == _NOT_YET_VALID else 'out of date'}"
        now = time.strftime("%Y-%m-%d %H:%M")
        advice = f"this machine's clock says {now}: set it right if that is wrong; otherwise the server is at fault"
    elif code in _UNKNOWN_ISSUER:
        text = f"{what}: the certificate of {host} comes from an authority that is not trusted here"
        advice = (
            "a company proxy or virus scanner that opens encrypted traffic does this: save its root certificate as a "
            "PEM file and set SSL_CERT_FILE to that file"
        )
    elif code == _HOST_MISMATCH:
        text = f"{what}: the certificate is not for {host}"
        advice = "the network answers in the server's place, often a login page: open a browser, log in, try again"
    else:
        text = f"{what}: no encrypted connection to {host} ({_reason(error)})"
        advice = "a proxy or firewall may be in between: check HTTPS_PROXY and SSL_CERT_FILE"
        return TransferFault(NetworkError(text, advice), transient=not isinstance(error, ssl.SSLCertVerificationError))
    return TransferFault(NetworkError(text, advice))


def _dns_fault(error: socket.gaierror, host: str, what: str) -> TransferFault:
    text = f"{what}: the name {host} could not be resolved ({error.strerror or error})"
    advice = f"is this machine online? Behind a proxy set HTTPS_PROXY; {_mirror(host)}{_CARRY}"
    return TransferFault(NetworkError(text, advice), transient=error.errno == socket.EAI_AGAIN)


def _proxy_fault(error: Exception, what: str) -> TransferFault:
    text = f"{what}: the proxy refused ({_reason(error)})"
    if "407" in str(error):
        return TransferFault(NetworkError(text, "the proxy wants a login: HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"))
    return TransferFault(NetworkError(text, "check HTTPS_PROXY and NO_PROXY"), transient=True)


def from_status(
    status: int, headers: dict[str, str], url: str, what: str, *, token_sent: bool = False
) -> TransferFault:
    """The fault behind an HTTP status that is not success. `headers` have lower-case names."""
    host = urllib.parse.urlsplit(url).hostname or "the server"
    said = printable(headers.get("x-error-message", ""))
    text = f"{what}: {host} answered {status} {_phrase(status)}" + (f" ({said})" if said else "")
    code = headers.get("x-error-code", "")
    if status in (404, 410) or code in ("RepoNotFound", "EntryNotFound", "RevisionNotFound"):
        advice = "check the spelling of the source"
        if code == "RepoNotFound" and not token_sent:
            advice += f"; a private or gated repository needs HF_TOKEN ({_TOKENS})"
        return TransferFault(NotFoundError(text, advice))
    if status in (401, 403, 407):
        return TransferFault(NetworkError(text, _access_advice(status, host, url, token_sent)))
    wait = retry_after(headers.get("retry-after", ""))
    if status == 429:
        advice = (
            f"the server limits downloads; wait{f' {wait:.0f} s' if wait else ' a while'} and run it again; {_KEPT}"
        )
        return TransferFault(NetworkError(text, advice), transient=True, wait_seconds=wait)
    advice = f"the trouble is on the server's side; {_KEPT}, or use a mirror (HF_ENDPOINT)"
    return TransferFault(NetworkError(text, advice), transient=status in _TRANSIENT, wait_seconds=wait)


def _access_advice(status: int, host: str, url: str, token_sent: bool) -> str:
    if status == 407:
        return "the proxy wants a login: HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
    if host != "huggingface.co":
        advice = "this server wants a login or refuses this file"
        return advice + "; HF_TOKEN is never sent to a mirror: unset HF_ENDPOINT to fetch a gated model with it"
    page = "https://huggingface.co/" + "/".join(urllib.parse.urlsplit(url).path.strip("/").split("/")[:2])
    if status == 401:
        if token_sent:
            return f"HF_TOKEN is wrong or has expired: make a new one at {_TOKENS}"
        return f"the model is gated or private: accept its terms at {page}, then set HF_TOKEN ({_TOKENS})"
    if token_sent:
        return f"accept the terms at {page} with HF_TOKEN's account; the token must be allowed to read gated models"
    return f"accept the model's terms at {page}, then set HF_TOKEN ({_TOKENS})"


def _phrase(status: int) -> str:
    with contextlib.suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""


def retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header (a number or a date), None when it is absent or malformed."""
    if value.strip().isdigit():
        return float(value.strip()[:9])
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def make_models_folder(folder: Path) -> None:
    """Make the folder of the store; a place where none can be is told as the wrong setting it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(folder, error) from error
        raise EdgellamaError(
            f"the models folder {folder} cannot be made ({error.strerror or error})",
            "the setting models_dir (or EDGELLAMA_MODELS_DIR) names it: `edgellama config set models_dir FOLDER` "
            "takes one that can be written",
        ) from error


def from_write(error: OSError, path: Path) -> EdgellamaError:
    """The error for a write to `path` that failed."""
    if error.errno in _FULL:
        return disk_full(path, error)
    if error.errno == errno.EFBIG:
        return DiskFullError(
            f"{path}: the file system there takes no file of this size ({free_bytes(path.parent):,} bytes are free)",
            "FAT32 holds at most 4 GiB in one file: use a disk with exFAT, ext4, NTFS or APFS (EDGELLAMA_MODELS_DIR); "
            "or a limit on file sizes is set (ulimit -f)",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return EdgellamaError(
            f"{path}: cannot be written ({error.strerror})",
            "set EDGELLAMA_MODELS_DIR to a folder that can be written",
        )
    return EdgellamaError(f"{path}: {error.strerror or error}", "check the disk; what was fetched so far is kept")
