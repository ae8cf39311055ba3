"""Block layouts, quantize and dequantize kernels: one file per codec family."""
