"""Calls of a model inside a step, which a plan replaces while the step is traced.

Classes, instances and tree structures stay what they are. While a step is traced, a class's
`__call__` asks whether a call in this thread is to be replaced, so that a step needs no edit.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jax.ad_checkpoint import checkpoint_name

from ..._core.compat import Replacement
from ..._core.contexts import planned_trace
from ..._core.tree import is_array

# A path of keys in a tree.
Path = tuple[Any, ...]
T = TypeVar("T")
_numbers = itertools.count()
_running: dict[int, "Calls | LayerInputs"] = {}
_MARK = "mylib.plan"


@dataclass(frozen=True)
class CalledModule:
    """A Module in an argument that can be called: `path` is that of the tuple of arguments, and
    `shapes` are those of its arrays by their path in it.
    """

    path: str
    module: eqx.Module
    shapes: dict[str, tuple[int, ...]]

    def is_like(self, module: object) -> bool:
        """Whether this may be the module that is called. Static fields and dtypes may change before
        it is.
        """
        return type(self.module) is type(module) and self.shapes == _shapes(module)


def argument_of(path: str) -> tuple[int, str]:
    """For a path of the tuple of arguments: the number of the argument, and the path in it."""
    number, _, rest = path[1:].partition("]")
    return int(number), rest


def _shapes(module: object) -> dict[str, tuple[int, ...]]:
    leaves = jtu.tree_flatten_with_path(module)[0]
    return {jtu.keystr(path): tuple(x.shape) for path, x in leaves if is_array(x, abstract=True)}


def roles_in(args: tuple[object, ...]) -> list[CalledModule]:
    """The outermost Modules in the arguments that can be called and have arrays. Those deep in an
    argument come last, as they may be moments, which have the class of their model.
    """
    nodes = jtu.tree_flatten_with_path(args, is_leaf=_can_be_called)[0]
    roles = [
        CalledModule(jtu.keystr(path), x, _shapes(x))
        for path, x in sorted(nodes, key=lambda node: len(node[0]))
        if _can_be_called(x)
    ]
    return [role for role in roles if role.shapes]


def _can_be_called(node: object) -> TypeGuard[eqx.Module]:
    return isinstance(node, eqx.Module) and _owner(type(node)) is not None


def _owner(cls: type) -> type | None:
    """The class that defines `__call__`."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


@dataclass(eq=False)
class Calls:
    """The calls of models in one trace. `shard` makes the model that is called instead. `order` are
    the roles that are called, one after the other, as the first trace has found; it decides
    between roles of the same kind.
    """

    roles: Sequence[CalledModule]
    shard: Callable[[CalledModule, Any], Callable[..., object]]
    order: Sequence[CalledModule] | None = None
    seen: list[tuple[str, list[CalledModule]]] = field(default_factory=list)

    def serve(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        candidates = [role for role in self.roles if role.is_like(module)]
        if not candidates:
            raise NotServedError(
                f"the step calls a {type(module).__qualname__} whose arrays don't have the shapes "
                "of one in its arguments, such as a member of an ensemble under "
                "equinox.filter_vmap"
            )
        number = len(self.seen)
        mark = f"{_MARK}.{number}"
        self.seen.append((mark, candidates))
        if self.order is None:
            module = _marked(module, mark)
            role = candidates[0]
        else:
            role = self.order[number] if number < len(self.order) else None
            if role not in candidates:
                raise NotServedError(
                    f"the step calls {type(module).__qualname__} in another order than when it "
                    "was planned: it is not the same step, or it depends on something else than "
                    "its arguments. Plan it again"
                )
        # Inside, Modules of the same class are called as they are: `fully_shard` has gathered them.
        with planned_trace(None):
            return self.shard(role, module)(*args, **kwargs)

    def called(self, origins: dict[str, int | None], paths: Sequence[str]) -> list[CalledModule]:
        """The roles that are called, one after the other: of several of the same kind the one
        whose arrays most of the call's are, or are computed from.
        """
        return [_most_likely(mark, roles, origins, paths) for mark, roles in self.seen]

    def tracing(self) -> AbstractContextManager[None]:
        return _answering_calls(self, {type(role.module) for role in self.roles})

    def is_for(self, module: object) -> bool:
        return any(type(role.module) is type(module) for role in self.roles)


@dataclass(eq=False)
class LayerInputs:
    """The inputs of layers in a trace: each call's first argument gets a name. `ranks` are the
    ranks that the layers see, without the dimensions of `jax.vmap`; None if an argument is not one
    array. Equal layers are traced once.
    """

    ranks: list[int | None] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    call_layer: Callable[..., object] = field(
        default_factory=lambda: eqx.filter_jit(lambda module, args, kwargs: module(*args, **kwargs))
    )

    def serve(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        with planned_trace(None):
            first: Any = args[0] if args else None
            self.ranks.append(first.ndim if is_array(first) else None)
            if is_array(first):
                args = checkpoint_name(first, self.name(len(self.ranks) - 1)), *args[1:]
            if _is_hashable((module, args, kwargs)):
                return self.call_layer(module, args, kwargs)
            return module(*args, **kwargs)

    def is_for(self, module: object) -> bool:
        return type(module) in self.classes

    def name(self, number: int) -> str:
        return f"{_MARK}.input.{number}"

    def tracing(self, classes: set[type]) -> AbstractContextManager[None]:
        self.classes |= classes
        return _answering_calls(self, classes)


def _is_hashable(tree: object) -> bool:
    """Whether all but arrays can be hashed, as JAX must to know a call again."""
    leaves, treedef = jtu.tree_flatten(eqx.filter(tree, is_array, inverse=True))
    try:
        hash((tuple(leaves), treedef))
    except TypeError:
        return False
    return True


@contextmanager
def _answering_calls(calls: "Calls | LayerInputs", classes: Iterable[type]) -> Iterator[None]:
    number = next(_numbers)
    _running[number] = calls
    try:
        with ExitStack() as stack:
            for owner in {_owner(cls) for cls in classes} - {None}:
                stack.enter_context(Replacement(owner, "__call__", _asking))
            stack.enter_context(planned_trace(number))
            yield
    finally:
        del _running[number]


class NotServedError(Exception):
    """A call of a model that a plan can't replace. `plan` makes a `PlanError` of it."""


def _marked(module: T, mark: str) -> T:
    """The module with names on its arrays, by which the arguments that they are can be found."""
    leaves, treedef = jtu.tree_flatten(module)
    named = [
        checkpoint_name(x, f"{mark}.{i}") if is_array(x, abstract=True) else x
        for i, x in enumerate(leaves)
    ]
    return jtu.tree_unflatten(treedef, named)


def _most_likely(
    mark: str, roles: Sequence[CalledModule], origins: dict[str, int | None], paths: Sequence[str]
) -> CalledModule:
    marked = {
        paths[number]
        for name, number in origins.items()
        if number is not None and name.rpartition(".")[0] == mark
    }
    # If none is known to be an argument's, it is the first: `roles_in` has those deep in an
    # argument, as moments are, last.
    return max(roles, key=lambda role: sum(role.path + path in marked for path in role.shapes))


def _asking(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def called(module: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        calls = _running.get(planned_trace.value)
        if calls is None or not calls.is_for(module):
            return original(module, *args, **kwargs)
        return calls.serve(module, args, kwargs)

    return called
