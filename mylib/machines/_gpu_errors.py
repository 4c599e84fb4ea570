"""Notes on the GPU compiler's errors about single operations."""


def about_kernels(error: Exception) -> str | None:
    """How to compile a program for which the GPU's compiler has chosen a Triton kernel that it
    can't make, or None if this is another error.
    """
    if not any(text in str(error) for text in _NO_KERNEL):
        return None
    return (
        "(XLA's compiler for GPUs chose a Triton kernel that it can't make. With a GPU it tries "
        "several kernels and keeps one that works; for GPUs that are not here it tries only one. "
        "Compile matrix products without Triton: "
        ".lower(...).compile({'xla_gpu_enable_triton_gemm': False}))"
    )


_NO_KERNEL = (
    "Couldn't find output tile sizes",
    "launch needs more blocks",
    "No supported config",
)
