"""`pipeline`: a model cut into stages, each on a mesh of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from ..._core.errors import Fault, PlacementError, because
from ..._moving.links import get_ready
from .actions import Pass
from .batch import PipelineBatch, check_rows, read_batch
from .loop import Run
from .modules import Module, read_stages
from .plan import Loss, PipelinePlan, chain
from .schedule import Schedule
from .ties import Tied, Where, tied_groups


def pipeline(
    stages: Sequence[Callable[..., Any]],
    loss: Loss,
    *,
    schedule: Schedule,
    tied: Sequence[tuple[Where, Where]] = (),
    checkpoint: bool = False,
) -> "Pipeline":
    """A model cut into stages, each on a mesh of its own: its loss and its gradients.

    A batch is cut into microbatches, which pass through the stages one after the other, so that
    all meshes work at the same time. The schedule is who does what when. The prediction is
    `stages[-1](...stages[0](x))`; the result is the mean of `loss` over the microbatches, and the
    gradients are those of this mean.

    Each stage is compiled for its own mesh, and may be sharded over it in any way: FSDP, tensor
    parallelism. It is traced with its mesh as that of `jax.set_mesh`, so that
    `mylib.filter_shard` inside it needs no `mesh`. Stages are compiled at the first call, and
    for batches of other shapes once more; afterwards nothing is.

    **Arguments:**

    - `stages`: functions of one argument, usually Modules, whose arrays are already on their
        meshes; `pipeline` looks at their shapes and shardings only. A stage's output, which may be
        any PyTree, is the next stage's input. Stage `s` is on mesh `s % meshes` of the schedule.
    - `loss`: a function of the prediction and of `y`, both for one microbatch. Returns a scalar.
    - `schedule`: `mylib.mpmd.gpipe`, `mylib.mpmd.one_f_one_b`,
        `mylib.mpmd.interleaved`, `mylib.mpmd.zero_bubble`, or a `mylib.mpmd.Schedule`
        of your own.
    - `tied`: parameters that are in several stages, such as an embedding that is also the last
        matrix: pairs of functions that take the list of stages and return the same parameter, as
        for `equinox.tree_at`. Each place has its own array and gets the sum of their gradients, so
        that equal arrays stay equal.
    - `checkpoint`: if True, only the inputs of stages are held between the forward and the backward
        pass, which computes the forward pass again.

    **Returns:**

    A function of `stages`, `x` and `y` that returns the loss and the gradients at once, before they
    are computed. The loss is on the last stage's mesh. The gradients are a list with a tree for
    each stage, as `equinox.filter_grad` returns it: None in place of anything that isn't a
    floating-point array. Each gradient has the sharding and the dtype of its parameter, and
    microbatches are added up in this dtype. In several processes, losses and gradients of stages
    on other processes' devices are arrays without local shards.

    The first dimension of all arrays of `x` and `y` are the rows of the batch. Microbatch `i` of
    `n` has the rows `i`, `i + n`, `i + 2 * n`, ..., so that a batch that is split over devices is
    cut without communication. Place `x` on the first stage's mesh and `y` on the last one's; NumPy
    arrays are copied to all devices of the mesh, each of which then computes the same.

    Between stages, arrays with as many rows as a microbatch are split over the mesh axes over which
    the rows of `x` are split, if the mesh has axes of these names and their sizes divide the rows.
    All others are copied to all devices of the mesh. Integers have no cotangent, and none is sent
    back. Anything else than arrays is static, in batches, too: other values compile other programs.

    The backward pass of a schedule that splits it (`zero_bubble`) computes what the input's
    cotangent needs, and hands the rest to the weight pass; nothing is computed twice. A loop
    (`jax.lax.scan`), a condition, or a `shard_map` is not cut: it stays in the backward pass as a
    whole. A stage that is one `scan` over its layers gains nothing from such a schedule.

    The function's method `compile(x, y)` returns the compiled programs by pass and stage, for
    `mylib.audit`. For it, the arrays of stages and batches may be `jax.ShapeDtypeStruct`s with
    shardings, also over machines that you don't have. A failing `equinox.error_if` in a stage ends
    as in `jax.jit`, not with the readable error of `mylib.filter_jit`.

    **Raises:**

    `mylib.PlacementError`, naming everything that is wrong: stages that are not on one mesh,
    more or fewer stages than in the schedule, tied parameters of different shapes. Calls raise it,
    too, before anything has been moved or compiled: for stages that differ from the first ones in
    more than their values, for batches that can't be cut or are on another mesh, and for a loss
    that is not a scalar. `TypeError` inside `jax.jit`, `jax.grad` or `jax.vmap`.

    !!! Example

        ```python
        devices = np.array(jax.devices()).reshape(2, 4)
        meshes = [jax.sharding.Mesh(row, "data") for row in devices]
        keys = jax.random.split(jax.random.key(0))
        layers = [eqx.nn.Linear(16, 16, key=key) for key in keys]
        stages = [
            mylib.filter_device_put(eqx.filter_vmap(layer), P("data"), mesh=mesh)
            for layer, mesh in zip(layers, meshes, strict=True)
        ]


        def loss(prediction, y):
            return jnp.mean((prediction - y) ** 2)


        pipe = mylib.mpmd.pipeline(
            stages, loss, schedule=mylib.mpmd.one_f_one_b(stages=2, microbatches=4)
        )
        x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
        x0 = mylib.filter_device_put(x, P("data"), mesh=meshes[0])
        x1 = mylib.filter_device_put(x, P("data"), mesh=meshes[1])
        value, grads = pipe(stages, x0, x1)
        assert grads[1].__wrapped__.weight.sharding.spec == P("data")
        ```
    """
    _refuse_tracers(stages)
    modules = read_stages(stages, schedule)
    # Before anything is compiled, which may take some processes longer than others.
    get_ready(device for module in modules for device in module.mesh.devices.flat)
    return Pipeline(modules, loss, schedule, tied_groups(tied, modules), checkpoint)


@dataclass(eq=False, repr=False)
class Pipeline:
    """The loss of a pipeline and its gradients, as a function of the stages and a batch. Made by
    `mylib.mpmd.pipeline`, which explains how it is called.

    **Attributes:**

    - `schedule`: who does what when, a `mylib.mpmd.Schedule`.

    !!! Example

        ```python
        meshes = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        layers = [eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(2)]
        stages = [
            mylib.filter_device_put(eqx.filter_vmap(layer), P(), mesh=mesh)
            for layer, mesh in zip(layers, meshes, strict=True)
        ]
        pipe = mylib.mpmd.pipeline(
            stages,
            lambda prediction, y: jnp.mean((prediction - y) ** 2),
            schedule=mylib.mpmd.one_f_one_b(stages=2, microbatches=2),
        )
        print(pipe.schedule)
        ```
    """

    _modules: list[Module]
    _loss: Loss
    schedule: Schedule
    _tied: list[list[Tied]]
    _checkpoint: bool
    _plans: dict[Any, PipelinePlan] = field(default_factory=dict, init=False)

    def compile(
        self, x: PyTree[Any], y: PyTree[Any], /
    ) -> dict[tuple[Pass, int], jax.stages.Compiled]:
        """Compiles the programs for batches like `x` and `y`, which may be
        `jax.ShapeDtypeStruct`s. Returns those of this process by pass and stage, for
        `mylib.audit`. The meshes may be of machines that you don't have.
        """
        return self._planned(x, y, [])[0].compiled()

    def __call__(
        self, stages: Sequence[Any], x: PyTree[Any], y: PyTree[Any], /
    ) -> tuple[jax.Array, list[Any]]:
        _refuse_tracers(stages, x, y)
        modules = self._modules
        if len(stages) != len(modules):
            reason = f"the pipeline was made for {len(modules)}"
            fix = "give the stages that it was made for"
            raise PlacementError([because(reason, fix, f"a call with {len(stages)} stages")])
        faults: list[Fault] = []
        arrays = [
            module.arrays_of(stage, faults) for module, stage in zip(modules, stages, strict=True)
        ]
        plan, batch, targets = self._planned(x, y, faults)
        return Run(plan, arrays, batch, targets).run()

    def _planned(
        self, x: Any, y: Any, faults: list[Fault]
    ) -> tuple[PipelinePlan, PipelineBatch, PipelineBatch]:
        batch = read_batch(x, "x", self._modules[0].mesh, faults)
        targets = read_batch(y, "y", self._modules[-1].mesh, faults)
        rows = check_rows(batch, targets, self.schedule.microbatches, faults)
        if faults:
            raise PlacementError(faults)
        key = batch.form, targets.form
        if key not in self._plans:
            stages = chain(self._modules, self._loss, self.schedule, batch, targets, rows)
            self._plans[key] = PipelinePlan.of(stages, self.schedule, self._tied, self._checkpoint)
        return self._plans[key], batch, targets


def _refuse_tracers(*trees: Any) -> None:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(trees)):
        raise TypeError(
            "a pipeline runs programs on several meshes, so it can't be called inside jax.jit, "
            "jax.grad or jax.vmap: it returns the loss and the gradients, and compiles itself"
        )
