"""What devices send each other."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from ..audit import Groups, Instruction, groups_of, pairs_of
from .combined import reduced
from .layouts import Interpreting

KINDS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip


def sent(run: Interpreting, x: Instruction, values: Sequence[ndarray]) -> list[ndarray]:
    """The results of a collective, one for each operand, or for each device of a group."""
    if x.does == "collective-permute":
        return [_permuted(run, x, value) for value in values]
    groups = _groups(run, x)
    back, size = np.argsort(groups.ravel()), groups.shape[1]
    # Groups, then their members.
    grouped = [value[groups.ravel()].reshape(*groups.shape, *value.shape[1:]) for value in values]

    def to_devices(value: ndarray) -> ndarray:
        return value.reshape(run.devices, *value.shape[2:])[back]

    def to_all(value: ndarray) -> ndarray:
        return to_devices(np.repeat(value[:, None], size, 1))

    dim = 1 + x.dims()[0] if "dimensions" in x.attributes else 0
    match x.does:
        case "all-reduce":
            return [to_all(reduced(run, x.called, [value], 1)[0]) for value in grouped]
        case "reduce-scatter":
            sums = (reduced(run, x.called, [value], 1)[0] for value in grouped)
            return [to_devices(np.stack(np.split(whole, size, dim), 1)) for whole in sums]
        case "all-gather":
            return [to_all(_joined(value, dim)) for value in grouped]
        case "all-to-all" if dim:  # groups, from, to, ...
            parts = (np.stack(np.split(value, size, 1 + dim), 2) for value in grouped)
            return [to_devices(_joined(value, 1 + dim)) for value in parts]
        case "all-to-all":  # operand j is for the j-th of a group; result i is from the i-th
            every = np.stack(grouped, 2)
            return [to_devices(every[:, i]) for i in range(size)]
    return [to_all(value[:, 0]) for value in grouped]


def _joined(value: ndarray, dim: int) -> ndarray:
    """The parts of a group's members, one after the other along a dimension."""
    return np.concatenate(list(np.moveaxis(value, 1, 0)), dim)


def _permuted(run: Interpreting, x: Instruction, value: ndarray) -> ndarray:
    result = np.zeros_like(value)  # for devices that nobody sends to
    for source, target in pairs_of(x.attribute("source_target_pairs"), run.devices):
        result[target] = value[source]
    return result


def _groups(run: Interpreting, x: Instruction) -> Groups:
    groups = groups_of(x.attribute("replica_groups"), run.devices)
    over_replicas = "channel_id" not in x.attributes
    if over_replicas and x.attributes.get("use_global_device_ids") != "true":
        # Of a program whose only replica is all devices: each is alone.
        return np.arange(run.devices)[:, None]
    return groups
