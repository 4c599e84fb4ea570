"""`mpmd.jit`: functions that run on one mesh, and are called in all processes."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from .._advice import code_of
from .._compat import sharding_under, value_under
from .._errors import Fault, PlacementError, because
from .._jit import Donate, Jitted, about, filter_jit
from .._lines import line_of_caller
from .._links import get_ready, handle, next_call, set_origin
from .._placement import Placement, current_world, resolve_leaves, sharding_of
from .._processes import named, processes_of
from .._transfer import filter_device_put
from .._tree import Kind, Leaves, outline_of, signature_of, split

P = ParamSpec("P")
T = TypeVar("T")


def jit(
    fun: Callable[P, T],
    *,
    mesh: Mesh,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    donate: Donate = "none",
) -> Callable[P, T]:
    """[`mylib.filter_jit`][] on one of several meshes, for programs of several processes.

    All processes make the same calls of a function in the same order. Those with devices of its
    mesh compute; the others get handles: arrays without local shards, to pass on to
    [`mylib.mpmd.transfer`][] or to other functions on this mesh.

    **Arguments:**

    - `fun`: a function, method or Module.
    - `mesh`: the mesh on which it runs. Its arrays must be there; NumPy arrays, and JAX arrays that
        are not committed to a device, are put there, replicated.
    - `in_shardings`, `out_shardings`, `donate`: as for [`mylib.filter_jit`][]. Processes without
        devices of the mesh compile the function, too, unless `out_shardings` gives the placement of
        every result.

    **Returns:**

    The function. Calls return before the work is done.

    **Raises:**

    Calls raise [`mylib.PlacementError`][] if arrays are on other devices, naming all of them, and
    as [`mylib.filter_jit`][].

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        double = mylib.mpmd.jit(lambda x: 2 * x, mesh=first, out_shardings=P("data"))
        add = mylib.mpmd.jit(lambda x: x + 1, mesh=second)
        y = mylib.mpmd.transfer(double(np.ones(8)), P("data"), mesh=second)
        print(mylib.mpmd.fetch(add(y)))  # [3. 3. 3. 3. 3. 3. 3. 3.]
        ```
    """
    return OnMesh(fun, mesh, in_shardings, out_shardings, donate)


class OnMesh(Generic[P, T]):
    """A function compiled by `mpmd.jit`."""

    def __init__(
        self,
        fun: Callable[P, T],
        mesh: Mesh,
        in_shardings: Any,
        out_shardings: Any,
        donate: Donate,
    ):
        self._fun = fun
        self._mesh = mesh
        self._out_shardings = out_shardings
        self._places = in_shardings is None
        self._devices = frozenset(mesh.devices.flat)
        processes = processes_of(self._devices)
        self._is_here = jax.process_index() in processes
        self._compiled: Jitted[..., Any] = filter_jit(
            fun, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh, donate=donate
        )
        self._results_by_types: dict[Any, Callable[[], Any] | None] = {}
        self._name = f"{getattr(fun, '__qualname__', type(fun).__name__)} on {named(processes)}"
        # Lambdas, for instance, all have one name.
        code = code_of(fun)
        self._line = "" if code is None else f", line {code.__code__.co_firstlineno}"
        self.__dict__.update(about(fun))
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

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def _call_compiled(self, leaves: Leaves, args: Any, kwargs: Any) -> Any:
        if leaves.arrays:
            return self._compiled(*args, **kwargs)
        # Nothing else says where a function without arrays runs.
        with jax.set_mesh(self._mesh):
            return self._compiled(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function, as `filter_jit(fun).lower` does."""
        return self._compiled.lower(*args, **kwargs)

    def __repr__(self) -> str:
        return f"mpmd.jit({self._fun!r})"

    def _placed(self, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], Leaves]:
        leaves = split((args, kwargs))
        devices = [_devices_of(x) for x in leaves.arrays]
        self._refuse_others(devices, args, kwargs)
        everywhere = NamedSharding(self._mesh, PartitionSpec()) if self._places else None
        where = [
            everywhere if current is None and kind in (Kind.HOST, Kind.DEVICE) else None
            for current, kind in zip(devices, leaves.kinds, strict=True)
        ]
        if any(where):
            args, kwargs = leaves.join(filter_device_put(list(leaves.arrays), where))
            leaves = split((args, kwargs))
        return (args, kwargs), leaves

    def _refuse_others(self, devices: Sequence[set[Any] | None], args: Any, kwargs: Any) -> None:
        elsewhere = {
            i: sorted(device.id for device in current)
            for i, current in enumerate(devices)
            if current is not None and not current <= self._devices
        }
        if elsewhere:
            bound = signature_of(self._fun).bind(*args, **kwargs)
            named_leaves = split(dict(bound.arguments))
            fix = "send it there first, with mylib.mpmd.transfer(..., mesh=mesh)"
            request = f"an argument of {self._name}"
            faults: list[Fault] = []
            for i, ids in elsewhere.items():
                reason = f"it is on devices {ids}, which are not those of this function's mesh"
                faults.append(named_leaves.at(i, because(reason, fix, request)))
            raise PlacementError(faults)

    def _results_of(self, leaves: Leaves, arguments: tuple[Any, Any]) -> Callable[[], Any] | None:
        """Makes what the function returns in a process that doesn't run it; None if only compiling
        it tells. It is the same for all arguments of the same types.
        """
        if self._out_shardings is None or Kind.TRACED in leaves.kinds:
            return None
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves.arrays)
        key = outline_of(leaves), types
        if key not in self._results_by_types:
            self._results_by_types[key] = self._resolved(arguments)
        return self._results_by_types[key]

    def _resolved(self, arguments: tuple[Any, Any]) -> Callable[[], Any] | None:
        args, kwargs = arguments
        shapes = split(eqx.filter_eval_shape(self._fun, *args, **kwargs))
        targets = resolve_leaves(shapes, self._out_shardings, self._mesh, current_world())
        shardings = [sharding_of(target) for target in targets if target is not None]
        if len(shardings) < len(targets):
            return None
        return lambda: shapes.join(map(handle, shapes.arrays, shardings))


def _devices_of(x: Any) -> set[Any] | None:
    """None if it is not on any mesh yet, or this is not known."""
    sharding = sharding_under(x)
    return sharding.device_set if isinstance(sharding, Sharding) else None
