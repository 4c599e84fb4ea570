"""A step under a plan: its arguments are placed, and its models gather their weights."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh, PartitionSpec

from .._jit import filter_jit
from .._tree import Leaf
from ..rules import Rule
from .calls import Calls, NotServedError, argument_of, roles_in
from .fixes import Spec
from .trace import PlanError, sharded


@dataclass(frozen=True, repr=False)
class Planned(Rule):
    """Places each array as a plan says, by its path. All others raise."""

    specs: Mapping[str, Spec]
    of: str
    reasons: Mapping[str, str] = field(default_factory=dict)

    def _path(self, leaf: Leaf) -> str | None:
        # The tree may be a part of a larger one, such as all arguments of a function.
        ends = (jtu.keystr(leaf.path[start:]) for start in range(len(leaf.path) + 1))
        return next((path for path in ends if path in self.specs), None)

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        path = self._path(leaf)
        if path is not None:
            return PartitionSpec(*self.specs[path])
        name = leaf.name.rpartition(f"[{self.of!r}]")[2]
        raise PlanError(
            f"{self.of}{name} isn't in the plan, which was made for other arguments: plan the step "
            "again, or say which argument this is, as explain(..., argument=) and "
            "make(..., arguments=) take it"
        )

    def why(self, leaf: Leaf) -> str:
        return self.reasons.get(self._path(leaf) or "", f"planned for {self.of}{leaf.name}")

    def __hash__(self) -> int:
        return hash((self.of, tuple(self.specs)))

    def __repr__(self) -> str:
        return f"the plan of {self.of}"


@dataclass(frozen=True)
class Applying:
    """What is needed to run a step under a plan.

    - `names`: of the arguments.
    - `returned`: those that the step returns with the same shapes. They are donated.
    - `arguments`, `results`: where arrays are, by path; for each argument by its name.
    - `used`: where the weights of each model are used, by the model's path.
    - `reasons`: why each array of each argument is where it is.
    - `fixed`: the paths of what `kept=` fixes in each argument.
    - `order`: the paths of the models that the step calls, one after the other.
    - `layered`: the names of the classes of layers that each model has.
    """

    names: tuple[str, ...]
    returned: tuple[str, ...]
    arguments: Mapping[str, Mapping[str, Spec]]
    results: Mapping[str, Spec]
    used: Mapping[str, Mapping[str, Spec]]
    reasons: Mapping[str, Mapping[str, str]]
    fixed: Mapping[str, Sequence[str]]
    order: tuple[str, ...]
    layered: Mapping[str, tuple[str, ...]]
    layers: tuple[type, ...]
    policy: str
    dtype: Any
    saved: Spec | None

    def kept(self, model: str) -> Planned:
        """Where a model's weights are kept."""
        name, rest = self._named(model)
        specs = self.arguments[name]
        return Planned({path: specs[rest + path] for path in self.used[model]}, name + rest)

    def used_in(self, model: str) -> Planned:
        """Where a model's weights are used."""
        return Planned(self.used[model], self.called(model))

    def fixed_in(self, model: str) -> list[str]:
        """Those of a model's weights that `kept=` fixes, by their path in it."""
        name, rest = self._named(model)
        fixed = self.fixed.get(name, ())
        return [path for path in self.used[model] if rest + path in fixed]

    def called(self, model: str) -> str:
        return "".join(self._named(model))

    def _named(self, model: str) -> tuple[str, str]:
        """The name of the argument that a model is in, and the path in it."""
        number, rest = argument_of(model)
        return self.names[number], rest

    def shard(self, model: str, module: Any, mesh: Mesh) -> Any:
        kept, used = self.kept(model), self.used_in(model)
        return sharded(module, self.layers, kept, used, mesh, self.dtype, self.policy, self.saved)


class PlannedFunction:
    """A step under a plan: it takes the step's arguments."""

    def __init__(self, fun: Callable[..., Any], applying: Applying, mesh: Mesh):
        functools.update_wrapper(self, fun, updated=())
        self._applying = applying
        self._fun = fun
        self._mesh = mesh
        places = [Planned(applying.arguments[name], name) for name in applying.names]
        self._jitted = filter_jit(
            self._step,
            in_shardings=self.parted(places),
            out_shardings=Planned(applying.results, "the result"),
            mesh=mesh,
            donate="all-except-first",
        )

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*self.parted(args))

    def lower(self, *args: Any) -> Any:
        """Lowers the step for these arguments, as `lower` of `filter_jit`."""
        return self._jitted.lower(*self.parted(args))

    def parted(self, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments as the lowered and compiled program takes them."""
        names, returned = self._applying.names, self._applying.returned
        if len(args) != len(names):
            raise TypeError(f"the step was planned with the arguments {', '.join(names)}")
        named = dict(zip(names, args, strict=True))
        others = {name: x for name, x in named.items() if name not in returned}
        return others, {name: named[name] for name in returned}

    def _step(self, arguments: dict[str, Any], returned: dict[str, Any]) -> Any:
        """The step, with its models sharded."""
        applying, mesh = self._applying, self._mesh
        args = tuple((arguments | returned)[name] for name in applying.names)
        roles = {role.path: role for role in roles_in(args)}
        calls = Calls(
            list(roles.values()),
            shard=lambda role, model: applying.shard(role.path, model, mesh),
            order=[roles[path] for path in applying.order],
        )
        try:
            with calls.tracing():
                return self._fun(*args)
        except NotServedError as error:
            raise PlanError(str(error)) from None

    def __repr__(self) -> str:
        return f"planned({self._fun!r})"
