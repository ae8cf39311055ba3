"""Raw memory in kernels: addresses as int64, typed access, atomics, calls through pointers.

Addresses come from arrays that the recorder keeps alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from edgellama.codecs.compiling import intrinsic
from edgellama.engine.jit.kernels.emit import I32, I64, Emit, host


def pointer_to(kind: Any) -> Any:
    """A function from an address to elements of a Numba type there."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


floats = pointer_to(types.float32)
"""float32 elements at an address."""
ints = pointer_to(types.int32)
longs = pointer_to(types.int64)
doubles = pointer_to(types.float64)


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was, seen in one order by all threads."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """An int64, with all that was written before it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 after all that was written before it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        void = ir.VoidType()
        if "x86_64" in host():
            Emit(b).call("llvm.x86.sse2.pause", void)
        elif host() & {"aarch64", "arm64"}:
            Emit(b).call("llvm.aarch64.hint", void, ir.Constant(I32, 1))  # yield
        return context.get_dummy_value()

    return types.void(), codegen


def _call(result: Any, count: int) -> Any:
    """A call of a C function of `count` int64 arguments at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(result, [I64] * count)
        b.call(b.inttoptr(args[0], kind.as_pointer()), list(args[1:]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def call0(typingctx: Any, function: Any) -> Any:
    """`int function(void)`, its result unused."""
    return types.void(types.int64), _call(I32, 0)


@intrinsic
def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """`void function(int64 x 4)`."""
    return types.void(*[types.int64] * 5), _call(ir.VoidType(), 4)


@intrinsic
def call9(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any) -> Any:
    """`void function(int64 x 9)`."""
    return types.void(*[types.int64] * 10), _call(ir.VoidType(), 9)
