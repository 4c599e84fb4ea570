"""The rates that a measured step reaches, as shares of a machine's data sheet."""

from collections.abc import Mapping, Sequence

from .._measured import Cost, Measured
from ..machines import Machine
from .links import Message, seconds
from .speed import Speed


def measured_speed(measured: Measured, ideal: Speed, assumed: Speed) -> Speed:
    """The speed that is reached: of products and kernels by the instructions that are bound by
    them, of memory by the others. Without such instructions it is as assumed.
    """
    groups: dict[str, list[Cost]] = {}
    for cost in measured.costs:
        products, memory = ideal.seconds(cost.work)
        by_products = "of_kernels" if cost.work.is_kernel else "of_products"
        groups.setdefault(by_products if products > memory else "of_memory", []).append(cost)
    return assumed._replace(**{name: _share(costs, ideal) for name, costs in groups.items()})


def _share(costs: Sequence[Cost], ideal: Speed) -> float:
    least = sum(cost.runs * max(ideal.seconds(cost.work)) for cost in costs)
    taken = sum(cost.seconds for cost in costs)
    return least / taken if least and taken else 1.0


def links_of(
    sent: Sequence[Message],
    axes: Mapping[str, int],
    machine: Machine,
    measured: Measured | None,
) -> list[tuple[float, str]]:
    """How long each collective takes once, and what is assumed about its links."""
    longer = {} if measured is None else _longer(measured, axes, machine)
    links = [seconds(message, axes, machine) for message in sent]
    return [
        (each * longer.get(message.axes, 1), text)
        for message, (each, text) in zip(sent, links, strict=True)
    ]


def _longer(
    measured: Measured, axes: Mapping[str, int], machine: Machine
) -> dict[tuple[str, ...], float]:
    """For each combination of mesh axes, how much longer its collectives take than is assumed."""
    times: dict[tuple[str, ...], list[float]] = {}
    for c in measured.collectives:
        if c.axes and set(c.axes) <= axes.keys() and c.times and c.sending:
            message = Message(c.kind, c.axes, round(c.wire_bytes / c.times), 1)
            each, _ = seconds(message, axes, machine)
            of = times.setdefault(c.axes, [0.0, 0.0])
            of[0] += c.sending
            of[1] += each * c.times
    return {names: taken / assumed for names, (taken, assumed) in times.items() if assumed}
