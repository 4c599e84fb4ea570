"""Contracts about whole strategies: each gradient is followed from where it is made to where it is
used. They judge what is sent; whether the numbers are right, `mylib.testing.verify` judges.
"""

from collections.abc import Iterator, Sequence

from ..._core.text import show_bytes
from ..audit import Contract, Report, times_of
from .judged import SUMMING, Judged, Moved
from .roles import axes_of
from .text import Size, Violation, bytes_in, lines, text_of


def data_parallel(
    axis: str, *, argument: str | None = None, pieces: int = 1, activations: Size = 0
) -> Contract:
    """Each device has the whole model and a part of the batch. The gradient of each trained weight
    is sent once over `axis`, and nothing else is communicated but single numbers.

    **Arguments:**

    - `axis`: the mesh axis of the batch.
    - `argument`: the name of the argument that is the model; by default the first.
    - `pieces`: how often each gradient may be summed in a call, if it is accumulated over pieces of
        the batch and summed for each of them. Sums that XLA:CPU writes into a loop don't count.
    - `activations`: how much else may be moved in a call, such as `"64 KiB"` for the statistics of
        a batch.

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
    limit = bytes_in(activations)
    return lambda report: lines(_of_data_parallel(Judged(report, axis, argument), pieces, limit))


def fsdp(
    axis: str,
    *,
    argument: str | None = None,
    largest: Size | None = None,
    pieces: int | None = None,
    activations: Size = 0,
) -> Contract:
    """The model and its optimiser's state are sharded over `axis`. Each layer's weights are
    gathered where they are used, and gradients are reduce-scattered; for the gradient of an
    embedding, devices may exchange the rows of the batch (if they gather them, `activations` is the
    limit).

    **Arguments:**

    - `axis`: the mesh axis.
    - `argument`: the name of the argument that is the model; by default the first.
    - `largest`: the largest result of an all-gather, such as `"64 MiB"`.
    - `pieces`: how often each gradient may be summed in a call, if it is accumulated over pieces of
        the batch; by default any number of times.
    - `activations`: how much else may be moved in a call, such as `"64 KiB"` for the statistics of
        a batch.

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
    most = None if largest is None else bytes_in(largest)
    limit = bytes_in(activations)

    def faults(report: Report) -> list[str]:
        judged = Judged(report, axis, argument)
        return lines(_of_fsdp(judged, judged.roles.weights, pieces, most, limit))

    return faults


def tensor_parallel(
    axis: str,
    *,
    argument: str | None = None,
    forward: int | None = None,
    activations: Size = 0,
) -> Contract:
    """Tensor parallelism as in Megatron: pairs of layers are sharded over `axis`. Activations are
    summed over it after each pair, or reduce-scattered and gathered before the next (sequence
    parallelism), and no weight is communicated.

    **Arguments:**

    - `axis`: the mesh axis of the layers.
    - `argument`: the name of the argument that is the model; by default the first.
    - `forward`: how often activations are summed in the forward pass: in a transformer twice per
        block, and once more if the table of its embedding is sharded.
    - `activations`: how much of them may be moved in a call in other ways, such as `"64 KiB"`.

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
    limit = bytes_in(activations)
    return lambda report: lines(_of_tensor_parallel(Judged(report, axis, argument), forward, limit))


def two_d(
    data: str,
    model: str,
    *,
    argument: str | None = None,
    pieces: int | None = None,
    activations: Size = 0,
) -> Contract:
    """FSDP and tensor parallelism: the model is sharded over two axes. Its weights are gathered
    over `data`, and activations are summed over `model`. Tables that are looked up in may be
    replicated.

    **Arguments:**

    - `data`, `model`: the two mesh axes.
    - `argument`: the name of the argument that is the model; by default the first.
    - `pieces`, `activations`: as in `mylib.contracts.fsdp`.

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

    limit = bytes_in(activations)

    def faults(report: Report) -> list[str]:
        judged = Judged(report, data, argument)
        violations = list(_of_fsdp(judged, judged.multiplied, pieces, None, limit))
        return lines(
            [*violations, *_of_tensor_parallel(Judged(report, model, argument), None, limit)]
        )

    return faults


def _of_data_parallel(judged: Judged, pieces: int, limit: int) -> Iterator[Violation]:
    axis, report = judged.axis, judged.report
    for number in judged.roles.weights:
        if axis in axes_of(report.parameters[number]):
            text = f"sharded over {axis}, and each device should have all of it"
            yield judged.fault(number, text)
    yield from judged.without_data()
    yield from _of_results(judged, judged.roles.weights, pieces)
    for m in judged.moved:
        if m.role == "weight":
            text = f"moved by {text_of(m.c)}, and each device should have all weights"
            yield Violation(m.names, text)
    yield from _bounded(judged, limit)


def _of_results(judged: Judged, kept: Sequence[int], pieces: int | None) -> Iterator[Violation]:
    """What holds of all strategies: a gradient is sent, and summed once; and what is `kept` comes
    back as it was given.
    """
    yield from judged.gradients()
    yield from judged.maxima()
    yield from judged.resharded(kept)
    yield from judged.repeated(pieces)


def _bounded(judged: Judged, limit: int) -> Iterator[Violation]:
    yield from judged.bounded([m for m in judged.moved if judged.is_activation(m)], limit)


def _of_fsdp(
    judged: Judged, weights: Sequence[int], pieces: int | None, most: int | None, limit: int
) -> Iterator[Violation]:
    """`weights` are those that must be sharded."""
    yield from judged.unsharded(weights)
    yield from judged.state()
    yield from judged.without_data()
    yield from _of_results(judged, [*judged.roles.weights, *judged.roles.state], pieces)
    yield from judged.ungathered()
    yield from judged.held()
    for m in judged.moved:
        if reason := _wrong_in_fsdp(judged, m, most):
            yield Violation(m.names, f"{text_of(m.c)}, and {reason}")
    yield from _bounded(judged, limit)


def _wrong_in_fsdp(judged: Judged, m: Moved, most: int | None) -> str:
    """Why a collective that moves weights or gradients is wrong, or nothing."""
    kind = m.c.kind
    if m.role == "weight":
        # The TPU's compiler gathers small arrays by a sum of what is zero elsewhere.
        if kind == "all-gather" or (kind == "all-reduce" and m.c.inserted is not False):
            large = most is not None and m.array.bytes > most
            return f"at most {show_bytes(most or 0)} at once expected" if large else ""
        return "" if judged.is_statistic(m) else "weights should be gathered"
    # XLA sums gradients that are no products whole: those of tables, biases and norms.
    whole = m.role == "gradient" and kind == "all-reduce" and judged.is_of_product(m)
    return "gradients should be reduce-scattered" if whole and judged.is_of_split(m) else ""


def _of_tensor_parallel(judged: Judged, forward: int | None, limit: int) -> Iterator[Violation]:
    axis = judged.axis
    yield from judged.unsharded(judged.multiplied)
    yield from judged.state()
    yield from _of_results(judged, [*judged.roles.weights, *judged.roles.state], None)
    for m in judged.moved:
        if reason := _wrong_in_tensor_parallel(judged, m):
            yield Violation(m.names, f"{text_of(m.c)}, and {reason}")
    moved = [m for m in judged.moved if m.role in ("activation", "result")]
    # Megatron's sequence parallelism gathers what it has scattered.
    others = [m for m in moved if m.c.kind not in SUMMING and not judged.is_of_scattered(m)]
    yield from judged.bounded(others, limit)
    forwards = [m for m in moved if judged.completes(m) and judged.is_forward(m)]
    sums = sum(times_of(m.c) for m in forwards)
    if forward is not None and sums != forward:
        yield Violation(
            (),
            f"activations are summed {sums} times over {axis} in the forward pass, and {forward} "
            "expected",
        )


def _wrong_in_tensor_parallel(judged: Judged, m: Moved) -> str:
    """Why a collective that moves weights or gradients over the axis of the layers is wrong, or
    nothing.
    """
    if m.role == "weight":
        return "" if judged.is_statistic(m) else "weights should stay where they are"
    # What is summed may also be an activation of which rows are added to a table.
    is_sum = m.role != "gradient" or m.c.kind in SUMMING
    if is_sum or judged.is_part(m) or not judged.is_of_split(m):
        return ""
    return "gradients of sharded weights should stay where they are"
