"""`mpmd.jit`: functions that run on one mesh, and are called in all processes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ..._core.compat import sharding_under, value_under
from ..._core.errors import Fault, PlacementError, because
from ..._core.lines import line_of_caller
from ..._core.placement import Placement, current_world, resolve_leaves, sharding_of
from ..._core.tree import Kind, Leaves, outline_of, split
from ..._moving.links import get_ready, handle, next_call, set_origin
from ..._moving.processes import named, processes_of
from ..._moving.transfer import filter_device_put
from ..jit import Donate, Jitted, filter_jit

P = ParamSpec("P")
T = TypeVar("T")
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]


def jit(
    fun: Callable[P, T],
    *,
    mesh: Mesh,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    donate: Donate = "none",
) -> Callable[P, T]:
    """`mylib.filter_jit` on one of several meshes, for programs of several processes.

    All processes make the same calls of a function in the same order. Those with devices of its
    mesh compute; the others get handles: arrays without local shards, to pass on to
    `mylib.mpmd.transfer` or to other functions on this mesh.

    **Arguments:**

    - `fun`: a function, method or Module.
    - `mesh`: the mesh on which it runs. Its arrays must be there; NumPy arrays, and JAX arrays that
        are not committed to a device, are put there, replicated.
    - `in_shardings`, `out_shardings`, `donate`: as for `mylib.filter_jit`. Processes without
        devices of the mesh compile the function, too, unless `out_shardings` gives the placement of
        every result.

    **Returns:**

    The function. Calls return before the work is done.

    **Raises:**

    Calls raise `mylib.PlacementError` if arrays are on other devices, naming all of them, and
    as `mylib.filter_jit`.

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        double = mylib.mpmd.jit(lambda x: 2 * x, mesh=first, out_shardings=P("data"))
        add = mylib.mpmd.jit(lambda x: x + 1, mesh=second)
        y = mylib.mpmd.transfer(double(np.ones(8)), P("data"), mesh=second)
        print(mylib.mpmd.fetch(add(y)))  # [3. 3. 3. 3. 3. 3. 3. 3.]
        ```
    """
    compiled = filter_jit(
        fun, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh, donate=donate
    )
    return OnMesh(fun, mesh, compiled)


class OnMesh(Generic[P, T]):
    """A function compiled by `mpmd.jit`."""

    def __init__(self, fun: Callable[P, T], mesh: Mesh, compiled: Jitted[..., T]):
        self._fun, self._mesh, self._compiled = fun, mesh, compiled
        self._dispatcher = compiled.dispatcher
        self._devices = frozenset(mesh.devices.flat)
        processes = processes_of(self._devices)
        self._is_here = jax.process_index() in processes
        self._results_by_types: dict[object, Callable[[], T] | None] = {}
        self._name = f"{getattr(fun, '__qualname__', type(fun).__name__)} on {named(processes)}"
        # Lambdas, for instance, all have one name.
        code = self._dispatcher.code
        self._line = "" if code is None else f", line {code.__code__.co_firstlineno}"
        self.__dict__.update(self._dispatcher.about)
        get_ready(self._devices)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        arguments, leaves = self._placed(args, kwargs)
        results = None if self._is_here else self._results_of(leaves, arguments)
        out = self._call_compiled(leaves, *arguments) if results is None else results()
        if jax.process_count() > 1:
            maker = f"{self._name}{self._line}, called in {line_of_caller()}"
            # Transfers under `grad` find the values, not the tracers.
            set_origin(map(value_under, jtu.tree_leaves(out)), next_call(maker))
        return out

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., T]:
        return self if instance is None else eqx.Partial(self, instance)

    def _call_compiled(self, leaves: Leaves, args: Args, kwargs: Kwargs) -> T:
        # Without arrays nothing else says where it runs. A mesh of more devices is set aside.
        world = current_world()
        around = world.devices if world.clean else None
        is_wider = around is not None and self._devices < {*around.devices.flat}
        with jax.set_mesh(self._mesh) if is_wider or not leaves.arrays else nullcontext():
            return self._compiled(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function, as `filter_jit(fun).lower` does."""
        return self._compiled.lower(*args, **kwargs)

    def __repr__(self) -> str:
        return f"mpmd.jit({self._fun!r})"

    def _placed(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Args, Kwargs], Leaves]:
        leaves = self._dispatcher.function.split((args, kwargs))
        devices = [_devices_of(x) for x in leaves.arrays]
        self._refuse_others(leaves, devices)
        is_placed = self._dispatcher.inputs is not None
        everywhere = None if is_placed else NamedSharding(self._mesh, PartitionSpec())
        where = [
            everywhere if current is None and kind in (Kind.HOST, Kind.DEVICE) else None
            for current, kind in zip(devices, leaves.kinds, strict=True)
        ]
        if any(where):
            args, kwargs = leaves.join(filter_device_put(list(leaves.arrays), where))
            leaves = split((args, kwargs))
        return (args, kwargs), leaves

    def _refuse_others(self, leaves: Leaves, devices: Sequence[set[Any] | None]) -> None:
        faults: list[Fault] = []
        for i, current in enumerate(devices):
            if current is not None and not current <= self._devices:
                ids = sorted(device.id for device in current)
                reason = f"it is on devices {ids}, which are not those of this function's mesh"
                fix = "send it there first, with mylib.mpmd.transfer(..., mesh=mesh)"
                faults.append(leaves.at(i, because(reason, fix, f"an argument of {self._name}")))
        if faults:
            raise PlacementError(faults)

    def _results_of(self, leaves: Leaves, arguments: tuple[Args, Kwargs]) -> Callable[[], T] | None:
        """Makes what the function returns in a process that doesn't run it; None if only compiling
        it tells. It is the same for all arguments of the same types.
        """
        if self._dispatcher.out_shardings is None or Kind.TRACED in leaves.kinds:
            return None
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves.arrays)
        key = outline_of(leaves), types
        if key not in self._results_by_types:
            self._results_by_types[key] = self._resolved(arguments)
        return self._results_by_types[key]

    def _resolved(self, arguments: tuple[Args, Kwargs]) -> Callable[[], T] | None:
        args, kwargs = arguments
        shapes = split(eqx.filter_eval_shape(self._fun, *args, **kwargs))
        out_shardings = self._dispatcher.out_shardings
        targets = resolve_leaves(shapes, out_shardings, self._mesh, current_world())
        shardings = [sharding_of(target) for target in targets if target is not None]
        if len(shardings) < len(targets):
            return None
        return lambda: shapes.join(map(handle, shapes.arrays, shardings))


def _devices_of(x: object) -> set[Any] | None:
    """None if it is not on any mesh yet, or this is not known."""
    sharding = sharding_under(x)
    return sharding.device_set if isinstance(sharding, Sharding) else None
