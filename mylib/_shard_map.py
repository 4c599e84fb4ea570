"""`filter_shard_map`: `jax.shard_map` for functions of PyTrees."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._arguments import Function, Inputs
from ._errors import Fault, PlacementError
from ._fit import show_mesh, unfit_rank, unfit_shape
from ._jit import Jitted
from ._leaves import Leaves, name_of, split
from ._placement import Decision, Placement, decide, is_placement_leaf
from ._program import Arrays, Outline, outlined
from ._shard import place_leaves
from ._target import (
    AnyMesh,
    Target,
    axes_in,
    axis_names as names_of,
    axis_types,
    default_memory_kind,
    entries_of,
    memory_kind,
    same_axes,
    with_entries,
)
from ._varying import varying, wrong_in
from ._world import World, current_world, sharding_under

P = ParamSpec("P")
T = TypeVar("T")


@overload
def filter_shard_map(
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree[Placement],
    out_specs: PyTree[Placement],
    axis_names: Collection[Any] | None = None,
    check_vma: bool = True,
    reshard: bool = True,
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
    axis_names: Collection[Any] | None = None,
    check_vma: bool = True,
    reshard: bool = True,
    jit: bool = True,
) -> Jitted[P, T]: ...


def filter_shard_map(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree[Placement],
    out_specs: PyTree[Placement],
    axis_names: Collection[Any] | None = None,
    check_vma: bool = True,
    reshard: bool = True,
    jit: bool = True,
) -> Callable[..., Any]:
    """`jax.shard_map` for functions of PyTrees: each device runs `fun` on its part of the arrays.

    What is not an array is static: the same object on all devices, on its way in and out.

    **Arguments:**

    - `fun`: the function, or method, or Module. Without it a decorator is returned.
    - `mesh`: by default that of `jax.set_mesh`.
    - `in_specs`: how the arguments are split: a placement for all of them, a tuple with a prefix
        for each of the positional ones, or a dict from names of parameters to prefixes. Parameters
        that aren't named, and arrays in `fun` itself, are whole on every device. None is as the
        array lies, which is known on Explicit axes.
    - `out_specs`: how the results are put together: a prefix of what `fun` returns. A rule is asked
        with the shapes that one device returns. `P()` says that all devices return the same, which
        is checked.
    - `axis_names`: the mesh axes that `fun` is given its own part of, and may communicate along; by
        default all. The other ones go on as outside.
    - `check_vma`: whether JAX keeps account of what differs between devices. Without it nothing is
        checked, and gradients communicate more.
    - `reshard`: on Explicit axes, whether an argument that is split otherwise than `in_specs`
        says is resharded or refused. (On Auto axes the compiler reshards.)
    - `jit`: whether to compile the function. Outside of `jax.jit` it is slow otherwise, but can be
        stepped through.

    **Returns:**

    A function of the same arguments. Unless `jit=False` it has a method `lower`, as those of
    [`mylib.filter_jit`][] have.

    **Raises:**

    [`mylib.PlacementError`][], naming every array that can't be split so, and every result that
    differs between devices that are to return the same. `ValueError` for a loop or condition that
    would wait for ever, and for calls that JAX can't look into (see [`mylib.opaque`][]).

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))

        @mylib.filter_shard_map(mesh=mesh, in_specs={"x": P("data")}, out_specs=P())
        def mean(model, x):
            return jax.lax.pmean(jnp.mean(jax.vmap(model)(x)), "data")

        model = eqx.nn.MLP(4, "scalar", 32, 1, key=jax.random.key(0))
        mean(model, np.ones((16, 4), np.float32))
        ```
    """
    options = {"axis_names": axis_names, "check_vma": check_vma, "reshard": reshard, "jit": jit}
    if fun is None:
        return functools.partial(
            filter_shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
        )
    manual = None if axis_names is None else _names(axis_names)
    inputs = Specs(in_specs, mesh, manual, reshard)
    mapped = Mapped(fun, Plan(Function.of(fun), inputs, out_specs, check_vma))
    return Jitted.of(mapped, inputs) if jit else mapped


def _names(axis_names: Collection[Any]) -> frozenset[Any]:
    names = frozenset([axis_names] if isinstance(axis_names, str) else axis_names)
    if not names:
        raise ValueError("filter_shard_map: axis_names is empty. Leave it out to mean all axes")
    return names


@dataclass(frozen=True)
class Region:
    """What is split over: a mesh, its axes of the types that they have around the call, and those
    of its axes of which each device is given its own part.
    """

    mesh: AnyMesh
    names: frozenset[Any]

    @cached_property
    def explicit(self) -> frozenset[Any]:
        """Those of the axes of which the arrays' types say how they are split over them."""
        types = axis_types(self.mesh)
        return frozenset(name for name in self.names if types[name] == AxisType.Explicit)

    def unfit_input(self, target: Target, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        reasons = list(self._unfit(target))
        yield from reasons or unfit_shape(target, shape)

    def unfit_output(self, target: Target, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        reasons = list(self._unfit(target))
        yield from reasons or unfit_rank(self.spec_of(target), shape)

    def _unfit(self, target: Target) -> Iterator[tuple[str, str]]:
        if not isinstance(target, NamedSharding):
            yield "shard_map splits arrays over a mesh", "give a PartitionSpec"
            return
        if not same_axes(target.mesh, self.mesh):
            yield (
                f"shard_map splits over {show_mesh(self.mesh)} here",
                "give a PartitionSpec over that",
            )
            return
        if target.memory_kind is not None and (memory_kind(target) != default_memory_kind(target)):
            yield (
                "the parts of an array are in the devices' own memory inside shard_map",
                "leave out the memory kind, and use mylib.filter_device_put before or after",
            )
        if PartitionSpec.UNCONSTRAINED in entries_of(target.spec):
            yield "shard_map leaves no choice to the compiler", "write the axes, or None"
        others = sorted(axes_in(target.spec) - self.names, key=str)
        for name in others:
            yield (
                f"{name!r} is not among the axes that are split over here, "
                f"{tuple(sorted(self.names, key=str))}",
                "leave it out of the spec, or name it in axis_names",
            )

    @staticmethod
    def spec_of(target: Any) -> PartitionSpec:
        return target.spec

    def beside(self, target: NamedSharding, here: PartitionSpec) -> NamedSharding:
        """The target of an array that is `here`, which stays split over all other axes as it is."""
        spec, taken = target.spec, axes_in(target.spec) | self.names
        count = max(len(spec), len(here))
        asked, found = ([*entries_of(s), *[None] * (count - len(s))] for s in (spec, here))
        entries = [
            (*names_of(a), *(n for n in names_of(f) if n not in taken)) or None
            for a, f in zip(asked, found, strict=True)
        ]
        return target.update(spec=with_entries(spec, entries))


def _refuse(function: Function, reason: str, mend: str) -> NoReturn:
    request = f"filter_shard_map of {function.name}"
    raise PlacementError([Fault("", None, request, reason, mend)])


@dataclass(frozen=True, eq=False)
class Specs(Inputs):
    """How the arguments are split, over the axes `manual` (None: all)."""

    manual: frozenset[Any] | None
    reshard: bool

    option: ClassVar[str] = "in_specs"
    otherwise: ClassVar[Placement] = PartitionSpec()
    # Those that are on the mesh are split by the program, whatever their shape.
    decisive: ClassVar[Any] = staticmethod(attrgetter("sharding"))

    def region(self, function: Function, world: World) -> Region:
        mesh = self._mesh_in(function, world)
        free = frozenset(n for n, kind in axis_types(mesh).items() if kind != AxisType.Manual)
        names = free if self.manual is None else self.manual
        if not names or not names <= free:
            _refuse(
                function,
                f"it is to split over {tuple(sorted(names, key=str))}, and the axes of "
                f"{show_mesh(mesh)} that are not split over yet are "
                f"{tuple(sorted(free, key=str))}",
                "name some of these in axis_names",
            )
        return Region(mesh, names)

    def _mesh_in(self, function: Function, world: World) -> AnyMesh:
        around = world.mesh
        given = self.mesh or self._mesh_of_specs()
        if around.empty:
            mesh = given or world.devices
            if mesh is None:
                _refuse(
                    function,
                    "there is no mesh here",
                    "pass `mesh=`, or call it under `jax.set_mesh(mesh)`",
                )
            return mesh
        devices = world.devices
        if given is not None and not (
            same_axes(given, around)
            and (
                devices is None
                or isinstance(given, AbstractMesh)
                or list(given.devices.flat) == list(devices.devices.flat)
            )
        ):
            _refuse(
                function,
                f"the mesh in force here is {show_mesh(around)}, and it is to split over another: "
                f"{show_mesh(given)}, or the same one with its devices in another order",
                "leave out `mesh=`, or call it outside of `jax.set_mesh`",
            )
        return around if world.staged or devices is None else devices

    def _mesh_of_specs(self) -> AnyMesh | None:
        given = jax.tree.leaves(self.placement, is_leaf=is_placement_leaf)
        return next((x.mesh for x in given if isinstance(x, NamedSharding)), None)

    def decide(self, function: Function, leaves: Leaves, prefix: Any, world: World) -> Decision:
        region = self.region(function, world)
        return decide(leaves, prefix, region.mesh, world, fit=region.unfit_input)

    def are_placed(self, world: World) -> bool:
        # Inside of a program placing the arguments is a part of the program.
        return world.staged

    def missing(
        self, function: Function, leaves: Leaves, targets: Sequence[Target | None]
    ) -> Sequence[Target | None]:
        """Those on the mesh are resharded by the program."""
        missing = [
            target if isinstance(target, NamedSharding) and not _is_on(target.mesh, x) else None
            for x, target in zip(leaves.arrays, targets, strict=True)
        ]
        faults = (
            [
                Fault(
                    function.readable(name_of(path)),
                    x.shape,
                    f"{target.spec} over {show_mesh(target.mesh)}",
                    f"it is elsewhere, at {x.sharding}, and reshard=False",
                    "move it before, or leave out reshard=False",
                )
                for x, path, target in zip(leaves.arrays, leaves.paths, missing, strict=True)
                if target is not None and isinstance(x, jax.Array) and _is_committed(x)
            ]
            if not self.reshard
            else []
        )
        if faults:
            raise PlacementError(faults)
        return missing


def _is_committed(x: jax.Array) -> bool:
    return not isinstance(x, Tracer) and x.committed


def _is_on(mesh: AnyMesh, x: Any) -> bool:
    """Whether an array is on this mesh, however it is split."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    here = x.sharding if concrete else sharding_under(x)
    if not isinstance(here, NamedSharding) or here.mesh != mesh:
        return False
    return here.memory_kind in (None, _memory_of(mesh))


@functools.lru_cache(maxsize=64)
def _memory_of(mesh: AnyMesh) -> str:
    return default_memory_kind(NamedSharding(mesh, PartitionSpec()))


@dataclass(frozen=True, eq=False)
class Plan:
    """All of a mapped function but the function."""

    function: Function
    specs: Specs
    out_specs: Any
    check_vma: bool


@jtu.register_pytree_node_class
class Mapped:
    """A function of which each device runs its part. As it may hold arrays, it is a PyTree."""

    def __init__(self, fun: Callable[..., Any], plan: Plan):
        self.fun = fun
        self.plan = plan

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __repr__(self) -> str:
        return f"filter_shard_map({self.fun!r})"

    def tree_flatten(self) -> tuple[tuple[Callable[..., Any]], Plan]:
        return (self.fun,), self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, children: Any) -> "Mapped":
        (fun,) = children
        return cls(fun, plan)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        plan, world = self.plan, current_world()
        function, specs = plan.function, plan.specs
        args, kwargs = specs.bind(function, args, kwargs)
        region = specs.region(function, world)
        asked = specs.resolve(function, split((args, kwargs)), args, kwargs, world)
        # The arrays of the function itself go in as arguments do, whole.
        leaves = split((self.fun, (args, kwargs)))
        whole = NamedSharding(region.mesh, PartitionSpec())
        targets = [whole] * (len(leaves.arrays) - len(asked)) + asked
        arrays, in_specs = _enter(plan, leaves, targets, region, world)
        outputs = _Outputs(plan, region, world)

        def part(arrays: Arrays) -> Arrays:
            fun, (args, kwargs) = leaves.join(arrays)
            return outputs.take(fun(*args, **kwargs))

        part.__name__ = part.__qualname__ = function.name
        mapped = jax.shard_map(
            part,
            mesh=None if not world.mesh.empty else region.mesh,
            in_specs=(in_specs,),
            out_specs=outputs.specs,
            axis_names=set(region.names),
            check_vma=plan.check_vma,
        )
        if plan.check_vma and world.staged:
            mapped = jax.jit(mapped)
            _check(function, mapped.trace(arrays).jaxpr)
        returned = mapped(arrays)
        return outputs.outline.fill(returned)


def _enter(
    plan: Plan, leaves: Leaves, targets: Sequence[Any], region: Region, world: World
) -> tuple[Arrays, list[PartitionSpec]]:
    """The arrays of (function, (args, kwargs)) as they go in, and their specs."""
    specs: list[PartitionSpec] = []
    wanted: list[Target | None] = []
    faults: list[Fault] = []

    def refuse(i: int, request: str, reason: str, mend: str) -> None:
        (root, *path), shape = leaves.paths[i], tuple(leaves.arrays[i].shape)
        name = jtu.keystr(tuple(path))
        name = plan.function.readable(name) if root.idx else plan.function.name + name
        faults.append(Fault(name, shape, request, reason, mend))

    for i, (x, target) in enumerate(zip(leaves.arrays, targets, strict=True)):
        here = _spec_of(x, region)
        if target is None:
            if region.explicit != region.names:
                reason = "only of Explicit axes it is known how an array lies"
                refuse(i, "None: split as it lies", reason, "write a PartitionSpec")
            specs.append(PartitionSpec(*_entries(here, region.names)))
            wanted.append(None)
            continue
        # On Auto axes a program is resharded by its compiler.
        visible = region.explicit if world.staged else region.names
        lies_so = here is not None and _entries(here, visible) == _entries(target.spec, visible)
        if region.explicit and not (plan.specs.reshard or lies_so or here is None):
            refuse(
                i,
                f"{target.spec} over {show_mesh(region.mesh)}",
                f"it lies as {here}, and reshard=False",
                "call mylib.filter_shard on it before, or leave out reshard=False",
            )
        specs.append(target.spec)
        left_alone = world.staged and (lies_so or not region.explicit)
        wanted.append(None if left_alone else region.beside(target, here or PartitionSpec()))
    if faults:
        raise PlacementError(faults)
    return place_leaves(leaves, wanted, world), specs


def _entries(spec: PartitionSpec | None, names: frozenset[Any]) -> tuple[tuple[Any, ...], ...]:
    """What a spec says of some axes; equal where it means the same."""
    entries = [
        tuple(name for name in names_of(entry) if name in names)
        for entry in (entries_of(spec) if spec is not None else ())
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def _spec_of(x: Any, region: Region) -> PartitionSpec | None:
    """How an array is split over the region's mesh, where that is known."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    here = x.sharding if concrete else jax.typeof(x).sharding
    if not isinstance(here, NamedSharding) or here.mesh.empty:
        return None
    types = axis_types(here.mesh)
    if not same_axes(here.mesh, region.mesh) or any(
        types[name] != AxisType.Explicit for name in region.explicit
    ):
        return None
    return here.spec


class _Outputs:
    """What comes back from one call: known when the function has been traced."""

    def __init__(self, plan: Plan, region: Region, world: World):
        self._plan, self._region, self._world = plan, region, world
        # JAX reads it when the function has returned, so that it can be filled until then. Else
        # the function would have to be traced twice.
        self.specs: list[PartitionSpec] = []
        self.outline = Outline(None, ())

    def take(self, result: Any) -> Arrays:
        arrays, self.outline = outlined(result)
        arrays = [jnp.asarray(x) for x in arrays]
        self.specs[:] = self._specs_of(arrays)
        return arrays

    def _specs_of(self, arrays: Arrays) -> list[PartitionSpec]:
        region, checked = self._region, self._plan.check_vma
        shapes = self.outline.fill(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        leaves = split(shapes)
        decision = decide(
            leaves, self._plan.out_specs, region.mesh, self._world, fit=region.unfit_output
        )
        faults = list(decision.faults)
        specs: list[PartitionSpec] = []
        for i, (x, target) in enumerate(zip(arrays, decision.targets, strict=True)):
            spec = PartitionSpec() if target is None else region.spec_of(target)
            specs.append(spec)
            differs = (varying(x) & region.names) - axes_in(spec) - set(spec.unreduced)
            if i in decision.faulty or not (differs or (target is None and not checked)):
                continue
            along = ", ".join(map(repr, sorted(differs, key=str)))
            faults.append(
                Fault(
                    name_of(leaves.paths[i]),
                    tuple(x.shape),
                    "None" if target is None else f"{spec} over {show_mesh(region.mesh)}",
                    f"it differs between the devices along {along}, of which this says nothing"
                    if checked
                    else "with check_vma=False nobody knows whether all devices return the same",
                    f"name {along} in its spec"
                    + ("" if x.ndim else ", having given it a dimension (x[None]),")
                    + " or make it the same everywhere: jax.lax.psum, pmean, "
                    "all_gather(..., to='invarying')"
                    if checked
                    else "write P() to promise that they do",
                )
            )
        if faults:
            raise PlacementError([replace(f, path=_in_result(f.path)) for f in faults])
        return specs


def _in_result(path: str) -> str:
    # The rest are names of the root: "the array", "the tree".
    return "the result" + path if path.startswith((".", "[")) else "the result"


def _check(function: Function, program: Any) -> None:
    wrong = dict.fromkeys(wrong_in(program))
    if wrong:
        raise ValueError("\n  ".join([f"{function.name} can't run on several devices:", *wrong]))
