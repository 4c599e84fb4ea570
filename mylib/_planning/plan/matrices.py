"""Optimisers with `mylib.by_matrix` in planned steps: their states are laid out for each plan."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..._core.placement import PLANNING, AnyMesh, bytes_on_each
from ..._training.matrices import MatrixState, loads_of
from .apply import Planned, unambiguous
from .calls import Path
from .fixes import Spec
from .strategy import Strategy, spec_of
from .trace import PlanError, TracedStep, is_matrix_state

T = TypeVar("T")
# What of a state depends on the mesh.
OF_MESH = ".stacks", ".shared"
# The spec of the weight with this path; None if it is unknown.
SpecAt = Callable[[Path], Spec | None]


def check_states(args: tuple[object, ...]) -> None:
    """Raises if the owners of matrices are known already."""
    for path, node in jtu.tree_flatten_with_path(args, is_leaf=is_matrix_state)[0]:
        if is_matrix_state(node) and node.layout.groups[0].mesh.axis_names != (PLANNING,):
            raise PlanError(
                "hand over the step as for one device: write mylib.by_matrix(transform, None). The "
                f"plan decides where weights are kept, and the state at {jtu.keystr(path)} is for "
                "weights that are kept somewhere"
            )


def laid_out(tree: T, spec_at: SpecAt, mesh: AnyMesh) -> T:
    """A tree without numbers, with the states of `by_matrix` as they are on a mesh."""
    return jtu.tree_map(
        lambda node: _on_mesh(node, spec_at, mesh) if is_matrix_state(node) else node,
        tree,
        is_leaf=is_matrix_state,
    )


def _on_mesh(state: MatrixState, spec_at: SpecAt, mesh: AnyMesh) -> MatrixState:
    tree = state.layout.tree
    weights = jtu.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0]
    shardings: list[NamedSharding] = []
    for path, _ in weights:
        # Not whole instead: the figures would be those of another program.
        spec = spec_at(path)
        if spec is None:
            raise PlanError(
                f"by_matrix updates {jtu.keystr(path)}, and it is unknown which weight of the "
                "step's models that is: give it a tree of the weights of one model, such as "
                "eqx.filter(model, eqx.is_array)"
            )
        shardings.append(NamedSharding(mesh, PartitionSpec(*spec)))
    return state.on(shardings)


def states_on(traced: TracedStep, strategy: Strategy) -> dict[str, MatrixState]:
    """The states of `by_matrix` on the mesh of a strategy."""
    states = traced.states
    if not states:
        return {}
    weights = [leaf for leaf in traced.leaves if leaf.path in traced.in_models]
    specs = [(traced.in_models[x.path][1], spec_of(x, strategy, traced)) for x in weights]
    spec_at, sizes = Planned(unambiguous(specs), "").spec_at, strategy.sizes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return {path: _on_mesh(x, spec_at, mesh) for path, x in states.items()}


def specs_in(traced: TracedStep, strategy: Strategy) -> dict[str, dict[str, Spec]]:
    """For the path of each state: where its arrays are that only its mesh has, by their paths in
    it.
    """
    return {
        path: {
            jtu.keystr(inner): x.sharding.spec.partitions
            for inner, x in jtu.tree_flatten_with_path(state)[0]
            if jtu.keystr(inner).startswith(OF_MESH)
        }
        for path, state in states_on(traced, strategy).items()
    }


def state_bytes(state: MatrixState) -> int:
    """What each device holds of these arrays."""
    arrays = jtu.tree_leaves((state.stacks, state.shared))
    return sum(bytes_on_each(x.sharding, x.shape, x.dtype) for x in arrays)


def seconds_of(state: MatrixState, flops: Mapping[str, float]) -> float:
    """What the most loaded device computes, at these rates of dtypes."""
    layout = state.layout
    works = [(x.work or 0) / flops[str(x.group.dtype)] for x in layout.updates]
    return float(loads_of(layout.groups, works).max())


def sent_by(state: MatrixState) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """The collectives of an update: their kind, over which axes, and of how many bytes."""
    for update in state.layout.updates:
        yield from update.group.sent(3 if update.reads_weights else 2)
