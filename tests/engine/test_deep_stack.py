"""Calls that need much stack."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from edgellama.engine.llamacpp import deep_stack
from edgellama.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("short", 5), ("a" * 3000 + " " + "b" * 2000, 3000), ("a " * 5000, 1), ("a" + " " * 4000 + "b", 4000)],
)
def test_longest_run(text: str, expected: int) -> None:
    assert deep_stack.longest_run(text) == expected


def test_short_runs_stay_on_the_thread_and_long_ones_get_another() -> None:
    here = threading.get_ident()
    assert deep_stack.call(threading.get_ident, "words " * 5000) == here
    assert deep_stack.call(threading.get_ident, "w" * 5000) != here
    assert threading.stack_size() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc or musl")
def test_the_stack_is_as_deep_as_told() -> None:
    def stack_bytes() -> int:
        libc = ctypes.CDLL(None)
        libc.pthread_self.restype = ctypes.c_void_p
        attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
        libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
        libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        return size.value

    assert deep_stack.call(stack_bytes, "x" * 200_000) > 200_000 * 325


def test_errors_come_back_and_endless_runs_are_refused() -> None:
    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        deep_stack.call(fail, "x" * 2000)
    with pytest.raises(UsageError, match="500,001"):
        deep_stack.call(fail, "x" * (deep_stack.MAX_RUN + 1))
