"""Steps of examples/models, compiled for machines that are not here, and what they compute."""

from typing import Any

import equinox as eqx
import jax
from example_models import program, task_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib._core.tree import outlined
from mylib._planning.verify.arguments import filled
from mylib.rules import batch as rows


def compiled(
    name: str, strategy: str, mesh: Mesh, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """A step of an example, for the devices of a mesh, with these options of the compiler."""
    running, how = program("running"), program(name).STRATEGIES[strategy]
    task = task_of(name, how)
    make, step = running.training(task, how, mesh)
    first = task.batch(0)
    with jax.set_mesh(mesh):
        shapes = _shapes(first, make)
        batch = mylib.filter_shard(shapes[0], rows(how.rows), mesh)
        model, state = mylib.filter_shard(shapes[1:], how.kept, mesh)
        arrays, outline = outlined((batch, model, state), abstract=True)
        kept = [x.sharding for x in outlined((model, state), abstract=True)[0]]
        results = [*kept, NamedSharding(mesh, P())]

        def run(arrays: list[Any]) -> list[Any]:
            return outlined(step.__wrapped__(*outline.fill(arrays)))[0]

        lowered = jax.jit(run, out_shardings=results, keep_unused=True).lower(arrays)
        return lowered.compile(options)


def values(name: str, strategy: str) -> list[Any]:
    """Arguments of a step: random weights and moments, and the first batch."""
    running, how = program("running"), program(name).STRATEGIES[strategy]
    task = task_of(name, how)
    make, _ = running.training(task, how, mylib.make_mesh(**how.axes))
    batch = task.batch(0)
    drawn = filled(_shapes(batch, make)[1:], 2, 0)
    return outlined((batch, *drawn))[0]


def _shapes(batch: Any, make: Any) -> Any:
    # A key itself would be on the mesh in force, which can't hold it.
    made = eqx.filter_eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    return jax.tree.map(lambda x: describe(x) if is_array(x) else x, (batch, *made))
