"""A step under a plan: its arguments are placed, and its models gather their weights."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ..._core.contexts import plan_in_force
from ..._core.placement import no_mesh
from ..._core.rules import Rule
from ..._core.tree import Leaf
from ..._training.fsdp import fully_shard
from ..._training.jit import filter_jit
from .calls import Calls, NotServedError, Path, argument_of, roles_in
from .fixes import Spec
from .trace import POLICIES, PlanError, outermost


@dataclass(frozen=True, repr=False)
class Planned(Rule):
    """Places each array as planned, by its path. All others raise. `depth` is the number of
    keys before that path; None if the tree may be a part of any other, such as all arguments of a
    function.
    """

    specs: Mapping[str, Spec]
    of: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    depth: int | None = None

    def at(self, depth: int) -> "Planned":
        return replace(self, depth=depth)

    def _path(self, path: Path) -> str | None:
        # Not by `_belongs`, which also finds the weight of a leaf with further keys in its path, as
        # of a moment: each array of the step has a place of its own, and one without must raise.
        starts = range(len(path) + 1) if self.depth is None else (self.depth,)
        ends = (jtu.keystr(path[start:]) for start in starts)
        return next((end for end in ends if end in self.specs), None)

    def spec_at(self, path: Path) -> Spec | None:
        """The entries of the spec for this path, None if it isn't in the plan."""
        return self.specs.get(self._path(path) or "")

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        path = self._path(leaf.path)
        if path is not None:
            return PartitionSpec(*self.specs[path])
        name = jtu.keystr(leaf.path[self.depth or 0 :])
        raise PlanError(
            f"{self.of}{name} isn't in the plan, which was made for other arguments: plan the step "
            "again, or name the argument that this is, as explain(..., argument=) and "
            "make(..., arguments=) take it"
        )

    def why(self, leaf: Leaf) -> str:
        return self.reasons.get(self._path(leaf.path) or "", f"planned for {self.of}{leaf.name}")

    def __hash__(self) -> int:
        return hash((self.of, tuple(self.specs)))

    def __repr__(self) -> str:
        return f"the plan of {self.of}"


def unambiguous(pairs: Iterable[tuple[str, Spec]]) -> dict[str, Spec]:
    """The specs of paths that have one each."""
    specs: dict[str, set[Spec]] = {}
    for path, spec in pairs:
        specs.setdefault(path, set()).add(spec)
    return {path: only for path, (only, *others) in specs.items() if not others}


# The reason for where `kept=` has an array.
FIXED = "fixed by kept="


@dataclass(frozen=True)
class Applying:
    """What is needed to run a step under a plan.

    - `names`: of the arguments.
    - `donated`: those that the results replace.
    - `arguments`, `results`: where arrays are, by path; for each argument by its name.
    - `used`: where the weights of each model are used, by the model's path.
    - `reasons`: why each array of each argument is where it is.
    - `order`: the paths of the models that the step calls, one after the other.
    - `micro_batches`: into how many the step cuts its batch.
    - `by_matrix`: the paths of the states of `by_matrix`, which are created for the mesh.
    - `layered`: the positions in `layers` of the classes that each model has.
    """

    names: tuple[str, ...]
    donated: tuple[str, ...]
    arguments: Mapping[str, Mapping[str, Spec]]
    results: Mapping[str, Spec]
    used: Mapping[str, Mapping[str, Spec]]
    reasons: Mapping[str, Mapping[str, str]]
    order: tuple[str, ...]
    by_matrix: tuple[str, ...]
    layered: Mapping[str, tuple[int, ...]]
    layers: tuple[type, ...]
    policy: str
    micro_batches: int
    dtype: DTypeLike | None
    saved: Spec | None

    def kept(self, model: str) -> Planned:
        """Where a model's weights are kept."""
        name, rest = self._named(model)
        specs = self.arguments[name]
        return Planned({path: specs[rest + path] for path in self.used[model]}, name + rest)

    def used_in(self, model: str) -> Planned:
        """Where a model's weights are used."""
        return Planned(self.used[model], self.called(model))

    @property
    def of_matrices(self) -> Planned:
        """Where `by_matrix` keeps the weights of all models."""
        pairs = [x for model in self.used for x in self.kept(model).specs.items()]
        return Planned(unambiguous(pairs), "the weights of by_matrix, ")

    def fixed_in(self, model: str) -> list[str]:
        """The paths of a model's weights that `kept=` fixes."""
        name, rest = self._named(model)
        return [x for x in self.used[model] if self.reasons[name][rest + x] == FIXED]

    def called(self, model: str) -> str:
        return "".join(self._named(model))

    def _named(self, model: str) -> tuple[str, str]:
        """The name of the argument that a model is in, and the path in it."""
        number, rest = argument_of(model)
        return self.names[number], rest

    def shard(self, model: str, module: Any, mesh: Mesh) -> Any:
        return fully_shard(
            module,
            outermost(module, self.layers),
            self.kept(model),
            self.used_in(model),
            mesh=mesh,
            dtype=self.dtype,
            policy=POLICIES[self.policy][1],
            saved=None if self.saved is None else PartitionSpec(*self.saved),
        )


class PlannedFunction:
    """A step under a plan: it takes the step's arguments."""

    def __init__(
        self,
        fun: Callable[..., object],
        applying: Applying,
        mesh: Mesh,
        donate: tuple[str, ...] | None = None,
    ):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._names = fun, applying.names
        signature = inspect.Signature(
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in applying.names]
        )
        self.__signature__: inspect.Signature = signature

        def run(*args: object) -> object:
            return _applied(fun, applying, mesh, args)

        # The program's arguments then have the names of the step's.
        described: Any = functools.update_wrapper(run, fun, updated=())
        described.__signature__ = signature
        # After (args, kwargs) and the position.
        places = (Planned(applying.arguments[name], name, depth=2) for name in applying.names)
        self._jitted = filter_jit(
            described,
            in_shardings=tuple(places),
            out_shardings=Planned(applying.results, "the result", depth=0),
            mesh=mesh,
            donate=applying.donated if donate is None else donate,
        )

    @no_mesh()
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return self._jitted(*self._positional(args, kwargs))

    @no_mesh()
    def lower(self, /, *args: object, **kwargs: object) -> Any:
        """Lowers the step for these arguments, as `lower` of `filter_jit`."""
        return self._jitted.lower(*self._positional(args, kwargs))

    def _positional(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[object, ...]:
        if not kwargs and len(args) == len(self._names):
            return args
        try:
            return self.__signature__.bind(*args, **kwargs).args
        except TypeError as error:
            names = ", ".join(self._names)
            raise TypeError(f"the step was planned with the arguments {names}: {error}") from None

    def __repr__(self) -> str:
        return f"planned({self._fun!r})"


def _applied(fun: Callable[..., Any], applying: Applying, mesh: Mesh, args: Any) -> Any:
    """Calls a step with its models sharded."""
    roles = {role.path: role for role in roles_in(args)}
    calls = Calls(
        list(roles.values()),
        shard=lambda role, model: applying.shard(role.path, model, mesh),
        order=[roles[path] for path in applying.order],
    )
    try:
        with calls.tracing(), plan_in_force((applying.of_matrices, mesh)):
            return fun(*args)
    # Its way through the step's frames says nothing: the call is named in the message.
    except NotServedError as error:
        raise PlanError(str(error)) from None
