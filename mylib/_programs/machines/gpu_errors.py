"""Errors of single operations where the GPU's compiler can't measure kernels."""

from typing import Any

# Matrix products by cuBLAS, which chooses by itself when they run.
WITHOUT_TRITON: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


def about_kernels(error: Exception) -> str:
    """How to compile a program for which the GPU's compiler has chosen a Triton kernel that it
    can't make; nothing if this is another error.
    """
    if not any(text in str(error) for text in _NO_KERNEL):
        return ""
    return (
        f"Compile matrix products without Triton: .lower(...).compile({WITHOUT_TRITON}). XLA's "
        "compiler for GPUs chose a Triton kernel that it can't make. With a GPU it tries several "
        "kernels and keeps one that works; for GPUs that you don't have it tries only one"
    )


_NO_KERNEL = (
    "Couldn't find output tile sizes",
    "launch needs more blocks",
    "No supported config",
)
