"""The placement law, in every context that it names: enough cells for every pair of choices."""

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


_CELLS = all_cells()


@pytest.mark.parametrize("cell", pairwise(_CELLS, seed=0), ids=str)
def test_filter_shard(cell: Cell):
    check(cell, filter_shard)


@pytest.mark.parametrize("cell", pairwise(_CELLS, seed=1), ids=str)
def test_filter_device_put(cell: Cell):
    check(cell, filter_device_put)
