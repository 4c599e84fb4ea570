"""The placement law, in every context that it names: enough cells for every pair of choices."""

import dataclasses

import jax
import pytest
from matrix import Cell, Request, all_cells, check, pairwise

import mylib


def filter_shard(x, request: Request, mesh):
    return mylib.filter_shard(x, request.placement, mesh=_mesh_for(request, mesh))


def filter_device_put(x, request: Request, mesh):
    return mylib.filter_device_put(x, request.placement, mesh=_mesh_for(request, mesh))


def _mesh_for(request: Request, mesh):
    # A mesh that doesn't hold the device would make the request a fault.
    return None if isinstance(request.placement, jax.Device) else mesh


VERBS = {f.__name__: f for f in (filter_shard, filter_device_put)}


@dataclasses.dataclass(frozen=True)
class Case(Cell):
    verb: str

    def __str__(self) -> str:
        return f"{self.verb}-{super().__str__()}"


CASES = [Case(*vars(cell).values(), verb) for cell in all_cells() for verb in VERBS]


@pytest.mark.parametrize("case", pairwise(CASES), ids=str)
def test_every_pair_of_choices(case: Case):
    check(case, VERBS[case.verb])
