"""A function's parameters: which argument each one gets, and readable names of the arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh

from ..._core.tree import KeyPath, Leaves, annotations_of, outlined, signature_of, split

_Parameter = inspect.Parameter
_ABOUT = ("__module__", "__name__", "__qualname__", "__doc__")
# The most ways of passing arguments that are kept for a function. More are found anew each time.
_MOST = 256
# The order in which a function gets its arguments, as positions in the list of those that a call
# passes (positional ones, then keyword ones) with some defaults at its end, and these.
_Order = tuple[Sequence[int], Mapping[str, int], Sequence[Any]]


def about(fun: Callable[..., object]) -> Mapping[str, object]:
    """Metadata to copy onto wrappers."""
    shown = inspect.unwrap(fun)
    metadata = {name: getattr(shown, name) for name in _ABOUT if hasattr(shown, name)}
    return metadata | ({"__annotations__": annotations_of(shown)} if callable(shown) else {})


@dataclass(frozen=True, eq=False)
class Function:
    """A function's name and signature."""

    name: str
    signature: inspect.Signature

    @classmethod
    def of(cls, fun: Callable[..., object]) -> "Function":
        if isinstance(fun, Mesh | AbstractMesh):  # which can be called
            raise TypeError("a mesh is given by position, in place of a function: write mesh=mesh")
        name = getattr(inspect.unwrap(fun), "__name__", None)
        return cls(name if isinstance(name, str) else "the function", signature_of(fun))

    @cached_property
    def array_defaults(self) -> frozenset[str]:
        """The parameters whose defaults hold arrays."""
        parameters = self.signature.parameters.values()
        return frozenset(p.name for p in parameters if outlined(p.default)[0])

    def bind(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        defaults: frozenset[str] = frozenset(),
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the arguments into positional and keyword ones, in the same way for all calls that
        pass the same. Parameters in `defaults` get their default if the call passes nothing.
        """
        by_position, by_name, added = self._order(len(args), tuple(kwargs), defaults)
        arguments = [*args, *kwargs.values(), *added]
        positional = tuple([arguments[i] for i in by_position])
        return positional, {name: arguments[i] for name, i in by_name.items()}

    @cached_property
    def _order(self) -> Callable[[int, tuple[str, ...], frozenset[str]], _Order]:
        return lru_cache(maxsize=_MOST)(self._find_order)

    def _find_order(self, count: int, names: tuple[str, ...], defaults: frozenset[str]) -> _Order:
        # Only the number of arguments and their names matter, so positions stand for them.
        total = count + len(names)
        by_name = dict(zip(names, range(count, total), strict=True))
        try:
            bound = self.signature.bind(*range(count), **by_name)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        missing = [p for p in self.signature.parameters.values() if p.name not in bound.arguments]
        # Positional-only arguments before another one can't be left out.
        positional_only = [p.name for p in missing if p.kind is p.POSITIONAL_ONLY]
        last = max((i for i, name in enumerate(positional_only) if name in defaults), default=0)
        added = [p for p in missing if p.name in defaults.union(positional_only[:last])]
        bound.arguments.update((p.name, total + i) for i, p in enumerate(added))
        return bound.args, bound.kwargs, [p.default for p in added]

    def parameter(self, key: int | str) -> str:
        """The parameter that gets an argument, by the argument's position or keyword."""
        if isinstance(key, str):
            named = self._of_kinds(_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
            others = self._of_kinds(_Parameter.VAR_KEYWORD)
            return others[0] if others and key not in named else key
        if key < len(self.by_position):
            return self.by_position[key]
        return self.args_name or f"args[{key}]"  # one too many: the call will fail

    @cached_property
    def by_position(self) -> list[str]:
        return self._of_kinds(_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)

    @cached_property
    def args_name(self) -> str | None:
        """The name of `*args`."""
        return next(iter(self._of_kinds(_Parameter.VAR_POSITIONAL)), None)

    def _of_kinds(self, *kinds: object) -> list[str]:
        return [p.name for p in self.signature.parameters.values() if p.kind in kinds]

    def naming(self, path: KeyPath) -> str:
        """The name of a node of (args, kwargs): `model.layers[0].weight`."""
        if len(path) < 2:
            return jtu.keystr(path)
        side, key, *keys = path
        name = key.key if side.idx else self.parameter(key.idx)
        if self.args_name and not side.idx and key.idx >= len(self.by_position):
            keys = [jtu.SequenceKey(key.idx - len(self.by_position)), *keys]
        return name + jtu.keystr(tuple(keys))

    def split(self, arguments: object, abstract: bool = False) -> Leaves:
        """Flattens (args, kwargs)."""
        return split(arguments, self.naming, abstract)
