"""`filter_shard_map`: `jax.shard_map` for functions of PyTrees."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._core.compat import jit, names
from ..._core.contexts import on_one_device
from ..._core.errors import Fault, PlacementError, all_words, because, explained
from ..._core.placement import (
    AnyMesh,
    Placement,
    Target,
    World,
    axes_in,
    current_world,
    decide,
    entries_over,
    show_mesh,
    union,
    varying,
)
from ..._core.text import show_spec
from ..._core.tree import Arrays, KeyPath, Kind, Leaves, Outline, kind_of, outlined, split
from ..._moving.transfer import place_leaves
from ..advice import captured_by, code_of
from ..jit import Function, Jitted, about
from .hazards import wrong_in
from .missing_axes import unknown_named
from .specs import ManualMesh, Specs, spec_in
from .summed_twice import warn_of_sums

P = ParamSpec("P")
T = TypeVar("T")


@overload
def filter_shard_map(
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree[Placement],
    out_specs: PyTree[Placement],
    axis_names: Collection[Hashable] | None = None,
    check_vma: bool = True,
    jit: bool = True,
) -> Callable[[Callable[P, T]], Jitted[P, T]]: ...


@overload
def filter_shard_map(
    fun: Callable[P, T],
    /,
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree[Placement],
    out_specs: PyTree[Placement],
    axis_names: Collection[Hashable] | None = None,
    check_vma: bool = True,
    jit: bool = True,
) -> Jitted[P, T]: ...


def filter_shard_map(
    fun: Callable[..., object] | None = None,
    /,
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree[Placement],
    out_specs: PyTree[Placement],
    axis_names: Collection[Hashable] | None = None,
    check_vma: bool = True,
    jit: bool = True,
) -> Callable[..., Any]:
    """`jax.shard_map` for functions of PyTrees: each device runs `fun` on its part of the arrays.

    Everything that is not an array is static: the same object on all devices, in arguments and
    results.

    **Arguments:**

    - `fun`: a function, method or Module. Without it a decorator is returned.
    - `mesh`: by default the mesh of `jax.set_mesh`. Inside `jax.jit` the types of its axes (Auto,
        Explicit) are those of the surrounding mesh.
    - `in_specs`: how the arguments are split: a placement for all of them, a tuple with a prefix
        for each positional argument, or a dict from parameter names to prefixes. Parameters that
        aren't named, and arrays in `fun` itself, are replicated. A placement of None keeps the
        array as it is, which needs Explicit axes.
    - `out_specs`: how the results are combined: a prefix of the result of `fun`. A rule is called
        with the shapes that one device returns. `P()` states that all devices return the same,
        which is checked.
    - `axis_names`: the mesh axes that the arrays are split over inside `fun`, and that it may
        communicate along; by default all. The other axes work as outside.
    - `check_vma`: whether JAX tracks which values differ between devices. Without it nothing is
        checked, and gradients communicate more.
    - `jit`: whether to compile the function. If not, it is slow outside `jax.jit`, but can be
        stepped through with a debugger; deadlocks and opaque calls are not detected.

    **Returns:**

    A function of the same arguments. Unless `jit=False` it has a method `lower`, as with
    `mylib.filter_jit`.

    **Raises:**

    `mylib.PlacementError`, naming every array that can't be split as specified, and every
    result that differs between devices although its spec says it doesn't. `ValueError` for loops
    and conditions that would deadlock, and for opaque calls (see `mylib.opaque`).

    **Warns:**

    `mylib.errors.SummedTwiceWarning`, if JAX sums a gradient over the devices and `fun` does,
    too.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_shard_map(mesh=mesh, in_specs={"x": P("data")}, out_specs=P())
        def mean(model, x):
            return jax.lax.pmean(jnp.mean(jax.vmap(model)(x)), "data")

        model = eqx.nn.MLP(4, "scalar", 32, 1, key=jax.random.key(0))
        mean(model, np.ones((16, 4), np.float32))
        ```
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"filter_shard_map: mesh={mesh!r} is a {type(mesh).__name__}, not a mesh")
    manual = None if axis_names is None else _names(axis_names)

    def wrap(fun: Callable[..., object]) -> Callable[..., Any]:
        specs = Specs(in_specs, mesh, Function.of(fun), manual)
        mapped = Mapped(fun, MapOptions(about(fun), specs, out_specs, check_vma))
        return JittedMap.of(mapped, inputs=specs) if jit else mapped

    return wrap if fun is None else wrap(fun)


def _names(axis_names: Collection[Hashable]) -> frozenset[Any]:
    names = frozenset([axis_names] if isinstance(axis_names, str) else axis_names)
    if not names:
        raise ValueError("filter_shard_map: axis_names is empty. Leave it out to mean all axes")
    return names


@dataclass(frozen=True, eq=False)
class MapOptions:
    """Everything about a mapped function except the function itself."""

    about: Mapping[str, object]
    specs: Specs
    out_specs: PyTree[Placement]
    check_vma: bool

    @property
    def function(self) -> Function:
        return self.specs.function

    def naming(self, path: KeyPath) -> str:
        """The name of a node of (function, (args, kwargs))."""
        root, *rest = path
        if root.idx:
            return self.function.naming(tuple(rest))
        return self.function.name + jtu.keystr(tuple(rest))


@jtu.register_pytree_node_class
class Mapped:
    """A function that each device runs on its part of the arrays. It is a PyTree, as it may hold
    arrays.
    """

    def __init__(self, fun: Callable[..., object], options: MapOptions):
        self.fun = fun
        self.options = options
        self.__dict__.update(options.about)

    @property
    def __wrapped__(self) -> Callable[..., object]:
        return self.fun

    def __repr__(self) -> str:
        return f"filter_shard_map({self.fun!r})"

    def tree_flatten(self) -> tuple[tuple[Callable[..., object]], MapOptions]:
        return (self.fun,), self.options

    @classmethod
    def tree_unflatten(
        cls, options: MapOptions, children: tuple[Callable[..., object]]
    ) -> "Mapped":
        (fun,) = children
        return cls(fun, options)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        options, world = self.options, current_world()
        function, specs = options.function, options.specs
        _refuse_in_verify(function.name, world)
        arguments = specs.bind(function, args, kwargs)
        region = specs.region(world)
        of_arguments = specs.resolve(function, function.split(arguments), *arguments, world)
        if not options.check_vma:
            _refuse_to_forget(specs, arguments, world)
        # The arrays in the function itself are passed as arguments, too, replicated.
        leaves = split((self.fun, arguments), options.naming, abstract=False)
        whole = NamedSharding(region.mesh, PartitionSpec())
        targets = [whole] * (len(leaves.arrays) - len(of_arguments)) + of_arguments
        arrays, in_specs = _enter(options, leaves, targets, region, world)
        outputs = _Outputs(options, region, world)

        def on_each_device(arrays: Arrays) -> Arrays:
            fun, (args, kwargs) = leaves.join(arrays)
            with unknown_named(function.name, {*region.names, *world.manual_axes}):
                return outputs.take(fun(*args, **kwargs))

        on_each_device.__name__ = on_each_device.__qualname__ = function.name
        nested = world.manual_axes and options.check_vma
        # JAX saves residuals of an inner shard_map for the backward pass, and splits them over the
        # axes of the outer one as well, which XLA rejects. With a checkpoint only arguments are
        # saved. Needed with JAX 0.12.0; no public issue is known. May go once
        # `test_gradients_of_weights` of `tests/per_device/test_nested_maps.py` passes without it.
        body = jax.checkpoint(on_each_device) if nested else on_each_device
        mapped = jax.shard_map(
            body,
            mesh=None if not world.mesh.empty else region.mesh,
            in_specs=(in_specs,),
            out_specs=outputs.specs,
            axis_names=set(region.names),
            check_vma=options.check_vma,
        )
        returned = self._mapped(mapped, arrays, world)
        return outputs.outline.fill(returned)

    def _mapped(self, mapped: Callable[[Arrays], Arrays], arrays: Arrays, world: World) -> Arrays:
        if not self.options.check_vma or not world.staged:
            with _captured_named(self.fun):
                return mapped(arrays)
        function, jitted = self.options.function, jit(mapped)
        with _captured_named(self.fun):
            program = jitted.trace(arrays).jaxpr
        wrong = wrong_in(program)
        if wrong:
            raise ValueError(
                "\n  ".join([f"{function.name} can't run on several devices:", *wrong])
            )
        if not world.manual_axes:  # else the surrounding program is checked
            warn_of_sums(function.name, program)
        return jitted(arrays)


@jtu.register_pytree_node_class
class JittedMap(Jitted[P, T]):
    """A mapped function with `jax.jit` around it."""

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self._compiled_function().fun

    def __repr__(self) -> str:
        return repr(self._compiled_function())


@contextmanager
def _captured_named(fun: Callable[..., object]) -> Iterator[None]:
    """Names the captured arrays that JAX rejects because they are on the mesh."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        text = all_words(error)
        if names.TEXT_OTHER_MESH in text or names.TEXT_CLOSING_OVER in text:
            captured = [name for name, x in captured_by(code_of(fun)) if _is_on_a_mesh(x)]
            if captured:
                explained(
                    error,
                    f"{Function.of(fun).name} captures {', '.join(captured)}, which is on a mesh "
                    "already: pass it as an argument",
                )
        raise


def _is_on_a_mesh(leaf: Any) -> bool:
    if kind_of(leaf) is Kind.TRACED:
        return bool(jax.typeof(leaf).sharding.mesh.explicit_axes)
    return kind_of(leaf) is Kind.DEVICE and isinstance(leaf.sharding, NamedSharding)


def _enter(
    options: MapOptions,
    leaves: Leaves,
    targets: Sequence[Any],
    region: ManualMesh,
    world: World,
) -> tuple[Arrays, list[PartitionSpec]]:
    """The arrays of (function, (args, kwargs)), placed for the call, and their specs."""
    specs: list[PartitionSpec] = []
    moves: list[Target | None] = []
    faults: list[Fault] = []

    for i, (x, target) in enumerate(zip(leaves.arrays, targets, strict=True)):
        spec_now = region.spec_of(x)
        if spec_now is None:
            faults += [leaves.at(i, fault) for fault in options.specs.elsewhere(x, target)]
        if target is None:
            if region.explicit != region.names:
                reason = "an array's sharding is known only over Explicit axes"
                no_sharding = because(reason, "write a PartitionSpec", "None: keep its sharding")
                faults.append(leaves.at(i, no_sharding))
            specs.append(PartitionSpec(*entries_over(spec_now, region.names)))
            moves.append(None)
            continue
        # On Auto axes the compiler reshards.
        visible = region.explicit if world.staged else region.names
        is_there = spec_now is not None and entries_over(spec_now, visible) == entries_over(
            target.spec, visible
        )
        specs.append(target.spec)
        left_alone = world.staged and (is_there or not region.explicit)
        moves.append(None if left_alone else region.beside(target, spec_now or PartitionSpec()))
    if faults:
        raise PlacementError(faults)
    return place_leaves(leaves, moves, world), specs


def _refuse_in_verify(name: str, world: World) -> None:
    if on_one_device.value and world.mesh.empty:
        raise TypeError(
            "verify: give the function for one device, verify(step, ..., reference=): "
            f"{name} runs on a mesh, by filter_shard_map"
        )


def _refuse_to_forget(specs: Specs, arguments: object, world: World) -> None:
    """An inner shard_map with `check_vma=False` would drop the varying types of the outer one."""
    axes = union(varying(x) for x in outlined(arguments)[0]) & world.manual_axes
    if axes:
        specs.refuse(
            "check_vma=False here would lose track of arguments that differ between the devices "
            f"of the outer filter_shard_map along {', '.join(map(repr, sorted(axes)))}",
            "give both of them the same check_vma",
        )


class _Outputs:
    """The results of one call, known after the function has been traced."""

    def __init__(self, options: MapOptions, region: ManualMesh, world: World):
        self._options, self._region, self._world = options, region, world
        # JAX reads this list after the function has returned, so `take` can fill it during the
        # trace. Otherwise the function would have to be traced twice.
        self.specs: list[PartitionSpec] = []
        self.outline = Outline(None, (), ())

    def take(self, result: object) -> Arrays:
        arrays, self.outline = outlined(result)
        arrays = [jnp.asarray(x) for x in arrays]
        leaves = split(result, lambda path: "the result" + jtu.keystr(path), abstract=False)
        leaves, region = leaves.with_shapes(arrays), self._region
        decision = decide(
            leaves, self._options.out_specs, region.mesh, self._world, fit=region.unfit_output
        )
        faults = list(decision.faults)
        self.specs.clear()
        for i, (x, target) in enumerate(zip(arrays, decision.targets, strict=True)):
            spec = PartitionSpec() if target is None else spec_in(target)
            self.specs.append(spec)
            if i not in decision.faulty:
                text = f"{show_spec(spec)} over {show_mesh(region.mesh)}"
                request = "None" if target is None else text
                for fault in self._promises(x, spec, target is None):
                    faults.append(leaves.at(i, replace(fault, request=request)))
        if faults:
            raise PlacementError(faults)
        return arrays

    def _promises(self, x: jax.Array, spec: PartitionSpec, by_default: bool) -> Iterator[Fault]:
        """Reasons why a result may differ between devices although its spec says it doesn't."""
        if not self._options.check_vma:
            if by_default:
                yield because(
                    "with check_vma=False it is unknown whether all devices return the same",
                    "write P() to promise that they do",
                )
            return
        differs = (varying(x) & self._region.names) - axes_in(spec) - set(spec.unreduced)
        if differs:
            along = ", ".join(map(repr, sorted(differs, key=str)))
            how = "" if x.ndim else ", after adding a dimension (x[None]),"
            yield because(
                f"it differs between the devices along {along}, which this does not name",
                f"name {along} in its spec{how} or make it the same everywhere: "
                "jax.lax.psum, pmean, all_gather(..., to='invarying')",
            )
