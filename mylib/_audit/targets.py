"""The custom calls that are known to stay on their device, or to call its host, by their whole
names: one that is not here may communicate. cuBLAS and cuSOLVER, for example, have routines over
several processes, whose names begin as those of the others.

JAX's own are those that it registers (`jaxlib.lapack`, `jaxlib.gpu_solver` and others); the
compilers' are in the programs that they write.
"""

import re

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
# cuDNN's attention, forward and backward.
_ATTENTION = """
    Softmax SoftmaxDropout SoftmaxF8 ScaleBiasSoftmax ScaleBiasSoftmaxDropout
    SoftmaxBackward SoftmaxDropoutBackward SoftmaxBackwardF8 ScaleBiasSoftmaxBackward
    ScaleBiasSoftmaxDropoutBackward
"""
_OTHERS = """
    cpu_csr_sparse_dense_ffi dce_sink ducc_fft dynamic_ducc_fft tridiagonal_solve_perturbed_ffi
    triton_kernel_call triton_kernel_call_ffi

    AllocateBuffer ApproxTopK CreateBuffer HostExecute InspectSharding LayoutConstraint MoveToDevice
    MoveToHost PadRealToStatic PadToStatic PartialReduce Pin Sharding SliceToDynamic
    SPMDFullToShardShape SPMDShardToFullShape TopK Unpin X64Combine X64SplitHigh X64SplitLow
    __xla_internal_call_marker_after __xla_internal_call_marker_before annotate_device_placement

    __cub$DeviceRadixSort __cub$DeviceRadixSortUnassignedScratchSize __cublas$gemm
    __cublas$lt$groupedMatmul __cublas$lt$matmul __cublas$lt$matmul$f8 __cublas$triangularSolve
    __cudnn$blockScaledDot __cudnn$convBackwardFilter __cudnn$convBackwardInput
    __cudnn$convBiasActivationForward __cudnn$convForward __cudnn$convForwardGraph
    __cudnn$convReorderFilterAndBias __cudnn$fusion __cudnn$norm __cusolver$cholesky __gpu$TopK
    __gpu$xla.gpu.ptx __gpu$xla.gpu.triton __op$block_scaled_dot xla.gpu.ext.cub_scan
    xla.gpu.ext.cub_scan_unassigned_scratch_size xla.gpu.ext.cub_sort_keys
    xla.gpu.ext.cub_sort_pairs xla.gpu.ext.cub_sort_unassigned_scratch_size

    __onednn$convolution __onednn$layernorm __onednn$matmul __onednn$matmul_reorder
    __onednn$softmax __onednn_fusion

    AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart Cholesky CompactWyHelper
    ConcatBitcast Eigh EighTpu GatherScatterIndicesBitpacked InvertDiagBlocksLowerTriangular
    InvertDiagBlocksUpperTriangular LuComplexDecompositionBlock LuDecomposition
    LuRealDecompositionBlock ProductOfElementaryHouseholderReflectors Qr QrDecompositionBlock
    ResizeBilinear ResizeBilinearGrad ResizeNearest ResizeNearestGrad device_placement
    tpu_custom_call
"""


# Call functions of Python.
CALLBACKS = frozenset(f"{name}_{x}_callback" for name in _PYTHON.split() for x in ("cpu", "gpu"))
# What the autotuner of the compiler for GPUs chooses by measuring.
CUDNN = "__cudnn$"
PRODUCT_BY_TRITON = re.compile(r'"kind":"__triton\w*gemm')


LOCAL = frozenset(
    [
        *(f"lapack_{x}{n}_ffi" for names, xs in _LAPACK.items() for n in names.split() for x in xs),
        *(f"{vendor}{name}" for name in _GPU.split() for vendor in ("cu", "hip")),
        *CALLBACKS,
        *(f"{CUDNN}fmha{name}" for name in _ATTENTION.split()),
        *_OTHERS.split(),
    ]
)
