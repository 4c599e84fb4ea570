"""Steps of examples/models, compiled for machines that are not here, and what they compute."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from example_models import program, task_of
from hlo_program import Execution
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxlib import _hlo  # for programs with all of their constants

import mylib
from mylib._placement import axis_names, entries_of
from mylib._tree import is_of_keys, outlined
from mylib._verify.arguments import filled
from mylib.rules import batch as rows


class Compiled(NamedTuple):
    """A program, and where its arguments and results are."""

    text: str
    arguments: list[NamedSharding]
    results: list[NamedSharding]

    def run(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """The results for whole arguments."""
        pairs = zip(values, self.arguments, strict=True)
        parts = Execution(self.text)(*(_parts(x, sharding) for x, sharding in pairs))
        return [_whole(x, sharding) for x, sharding in zip(parts, self.results, strict=True)]


def compiled(name: str, strategy: str, mesh: Mesh) -> Compiled:
    """A step of an example, for the devices of a mesh."""
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

        found = jax.jit(run, out_shardings=results, keep_unused=True).lower(arrays).compile()
    return Compiled(text_of(found), [x.sharding for x in arrays], results)


def text_of(program: Any) -> str:
    """A compiled program with all of its constants, and without its lines of Python."""
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    options.print_backend_config = True
    options.print_metadata = False
    (module,) = program.runtime_executable().hlo_modules()
    return module.to_string(options)


def values(name: str, strategy: str) -> list[np.ndarray]:
    """Arguments of a step: random weights and moments, and the first batch."""
    running, how = program("running"), program(name).STRATEGIES[strategy]
    task = task_of(name, how)
    make, _ = running.training(task, how, mylib.make_mesh(**how.axes))
    batch = task.batch(0)
    drawn = filled(_shapes(batch, make)[1:], 2, 0)
    arrays = outlined((batch, *drawn))[0]
    return [np.asarray(jax.random.key_data(x) if is_of_keys(x) else x) for x in arrays]


def _shapes(batch: Any, make: Any) -> Any:
    # A key itself would be on the mesh in force, which can't hold it.
    made = eqx.filter_eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    return jax.tree.map(lambda x: describe(x) if is_array(x) else x, (batch, *made))


def _parts(x: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """The part of each device, in float64."""
    x = x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return np.stack([x[index] for index in _indices(sharding, x.shape)])


def _whole(parts: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """An array from its parts. Copies must be equal."""
    mesh, entries = sharding.mesh, entries_of(sharding.spec, parts.ndim - 1)
    counts = [math.prod(mesh.shape[axis] for axis in axis_names(entry)) for entry in entries]
    shape = tuple(n * k for n, k in zip(parts.shape[1:], counts, strict=True))
    whole = np.zeros(shape, parts.dtype)
    indices = _indices(sharding, shape)
    for index, part in zip(indices, parts, strict=True):
        whole[index] = part
    for index, part in zip(indices, parts, strict=True):
        np.testing.assert_allclose(part, whole[index], rtol=1e-9, atol=1e-12, err_msg="copies")
    return whole


def _indices(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    """Which part of an array each device has, in the order of the program."""
    parts = sharding.devices_indices_map(shape)
    return [parts[device] for device in sharding.mesh.devices.flat]
