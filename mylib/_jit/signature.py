"""A function's parameters: which argument each one gets, and readable names of the arguments."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._tree import KeyPath, Leaves, annotations_of, outlined, signature_of, split

_Parameter = inspect.Parameter
_ABOUT = ("__module__", "__name__", "__qualname__", "__doc__")
# The most ways of passing arguments that are kept for a function.
_MOST = 256


def about(fun: Any) -> dict[str, Any]:
    """Metadata to copy onto wrappers."""
    shown = inspect.unwrap(fun)
    metadata = {name: getattr(shown, name) for name in _ABOUT if hasattr(shown, name)}
    return metadata | ({"__annotations__": annotations_of(shown)} if callable(shown) else {})


class Slot(NamedTuple):
    """The parameter that gets an argument. `within` is the index in `*args`, or the name in
    `**kwargs`.
    """

    parameter: str
    within: int | str | None = None

    def __str__(self) -> str:
        if isinstance(self.within, str):
            return self.within
        return self.parameter if self.within is None else f"{self.parameter}[{self.within}]"


class _Binding(NamedTuple):
    """The order in which a function gets its arguments, as positions in the list of those that a
    call passes (positional ones, then keyword ones) with `defaults` at its end.
    """

    args: Sequence[int]
    kwargs: Mapping[str, int]
    defaults: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Function:
    """A function's name and signature."""

    name: str
    signature: inspect.Signature
    _bindings: dict[Any, _Binding] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, fun: Any) -> "Function":
        name = getattr(inspect.unwrap(fun), "__name__", None)
        return cls(name if isinstance(name, str) else "the function", signature_of(fun))

    @cached_property
    def array_defaults(self) -> Mapping[str, Any]:
        """The defaults that hold arrays, by parameter."""
        defaults = ((p.name, p.default) for p in self.signature.parameters.values())
        return {
            name: default
            for name, default in defaults
            if default is not _Parameter.empty and outlined(default)[0]
        }

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: frozenset[str] = frozenset()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the arguments into positional and keyword ones, in the same way for all calls that
        pass the same. Parameters in `defaults` get their default if the call passes nothing.
        """
        key = (len(args), defaults, *kwargs)
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) >= _MOST:
                self._bindings.clear()
            binding = self._bindings[key] = self._bind(len(args), list(kwargs), defaults)
        arguments = [*args, *kwargs.values(), *binding.defaults]
        return (
            tuple([arguments[i] for i in binding.args]),
            {name: arguments[i] for name, i in binding.kwargs.items()},
        )

    def _bind(self, count: int, names: list[str], defaults: frozenset[str]) -> _Binding:
        # Only the number of arguments and their names matter, so positions stand for them.
        positions = range(count + len(names))
        try:
            bound = self.signature.bind(
                *positions[:count], **dict(zip(names, positions[count:], strict=True))
            )
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        added: list[Any] = []
        before: list[_Parameter] = []
        for parameter in self.signature.parameters.values():
            if parameter.name in bound.arguments or parameter.default is parameter.empty:
                continue
            is_positional = parameter.kind is parameter.POSITIONAL_ONLY
            if parameter.name in defaults:
                # Positional-only arguments before it can't be left out.
                for one in (*(before if is_positional else ()), parameter):
                    bound.arguments[one.name] = len(positions) + len(added)
                    added.append(one.default)
                before.clear()
            elif is_positional:
                before.append(parameter)
        return _Binding(bound.args, bound.kwargs, added)

    def slot(self, key: int | str) -> Slot:
        """The parameter that gets an argument, by the argument's position or keyword."""
        if isinstance(key, str):
            named = key in self.by_keyword or self.rest is None
            return Slot(key) if named else Slot(self.rest or "", key)
        if key < len(self.by_position):
            return Slot(self.by_position[key])
        if self.several is None:  # one too many: the call will fail
            return Slot("args", key)
        return Slot(self.several, key - len(self.by_position))

    @cached_property
    def by_position(self) -> list[str]:
        return self._of_kinds(_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)

    @cached_property
    def by_keyword(self) -> list[str]:
        return self._of_kinds(_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)

    @cached_property
    def several(self) -> str | None:
        """The name of `*args`."""
        return next(iter(self._of_kinds(_Parameter.VAR_POSITIONAL)), None)

    @cached_property
    def rest(self) -> str | None:
        """The name of `**kwargs`."""
        return next(iter(self._of_kinds(_Parameter.VAR_KEYWORD)), None)

    def _of_kinds(self, *kinds: Any) -> list[str]:
        return [p.name for p in self.signature.parameters.values() if p.kind in kinds]

    def naming(self, path: KeyPath) -> str:
        """The name of a node of (args, kwargs): `model.layers[0].weight`."""
        if len(path) < 2:
            return jtu.keystr(path)
        side, key, *rest = path
        return f"{self.slot(key.key if side.idx else key.idx)}{jtu.keystr(tuple(rest))}"

    def split(self, arguments: Any, abstract: bool = False) -> Leaves:
        """Flattens (args, kwargs)."""
        return split(arguments, self.naming, abstract)
