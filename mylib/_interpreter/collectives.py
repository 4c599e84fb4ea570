"""What devices send each other."""

from typing import Any

import numpy as np

from .._audit import Instruction, groups_of, pairs_of


def sent(run: Any, x: Instruction, values: Any) -> Any:
    """The results of a collective, one for each operand, or for each device of a group."""
    if x.does == "collective-permute":
        return [_permuted(run, x, v) for v in values]
    groups = _groups(run, x)
    back = np.argsort(groups.ravel())
    # Groups, then their members.
    grouped = [v[groups.ravel()].reshape(*groups.shape, *v.shape[1:]) for v in values]

    def to_devices(v: Any) -> Any:
        return v.reshape(run.devices, *v.shape[2:])[back]

    def to_all(v: Any) -> Any:
        return to_devices(np.repeat(v[:, None], groups.shape[1], 1))

    return _KINDS[x.does](run, x, grouped, to_devices, to_all)


def _permuted(run: Any, x: Instruction, v: Any) -> Any:
    result = np.zeros_like(v)  # for devices that nobody sends to
    for source, target in pairs_of(x.attribute("source_target_pairs"), run.devices):
        result[target] = v[source]
    return result


def _groups(run: Any, x: Instruction) -> Any:
    groups = groups_of(x.attribute("replica_groups"), run.devices)
    over_replicas = "channel_id" not in x.attributes
    if over_replicas and x.attributes.get("use_global_device_ids") != "true":
        # Of a program whose only replica is all devices: each is alone.
        return np.arange(run.devices)[:, None]
    return groups


def _dim(x: Instruction) -> Any:
    (dim,) = x.dims()
    return 1 + dim


def _all_reduce(run: Any, x: Instruction, grouped: Any, to_devices: Any, to_all: Any) -> Any:
    return [to_all(run.reduced(x.called, [v], 1)[0]) for v in grouped]


def _reduce_scatter(run: Any, x: Instruction, grouped: Any, to_devices: Any, to_all: Any) -> Any:
    results = []
    for v in grouped:
        (whole,) = run.reduced(x.called, [v], 1)
        results.append(to_devices(np.stack(np.split(whole, v.shape[1], _dim(x)), 1)))
    return results


def _all_gather(run: Any, x: Instruction, grouped: Any, to_devices: Any, to_all: Any) -> Any:
    return [to_all(np.concatenate(list(np.moveaxis(v, 1, 0)), _dim(x))) for v in grouped]


def _all_to_all(run: Any, x: Instruction, grouped: Any, to_devices: Any, to_all: Any) -> Any:
    if "dimensions" not in x.attributes:
        # Operand j is for the j-th of a group; result i is from the i-th.
        every = np.stack(grouped, 2)
        return [to_devices(every[:, i]) for i in range(every.shape[1])]
    results = []
    for v in grouped:
        size, dim = v.shape[1], _dim(x)
        parts = np.stack(np.split(v, size, 1 + dim), 2)  # groups, from, to, ...
        results.append(to_devices(np.concatenate(list(np.moveaxis(parts, 1, 0)), 1 + dim)))
    return results


def _broadcast(run: Any, x: Instruction, grouped: Any, to_devices: Any, to_all: Any) -> Any:
    return [to_all(v[:, 0]) for v in grouped]


_KINDS = {
    "all-reduce": _all_reduce, "reduce-scatter": _reduce_scatter, "all-gather": _all_gather,
    "all-to-all": _all_to_all, "collective-broadcast": _broadcast,
}  # fmt: skip
KINDS = ("collective-permute", *_KINDS)
