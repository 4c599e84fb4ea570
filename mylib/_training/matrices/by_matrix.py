"""`by_matrix`: the public function."""

from functools import cache, partial
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..._core.placement import AnyMesh, Placement, current_world
from ..jit import filter_jit
from .matrices import Matrices
from .planned import Request
from .state import MatrixState, from_plain, to_plain
from .transform import Transform, Tree
from .update import initial, updated


def by_matrix(
    transform: Any,
    kept: PyTree[Placement] | None,
    /,
    over: str | tuple[str, ...] | None = None,
    *,
    matrices: Matrices | None = None,
    dtype: DTypeLike | None = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Gives each device whole matrices to update: for Muon, SOAP, Shampoo and other optimisers
    whose update of a weight needs all of it.

    Weights, gradients and updates are sharded by `kept`. Matrices of one shape are stacked,
    and an all-to-all gives each device an equal share of them, whole. It updates these, and another
    all-to-all returns to each device its part of the updates. Without this the compiler gathers
    matrices on all devices for one product after the other.

    The state is created sharded, by the devices that own the matrices. Rules leave it alone, so
    `out_shardings=(kept, kept)` is right, also beside the state of another optimiser. Weights that
    need not be whole, such as Adam's, are updated where they are kept.

    **Arguments:**

    - `transform`: an optimiser with `init` and `update`, such as `optax.contrib.muon(1e-3)`.
        Masks and labels inside of it work. What combines gradients of different weights, such as
        clipping by the global norm, goes outside: `optax.chain(clip, by_matrix(...))`.
    - `kept`: how weights are kept, as for `mylib.fully_shard`; None in a step for
        `mylib.plan`, which decides it.
    - `over`: the mesh axes over which matrices are given out; by default those that `kept` uses.
        For a plan, those of them that its mesh has.
    - `matrices`: a function of a `mylib.Leaf` that returns its dimensions as
        `(batch, rows, columns)`, each a number or a tuple of numbers; None for a leaf that is not
        a matrix, or `mylib.rules.PASS`. By default leaves of two dimensions are matrices, and
        stacked layers are stacks of them. Other leaves are updated as they are.
    - `dtype`: a dtype in which matrices and updates are sent, such as `jnp.bfloat16`.
    - `mesh`: the mesh for `kept`; by default the mesh of `jax.set_mesh`.

    **Returns:**

    An optimiser of the same type, with `init` and `update`. On one device it is `transform`. It
    also has `to_plain(state)` and `from_plain(plain, like)`, which are those of `by_matrix` itself:
    they turn any state that contains such states into that of the transform, and back, for
    checkpoints that any number of devices can read.

    **Raises:**

    `init` raises `mylib.PlacementError` for leaves whose dimensions can't be told, and
    `ValueError` for a transform whose updates or state depend on several weights, or on their
    dtypes, or that draws random numbers.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        kept = mylib.rules.fsdp("data")
        model = eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))
        model = mylib.filter_shard(model, kept, mesh=mesh)
        muon = mylib.by_matrix(optax.contrib.muon(1e-2), kept, mesh=mesh)
        optim = optax.chain(optax.clip_by_global_norm(1.0), muon)
        state = optim.init(eqx.filter(model, eqx.is_array))
        ```
    """
    if isinstance(transform, type) or not hasattr(transform, "update"):
        name = getattr(transform, "__name__", transform)
        raise TypeError(f"by_matrix takes an optimiser: call {name}(...), such as muon(1e-3)")
    axes = (over,) if isinstance(over, str) else over
    request = Request(transform, kept, axes, matrices, dtype, mesh)
    run_eagerly = filter_jit(partial(updated, transform))
    start_eagerly = filter_jit(partial(initial, transform))

    def init(params: Tree) -> object:
        layout = request.layout(params)
        if layout is None:
            return transform.init(params)
        start = start_eagerly if current_world().clean else partial(initial, transform)
        return start(layout, params)

    def update(
        updates: Tree, state: object, params: Tree | None = None, **extra: object
    ) -> tuple[object, object]:
        if isinstance(state, MatrixState):
            run = run_eagerly if current_world().clean else partial(updated, transform)
            return run(updates, state, params, **extra)
        updates, state = transform.update(request.as_sent(updates), state, params, **extra)
        return request.as_sent(updates), state

    return _type_like(type(transform))(init, update)


# For states inside of others', such as `optax.chain`'s.
by_matrix.to_plain = to_plain  # pyright: ignore[reportFunctionMemberAccess]
by_matrix.from_plain = from_plain  # pyright: ignore[reportFunctionMemberAccess]


@cache
def _type_like(cls: type) -> type:
    """A class that is also the transform's own, as Optax asks whether a transform takes more
    arguments by its class.
    """
    is_pair = issubclass(cls, tuple) and getattr(cls, "_fields", None) == Transform._fields
    methods = {"to_plain": staticmethod(to_plain), "from_plain": staticmethod(from_plain)}
    return type("ByMatrix", (cls if is_pair else Transform,), methods)
