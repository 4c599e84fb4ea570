"""Contracts about kinds, numbers and sizes."""

import math
from collections.abc import Mapping
from dataclasses import fields

from ..._core.text import counted, show_bytes
from ..audit import Contract, Report, bytes_of, size_of
from ..machines import Memory
from .roles import Roles, parts
from .text import (
    Axes,
    Size,
    Violation,
    bytes_in,
    including,
    lines,
    moved_by,
    names_of,
    over,
    text_of,
)


def communicates(expected: Mapping[tuple[str, Axes], int]) -> Contract:
    """Exactly these collectives run in a call.

    **Arguments:**

    - `expected`: the number for each kind and axes: `{("all-reduce", "data"): 2}`.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        sharding = jax.NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=sharding)
        report = mylib.audit(jnp.sum, x)
        report.expect(mylib.contracts.communicates({("all-reduce", "data"): 1}))
        ```
    """
    counts = {(kind, names_of(axes)): n for (kind, axes), n in expected.items()}

    def faults(report: Report) -> list[str]:
        for kind, axes in counts:
            report.among(kind, axes)  # names that don't exist are an error
        present = {(c.kind, over(c)) for c in report.collectives}
        wrong: list[str] = []
        for kind, axes in sorted(counts.keys() | present):
            n, m = counts.get((kind, axes), 0), report.count(kind, axes)
            if n != m:
                wrong.append(f"{counted(m, kind)} over {', '.join(axes)}, and {n} expected")
        return wrong

    return faults


def at_most(size: Size, kind: str | None = None, axes: Axes | None = None) -> Contract:
    """All executions of these collectives in a call have at most `size` bytes together.

    **Arguments:**

    - `size`: the number of bytes, or a text such as `"64 MiB"`.
    - `kind`: only those of this kind; None for all.
    - `axes`: only those over these mesh axes, or parts of them, alone or with others; None for all.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        x = mylib.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh=mesh)
        report = mylib.audit(jax.jit(jnp.sum), x)
        report.expect(mylib.contracts.at_most("4 B", "all-reduce", "data"))
        ```
    """
    limit = bytes_in(size)

    def faults(report: Report) -> list[str]:
        moved = bytes_of(including(report, kind, axes))
        if moved <= limit:
            return []
        what = (kind or "all collectives") + (f" over {', '.join(names_of(axes))}" if axes else "")
        return [f"{what}: {show_bytes(moved)} in a call, and at most {show_bytes(limit)} expected"]

    return faults


def never(
    kind: str | None = None,
    axes: Axes | None = None,
    *,
    above: Size = 0,
    in_loops: bool = False,
    inserted: bool = False,
) -> Contract:
    """No collective of this kind over these axes.

    **Arguments:**

    - `kind`, `axes`: as in `mylib.contracts.at_most`.
    - `above`: only collectives with more bytes, such as `"1 MiB"`.
    - `in_loops`: only collectives in the body of a loop.
    - `inserted`: only collectives that the partitioner has inserted, or may have inserted.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        x = mylib.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh=mesh)
        report = mylib.audit(jax.jit(jnp.sum), x)
        report.expect(mylib.contracts.never("all-gather", "data", above="1 MiB"))
        ```
    """
    limit = bytes_in(above)
    above_it = f" above {show_bytes(limit)}" if limit else ""

    def faults(report: Report) -> list[str]:
        violations = [
            Violation(moved_by(c), f"{text_of(c)}, and none expected{above_it}")
            for c in including(report, kind, axes)
            if c.bytes > limit
            and (c.loops or not in_loops)
            and (c.inserted is not False or not inserted)
        ]
        return lines(violations)

    return faults


def memory(**limits: Size) -> Contract:
    """The program needs at most this much memory on each device.

    **Arguments:**

    - `limits`: sizes, by the attributes of `mylib.machines.Memory`:
        `memory(temporaries="400 MiB")`.

    **Returns:**

    A contract.

    **Raises:**

    `ValueError` for a name that is none of them.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        x = mylib.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh=mesh)
        report = mylib.audit(jax.jit(jnp.sum), x)
        report.expect(mylib.contracts.memory(arguments="32 B"))
        ```
    """
    names = [*(f.name for f in fields(Memory) if f.type in (int, "int")), "total"]
    for name in limits:
        if name not in names:
            raise ValueError(f"memory: there is no {name!r}: write one of {', '.join(names)}")
    allowed = {name: bytes_in(size) for name, size in limits.items()}

    def faults(report: Report) -> list[str]:
        if report.memory is None:
            return ["the memory is unknown: audit the compiled program, not its text"]
        return [
            f"{name}: {show_bytes(size)}, and at most {show_bytes(limit)} expected"
            for name, limit in allowed.items()
            if (size := getattr(report.memory, name)) > limit
        ]

    return faults


def sharded(
    argument: str | None = None, *, axis: str | None = None, within: float = 0.1
) -> Contract:
    """The arrays of an argument are sharded.

    **Arguments:**

    - `argument`: the name of the argument; by default the first.
    - `axis`: the mesh axis that they must at least be sharded over; by default all axes.
    - `within`: by how much a device may hold more than its share of all of them, for arrays such as
        biases that no axis divides.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        x = mylib.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh=mesh)
        report = mylib.audit(jax.jit(jnp.sum), x)
        report.expect(mylib.contracts.sharded(within=0.1))
        ```
    """

    def faults(report: Report) -> list[str]:
        axes = [axis] if axis is not None else list(report.axes)
        arrays = [report.parameters[i] for i in Roles(report, argument).weights]
        split = {p.path: parts(report, p, axes) for p in arrays}
        devices = math.prod(size_of(report, axis) for axis in axes)
        share = sum(p.bytes * split[p.path] / devices for p in arrays)
        if sum(p.bytes for p in arrays) <= share * (1 + within):
            return []
        whole = [p for p in arrays if split[p.path] < devices]
        return [
            f"{p.path} {list(p.shape)} is not sharded over {', '.join(axes)}: "
            f"{devices // split[p.path]} devices hold the same {show_bytes(p.bytes)}"
            for p in sorted(whole, key=lambda p: -p.bytes)[:10]
        ]

    return faults
