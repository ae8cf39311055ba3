"""Where things lie in a program's int64 memory: fields of an operation, of the step, of the control block."""

from __future__ import annotations

from typing import Any

from numba import types

from edgellama.codecs.compiling import intrinsic
from edgellama.engine.jit.kernels.emit import I16, Emit
from edgellama.engine.jit.kernels.memory import pointer_to

# ---- an operation: function, chunk counter, whether threads meet behind it, then its arguments
FUNCTION, COUNTER, BARRIER = 0, 1, 2
ALWAYS, MANY = 1, 2
"""Values of BARRIER: threads meet behind the operation always, or when there are many columns."""
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9 = range(3, 13)
A10, A11, A12, A13, A14, A15, A16, A17, A18, A19 = range(13, 23)
A20, A21, A22, A23, A24 = range(23, 28)
OPERATION_WORDS = 32

# ---- a step
TOKENS, WANTED, POSITIONS, SEQUENCES, CELLS, WANTED_ROWS, TABLE, CONTEXT, CELL_COUNT, LOGITS = range(10)
TURNS = 10
"""From here: addresses of cosines and sines for each rotation, float32[tokens, pairs]."""
STEP_WORDS = 24

# ---- control: shared with other threads
STOP, TICKS, ARRIVED, GENERATION, STOPPED = 0, 1, 8, 16, 24
CONTROL_WORDS = 32

# ---- cache types
F32, F16, BF16, Q8_0 = range(4)
# ---- elementwise operations
SCALE, ADD, SOFTCAP, SIGMOID = range(4)

shorts = pointer_to(types.int16)
signed = pointer_to(types.int8)


@intrinsic
def half_at(typingctx: Any, address: Any) -> Any:
    """float32 of the binary16 at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        e = Emit(b)
        return e.half(e.load(args[0], 0, I16))

    return types.float32(types.int64), codegen
