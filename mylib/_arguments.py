"""`in_shardings` over a function's own signature, and what its arguments are called."""

import inspect
import re
from typing import Any

from ._placement import is_placement_leaf
from ._program import outlined

# The beginning of a path in (args, kwargs).
_ARGUMENT = re.compile(r"\[0\]\[(?P<index>\d+)\]|\[1\]\['(?P<name>\w+)'\]")


def readable(path: str, signature: inspect.Signature) -> str:
    """A path in (args, kwargs), by name of the parameter: `model.layers[0].weight`."""
    match = _ARGUMENT.match(path)
    if match is None:
        return path
    if match["name"]:
        return match["name"] + path[match.end() :]
    index = int(match["index"])
    names = list(signature.parameters)
    kinds = [p.kind for p in signature.parameters.values()]
    several = inspect.Parameter.VAR_POSITIONAL
    first = kinds.index(several) if several in kinds else len(names)
    if index < first:
        name = names[index]
    else:
        name = f"{names[first]}[{index - first}]" if first < len(names) else f"args[{index}]"
    return name + path[match.end() :]


def give_defaults(bound: inspect.BoundArguments, in_shardings: Any) -> None:
    """Adds the defaults that hold arrays and are to be placed; the others are left to Python."""
    parameters = bound.signature.parameters.values()
    if isinstance(in_shardings, dict):
        placed = {name for name, given in in_shardings.items() if given is not None}
    elif type(in_shardings) in (tuple, list):
        placed = {p.name for p in list(parameters)[: len(in_shardings)]}
    else:
        placed = set(bound.signature.parameters)
    before: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in bound.arguments or parameter.default is parameter.empty:
            continue
        if parameter.name in placed and outlined(parameter.default)[0]:
            bound.arguments[parameter.name] = parameter.default
            # They can't be left out in front of it.
            for other in before if parameter.kind is parameter.POSITIONAL_ONLY else ():
                bound.arguments[other.name] = other.default
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            before.append(parameter)


def prefix_of(name: str, signature: inspect.Signature, given: Any, args: Any, kwargs: Any) -> Any:
    """`in_shardings` as a prefix of (args, kwargs)."""
    if is_placement_leaf(given):
        return given
    if isinstance(given, dict):
        return _prefix_by_name(name, signature, given, args, kwargs)
    if type(given) in (tuple, list):
        if len(given) != len(args):
            raise TypeError(
                f"{name}: in_shardings has {len(given)} entries, and there are {len(args)} "
                "positional arguments. Give one for each, or a dict from names of parameters"
            )
        return tuple(given), dict.fromkeys(kwargs)
    raise TypeError(
        f"{name}: in_shardings is a {type(given).__name__}, which could be meant for the "
        "first argument or for all. Write a tuple with an entry for each positional argument, or a "
        "dict from names of parameters"
    )


def _prefix_by_name(
    name: str, signature: inspect.Signature, given: dict[Any, Any], args: Any, kwargs: Any
) -> Any:
    parameters = signature.parameters.values()
    unknown = [key for key in given if key not in signature.parameters]
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    if unknown and not (rest and rest not in given and all(n in kwargs for n in unknown)):
        raise TypeError(
            f"{name} has no parameter {', '.join(map(repr, unknown))}: it has "
            f"{', '.join(signature.parameters)}. To place the entries of an argument that "
            "is a dict, write {'name of the parameter': {...}}"
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_position = [given.get(p.name) for p in positional[: len(args)]]
    left = len(args) - len(by_position)
    several: Any = next((given.get(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    by_position += [several] * left if is_placement_leaf(several) else several
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    others = given.get(rest, {key: given[key] for key in unknown})
    if isinstance(others, dict):
        spare = [key for key in others if key in named or key not in kwargs]
        if spare:
            raise TypeError(f"{name} was given no {', '.join(map(repr, spare))} in **{rest}")
    elif not is_placement_leaf(others):
        raise TypeError(
            f"{name}: write a placement for all of **{rest}, or a dict from its names, not "
            f"a {type(others).__name__}"
        )

    def of_keyword(key: str) -> Any:
        if key in named:
            return given.get(key)
        return others.get(key) if isinstance(others, dict) else others

    return tuple(by_position), {key: of_keyword(key) for key in kwargs}
