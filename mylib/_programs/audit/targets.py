"""What custom calls do, by their whole names: those that are known to stay on their device, or to
call its host. One that is not listed here may communicate. cuBLAS and cuSOLVER, for example, have
routines over several processes, whose names begin as those of the others.

JAX's own are those that it registers (`jaxlib.lapack`, `jaxlib.gpu_solver` and others); the
compilers' are in the programs that they write.
"""

import re
from typing import Any

from .opcodes import Likeness, Meaning, rows

_REAL, _COMPLEX = "sd", "cz"
_LAPACK = {
    "gees geev gehrd geqp3 geqrf gesdd gesvd getrf gtsv potrf trsm": _REAL + _COMPLEX,
    "orgqr ormqr syevd sytrd": _REAL,
    "heevd hetrd ungqr unmqr": _COMPLEX,
}
# Behind `cu` and `hip`.
_GPU = """
    _cholesky_update_ffi _lu_pivots_to_permutation _threefry2x32_ffi _tridiagonal_solve_perturbed
    hybrid_eig_comp hybrid_eig_real hybrid_geqp3
    dnn_rnn_bwd_ffi dnn_rnn_ffi
    solver_csrlsvqr_ffi solver_geev_ffi solver_geqrf_ffi solver_gesdd_ffi solver_gesvd_ffi
    solver_gesvdj_ffi solver_gesvdp_ffi solver_getrf_ffi solver_orgqr_ffi solver_ormqr_ffi
    solver_potrf_ffi solver_syevd_ffi solver_syrk_ffi solver_sytrd_ffi
    sparse_coo_fromdense_ffi sparse_coo_matmat_ffi sparse_coo_matvec_ffi sparse_coo_todense_ffi
    sparse_csr_fromdense_ffi sparse_csr_matmat_ffi sparse_csr_matvec_ffi sparse_csr_todense_ffi
    sparse_gtsv2_ffi
"""
_PYTHON = "xla_python xla_ffi_python xla_ffi_partitioned_python xla_buffer_python"
# Call functions of Python.
CALLBACKS = frozenset(f"{name}_{x}_callback" for name in _PYTHON.split() for x in ("cpu", "gpu"))
# What the autotuner of the compiler for GPUs chooses by measuring.
TUNED = re.compile(r'"(__cudnn\$|__triton\w*gemm)')

# Kernels whose work is not in the program, such as a user's own.
_CALL: dict[str, Any] = dict(calls="each", product=True)
KERNEL = Meaning(**_CALL, count="unknown")
_PASSED: dict[str, Any] = dict(calls="each", like=Likeness.VALUE)


def _called(names: str, count: str = "unknown", **columns: Any) -> dict[str, Meaning]:
    return rows(names, **(_CALL | columns), count=count)


def _lapack(names: str, kinds: str) -> str:
    return " ".join(f"lapack_{kind}{name}_ffi" for name in names.split() for kind in kinds)


# By their targets.
TARGETS: dict[str, Meaning] = {
    **_called(" ".join(_lapack(names, kinds) for names, kinds in _LAPACK.items())),
    **_called(" ".join(f"{vendor}{name}" for name in _GPU.split() for vendor in ("cu", "hip"))),
    **_called(
        """
        cpu_csr_sparse_dense_ffi dce_sink ducc_fft dynamic_ducc_fft tridiagonal_solve_perturbed_ffi
        triton_kernel_call triton_kernel_call_ffi

        HostExecute __xla_internal_call_marker_after __xla_internal_call_marker_before

        __gpu$xla.gpu.ptx __gpu$xla.gpu.triton __op$block_scaled_dot xla.gpu.ext.cub_scan
        xla.gpu.ext.cub_scan_unassigned_scratch_size xla.gpu.ext.cub_sort_keys
        xla.gpu.ext.cub_sort_pairs xla.gpu.ext.cub_sort_unassigned_scratch_size

        __onednn$convolution __onednn$layernorm __onednn$matmul __onednn$matmul_reorder
        __onednn$softmax __onednn_fusion

        Cholesky CompactWyHelper Eigh EighTpu LuComplexDecompositionBlock LuDecomposition
        LuRealDecompositionBlock ProductOfElementaryHouseholderReflectors Qr QrDecompositionBlock
        __cusolver$cholesky
        """
    ),
    # Bound by memory: they compute nothing, or little for what they read and write.
    **_called(
        """
        ApproxTopK GatherScatterIndicesBitpacked InspectSharding
        InvertDiagBlocksLowerTriangular InvertDiagBlocksUpperTriangular LayoutConstraint
        PadRealToStatic PadToStatic PartialReduce Pin ResizeBilinear ResizeBilinearGrad
        ResizeNearest ResizeNearestGrad SPMDFullToShardShape SPMDShardToFullShape SliceToDynamic
        TopK Unpin X64Combine X64SplitHigh X64SplitLow __cub$DeviceRadixSort
        __cub$DeviceRadixSortUnassignedScratchSize __gpu$TopK device_placement
        """,
        "",
    ),
    **_called(" ".join(CALLBACKS), ""),
    **rows(
        "AssumeGatherIndicesInBound Sharding MoveToHost MoveToDevice annotate_device_placement",
        **_PASSED,
    ),
    **rows("ConcatBitcast", calls="each", like=Likeness.PART, gathers=True),
    **rows("AllocateBuffer CreateBuffer", calls="each", reserves=True),
    **rows("AsyncCollectiveStart", calls="each", window="start"),
    **rows("AsyncCollectiveDone", calls="each", window="end"),
    # Products.
    **_called("__cublas$gemm __cublas$lt$matmul __cublas$lt$matmul$f8", "gemm", workspace=True),
    **_called(
        """
        __cudnn$convBackwardFilter __cudnn$convBackwardInput __cudnn$convBiasActivationForward
        __cudnn$convForward __cudnn$convForwardGraph
        """,
        "convolution",
        workspace=True,
    ),
    **_called(
        """
        __cublas$lt$groupedMatmul __cublas$triangularSolve __cudnn$blockScaledDot
        __cudnn$convReorderFilterAndBias __cudnn$fusion __cudnn$norm
        """,
        workspace=True,
    ),
    **_called(
        """
        __cudnn$fmhaSoftmax __cudnn$fmhaSoftmaxDropout __cudnn$fmhaSoftmaxF8
        __cudnn$fmhaScaleBiasSoftmax __cudnn$fmhaScaleBiasSoftmaxDropout
        __cudnn$fmhaSoftmaxBackward __cudnn$fmhaSoftmaxDropoutBackward
        __cudnn$fmhaSoftmaxBackwardF8 __cudnn$fmhaScaleBiasSoftmaxBackward
        __cudnn$fmhaScaleBiasSoftmaxDropoutBackward
        """,
        "attention",
        workspace=True,
        kernel=True,
    ),
    **_called("tpu_custom_call", "stated", kernel=True),
}
