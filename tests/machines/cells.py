"""The staged cells of the placement matrix, compiled for machines that are not here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.tree_util as jtu
import matrix
from matrix import EAGER, Cell, all_cells

import mylib
from mylib.machines import Machine


class There:
    """The devices of a machine, for which programs are compiled. What they return are shapes, with
    the shardings that the compiled program has.
    """

    runs = False

    def __init__(self, machine: Machine):
        self.machine = machine

    def devices(self) -> list[Any]:
        return list(self.machine.devices)

    @staticmethod
    def put(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    @staticmethod
    def program(fun: Callable[..., Any]) -> Callable[..., Any]:
        def compile_only(*args: Any) -> Any:
            lowered = jax.jit(fun).lower(*args)
            shardings = lowered.compile().output_shardings
            types, treedef = jtu.tree_flatten(lowered.out_info)
            return treedef.unflatten(
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x, sharding in zip(types, jtu.tree_leaves(shardings), strict=True)
            )

        return compile_only


@cache
def there(machine: Machine) -> There:
    return There(machine)


@contextmanager
def compiled_for(machine: Machine) -> Iterator[None]:
    matrix.world = there(machine)
    try:
        yield
    finally:
        matrix.world = matrix.Here


def staged_cells() -> list[Cell]:
    """Those that can be asked of a compiler: arrays that are elsewhere are no arguments of a
    program, and one that is split over devices that are not here can't be a constant.
    """
    return [
        cell
        for cell in all_cells()
        if cell.context not in EAGER | {"eval_shape", "make_jaxpr"}
        and not (cell.context == "jit_constant" and cell.input == "other_sharding")
        and cell.input not in {"other_half", "other_backend"}
    ]


def filter_shard(x: Any, request: matrix.Request, mesh: Any) -> Any:
    # A mesh that doesn't hold the device would make the request a fault.
    where = None if isinstance(request.placement, jax.Device) else mesh
    return mylib.filter_shard(x, request.placement, mesh=where)
