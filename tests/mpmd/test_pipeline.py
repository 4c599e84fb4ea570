"""Pipelines over the simulated devices of one process, against the same model on one device."""

import functools
import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from models import Block

import mylib
from mylib import mpmd

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WIDTH, VOCAB, LENGTH, ROWS, MICROBATCHES = 16, 32, 4, 16, 4
KEY = jax.random.key(0)
FSDP = mylib.rules.fsdp("data", min_size=1)


def meshes_of(count, model=1, kind=AUTO):
    """Meshes that share no devices."""
    devices = np.array(jax.devices()).reshape(count, -1, model)
    return [Mesh(x, ("data", "model"), axis_types=(kind, kind)) for x in devices]


def schedules(stages, meshes, microbatches=MICROBATCHES):
    if stages == meshes:
        yield mpmd.gpipe(stages, microbatches)
        yield mpmd.one_f_one_b(stages, microbatches)
        yield mpmd.zero_bubble(stages, microbatches)
    else:
        yield mpmd.interleaved(meshes, microbatches, stages // meshes)


def placed(stages, meshes, placement=FSDP):
    return [
        mylib.filter_device_put(stage, placement, mesh=meshes[s % len(meshes)])
        for s, stage in enumerate(stages)
    ]


def whole(stages, loss, x, y):
    """The loss and the gradients of the model that is not cut, on one device."""

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(stages):
        return loss(functools.reduce(lambda x, stage: stage(x), stages, x), y)

    return run(stages)


def check(result, reference, stages, rtol=1e-6):
    """In every process: the values, which are fetched, and where each of them is."""
    (value, grads), (expected, expected_grads) = result, reference
    assert float(mpmd.fetch(value)) == pytest.approx(float(expected), rel=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    params = eqx.filter(stages, eqx.is_inexact_array)
    trees = grads, mpmd.fetch(grads), expected_grads, params
    for grad, fetched, wanted, param in zip(*map(jax.tree.leaves, trees), strict=True):
        assert np.linalg.norm(fetched - wanted) <= rtol * (np.linalg.norm(wanted) + 1e-3)
        assert grad.sharding == param.sharding and grad.dtype == param.dtype
        assert mpmd.is_remote(grad) == mpmd.is_remote(param)


class Dense(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    scale: float

    def __init__(self, key):
        self.weight = jax.random.normal(key, (WIDTH, WIDTH)) / 4
        self.bias = jnp.zeros(WIDTH)
        self.scale = 0.5

    def __call__(self, x):
        return x + self.scale * jnp.tanh(x @ self.weight + self.bias)


def dense(count):
    return [Dense(key) for key in jax.random.split(KEY, count)]


def square(prediction, y):
    return jnp.mean((prediction - y) ** 2)


def numbers(rows=ROWS):
    x, y = np.random.default_rng(0).normal(size=(2, rows, WIDTH)).astype(np.float32)
    return x, y


def on(mesh, x, spec=None):
    return mylib.filter_device_put(x, P("data") if spec is None else spec, mesh=mesh)


def small(stages, schedule, *, model=1, kind=AUTO, placement=FSDP, **options):
    """A pipeline of dense layers: how it is called, and what should come out."""
    meshes, given = meshes_of(schedule.meshes, model, kind), dense(stages)
    x, y = numbers()
    here = placed(given, meshes, placement)
    pipe = mpmd.pipeline(here, square, schedule=schedule, **options)
    last = schedule.mesh_of(stages - 1)
    return pipe, (here, on(meshes[0], x), on(meshes[last], y)), whole(given, square, x, y)


class Embed(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]

    def __init__(self, key):
        keys = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.blocks = [Block(WIDTH, 2 * WIDTH, 2, key=keys[1])]

    def __call__(self, tokens):
        x = jax.vmap(jax.vmap(self.embedding))(tokens)
        return through(self.blocks, x)


class Blocks(eqx.Module):
    blocks: list[Block]

    def __init__(self, key):
        self.blocks = [Block(WIDTH, 2 * WIDTH, 2, key=key)]

    def __call__(self, x):
        return through(self.blocks, x)


class Unembed(eqx.Module):
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    weight: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.blocks = [Block(WIDTH, 2 * WIDTH, 2, key=keys[0])]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.weight = jax.random.normal(keys[1], (VOCAB, WIDTH))

    def __call__(self, x):
        return jax.vmap(jax.vmap(self.norm))(through(self.blocks, x)) @ self.weight.T


def through(blocks, x):
    for block in blocks:
        x = jax.vmap(block)(x)
    return x


def transformer(stages):
    keys = jax.random.split(KEY, stages)
    return [Embed(keys[0]), *map(Blocks, keys[1:-1]), Unembed(keys[-1])]


def cross_entropy(logits, y):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
    return -jnp.mean(picked)


def tokens():
    x = np.random.default_rng(0).integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
    return x, np.roll(x, 1, axis=1)


def check_transformer(stages, schedule, model, checkpoint):
    meshes, given = meshes_of(schedule.meshes, model), transformer(stages)
    here, (x, y) = placed(given, meshes), tokens()
    pipe = mpmd.pipeline(here, cross_entropy, schedule=schedule, checkpoint=checkpoint)
    result = pipe(here, on(meshes[0], x), on(meshes[schedule.mesh_of(stages - 1)], y))
    check(result, whole(given, cross_entropy, x, y), here)


@pytest.mark.slow
def test_of_a_transformer():
    check_transformer(2, mpmd.zero_bubble(2, MICROBATCHES), 2, False)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize(
    "schedule",
    [x for shape in ((2, 2), (4, 4), (4, 2)) for x in schedules(*shape)],
    ids=lambda x: f"{x.name} {x.stages} {x.meshes}",
)
def test_of_transformers(schedule, model, checkpoint):
    check_transformer(schedule.stages, schedule, model, checkpoint)


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [
        (mpmd.one_f_one_b(4, MICROBATCHES), False),
        (mpmd.zero_bubble(4, MICROBATCHES), True),
        (mpmd.interleaved(2, MICROBATCHES, 2), False),
        (mpmd.gpipe(1, MICROBATCHES), False),
    ],
    ids=["1F1B", "ZB-H1", "interleaved", "GPipe"],
)
@pytest.mark.everyday("interleaved")
def test_schedules(schedule, checkpoint):
    pipe, given, reference = small(schedule.stages, schedule, checkpoint=checkpoint)
    check(pipe(*given), reference, given[0])


class TestSteadyState:
    def test_nothing_is_compiled_or_allocated(self):
        pipe, given, _ = small(2, mpmd.zero_bubble(2, MICROBATCHES))
        with compilations() as found:
            x, y = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in given[1:])
            programs = pipe.compile(x, y)
            assert set(programs) == {("F", 0), ("F", 1), ("B", 1), ("W", 0), ("W", 1)}
            # Zeros, forward, backward and weight passes. The first stage has no backward pass:
            # nobody waits for the cotangent of the batch.
            assert len(found) == 7
            gc.collect()  # arrays of other tests, that would be freed in between
            alive = [self.alive(pipe(*given)) for _ in range(20)]
            assert len(found) == 7
        for each_step in zip(*alive, strict=True):
            assert max(each_step) == each_step[0]

    def alive(self, result):
        jax.block_until_ready(result)
        arrays = jax.live_arrays()
        return len(arrays), sum(x.nbytes for x in arrays)

    def test_other_batches_are_compiled_once_more(self):
        pipe, (stages, x, y), _ = small(2, mpmd.gpipe(2, MICROBATCHES))
        meshes = meshes_of(2)
        x, y = numbers(2 * ROWS)
        reference = whole(dense(2), square, x, y)
        check(pipe(stages, on(meshes[0], x), on(meshes[1], y)), reference, stages)


def test_tied_parameters():
    def tie(stages):
        return eqx.tree_at(lambda s: [s[-1].weight, s[-1].bias], stages, source(stages))

    def source(stages):
        return [stages[0].weight, stages[0].bias]

    schedule, meshes, (x, y) = mpmd.gpipe(3, 4), meshes_of(1) * 3, numbers()
    meshes = [Mesh(np.array(jax.devices()[i : i + 2]), "data") for i in (0, 2, 4)]
    given = tie(dense(3))
    here = placed(given, meshes)
    pairs = [
        (source, lambda stages: [stages[-1].weight, stages[-1].bias]),
        (lambda stages: stages[1].bias, lambda stages: stages[0].bias),
    ]
    pipe = mpmd.pipeline(here, square, schedule=schedule, tied=pairs)
    _, grads = pipe(here, x, y)
    _, expected = whole(given, square, x, y)
    weight = expected[0].weight + expected[2].weight
    bias = sum(stage.bias for stage in expected)
    for grad, total in ((grads[0], weight), (grads[2], weight)):
        np.testing.assert_allclose(grad.weight, total, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads[1].weight, expected[1].weight, rtol=1e-5, atol=1e-7)
    for stage, grad in zip(here, grads, strict=True):
        np.testing.assert_allclose(grad.bias, bias, rtol=1e-5, atol=1e-7)
        assert grad.bias.sharding == stage.bias.sharding


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_machines_that_are_not_here(machine):
    meshes = [Mesh(x, "data") for x in np.array(machine.devices).reshape(2, -1)]
    stages = eqx.filter_eval_shape(lambda: transformer(2))
    here = placed(stages, meshes)
    pipe = mpmd.pipeline(here, cross_entropy, schedule=mpmd.zero_bubble(2, MICROBATCHES))
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)
    x, y = (on(mesh, batch) for mesh in meshes)
    programs = pipe.compile(x, y)
    assert set(programs) == {("F", 0), ("F", 1), ("B", 1), ("W", 0), ("W", 1)}
    for compiled in programs.values():
        assert mylib.audit(compiled).collectives
    with pytest.raises(mylib.PlacementError, match="no array on a mesh"):
        pipe(here, x, y)


class TestPlacements:
    def test_explicit_axes(self):
        pipe, given, reference = small(2, mpmd.zero_bubble(2, 4), kind=EXPLICIT, placement=P())
        check(pipe(*given), reference, given[0])

    def test_tensor_parallelism(self):
        def split(stage):
            return P("model") if stage.name == ".bias" else P(None, "model")

        pipe, given, reference = small(2, mpmd.gpipe(2, 4), model=2, placement=split)
        check(pipe(*given), reference, given[0])

    @pytest.mark.slow
    def test_numpy_is_copied(self):
        pipe, (stages, _, _), reference = small(2, mpmd.gpipe(2, 4))
        check(pipe(stages, *numbers()), reference, stages)

    @pytest.mark.slow
    def test_other_numbers_of_devices_and_other_axes(self):
        """The second mesh can't split 4 rows over 3 devices, and the third has other axes."""
        devices, (x, y), given = np.array(jax.devices()), numbers(), dense(3)
        meshes = [Mesh(devices[:2], "data"), Mesh(devices[2:5], "data"), Mesh(devices[5:7], "x")]
        here = placed(given, meshes, P())
        seen = []

        def loss(prediction, y):
            seen.append(jax.sharding.get_abstract_mesh().axis_names)
            return square(prediction, y)

        pipe = mpmd.pipeline(here, loss, schedule=mpmd.one_f_one_b(3, 4))
        check(pipe(here, on(meshes[0], x), y), whole(given, square, x, y), here)
        assert set(seen) == {("x",)}

    def test_stages_may_name_axes_of_their_own_mesh(self):
        def constrained(layer, x):
            return mylib.filter_shard(layer(mylib.filter_shard(x, P("data"))), P("data"))

        meshes, (x, y) = meshes_of(2), numbers()
        layers = placed(dense(2), meshes)
        here = [eqx.Partial(constrained, layer) for layer in layers]
        pipe = mpmd.pipeline(here, square, schedule=mpmd.gpipe(2, 2))
        value, _ = pipe(here, on(meshes[0], x), on(meshes[1], y))
        expected, _ = whole(dense(2), square, x, y)
        assert float(value) == pytest.approx(float(expected), rel=1e-6)

    def test_all_stages_on_one_device(self):
        """To debug a pipeline."""
        mesh = Mesh(np.array(jax.devices()[:1]), "data")
        given, (x, y) = dense(2), numbers()
        here = placed(given, [mesh, mesh])
        pipe = mpmd.pipeline(here, square, schedule=mpmd.zero_bubble(2, 2))
        check(pipe(here, x, y), whole(given, square, x, y), here)


class Masked(eqx.Module):
    """Passes on a tree, in which integers and a scalar are, and has a table of integers."""

    layer: Dense
    table: jax.Array

    def __call__(self, given):
        x, mask, total = given["x"], given["mask"], given.get("total", jnp.zeros(()))
        x = jnp.where(mask[:, None] > 0, self.layer(x), x + self.table)
        return {"x": x, "mask": mask + 1 - 1, "total": total + jnp.mean(x), "name": "text"}


def test_trees_of_arrays_between_stages():
    def loss(prediction, y):
        return square(prediction["x"], y["y"]) + prediction["total"]

    meshes, (x, y) = meshes_of(2), numbers()
    given = [Masked(layer, jnp.arange(WIDTH)) for layer in dense(2)]
    here = placed(given, meshes)
    pipe = mpmd.pipeline(here, loss, schedule=mpmd.zero_bubble(2, 2))
    x, y = {"x": x, "mask": np.arange(ROWS) % 2}, {"y": y, "name": "text"}
    result = pipe(here, on(meshes[0], x), on(meshes[1], y))
    check(result, whole(given, loss, x, y), here)
    assert result[1][0].table is None


class TestErrors:
    def fails(self, *told, call=None, stages=None, schedule=None, **options):
        here = placed(dense(2), meshes_of(2)) if stages is None else stages
        with pytest.raises(mylib.PlacementError) as caught:
            schedule = schedule or mpmd.gpipe(2, 4)
            pipe = mpmd.pipeline(here, options.pop("loss", square), schedule=schedule, **options)
            assert call is not None
            call(pipe, here)
        for text in told:
            assert text in str(caught.value)
        return caught.value.faults

    def test_number_of_stages(self):
        self.fails("a pipeline of 2 stages", "'GPipe' is for 3", schedule=mpmd.gpipe(3, 4))
        self.fails(
            "a call with 1 stages",
            "made for 2",
            call=lambda pipe, here: pipe(here[:1], *numbers()),
        )

    def test_stages_that_are_not_on_one_mesh(self):
        one, other = meshes_of(2)
        first, second = dense(2)
        first = eqx.tree_at(lambda x: x.weight, on(one, first), on(other, first.weight))
        second = eqx.tree_at(lambda x: x.weight, second, np.ones((WIDTH, WIDTH)))
        faults = self.fails(
            "stages[0].bias",
            "stages[0].weight on the mesh ('data': 4, 'model': 1) of the devices [4, 5, 6, 7]",
            "stages[1].weight",
            "a NumPy array, and on no mesh",
            "stages[1].bias",
            "SingleDeviceSharding",
            stages=[first, second],
        )
        assert [x.path for x in faults] == [
            *("stages[0].bias", "stages[1].weight", "stages[1].bias", "stages[1]")
        ]

    def test_interleaved_stages_on_different_meshes(self):
        stages = placed(dense(4), meshes_of(4))
        self.fails(
            *("stages[2]", "on another mesh than stages[0]", "put both on the same mesh"),
            stages=stages,
            schedule=mpmd.interleaved(2, 4, 2),
        )

    def test_stages_without_arrays(self):
        first = placed(dense(1), meshes_of(2))[0]
        self.fails("stages[1]", "its mesh is unknown", stages=[first, jnp.tanh])
        self.fails("stages[1]", "it can't be called", stages=[first, first.weight])

    def test_batches(self):
        one, other = meshes_of(2)
        x, y = numbers()

        def call(x, y):
            return lambda pipe, here: pipe(here, x, y)

        self.fails("x (16, 16)", "it is on P('data')", call=call(on(other, x), y))
        self.fails("y['a']", "the last stage's mesh", call=call(x, {"a": on(one, y)}))
        self.fails(
            *("x (14, 16)", "can't be cut into 4 equal parts", "y (12, 16)", "it has 12 rows"),
            call=call(x[:14], y[:12]),
        )
        self.fails("x[1] ()", "it is a scalar", call=call((x, np.float32(1)), y))
        self.fails("it has no arrays", call=call(None, y))

    @pytest.mark.parametrize(
        ("loss", "told"),
        [
            (lambda p, y: (p - y) ** 2, "float32(4, 16)"),
            (lambda p, y: jnp.argmax(p), "int32()"),
            (lambda p, y: None, "no array"),
        ],
    )
    def test_losses(self, loss, told):
        self.fails(
            *("a loss", f"it returns {told}", "real scalar"),
            call=lambda pipe, here: pipe(here, *numbers()),
            loss=loss,
        )

    def test_other_stages_than_before(self):
        mesh = meshes_of(2)[1]

        def call(change):
            return lambda pipe, here: pipe([here[0], change(here[1])], *numbers())

        def at(where, value):
            return lambda stage: eqx.tree_at(where, stage, value)

        weight = jnp.ones((WIDTH, WIDTH))
        for told, change in {
            "P('data') over": at(lambda s: s.weight, on(mesh, weight, P())),
            "it was float32(16,)": at(lambda s: s.bias, on(mesh, weight)),
            "it is no array on a mesh": at(lambda s: s.bias, np.ones(WIDTH, np.float32)),
            "its static leaves are others": at(lambda s: s.scale, 0.25),
            "it was": lambda stage: eqx.Partial(stage),
        }.items():
            self.fails("stages[1]", told, call=call(change))

    def test_tied_parameters(self):
        def where(name):
            return lambda stages: getattr(stages[name == "bias"], name)

        weight, bias = where("weight"), where("bias")
        self.fails(
            "tied[0]", "float32(16, 16), and stages[1] has float32(16,)", tied=[(weight, bias)]
        )
        self.fails("tied[1]", "same array", tied=[(bias, lambda s: s[0].bias), (bias, bias)])
        self.fails(
            *("takes 1 arrays, and the second 2",),
            tied=[(bias, lambda s: [s[0].bias, s[0].weight])],
        )

    def test_inside_transformations(self):
        pipe, given, _ = small(2, mpmd.gpipe(2, 4))
        with pytest.raises(TypeError, match="can't be called inside jax.jit"):
            eqx.filter_jit(pipe)(*given)

    def test_of_stages_say_where(self):
        here = placed(dense(2), meshes_of(2))
        pipe = mpmd.pipeline(here, square, schedule=mpmd.gpipe(2, 4))
        with pytest.raises(TypeError) as caught:
            pipe(here, numbers()[0][:, :3], numbers()[1])
        assert "while stages[0] of a pipeline was traced" in caught.value.__notes__

    def test_nothing_is_traced_first(self):
        self.fails(
            "can't be cut",
            call=lambda pipe, here: pipe(here, *numbers(15)),
            loss=lambda prediction, y: pytest.fail("traced"),
        )
