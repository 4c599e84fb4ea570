"""How a kernel's call becomes a part of a program: as a call on each device's parts."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ..compat import mesh_of_lowering, names, spec_of_compiler, without_types_of_shard_map
from ..errors import Fault, PlacementError, all_words, because
from ..jaxprs import all_equations
from ..placement import show_mesh
from .axes import Axes, Called, CallInLayer, GivenArray, agreed, fault, specs_of, splits_in, unfit
from .checking import check_reference, noted
from .splits import Letters, Splits

Run = Callable[..., Sequence[jax.Array]]
Types = Sequence[jax.ShapeDtypeStruct]


def lowered(
    ctx: Any, *operands: object, on_tpu: bool, axes: Any, layer: CallInLayer | None, **about: Any
) -> Any:
    """The rule of the primitive. Where it is known which mesh axes split what, the call is a
    `shard_map`. Otherwise the compiler's partitioner asks, which those for TPUs can't.
    """
    call = _KernelCall(given=ctx.avals_in, mesh=mesh_of_lowering(ctx), **about)
    run: Run = call.on_parts
    if math.prod(call.mesh.shape[axis] for axis in call.free) > 1:
        if call.kernel.is_checked and call.splits.parts:
            check_reference(call.kernel, call.splits, call.given)
        split = call.known(axes)
        # In a `shard_map` over some of the axes the other partitioners abort.
        is_asked = not on_tpu and not call.mesh.manual_axes
        if split is None and not is_asked and layer is not None:
            split = layer.axes_of(call.splits)
        if split is not None:
            call.check(split)
            run = call.mapped(split)
        elif is_asked:
            run = call.partitioned()
        else:
            where = "inside a shard_map over other axes" if call.mesh.manual_axes else "on TPUs"
            raise PlacementError([call.unknown(where)])
    # Kernels don't know what varies over a mesh.
    plain = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


class _KernelCall:
    """A kernel with its splits, the types of its whole operands and results, and the mesh with the
    axes of it that are not Manual.
    """

    def __init__(
        self, kernel: Called, splits: Splits, given: Types, types: Types, mesh: AbstractMesh
    ):
        self.kernel, self.splits, self.given, self.types = kernel, splits, given, types
        self.mesh = mesh
        self.free = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
        # Kernels know nothing of meshes, but JAX looks there for what kind of device it is.
        self._no_mesh = AbstractMesh((), (), abstract_device=mesh.abstract_device)

    def known(self, axes: Any) -> Axes | None:
        """How the mesh splits the letters, if it is known for all of its axes."""
        if axes is not None or not self.splits.parts:
            return dict(axes or ())
        explicit = set(self.mesh.explicit_axes)
        if not explicit.issuperset(axis for axis in self.free if self.mesh.shape[axis] > 1):
            return None
        return agreed(self.kernel, self.splits, self.given, self.mesh)

    def check(self, split: Axes) -> None:
        """Refuses axes that this mesh lacks, or that don't divide what they split."""
        used: set[str] = set()
        faults: list[Fault] = []
        for letter, axes in split.items():
            missing = [axis for axis in axes if axis not in self.free or axis in used]
            used |= set(axes)
            if missing:
                mesh = show_mesh(self.mesh)
                reason = f"{missing[0]!r} is no axis of {mesh}, is Manual, or splits another"
            else:
                reason = unfit(letter, axes, self.splits, self.mesh)
            if reason is not None:
                request = (
                    f"{letter!r} of {self.splits} over {', '.join(axes)}, in {self.kernel.name}"
                )
                fix = "split another letter, or leave it unsharded"
                faults.append(because(reason, fix, request))
        if faults:
            raise PlacementError(faults)

    def unknown(self, where: str) -> Fault:
        """The line to write."""
        axes = [axis for axis in self.free if self.mesh.shape[axis] > 1]
        split: dict[str, str] = {}
        for axis in axes:
            fits = (
                x for x in self.splits.named if unfit(x, [axis], self.splits, self.mesh) is None
            )
            letter = next((x for x in fits if x not in split), None)
            if letter is not None:
                split[letter] = f'{self.kernel.shown(letter, self.splits)}: "{axis}"'
        return because(
            f"the compiler can't tell there how the Auto axes {', '.join(axes)} split its operands",
            "write which axis splits which letter, as in mylib.opaque(..., "
            f"axes={{{', '.join(split.values())}}}); others are whole. It isn't needed on Explicit "
            "axes, and in the layers of mylib.fully_shard",
            f"the kernel {self.kernel.name} ({self.splits}), {where}",
        )

    def on_parts(self, *parts: jax.Array) -> list[jax.Array]:
        """The kernel's results for one device's parts."""
        unchecked, note = without_types_of_shard_map(), noted(self._note(parts))
        with jax.sharding.use_abstract_mesh(self._no_mesh), unchecked, note:
            results = list(self.kernel(*parts))
            shapes = self.splits.shapes_of_results(self.given, parts, self.types)
            wanted = [
                jax.ShapeDtypeStruct(shape, whole.dtype)
                for shape, whole in zip(shapes, self.types, strict=True)
            ]
            if _shown(results) != _shown(wanted):
                raise TypeError(
                    f"opaque: {self.kernel.name} returns {_shown(results)}, and by like= or dims= "
                    f"these are {_shown(wanted)}, of the whole {_shown(self.types)}"
                )
            return results

    def asked(self, *parts: jax.Array) -> Sequence[jax.Array]:
        """The same for the compiler. Callbacks of what it is given are lost, and the process would
        crash.
        """
        with _remembered():
            try:
                program = jax.make_jaxpr(self.on_parts)(*parts)
            except Exception as error:
                # Only the text is left of it.
                raise RuntimeError(f"{error}\n{self._note(parts)}") from error
            if any(eqn.primitive.name in names.CALLBACKS for eqn in all_equations(program)):
                raise PlacementError([self.unknown("with a callback on Auto axes")])
        return jaxpr_as_fun(program)(*parts)

    def _note(self, parts: Sequence[jax.Array]) -> str:
        given = (f"{path}: {_shown([x])}" for path, x in zip(self.kernel.paths, parts, strict=True))
        name = self.kernel.name
        return f"opaque: raised while {name} was called for one device's parts, {', '.join(given)}"

    def mapped(self, split: Axes) -> Run:
        """A call in a `shard_map`."""
        mesh = self.mesh
        manual, auto = AxisType.Manual, AxisType.Auto
        kinds = tuple(manual if axis in mesh.manual_axes else auto for axis in mesh.axis_names)
        on_auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            with jax.sharding.use_abstract_mesh(on_auto):
                return jax.shard_map(
                    self.on_parts,
                    mesh=on_auto,
                    in_specs=tuple(specs_of(self.splits.operands, operands, split)),
                    out_specs=specs_of(self.splits.results, self.types, split),
                    axis_names=set(self.free),
                    check_vma=False,
                )(*operands)

        return run

    def partitioned(self) -> Run:
        """A call that the compiler's partitioner splits as its operands are."""
        wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]

        def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
            _enter_x64(wide)
            with _remembered():
                return mesh, self.asked, *self._shardings(mesh, args, results)

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            stand_in = custom_partitioning(
                lambda *_: [jnp.zeros(whole.shape, whole.dtype) for whole in self.types]
            )
            rule, whole, sizes = self._rule()
            stand_in.def_partition(
                partition,
                sharding_rule=rule,
                need_replication_factors=whole,
                decode_shardings=False,
                **sizes,
            )
            return stand_in(*operands)

        return run

    def _rule(self) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        """The rule in the partitioner's notation, its factors that are whole, in the order in which
        they come, and the sizes of factors that are a part of a dimension.
        """
        numbers = count()
        whole: list[str] = []
        sizes: dict[str, int] = {}

        def factor(letter: str, size: int) -> str:
            parts = self.splits.parts.get(letter, 1) if size > 1 else 1
            if parts == size:
                return f"split_{letter}"
            whole.append(f"whole{next(numbers)}")
            if parts == 1:
                return whole[-1]
            sizes.update({f"split_{letter}": parts, whole[-1]: size // parts})
            return f"(split_{letter} {whole[-1]})"

        def side(letters: Sequence[Letters], arrays: Types) -> str:
            pairs = zip(letters, arrays, strict=True)
            return ", ".join(" ".join(map(factor, names, array.shape)) for names, array in pairs)

        operands = side(self.splits.operands, self.given)
        rule = f"{operands} -> {side(self.splits.results, self.types)}"
        alone = {name for name in sizes if f" {name} " in f" {rule.replace(',', ' ')} "}
        return rule, tuple(whole), {name: n for name, n in sizes.items() if name not in alone}

    def _shardings(
        self, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[NamedSharding], tuple[NamedSharding, ...]]:
        """The shardings of results and operands, as the partitioner wants most of them."""
        splits, paths = self.splits, self.kernel.paths
        given: list[GivenArray] = []
        split: dict[str, tuple[str, ...]] = {}
        faults: list[Fault] = []
        for path, whole, letters in zip(
            [*(f"result {i}" for i in range(len(results))), *paths],
            [*results, *args],
            (*splits.results, *splits.operands),
            strict=True,
        ):
            spec = spec_of_compiler(whole.sharding, mesh)
            given.append(GivenArray(path, tuple(whole.shape), letters, tuple(spec or ())))
            if spec is None:
                parts = whole.sharding.shard_shape(whole.shape)
                request = f"{path} as parts {list(parts)}, where {self.kernel.name} is called"
                reason = (
                    "all of a mesh axis doesn't divide it, and the compiler takes a part of one"
                )
                most = ", ".join(f"{letter!r} into {n}" for letter, n in splits.parts.items())
                fix = f"split it over other axes: of {splits} these may be split: {most}"
                faults.append(Fault(path, tuple(whole.shape), request, reason, fix))
        for operand, dim, axes in splits_in(given, mesh):
            letter = operand.letters[dim]
            taken = {axis for x, others in split.items() if x != letter for axis in others}
            if letter in splits.parts and letter not in split and taken.isdisjoint(axes):
                reason = unfit(letter, axes, splits, mesh)
                if reason is None:
                    split[letter] = axes
                else:
                    faults.append(fault(self.kernel, operand, dim, axes, splits, reason))
        if faults:
            # What a user can place are operands.
            raise PlacementError([x for x in faults if x.path in paths] or faults)
        of_results, of_operands = (
            [NamedSharding(mesh, spec) for spec in specs_of(letters, arrays, split)]
            for letters, arrays in ((splits.results, results), (splits.operands, args))
        )
        # In the trees that `custom_partitioning` has of both.
        return of_results, tuple(of_operands)


def _shown(arrays: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays) or "no arrays"


# The latest errors that were raised where a compiler calls. JAX keeps only their text.
_RAISED = deque[BaseException](maxlen=8)


@contextmanager
def _remembered() -> Iterator[None]:
    """Remembers what is raised inside, where a compiler calls."""
    try:
        yield
    except BaseException as error:
        _RAISED.append(error)
        raise


def raise_as_in_compiler(error: BaseException) -> None:
    """Raises the error that a compiler's error tells of, in place of that; nothing if it tells of
    none.
    """
    text = all_words(error)
    told = (raised for raised in reversed(_RAISED) if str(raised).replace("\n", " ") in text)
    original = next(told, None)
    if original is not None and original is not error:
        raise original from None


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
