"""What programs may communicate and hold: for `Report.expect`, in tests.

A contract is a function from a [`mylib.Report`][] to a list of faults, each a sentence. You can
write your own.
"""

import math
import re
from collections.abc import Mapping, Sequence

from ._audit import Collective, Contract, Parameter, Report, readable, times_of, what_of
from ._compat import names
from ._errors import AuditError

__all__ = [
    "Contract",
    "at_most",
    "communicates",
    "data_parallel",
    "fsdp",
    "memory",
    "never",
    "sharded",
    "tensor_parallel",
    "two_d",
]

Axes = str | Sequence[str]
Size = int | str


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
    wanted = {(kind, _names(axes)): n for (kind, axes), n in expected.items()}

    def faults(report: Report) -> list[str]:
        for kind, axes in wanted:
            report.among(kind, axes)  # names that don't exist are an error
        found = {(c.kind, _over(c)) for c in report.collectives}
        wrong: list[str] = []
        for kind, axes in sorted(wanted.keys() | found):
            n, m = wanted.get((kind, axes), 0), report.count(kind, axes)
            if n != m:
                wrong.append(f"{_counted(m, kind)} over {_show(axes)}, and {n} expected")
        return wrong

    return faults


def at_most(size: Size, kind: str | None = None, axes: Axes | None = None) -> Contract:
    """All executions of these collectives in a call have at most `size` bytes together.

    **Arguments:**

    - `size`: the number of bytes, or a text such as `"64 MiB"`.
    - `kind`, `axes`: as in `Report.bytes`.

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
    limit = _bytes(size)

    def faults(report: Report) -> list[str]:
        found = report.bytes(kind, axes)
        if found <= limit:
            return []
        what = _what(kind, axes)
        return [f"{what}: {readable(found)} in a call, and at most {readable(limit)} expected"]

    return faults


def never(
    kind: str | None = None,
    axes: Axes | None = None,
    *,
    above: Size = 0,
    in_loops: bool = False,
    inserted: bool = False,
) -> Contract:
    """No collective of this kind over exactly these axes.

    **Arguments:**

    - `kind`, `axes`: as in `Report.count`.
    - `above`: only collectives with more bytes, such as `"1 MiB"`.
    - `in_loops`: only collectives in the body of a loop.
    - `inserted`: only collectives that the partitioner has inserted.

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
    limit = _bytes(above)

    def faults(report: Report) -> list[str]:
        return [
            f"{_text(c)}, and none expected" + (f" above {readable(limit)}" if limit else "")
            for c in report.among(kind, axes)
            if c.bytes > limit and (c.loops or not in_loops) and (c.inserted or not inserted)
        ]

    return faults


def memory(**limits: Size) -> Contract:
    """The program needs at most this much memory on each device.

    **Arguments:**

    - `limits`: sizes, by the attributes of [`mylib.ProgramMemory`][]:
        `memory(temporaries="400 MiB")`.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        x = mylib.filter_shard(np.ones((8, 8), np.float32), P("data"), mesh=mesh)
        report = mylib.audit(jax.jit(jnp.sum), x)
        report.expect(mylib.contracts.memory(arguments="32 B"))
        ```
    """
    allowed = {name: _bytes(size) for name, size in limits.items()}

    def faults(report: Report) -> list[str]:
        if report.memory is None:
            return ["the memory is unknown: audit the compiled program, not its text"]
        wrong: list[str] = []
        for name, limit in allowed.items():
            found = getattr(report.memory, name)
            if found > limit:
                wrong.append(f"{name}: {readable(found)}, and at most {readable(limit)} expected")
        return wrong

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
        arrays = _arrays_of(report, argument)
        over = [axis] if axis is not None else list(report.axes)
        parts = {p.path: _parts(report, p, over) for p in arrays}
        share = sum(p.bytes * parts[p.path] / _size(report, over) for p in arrays)
        held = sum(p.bytes for p in arrays)
        if held <= share * (1 + within):
            return []
        whole = [p for p in arrays if parts[p.path] < _size(report, over)]
        return [
            f"{p.path} {list(p.shape)} is not sharded over {_show(over)}: "
            f"{_size(report, over) // parts[p.path]} devices hold the same {readable(p.bytes)}"
            for p in sorted(whole, key=lambda p: -p.bytes)[:10]
        ]

    return faults


def data_parallel(axis: str, *, argument: str | None = None) -> Contract:
    """Each device has the whole model and a part of the batch. Only gradients are communicated over
    `axis`, and they are summed once.

    **Arguments:**

    - `axis`: the mesh axis of the batch.
    - `argument`: the name of the argument that is the model; by default the first.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        w = mylib.filter_shard(np.ones((64, 64), np.float32), P(), mesh=mesh)
        x = mylib.filter_shard(np.ones((64, 64), np.float32), P("data"), mesh=mesh)

        @mylib.filter_jit(out_shardings=P(), mesh=mesh)
        def gradient(w, x):
            return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

        report = mylib.audit(gradient, w, x)
        report.expect(mylib.contracts.data_parallel("data"))
        ```
    """

    def faults(report: Report) -> list[str]:
        wrong = _only(report, axis, ("all-reduce",))
        return [*wrong, *_gradients(report, axis, argument, ("all-reduce",))]

    return faults


def fsdp(axis: str, *, argument: str | None = None, largest: Size | None = None) -> Contract:
    """The model is sharded over `axis`. Its weights are gathered where they are used, and gradients
    are reduce-scattered; for the gradient of an embedding, devices may exchange the rows of the
    batch (an all-to-all in the backward pass).

    **Arguments:**

    - `axis`: the mesh axis.
    - `argument`: the name of the argument that is the model; by default the first.
    - `largest`: the largest result of an all-gather, such as `"64 MiB"`. Without it, gathering the
        whole model at once passes.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1)
        kept = mylib.rules.fsdp("data")
        make = mylib.filter_jit(eqx.nn.Linear, out_shardings=kept, mesh=mesh)
        layer = make(256, 256, key=jax.random.key(0))
        x = mylib.filter_shard(np.ones((64, 256), np.float32), P("data"), mesh=mesh)

        @mylib.filter_jit(out_shardings=kept, mesh=mesh)
        def gradient(layer, x):
            def loss(layer):
                layer = mylib.fully_shard(layer, eqx.nn.Linear, kept, mesh=mesh)
                return jnp.mean(jax.vmap(layer)(x) ** 2)

            return eqx.filter_grad(loss)(layer)

        report = mylib.audit(gradient, layer, x)
        report.expect(mylib.contracts.fsdp("data", largest="256 KiB"))
        ```
    """
    limit = None if largest is None else _bytes(largest)

    def faults(report: Report) -> list[str]:
        wrong = list(sharded(argument, axis=axis)(report))
        exchanged = [c for c in report.among("all-to-all", axis) if _is_of_embedding(c)]
        wrong += _only(report, axis, ("all-gather", "reduce-scatter", "all-reduce"), exchanged)
        # Each of them sums the gradient of one array, from as many rows as there are examples.
        largest_array = max(_whole_sizes(report, axis, argument))
        summed = sum(
            min(_size_of(report, axis) * c.bytes, largest_array)
            for c in exchanged
            if c.primitive == names.SCATTER_ADD
        )
        wrong += _gradients(report, axis, argument, ("reduce-scatter",), summed)
        weights = _whole(report, axis, argument)
        gathered = _half_precision * report.bytes("all-gather", axis)
        if gathered < 0.9 * weights:
            wrong.append(
                f"{readable(gathered)} are gathered over {axis}, less than the weights' "
                f"{readable(weights)}: something else is moved instead"
            )
        summed = report.bytes("all-reduce", axis)
        if summed > 0.1 * weights + _FEW:
            wrong.append(
                f"{readable(summed)} are all-reduced over {axis}: whole gradients, or activations"
            )
        for c in report.among("all-gather", axis):
            if limit is not None and c.bytes > limit:
                wrong.append(f"{_text(c)}, and at most {readable(limit)} at once expected")
        return wrong

    return faults


def tensor_parallel(
    axis: str, *, argument: str | None = None, forward: int | None = None
) -> Contract:
    """Tensor parallelism as in Megatron: pairs of layers are sharded over `axis`. Activations are
    summed over it after each pair, and no weight is communicated.

    **Arguments:**

    - `axis`: the mesh axis of the layers.
    - `argument`: the name of the argument that is the model; by default the first.
    - `forward`: how often activations are summed in the forward pass: in a transformer twice per
        block.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1, model=2)
        model = {"up": np.ones((64, 256)), "down": np.ones((256, 64))}
        divided = {"up": P(None, "model"), "down": P("model")}
        model = mylib.filter_shard(model, divided, mesh=mesh)
        x = mylib.filter_shard(np.ones((512, 64)), P("data"), mesh=mesh)

        @mylib.filter_jit(out_shardings=P("data"), mesh=mesh)
        def predict(model, x):
            return jnp.tanh(x @ model["up"]) @ model["down"]

        report = mylib.audit(predict, model, x)
        report.expect(mylib.contracts.tensor_parallel("model", forward=1))
        ```
    """

    def faults(report: Report) -> list[str]:
        wrong = list(sharded(argument, axis=axis)(report))
        wrong += _only(report, axis, ("all-reduce",))
        root = _root(report, argument)
        for c in report.among(None, axis):
            moved = [path for path in c.arrays if _first(path) == root]
            if moved:
                wrong.append(f"{_text(c)}: a weight, {moved[0]}, and only activations expected")
        if forward is not None:
            found = sum(
                times_of(c)
                for c in report.among("all-reduce", axis)
                if c.phase in ("forward", "") and c.bytes > _FEW
            )
            if found != forward:
                wrong.append(
                    f"activations are summed {found} times over {axis} in the forward pass, and "
                    f"{forward} expected"
                )
        return wrong

    return faults


def two_d(data: str, model: str, *, argument: str | None = None) -> Contract:
    """FSDP and tensor parallelism: the model is sharded over two axes. Its weights are gathered
    over `data`, and activations are summed over `model`.

    **Arguments:**

    - `data`, `model`: the two mesh axes.
    - `argument`: the name of the argument that is the model; by default the first.

    **Returns:**

    A contract.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1, model=2)
        pair = {"layers.0.*": P("model"), "layers.1.weight": P(None, "model")}
        used = mylib.rules.by_path(pair) | mylib.rules.replicated()
        kept = used & mylib.rules.fsdp("data")
        make = mylib.filter_jit(eqx.nn.MLP, out_shardings=kept, mesh=mesh)
        model = make(256, 256, 512, 1, key=jax.random.key(0))
        x = mylib.filter_shard(np.ones((64, 256), np.float32), P("data"), mesh=mesh)

        @mylib.filter_jit(out_shardings=kept, mesh=mesh)
        def gradient(model, x):
            def loss(model):
                model = mylib.fully_shard(
                    model, eqx.nn.Linear, kept, used, mesh=mesh
                )
                return jnp.mean(jax.vmap(model)(x) ** 2)

            return eqx.filter_grad(loss)(model)

        report = mylib.audit(gradient, model, x)
        report.expect(mylib.contracts.two_d("data", "model"))
        ```
    """

    def faults(report: Report) -> list[str]:
        wrong = list(fsdp(data, argument=argument)(report))
        return [*wrong, *tensor_parallel(model, argument=argument)(report)]

    return faults


def _is_of_embedding(c: Collective) -> bool:
    """Whether it exchanges rows of a batch for the gradient of an embedding, or then the gradient's
    columns for rows.
    """
    return c.phase == "backward" and not c.loops and c.primitive in _OF_EMBEDDINGS


_OF_EMBEDDINGS = (names.SCATTER_ADD, names.CONSTRAINT)
# Bytes that may be summed over any axis, for losses and similar values.
_FEW = 4096
# Weights may be sent in half of their own precision.
_half_precision = 2


def _only(
    report: Report, axis: str, kinds: Sequence[str], besides: Sequence[Collective] = ()
) -> list[str]:
    """Faults of collectives of other kinds over the axis."""
    return [
        f"{_text(c)}, and only {' and '.join(kinds)} expected over {axis}"
        for c in report.collectives
        if axis in _over(c) and c.bytes > _FEW and c.kind not in kinds and c not in besides
    ]


def _gradients(
    report: Report, axis: str, argument: str | None, kinds: Sequence[str], besides: int = 0
) -> list[str]:
    """The fault if the bytes summed over the axis are not those of the model. At most `besides`
    bytes of gradients may be summed in another way.
    """
    weights = _whole(report, axis, argument)
    summed = sum(
        # An unknown number of small sums, such as those of losses, doesn't matter.
        (c.times or 0 if c.bytes <= _FEW else times_of(c)) * c.bytes
        for c in report.collectives
        if c.kind in kinds and axis in _over(c)
    )
    named = " and ".join(kinds)
    if _half_precision * (summed + besides) < 0.9 * weights:
        return [
            f"{readable(summed)} are summed by {named} over {axis}, and the gradients have "
            f"{readable(weights)}: not all of them are summed"
        ]
    if summed > 1.1 * _half_precision * weights + _FEW:
        return [
            f"{readable(summed)} are summed by {named} over {axis}, and the gradients have only "
            f"{readable(weights)}"
        ]
    return []


def _whole(report: Report, axis: str, argument: str | None) -> int:
    """The bytes of an argument if it were not sharded over an axis."""
    return sum(_whole_sizes(report, axis, argument))


def _whole_sizes(report: Report, axis: str, argument: str | None) -> list[int]:
    return [p.bytes * _parts(report, p, [axis]) for p in _arrays_of(report, argument)]


def _arrays_of(report: Report, argument: str | None) -> list[Parameter]:
    root = _root(report, argument)
    found = [p for p in report.parameters if _first(p.path) == root]
    if not found:
        raise ValueError(f"{report.name} uses no array of an argument {root!r}")
    return found


def _root(report: Report, argument: str | None) -> str:
    if argument is not None:
        return argument
    if not report.parameters:
        raise ValueError(f"{report.name} has no arguments")
    return _first(report.parameters[0].path)


def _first(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _parts(report: Report, p: Parameter, over: Sequence[str]) -> int:
    """The number of parts that these axes split it into."""
    if p.axes is None:
        raise AuditError(f"the sharding of {p.path} is unknown: audit the compiled program")
    sizes = {axis: _size_of(report, axis) for axis in over}
    return math.prod(size for axis, size in sizes.items() if axis in p.axes)


def _size(report: Report, axes: Sequence[str]) -> int:
    return math.prod(_size_of(report, axis) for axis in axes)


def _size_of(report: Report, axis: str) -> int:
    if axis not in report.axes:
        raise ValueError(f"the mesh has no axis {axis!r}: it has {', '.join(report.axes)}")
    return report.axes[axis]


def _names(axes: Axes) -> tuple[str, ...]:
    return tuple(sorted((axes,) if isinstance(axes, str) else axes))


def _over(c: Collective) -> tuple[str, ...]:
    return tuple(sorted(c.axes or ("?",)))


def _show(axes: Sequence[str]) -> str:
    return ", ".join(axes)


def _what(kind: str | None, axes: Axes | None) -> str:
    return (kind or "all collectives") + (f" over {_show(_names(axes))}" if axes else "")


def _counted(n: int, kind: str) -> str:
    return f"{n} {kind}" + ("s" if n != 1 and not kind.endswith("s") else "")


def _text(c: Collective) -> str:
    what = what_of([c])
    where = "".join([f" of {what}" if what else "", f" at {c.source}" if c.source else ""])
    loop = " in a loop" if c.loops else ""
    return f"{c.kind} over {_show(_over(c))}{where}{loop}: {readable(c.bytes)}"


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(size: Size) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"([\d.]+) ?([kKMG]?i?B)", size)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{size!r} is not a size: write '64 MiB', or a number of bytes")
    return round(float(match[1]) * _UNITS[match[2]])
