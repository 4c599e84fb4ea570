"""What is known of a call of a kernel before it runs: its results, and how it may be split."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from ..contexts import kernel_axes
from ..tree import Outline
from .axes import CallInLayer
from .backward import Backward, calls_kernels, has_derivative, is_moving, splits_backward
from .checking import Types
from .primitive import Kernel, kernel_p, type_of
from .reading import UnreadableError, splits_like
from .splits import Splits, UnfitDimsError, splits_of

# A letter, or an argument and the number of its dimension.
Dimension = str | tuple[str, int]


@dataclass(frozen=True)
class HowSplit:
    """What `opaque` is told of how a function may be split."""

    dims: str | None
    whole: tuple[Dimension, ...]
    axes: tuple[tuple[Dimension, tuple[str, ...]], ...] | None

    def known(self, kernel: Kernel, arrays: Sequence[jax.Array]) -> "KnownCall":
        wide = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        return _known(kernel, self, tuple(map(type_of, arrays)), wide)

    def of_letters(self, kernel: Kernel, splits: Splits) -> "AxesOfLetters":
        """`axes=` by the letters of a call."""
        split: dict[str, tuple[str, ...]] = {}
        for key, axes in self.axes or ():
            letter = kernel.letter(key, splits)
            if letter not in splits.parts or split.setdefault(letter, axes) != axes:
                may = ", ".join(kernel.shown(each, splits) for each in splits.named) or "none"
                raise TypeError(
                    f"opaque: axes= splits {key!r} of {kernel.name}, and only these may be split, "
                    f'each over the same axes in all arrays: {may}, of dims="{splits}"'
                )
        return None if self.axes is None else tuple(split.items())


AxesOfLetters = tuple[tuple[str, tuple[str, ...]], ...] | None


@dataclass(frozen=True, eq=False)
class KnownCall:
    """How a call may be split, the types of its results, and what they are without arrays."""

    kernel: Kernel | Backward
    splits: Splits
    types: Types
    result: Outline
    axes: AxesOfLetters
    # Whether its derivative is that of the reference, and whether it has one of its own.
    is_plain: bool = False
    has_own: bool = False

    def backward(self, arrays: Sequence[jax.Array]) -> "KnownCall":
        """Its own derivative, as a call with the cotangents of its results."""
        assert isinstance(self.kernel, Kernel)  # `_known` makes the calls that have one
        types = list(map(type_of, arrays))
        are_moving, cotangents = tuple(map(is_moving, types)), sum(map(is_moving, self.types))
        kernel = Backward(self.kernel, are_moving, cotangents)
        splits = splits_backward(self.splits, types, self.types)
        # Letters that are whole here are split in the call itself.
        axes = self.axes and tuple(x for x in self.axes if x[0] in splits.parts)
        return KnownCall(kernel, splits, tuple(filter(is_moving, types)), self.result, axes)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        context, shapes = kernel_axes.value, tuple(array.shape for array in arrays)
        layer = context and CallInLayer(context, self.kernel.name, self.splits, shapes)
        about = {"splits": self.splits, "types": self.types, "axes": self.axes, "layer": layer}
        return kernel_p.bind(*arrays, kernel=self.kernel, **about)


@functools.lru_cache(maxsize=1024)
def _known(kernel: Kernel, how: HowSplit, types: Types, wide: bool) -> KnownCall:
    del wide  # a part of the key: it changes the dtypes of results
    program, result = kernel.program(types)
    results = tuple(map(type_of, program.out_avals))
    try:
        if how.dims is None:
            splits = splits_like(program)
        else:
            splits = splits_of(how.dims, types, results)
        splits = splits.without([kernel.letter(key, splits) for key in how.whole])
    except (UnfitDimsError, UnreadableError) as error:
        raise TypeError(f"opaque: {error.keyword}= of {kernel.name}: {error}") from None
    is_plain = kernel.like is not None and not calls_kernels(program)
    has_own = not is_plain and has_derivative(program)
    axes = how.of_letters(kernel, splits)
    return KnownCall(kernel, splits, results, result, axes, is_plain, has_own)
