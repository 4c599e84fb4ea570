"""The warning about a compiler for GPUs that is at fault."""

import warnings

import mylib
from mylib._core.known_faults import MISREAD
from mylib._training.advice import about_misread


def told(platform, flags=""):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        about_misread.__wrapped__(platform, flags)
    return [str(x.message) for x in caught if issubclass(x.category, mylib.MylibWarning)]


def test_where_it_is_at_fault():
    """It is told for the versions that have it, with the flag that avoids it."""
    off = "--xla_gpu_experimental_gemm_fusion_v2=false"
    assert bool(told("gpu")) == MISREAD.is_on("gpu")
    assert all(off in text for text in told("gpu"))
    assert told("gpu", f"--xla_cpu_x=1 {off}") == told("cpu") == told("") == []
