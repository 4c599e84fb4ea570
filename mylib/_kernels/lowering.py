"""How a kernel's call becomes a part of a program: as a call on each device's parts."""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from .._compat import (
    mesh_of_lowering,
    names,
    spec_of_compiler,
    without_types_of_shard_map,
)
from .._errors import Fault, PlacementError, all_words
from .._placement import show_mesh
from .._programs import all_equations
from .axes import Axes, GivenArray, agreed, fault, operands_of, specs_of, splits_in, unfit
from .splits import Splits

Run = Callable[..., Sequence[Any]]


def lowered(
    ctx: Any,
    *operands: Any,
    on_tpu: bool,
    kernel: Any,
    splits: Splits,
    types: Sequence[Any],
    axes: Any,
    layer: Any,
) -> Any:
    """The rule of the primitive. Where it is known which mesh axes split what, the call is a
    `shard_map`. Otherwise the compiler's partitioner asks, which those for TPUs can't.
    """
    mesh = mesh_of_lowering(ctx)
    free = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    call = _KernelCall(kernel, splits, types, mesh)
    run: Run = call.on_parts
    if math.prod(mesh.shape[axis] for axis in free) > 1:
        split = _known(call, ctx.avals_in, axes, mesh, free)
        # In a `shard_map` over some of the axes the other partitioners abort.
        is_asked = not on_tpu and not mesh.manual_axes
        if split is None and not is_asked and layer is not None:
            split = layer.axes_of(splits)
        if split is not None:
            _check(call, split, mesh, free)
            run = _mapped(call, split, mesh, free)
        elif is_asked:
            run = _partitioned(call, mesh)
        else:
            where = "inside a shard_map over other axes" if mesh.manual_axes else "on TPUs"
            raise PlacementError([_unknown(call, mesh, where)])
    # Kernels don't know what varies over a mesh.
    plain = [ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


class _KernelCall:
    """A kernel with its splits and the types of its results."""

    def __init__(self, kernel: Any, splits: Splits, types: Sequence[Any], mesh: AbstractMesh):
        self.kernel, self.splits, self.types = kernel, splits, types
        # Kernels know nothing of meshes, but JAX looks there for what kind of device it is.
        self._no_mesh = AbstractMesh((), (), abstract_device=mesh.abstract_device)

    def on_parts(self, *parts: Any) -> list[Any]:
        """The kernel's results for one device's parts."""
        unchecked, note = without_types_of_shard_map(), _WithNote(self._note(parts))
        with jax.sharding.use_abstract_mesh(self._no_mesh), unchecked, note:
            results = list(self.kernel(*parts))
            kinds, known = (
                [(len(x.shape), x.dtype) for x in side] for side in (results, self.types)
            )
            if kinds != known:
                shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in results)
                wanted = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.types)
                raise TypeError(
                    f"opaque: {self.kernel.name} returns {shown or 'no arrays'}; like= has "
                    f"{wanted or 'none'} for whole arguments"
                )
            return results

    def asked(self, mesh: AbstractMesh, parts: Sequence[Any]) -> list[Any]:
        """The same for the compiler, of whose errors only the text is left. Callbacks of what it is
        given are lost, and the process would crash.
        """
        with _Remembered():
            with _WithNote(self._note(parts), in_text=True):
                program = jax.make_jaxpr(self.on_parts)(*parts)
            if any(x.primitive.name in names.CALLBACKS for x in all_equations(program)):
                where = "with a callback on Auto axes"
                raise PlacementError([_unknown(self, mesh, where)])
        return jaxpr_as_fun(program)(*parts)

    def _note(self, parts: Sequence[Any]) -> str:
        shown = ", ".join(
            f"{path}: {x.dtype}{list(x.shape)}"
            for path, x in zip(self.kernel.paths, parts, strict=True)
        )
        return f"opaque: raised while {self.kernel.name} was called for one device's parts, {shown}"


class _WithNote:
    """Adds a note to what is raised inside, or raises another error with it."""

    def __init__(self, note: str, in_text: bool = False):
        self._note, self._in_text = note, in_text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and self._in_text:
            raise RuntimeError(f"{error}\n{self._note}") from error
        if error is not None:
            error.add_note(self._note)


# The latest errors that were raised where a compiler calls. JAX keeps only their text.
_RAISED = deque[BaseException](maxlen=8)


class _Remembered:
    """Remembers what is raised inside, where a compiler calls."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            _RAISED.append(error)


def raise_as_in_compiler(error: BaseException) -> None:
    """Raises the error that a compiler's error tells of, in place of that; nothing if it tells of
    none.
    """
    text = all_words(error)
    told = (x for x in reversed(_RAISED) if str(x).replace("\n", " ") in text)
    original = next(told, None)
    if original is not None and original is not error:
        raise original from None


def _known(
    call: _KernelCall, avals: Sequence[Any], axes: Any, mesh: AbstractMesh, free: Sequence[str]
) -> Axes | None:
    """How the mesh splits the letters, if it is known for all of its axes."""
    if axes is not None or not call.splits.parts:
        return dict(axes or ())
    explicit = set(mesh.explicit_axes)
    if not explicit.issuperset(axis for axis in free if mesh.shape[axis] > 1):
        return None
    return agreed(call.kernel.name, operands_of(call.kernel, call.splits, avals), call.splits, mesh)


def _check(call: _KernelCall, split: Axes, mesh: AbstractMesh, free: Sequence[str]) -> None:
    """Refuses axes that this mesh lacks, or that don't divide what they split."""
    used: set[str] = set()
    faults: list[Fault] = []
    for letter, axes in split.items():
        missing = [axis for axis in axes if axis not in free or axis in used]
        used |= set(axes)
        if missing:
            reason = f"{missing[0]!r} is no axis of {show_mesh(mesh)}, is Manual, or splits another"
        else:
            reason = unfit(letter, axes, call.splits, mesh)
        if reason is not None:
            request = f"{letter!r} of {call.splits} over {', '.join(axes)}, in {call.kernel.name}"
            faults.append(
                Fault("", None, request, reason, "split another letter, or leave it unsharded")
            )
    if faults:
        raise PlacementError(faults)


def _mapped(call: _KernelCall, split: Axes, mesh: AbstractMesh, free: Sequence[str]) -> Run:
    manual = mesh.manual_axes
    kinds = tuple(AxisType.Manual if x in manual else AxisType.Auto for x in mesh.axis_names)
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)

    def run(*operands: Any) -> Any:
        shapes = [x.shape for x in operands]
        in_specs = tuple(specs_of(call.splits.operands, shapes, split))
        out_specs = specs_of(call.splits.results, [x.shape for x in call.types], split)
        with jax.sharding.use_abstract_mesh(auto):
            return jax.shard_map(
                call.on_parts,
                mesh=auto,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(free),
                check_vma=False,
            )(*operands)

    return run


def _partitioned(call: _KernelCall, on: AbstractMesh) -> Run:
    """A call that the compiler's partitioner splits as its operands are."""

    wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]

    def partition(mesh: Any, args: Sequence[Any], result: Sequence[Any]) -> Any:
        _enter_x64(wide)
        with _Remembered():
            shardings = _shardings(call, mesh, args, result)
        return mesh, lambda *parts: call.asked(on, parts), *shardings

    def run(*operands: Any) -> Any:
        stand_in = custom_partitioning(lambda *_: [jnp.zeros(*type_) for type_ in call.types])
        rule, whole, sizes = _rule(call, [x.shape for x in operands])
        stand_in.def_partition(
            partition,
            sharding_rule=rule,
            need_replication_factors=whole,
            decode_shardings=False,
            **sizes,
        )
        return stand_in(*operands)

    return run


_entered = threading.local()


def _enter_x64(wide: bool) -> None:
    """Lets this thread compute in as many bits as the one that lowered the program. JAX 0.10.2 asks
    for partitions in threads of the compiler's, which lack the context of `jax.enable_x64`. What it
    then traces ends after `partition` has returned, so it is left when the thread is asked again.

    Needed with JAX 0.10.2; no public issue is known. May go once `test_random` of
    `tests/kernels/test_split_kernels.py` passes without it.
    """
    if hasattr(_entered, "context"):
        _entered.context.close()
    _entered.context = ExitStack()
    if jax.config.jax_enable_x64 != wide:  # pyright: ignore[reportAttributeAccessIssue]
        _entered.context.enter_context(jax.enable_x64(wide))


def _rule(
    call: _KernelCall, shapes: Sequence[tuple[int, ...]]
) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """The rule in the partitioner's notation, its factors that are whole, in the order in which
    they come, and the sizes of factors that are a part of a dimension.
    """
    splits, numbers = call.splits, count()
    whole: list[str] = []
    sizes: dict[str, int] = {}

    def factor(letter: str, size: int) -> str:
        parts = splits.parts.get(letter, 1) if size > 1 else 1
        if parts == size:
            return f"split_{letter}"
        whole.append(f"whole{next(numbers)}")
        if parts == 1:
            return whole[-1]
        sizes.update({f"split_{letter}": parts, whole[-1]: size // parts})
        return f"(split_{letter} {whole[-1]})"

    def side(letters: Any, shapes: Any) -> str:
        return ", ".join(" ".join(map(factor, *pair)) for pair in zip(letters, shapes, strict=True))

    operands = side(splits.operands, shapes)
    rule = f"{operands} -> {side(splits.results, [x.shape for x in call.types])}"
    alone = {x for x in sizes if f" {x} " in f" {rule.replace(',', ' ')} "}
    return rule, tuple(whole), {x: n for x, n in sizes.items() if x not in alone}


def _shardings(call: _KernelCall, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """The shardings of results and operands, as the partitioner wants most of them."""
    splits, paths = call.splits, call.kernel.paths
    given: list[GivenArray] = []
    split: dict[str, tuple[str, ...]] = {}
    faults: list[Fault] = []
    for path, x, letters in zip(
        [*(f"result {i}" for i in range(len(results))), *paths],
        [*results, *args],
        (*splits.results, *splits.operands),
        strict=True,
    ):
        spec = spec_of_compiler(x.sharding, mesh)
        array = GivenArray(path, tuple(x.shape), letters, tuple(spec or ()))
        given.append(array)
        faults += [] if spec is not None else [_between_axes(call, array, x.sharding, mesh)]
    for operand, dim, axes in splits_in(given, mesh):
        letter = operand.letters[dim]
        taken = {axis for x, others in split.items() if x != letter for axis in others}
        if letter in splits.parts and letter not in split and taken.isdisjoint(axes):
            reason = unfit(letter, axes, splits, mesh)
            if reason is None:
                split[letter] = axes
            else:
                faults.append(fault(call.kernel.name, operand, dim, axes, splits, reason))
    if faults:
        # What a user can place are operands.
        raise PlacementError([x for x in faults if x.path in paths] or faults)
    of_results = specs_of(splits.results, [x.shape for x in results], split)
    of_operands = specs_of(splits.operands, [x.shape for x in args], split)
    # In the trees that `custom_partitioning` has of both.
    return [NamedSharding(mesh, x) for x in of_results], tuple(
        NamedSharding(mesh, x) for x in of_operands
    )


def _between_axes(call: _KernelCall, array: GivenArray, sharding: Any, mesh: Any) -> Fault:
    """The compiler splits a dimension over a part of an axis, as all of it doesn't divide it."""
    counts = [
        n // part for n, part in zip(array.shape, sharding.shard_shape(array.shape), strict=True)
    ]
    of_axes = {1, *mesh.shape.values()}
    dim = next((i for i, n in enumerate(counts) if n not in of_axes), len(counts) - 1)
    letter = array.letters[dim]
    taken = [axis for axis, n in mesh.shape.items() if n > counts[dim]]
    reason = (
        f"an operand is split into more parts than the {call.splits.parts.get(letter, 1)} that all "
        f"arrays with {letter!r} can have"
    )
    return fault(call.kernel.name, array, dim, taken, call.splits, reason)


def _unknown(call: _KernelCall, mesh: AbstractMesh, where: str) -> Fault:
    """The line to write."""
    axes = [x for x in mesh.axis_names if x not in mesh.manual_axes and mesh.shape[x] > 1]
    split: dict[str, str] = {}
    for axis in axes:
        fits = (x for x in call.splits.named if unfit(x, [axis], call.splits, mesh) is None)
        letter = next((x for x in fits if x not in split), None)
        if letter is not None:
            split[letter] = axis
    shown = ", ".join(f'"{letter}": "{axis}"' for letter, axis in split.items())
    return Fault(
        "",
        None,
        f"the kernel {call.kernel.name} ({call.splits}), {where}",
        f"the compiler can't tell there how the Auto axes {', '.join(axes)} split its operands",
        f"write which axis splits which letter, as in mylib.opaque(..., axes={{{shown}}}); others "
        "are whole. It isn't needed on Explicit axes, and in the layers of mylib.fully_shard",
    )
