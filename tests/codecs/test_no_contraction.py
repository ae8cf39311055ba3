"""No kernel may fuse a multiply and an add: that would change bytes between machines."""

from __future__ import annotations

import inspect
import re
from typing import Any

import llvmlite.binding as llvm
import numba as nb
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llvmlite import ir
from numba import types

from edgellama.codecs import search
from edgellama.codecs.base import codec

FUSED_IR = re.compile(r"@llvm\.(fma|fmuladd)\.|\b(fadd|fmul|fsub|fdiv)\s+(fast|contract|reassoc|afn)")
FUSED_X86 = re.compile(r"\bvfn?m(add|sub)", re.IGNORECASE)
FUSED_ARM = re.compile(r"\b(fmla|fmls|fmadd|fmsub|fnmadd|fnmsub)\b")


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.IQ4_XS], ids=lambda t: t.name)
def test_ir_and_machine_code_hold_no_fused_multiply_add(kind: Type) -> None:
    chosen = codec(kind)
    cached: tuple[Any, ...] = chosen.compiled or (chosen.kernel,)
    x, y, odd = np.zeros((1, 256), np.float32), np.zeros((1, chosen.block_bytes), np.uint8), np.zeros(1, np.uint8)
    arrays = {"x": x, "importance": np.ones((1, 256), np.float32), "y": y, "odd": odd}
    for part in cached:
        fresh = nb.njit(nogil=True, error_model="numpy")(part.py_func)  # code from the cache cannot be inspected
        fresh(*(arrays[name] for name in inspect.signature(part.py_func).parameters))
        (code,) = fresh.inspect_llvm().values()
        assert "fmul" in code
        assert not FUSED_IR.search(code)
        (assembly,) = fresh.inspect_asm().values()
        assert not FUSED_X86.search(assembly)
        assert not FUSED_ARM.search(assembly)


class _Context:
    """The one thing the kernels ask of Numba's target context."""

    def get_dummy_value(self) -> None:
        return None


@pytest.mark.parametrize("make", [search.affine(32, 15, -1.0, 0.1, 20, 8), search.symmetric(16, 32, 16)])
def test_arm_code_from_the_same_ir_holds_no_fused_multiply_add(make: Any) -> None:
    """AArch64 always has fmla, so what is not fused here was not fused for lack of an instruction."""
    _, codegen = make._defn(None, *[types.uint64] * 4)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), "search")
    builder = ir.IRBuilder(function.append_basic_block())
    codegen(_Context(), builder, None, function.args)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert "fmul\tv" in assembly
    assert not FUSED_ARM.search(assembly)
