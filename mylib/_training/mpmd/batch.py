"""Reads the batches of a pipeline, and finds everything that is wrong with them."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.errors import Fault, because
from ..._core.placement import show
from ..._core.tree import Arrays, Kind, Leaves, canonical_dtype, outline_of
from ..._moving.links import handles
from ..._moving.transfer import filter_device_put
from .stage import Form, Struct, split_as


@dataclass(frozen=True, eq=False)
class PipelineBatch:
    """A tree of arrays with rows, and where they will be."""

    leaves: Leaves
    form: Form

    def arrays(self, is_here: bool) -> Arrays:
        """The arrays, moved to their mesh."""
        structs = self.form.structs
        if not is_here:
            return handles(structs)
        return filter_device_put(self.leaves.arrays, [x.sharding for x in structs])


def read_batch(tree: Any, name: str, mesh: Mesh, faults: list[Fault]) -> PipelineBatch:
    leaves = split_as(tree, name)
    request = f"the {'first' if name == 'x' else 'last'} stage's mesh"
    structs: list[Struct] = []
    for i, (x, kind) in enumerate(zip(leaves.arrays, leaves.kinds, strict=True)):
        sharding: Any = NamedSharding(mesh, P())
        if (kind is Kind.DEVICE and x.committed) or (kind is Kind.ABSTRACT and x.sharding):
            sharding = x.sharding
            if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
                reason = f"it is on {show(sharding, None)}"
                fix = f"move it there: mylib.filter_device_put({name}, P(...), mesh=...)"
                faults.append(leaves.at(i, because(reason, fix, request)))
        structs.append(Struct(x.shape, canonical_dtype(x), sharding=sharding))
    return PipelineBatch(leaves, Form(outline_of(leaves), tuple(structs)))


def check_rows(x: PipelineBatch, y: PipelineBatch, microbatches: int, faults: list[Fault]) -> int:
    """The number of rows of a batch, which all its arrays must have, in as many microbatches."""
    request = f"{microbatches} microbatches"
    arrays = [
        (batch.leaves, i, array) for batch in (x, y) for i, array in enumerate(batch.leaves.arrays)
    ]
    rows = next((array.shape[0] for *_, array in arrays if array.shape), 0)
    for leaves, i, array in arrays:
        if not array.shape:
            reason = (
                "it is a scalar, and the first dimension of each array is cut into microbatches"
            )
            fix = "give an array with a row for each example"
        elif array.shape[0] != rows:
            reason = f"it has {array.shape[0]} rows, and the arrays before it have {rows}"
            fix = "give all arrays of x and y as many rows"
        elif not rows or rows % microbatches:
            reason = f"its {rows} rows can't be cut into {microbatches} equal parts"
            fix = "choose a batch size that is a multiple of the microbatches"
        else:
            continue
        faults.append(leaves.at(i, because(reason, fix, request)))
    if not x.leaves.arrays:
        faults.append(because("it has no arrays", "give a batch", request, "x"))
    return rows
