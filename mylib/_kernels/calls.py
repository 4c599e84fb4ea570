"""What is known of a call of a kernel before it runs: its results, and how it may be split."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._placement import kernel_axes
from .._tree import Outline
from .axes import CallInLayer
from .backward import Backward, calls_kernels, has_derivative, is_moving, splits_backward
from .primitive import Kernel, Type, kernel_p
from .reading import UnreadableError, splits_like
from .splits import Splits, UnfitDimsError, splits_of


@dataclass(frozen=True)
class HowSplit:
    """What `opaque` is told of how a function may be split."""

    dims: str | None
    whole: tuple[str, ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...] | None

    def known(self, kernel: Kernel, arrays: Sequence[Any]) -> "KnownCall":
        types = tuple(Type(tuple(x.shape), x.dtype) for x in map(jax.typeof, arrays))
        wide = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        known = _known(kernel, self.dims, self.whole, types, wide)
        for letter, _ in self.axes or ():
            if letter not in known.splits.parts:
                may = ", ".join(map(repr, known.splits.named)) or "none"
                raise TypeError(
                    f"opaque: axes= splits {letter!r} of {kernel.name}, and only these may be "
                    f'split: {may}, of dims="{known.splits}"'
                )
        return known


@dataclass(frozen=True, eq=False)
class KnownCall:
    """How a call may be split, the types of its results, and what they are without arrays."""

    kernel: Kernel | Backward
    splits: Splits
    types: tuple[Type, ...]
    result: Outline
    # Whether its derivative is that of the reference, and whether it has one of its own.
    is_plain: bool = False
    has_own: bool = False

    def backward(self, arrays: Sequence[Any]) -> "KnownCall":
        """Its own derivative, as a call with the cotangents of its results."""
        types = [Type(tuple(x.shape), x.dtype) for x in arrays]
        are_moving, cotangents = tuple(map(is_moving, types)), sum(map(is_moving, self.types))
        kernel = Backward(self.kernel, are_moving, cotangents)
        splits = splits_backward(self.splits, types, self.types)
        return KnownCall(kernel, splits, tuple(filter(is_moving, types)), self.result)

    def __call__(self, arrays: Sequence[Any], axes: Any) -> list[Any]:
        context = kernel_axes.value
        layer = None
        if context is not None:
            layer = CallInLayer(
                context, self.kernel.name, self.splits, tuple(x.shape for x in arrays)
            )
        about = {"splits": self.splits, "types": self.types, "axes": axes, "layer": layer}
        return kernel_p.bind(*arrays, kernel=self.kernel, **about)


@functools.lru_cache(maxsize=1024)
def _known(
    kernel: Kernel,
    dims: str | None,
    whole: tuple[str, ...],
    types: tuple[Type, ...],
    wide: bool,
) -> KnownCall:
    del wide  # a part of the key: it changes the dtypes of results
    program, result = kernel.program(types)
    results = tuple(Type(tuple(x.shape), x.dtype) for x in program.out_avals)
    try:
        if dims is None:
            splits = splits_like(program)
        else:
            splits = splits_of(dims, [x.shape for x in types], [x.shape for x in results])
        splits = splits.without(whole)
    except UnfitDimsError as error:
        raise TypeError(f"opaque: dims= of {kernel.name}: {error}") from None
    except UnreadableError as error:
        raise TypeError(f"opaque: like= of {kernel.name}: {error}") from None
    is_plain = kernel.like is not None and not calls_kernels(program)
    has_own = not is_plain and has_derivative(program)
    return KnownCall(kernel, splits, results, result, is_plain, has_own)
