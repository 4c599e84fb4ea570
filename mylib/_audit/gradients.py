"""Finds the arguments whose gradients a collective sums: those that its result then updates."""

import re

from .attribution import Names
from .flow import Flow
from .hlo import HloModule


def gradients_of(number: int, flow: Flow, module: HloModule, names: Names) -> tuple[str, ...]:
    """The paths of the arguments that a collective's results update, without those of an
    optimiser's state, whose paths end like those of the model.
    """
    arguments = [module.entry.parameters[i] for i in flow.updated(number)]
    paths = list(dict.fromkeys(names((x.op_names or [x.name])[0]) for x in arguments))
    return tuple(p for p in paths if not any(_is_state_of(p, other) for other in paths))


def _is_state_of(path: str, other: str) -> bool:
    inner = re.sub(r"^\w+", "", other)
    return len(path) > len(other) and path.endswith(inner) and _keys(path) > _keys(other)


def _keys(path: str) -> int:
    return len(re.findall(r"[.\[]", path))
