"""`by_matrix` does what the transform does on one device, sends what must be sent, and refuses what
it can't do.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from optimisers import HOLDING, muon, shampoo, soap
from training import compare, difference, random_like, run

import mylib
from mylib.rules import fsdp

EIGHT = mylib.make_mesh(data=8)
TWO_AXES = mylib.make_mesh(data=4, model=2)
KEPT = fsdp("data", min_size=1)
ROWS_AND_COLUMNS = P("data", "model")
EVEN = [(16, 24)] * 8
UNEVEN = {"many": [(16, 24)] * 10, "few": [(8, 8)] * 3, "bias": (5,)}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def of_matrices(transform):
    """An optimiser of matrices alone, as those of the tests are; others are scaled."""
    labels = lambda tree: jax.tree.map(lambda x: "it" if x.ndim == 2 else "scale", tree)  # noqa: E731
    return optax.multi_transform({"it": transform, "scale": optax.scale(0.5)}, labels)


def split_matrices(leaf):
    return ROWS_AND_COLUMNS if leaf.ndim == 2 else P()


@pytest.mark.everyday("muon-even-rows", "soap-uneven-rows", "muon-uneven-both")
@pytest.mark.parametrize(
    ("kept", "over", "mesh"),
    [
        pytest.param(KEPT, None, EIGHT, id="rows"),
        pytest.param(split_matrices, None, TWO_AXES, id="both"),
        pytest.param(P(), ("data", "model"), TWO_AXES, id="replicated"),
        pytest.param(KEPT, ("data", "model"), TWO_AXES, id="hybrid"),
    ],
)
@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(muon(), id="muon"),
        pytest.param(muon(adaptive=True, nesterov=False), id="adaptive"),
        pytest.param(soap(), id="soap"),
        pytest.param(shampoo(), id="shampoo"),
        pytest.param(optax.adamw(1e-2), id="adamw"),
        pytest.param(optax.scale_by_factored_rms(min_dim_size_to_factor=4), id="factored"),
    ],
)
def test_the_same_as_on_one_device(transform, shapes, kept, over, mesh):
    transform = of_matrices(transform)
    assert max(compare(transform, random_like(shapes), kept, over=over, mesh=mesh)) < 1e-12


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(optax.contrib.muon(1e-2, weight_decay=0.1), id="muon"),
        pytest.param(
            optax.multi_transform({"a": muon(), "b": optax.sgd(0.1)}, ["a", "b", *"ababab"]),
            id="labels",
        ),
        pytest.param(optax.masked(muon(), [True, False, *[True] * 6]), id="mask"),
        pytest.param(
            optax.inject_hyperparams(lambda lr: optax.chain(muon(), optax.scale(lr)))(lr=0.1),
            id="hyperparameters",
        ),
        pytest.param(
            optax.chain(muon(), optax.scale_by_schedule(optax.linear_schedule(0, 1, 5))),
            id="schedule",
        ),
    ],
)
def test_what_is_put_inside(transform):
    """Weights of one shape with other labels are updated otherwise."""
    assert max(compare(transform, random_like(EVEN), KEPT, mesh=EIGHT)) < 1e-12


def test_what_is_put_around():
    """Another optimiser may accumulate, or make it anew in each step."""
    params = random_like(EVEN)

    def around(make):
        inner = lambda lr: make(optax.chain(muon(), optax.scale(lr)))  # noqa: E731
        accumulating = optax.MultiSteps(optax.inject_hyperparams(inner)(lr=0.1), 2)
        return optax.chain(optax.clip_by_global_norm(1.0), accumulating.gradient_transformation())

    ours = around(lambda t: mylib.by_matrix(t, KEPT, mesh=EIGHT))
    updates, _ = run(ours, params, jax.jit(ours.init)(params), 4)
    plain = around(lambda t: t)
    expected, _ = run(plain, params, plain.init(params), 4)
    assert difference(updates, expected) < 1e-12


def test_other_dimensions():
    """Stacked layers are known, others are named by `matrices=`."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(
        jax.random.split(jax.random.key(0), 4)
    )
    one = optax.contrib.scale_by_muon()
    numbers = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None, tree
    )
    by_layer = mylib.by_matrix(
        optax.contrib.muon(1.0, muon_weight_dimension_numbers=numbers), KEPT, mesh=EIGHT
    )
    params = eqx.filter(layers, eqx.is_array)
    updates, _ = by_layer.update(params, by_layer.init(params), params)
    for x, update in zip(params.weight, updates.weight, strict=True):
        expected, _ = one.update(x, one.init(x))
        assert difference(update, -expected) < 1e-6
    # Heads behind the rows: [D, H, K] is a matrix of D rows.
    heads = random_like([(24, 4, 8)] * 3)
    flat = [x.reshape(24, 32) for x in heads]
    plain = muon()
    ours = mylib.by_matrix(plain, KEPT, mesh=EIGHT, matrices=lambda leaf: ((), 0, (1, 2)))
    updates, _ = run(ours, heads, ours.init(heads), 2)
    expected, _ = run(plain, flat, plain.init(flat), 2)
    assert difference([x.reshape(24, 32) for x in updates], expected) < 1e-12


def test_a_shape_that_nothing_explains():
    optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT)
    with pytest.raises(mylib.PlacementError, match="which of the 3 dimensions") as error:
        optim.init({"w": jnp.ones((4, 8, 8))})
    assert "['w'] (4, 8, 8)" in str(error.value) and "((0,), (1,), (2,))" in str(error.value)
    wrong = mylib.by_matrix(muon(), KEPT, mesh=EIGHT, matrices=lambda leaf: (0, 0, 1))
    with pytest.raises(mylib.PlacementError, match="each of the 3 dimensions once"):
        wrong.init({"w": jnp.ones((4, 8, 8))})


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), muon()),
            r"update of \[0\] depends on the gradient of \[1\] \(clip_by_global_norm\): .*chain",
        ),
        (optax.apply_if_finite(muon(), 3), r"of \[0\] depends .*\(apply_if_finite\)"),
        (optax.contrib.prodigy(1.0), r"of \[0\] depends .*\(prodigy\)"),
        (
            optax.chain(optax.add_noise(0.1, 0.5, 0), muon()),
            "draws random numbers at .*put that part of it outside",
        ),
    ],
)
def test_refused(transform, says):
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    with pytest.raises(ValueError, match=says):
        optim.init(random_like(EVEN))


def test_a_state_that_depends_on_several_weights_is_refused():
    def init(params):
        return jnp.zeros(())

    def update(grads, state, params=None):
        norm = sum(jnp.sum(x) for x in jax.tree.leaves(grads))
        return grads, state + norm

    optim = mylib.by_matrix(optax.GradientTransformation(init, update), KEPT, mesh=EIGHT)
    with pytest.raises(
        ValueError, match=r"the state's  ?depends on several weights \(\[0\], \[1\]"
    ):
        optim.init(random_like(EVEN))


def test_a_state_that_is_no_tree_of_the_weights_is_refused():
    def init(params):
        return [jnp.zeros_like(x) for x in jax.tree.leaves(params)]

    def update(grads, state, params=None):
        leaves, tree = jax.tree.flatten(grads)
        state = [0.9 * m + g for m, g in zip(state, leaves, strict=True)]
        return tree.unflatten([m @ m.T @ m if m.ndim == 2 else m for m in state]), state

    optim = mylib.by_matrix(optax.GradientTransformation(init, update), KEPT, mesh=EIGHT)
    with pytest.raises(ValueError, match=r"isn't at the weight's place .* but at \[0\]"):
        optim.init({"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))})
    with pytest.raises(ValueError, match=r"isn't at the weight's place .* but at \[0\]"):
        optim.init({"a": jnp.ones((8, 8)), "b": jnp.ones(8)})


def sent(shapes, kept, mesh, over=None, **options):
    """The bytes that a device sends in an update, over those that must be sent: its gradients to
    their owners, and its part of the updates back.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )
    targets = mylib.resolve(params, kept, mesh=mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, targets
    )
    optim = mylib.by_matrix(muon(), kept, over, mesh=mesh, **options)
    made = jax.jit(optim.init).lower(params).compile()
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optim.init, params),
        made.output_shardings,
    )
    report = mylib.audit(jax.jit(lambda g, s: optim.update(g, s)), params, state)
    assert {x.kind for x in report.collectives} <= {"all-to-all", "all-gather"}
    specs = str([x.spec for x in jax.tree.leaves(targets)])
    n = int(np.prod([mesh.shape[axis] for axis in mesh.axis_names if axis in specs]))
    own = sum(4 * x.size / n for x in jax.tree.leaves(params))
    must = 2 * own * (n - 1) / n
    return sum(x.wire_bytes * x.times for x in report.collectives) / must


@pytest.mark.parametrize(
    ("shapes", "kept", "mesh", "options", "most"),
    [
        pytest.param([(64, 64)] * 8, KEPT, EIGHT, {}, 1.0, id="one axis"),
        pytest.param([(64, 64)] * 8, ROWS_AND_COLUMNS, TWO_AXES, {}, 1.0, id="tensor parallel"),
        pytest.param([(64, 64)] * 8, P("data"), TWO_AXES, {}, 1.0, id="hybrid"),
        pytest.param(
            [(64, 64)] * 8, P("data"), TWO_AXES, {"over": ("data", "model")}, 0.84,
            id="hybrid, both",
        ),
        pytest.param([(64, 64)] * 10, KEPT, EIGHT, {}, 1.6, id="10 on 8"),
        pytest.param([(64, 64)] * 3, KEPT, EIGHT, {}, 8 / 3, id="3 on 8"),
        pytest.param(
            [(16, 64, 64)], P("data"), EIGHT, {"matrices": lambda leaf: (0, 1, 2)}, 0.0,
            id="experts",
        ),
        pytest.param(
            [(8, 64, 64)], P(None, "data"), EIGHT, {"matrices": lambda leaf: (0, 1, 2)}, 1.0,
            id="a stack",
        ),
    ],
)  # fmt: skip
def test_bytes(shapes, kept, mesh, options, most):
    assert sent(shapes, kept, mesh, **options) == pytest.approx(most, abs=0.01)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU of 0.10 drops barriers early")
def test_one_shape_after_the_other():
    """So that the whole matrices of one are there at a time."""

    def temporaries(shapes):
        params = mylib.filter_shard(random_like(shapes), KEPT, mesh=EIGHT)
        optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT)
        update = jax.jit(optim.update).lower(params, jax.jit(optim.init)(params))
        return update.compile().memory_analysis().temp_size_in_bytes

    one = [(128, 256)] * 8
    four = [*one, *[(128, 264)] * 8, *[(136, 256)] * 8, *[(136, 264)] * 8]
    assert temporaries(four) < 1.3 * temporaries(one) < temporaries(one * 4)


def test_sent_in_another_dtype():
    """XLA's compiler for the CPU sends bfloat16 as float32, so the program is read before it."""
    params = random_like(EVEN)
    optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT, dtype=jnp.bfloat16)
    text = jax.jit(optim.update).lower(params, jax.jit(optim.init)(params)).as_text()
    lines = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(lines) == 2 and all("bf16>) -> " in line for line in lines)
    updates, _ = optim.update(params, optim.init(params))
    expected, _ = muon().update(params, muon().init(params))
    assert 0 < difference(updates, expected) < 0.05


def test_branches_stay_branches():
    """A count that isn't stacked keeps `cond` a branch, so that bases are renewed now and then."""
    params = random_like(EVEN)
    optim = mylib.by_matrix(soap(every=10), KEPT, mesh=EIGHT)
    state = jax.jit(optim.init)(params)
    text = jax.jit(optim.update).lower(params, state).compile().as_text()
    branches = [line for line in text.splitlines() if " conditional(" in line]
    assert len(branches) == 1
    assert all(x.shape == () for x in jax.tree.leaves(state.shared))


def test_one_device_is_the_transform_itself():
    params, mesh = random_like(UNEVEN), mylib.make_mesh(data=1, devices=jax.devices()[:1])
    transform = of_matrices(muon())
    ours = mylib.by_matrix(transform, KEPT, mesh=mesh)
    assert jax.tree.structure(ours.init(params)) == jax.tree.structure(transform.init(params))
    updates, _ = run(ours, params, ours.init(params), 2)
    expected, _ = run(transform, params, transform.init(params), 2)
    assert difference(updates, expected) == 0


@pytest.mark.parametrize("kept", [P("data"), P("data", "model")])
def test_explicit_axes(kept):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = random_like(EVEN)
        assert max(compare(muon(), params, kept)) < 1e-12


def test_eagerly():
    params = mylib.filter_shard(random_like(UNEVEN), KEPT, mesh=EIGHT)
    transform = of_matrices(muon())
    ours = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    updates, _ = ours.update(params, ours.init(params), params)
    expected, _ = transform.update(params, transform.init(params), params)
    assert difference(updates, expected) < 1e-12


@pytest.mark.everyday("4")
@pytest.mark.parametrize("devices", [6, 4, 3])
def test_a_checkpoint_for_any_number_of_devices(devices):
    """It is read part by part, as of a file."""
    params, transform = random_like(UNEVEN), of_matrices(soap())
    chained = lambda t: optax.chain(t, optax.scale(-1.0))  # noqa: E731
    expected, plain = run(chained(transform), params, chained(transform).init(params), 5)
    ours = chained(mylib.by_matrix(transform, KEPT, mesh=EIGHT))
    placed = mylib.filter_shard(params, KEPT, mesh=EIGHT)
    _, state = run(ours, placed, ours.init(placed), 3)
    saved = mylib.by_matrix.to_plain(state)
    assert jax.tree.structure(saved) == jax.tree.structure(plain)
    paths = jax.tree_util.tree_flatten_with_path(saved)[0]
    file = {jax.tree_util.keystr(path): np.asarray(x) for path, x in paths}
    fewer = mylib.make_mesh(data=devices, devices=jax.devices()[:devices])
    there = chained(mylib.by_matrix(transform, KEPT, mesh=fewer))
    placed = mylib.filter_shard(params, KEPT, mesh=fewer)
    like = eqx.filter_eval_shape(there.init, placed)
    shapes = eqx.filter_eval_shape(mylib.by_matrix.to_plain, like)
    read = lambda leaf, index: file[leaf.name][index]  # noqa: E731
    loaded = mylib.filter_load(shapes, KEPT, read, mesh=fewer)
    updates, state = run(there, placed, mylib.by_matrix.from_plain(loaded, like), 2, start=3)
    assert difference(updates, expected) < 1e-12
    assert difference(mylib.by_matrix.to_plain(state), plain) < 1e-12
    weight = next(
        x for x in jax.tree.leaves(mylib.by_matrix.to_plain(state)) if x.shape == (16, 24)
    )
    assert not weight.sharding.is_fully_replicated


def test_a_state_that_is_moved_away_is_told():
    params = mylib.filter_shard(random_like(EVEN), KEPT, mesh=EIGHT)
    optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT)
    moved = mylib.filter_shard(optim.init(params), P(), mesh=EIGHT)
    step = mylib.filter_jit(lambda grads, state: optim.update(grads, state))
    with pytest.warns(mylib.errors.PlacementWarning, match=r"state\.stacks.*P\(\) instead of"):
        step(params, moved)


def test_what_else_is_refused():
    with pytest.raises(ValueError, match="a tree of arrays"):
        mylib.by_matrix(muon(), KEPT, mesh=EIGHT).init([jnp.ones((8, 8)), "text"])
    sharded = mylib.filter_shard([jnp.ones((8, 8))], KEPT, mesh=EIGHT)
    for optim in (mylib.by_matrix(muon(), None, mesh=EIGHT), mylib.by_matrix(muon(), None)):
        with pytest.raises(
            mylib.PlacementError, match=r"where it is kept(.|\n)*None is for a step"
        ):
            optim.init(sharded)
    with pytest.raises(ValueError, match=r"over=\('dta',\): .* has no axis 'dta'"):
        mylib.by_matrix(muon(), KEPT, "dta", mesh=EIGHT).init(sharded)


def test_a_step_of_fsdp_holds_its_contract():
    """Also the state of what is no matrix is sharded like its weight."""
    optim = mylib.by_matrix(optax.contrib.muon(1e-3), KEPT, mesh=EIGHT)
    model = eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))
    model = mylib.filter_shard(model, KEPT, mesh=EIGHT)
    state = optim.init(eqx.filter(model, eqx.is_array))

    @mylib.filter_jit(in_shardings={"batch": P("data")}, out_shardings=(KEPT, None), mesh=EIGHT)
    def step(batch, model, state):
        def loss(model):
            model = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=EIGHT)
            return jnp.mean(jax.vmap(model)(batch) ** 2)

        grads = eqx.filter_grad(loss)(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    report = mylib.audit(step, np.ones((32, 64), np.float32), model, state)
    report.expect(mylib.contracts.fsdp("data", argument="model"))
    # Three matrices of one shape in one group, and one all-to-all each way, as they are written.
    sent = report.among("all-to-all", "data")
    assert [(x.scope, x.inserted, x.times) for x in sent] == [("by_matrix", False, 1)] * 2


def test_stacked_layers_in_a_scan():
    """With FSDP, moments in another dtype, and all that is replaced donated."""
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))
    layers = make(jax.random.split(jax.random.key(0), 8))
    transform = optax.chain(muon(mu_dtype=jnp.bfloat16), optax.scale(-0.1))

    def trained(optim, layers, sharded=lambda layers: layers, **options):
        def loss(weights, batch):
            turn = lambda x, layer: (jnp.tanh(jax.vmap(layer)(x)), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(turn, batch, sharded(weights))[0] ** 2)

        @mylib.filter_jit(**options)
        def step(batch, layers, state):
            grads = eqx.filter_grad(loss)(layers, batch)
            grads = eqx.tree_at(lambda x: x.bias, grads, None)
            updates, state = optim.update(grads, state)
            return eqx.apply_updates(layers, updates), state

        state = optim.init(eqx.tree_at(lambda x: x.bias, layers, None))
        for _ in range(3):
            layers, state = step(np.ones((16, 32)), layers, state)
        return layers.weight

    ours = trained(
        mylib.by_matrix(transform, KEPT, mesh=EIGHT),
        mylib.filter_shard(layers, KEPT, mesh=EIGHT),
        lambda x: mylib.fully_shard(x, eqx.nn.Linear, KEPT, mesh=EIGHT),
        in_shardings={"batch": P("data")},
        out_shardings=(KEPT, None),
        mesh=EIGHT,
        donate=("layers", "state"),
    )

    def each_alone():
        # Each matrix is an array of its own.
        apart = lambda tree: jax.tree.map(lambda x: tuple(x), tree)  # noqa: E731

        def update(grads, state, params=None):
            updates, state = transform.update(apart(grads), state)
            return jax.tree.map(lambda x, new: jnp.stack(new), grads, updates), state

        return optax.GradientTransformation(lambda params: transform.init(apart(params)), update)

    expected = trained(each_alone(), layers)
    assert difference([ours], [expected]) < 1e-3
    assert difference([ours], [layers.weight]) > 0.05


def test_flops():
    """Of a device, over an eighth of one device's alone."""
    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    kept = mylib.filter_shard(shapes, KEPT, mesh=EIGHT)
    optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT)
    reports = [
        mylib.audit(jax.jit(x.update), params, eqx.filter_eval_shape(x.init, params))
        for x, params in ((optim, kept), (muon(), shapes))
    ]
    ours, alone = (sum(report.work.flops.values()) for report in reports)
    assert 8 * ours == pytest.approx(alone, rel=0.01)


def test_padding_is_a_matrix():
    """Zeros in its place would be divided by zero."""

    def update(grads, state, params=None):
        made = jax.tree.map(lambda x: x / jnp.linalg.norm(x), grads)
        return made, made

    transform = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    params = random_like([(16, 24)] * 3)
    _, state = optim.update(params, optim.init(params))
    ((stack,),) = state.stacks
    assert stack.shape == (8, 16, 24) and np.isfinite(stack).all()


@pytest.mark.parametrize("name", HOLDING)
def test_transforms_that_differ_only_in_what_they_hold(name):
    make = HOLDING[name]
    transform = optax.partition({"a": make(1.0), "b": make(100.0)}, ["a", "b", "a"])
    params = random_like([(16, 24)] * 3)
    state = mylib.by_matrix(transform, KEPT, mesh=EIGHT).init(params)
    # Callbacks and derivative rules are other objects in each trace, and may hold anything.
    groups = [1, 1, 1] if name in ("callback", "rule") else [2, 1]
    assert [len(update.group.numbers) for update in state.layout.updates] == groups
    # Callbacks of eight devices wait for each other on machines with few cores.
    if name != "callback":
        assert max(compare(transform, params, KEPT, mesh=EIGHT)) < 1e-9


def test_labels_with_equal_transforms_have_their_own_hyperparameters():
    def make():
        return optax.inject_hyperparams(lambda lr: optax.chain(muon(), optax.scale(lr)))(lr=0.1)

    transform = optax.partition({"a": make(), "b": make()}, ["a", "b"])
    params = random_like([(16, 24)] * 2)
    plain = transform.init(params)
    plain.inner_states["b"].inner_state.hyperparams["lr"] = jnp.asarray(0.7)
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    state = mylib.by_matrix.from_plain(plain, optim.init(params))
    updates, _ = run(optim, params, state, 2)
    assert difference(updates, run(transform, params, plain, 2)[0]) < 1e-12


def test_hyperparameters_have_the_dtypes_of_the_optimiser_itself():
    """Each group sees its own weights, and none of another label's."""
    make = optax.inject_hyperparams(lambda lr: optax.chain(muon(), optax.scale(lr)))
    transform = optax.partition({"a": make(lr=0.1), "b": make(lr=0.2)}, ["a", "b"])
    params = [x.astype("bfloat16") for x in random_like([(16, 24)] * 2)]
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    state, plain = optim.init(params), transform.init(params)
    saved = mylib.by_matrix.to_plain(state)
    types = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]  # noqa: E731
    assert types(saved) == types(plain) and difference(saved, plain) == 0
    assert types(mylib.by_matrix.from_plain(saved, state)) == types(state)
    mixed = [params[0], params[1].astype("float32")]
    optim = mylib.by_matrix(make(lr=0.1), KEPT, mesh=EIGHT)
    with pytest.raises(
        ValueError, match=r"of \[0\] is float32 beside .*, and bfloat16 alone: .*hyperparam_dtype"
    ):
        optim.init(mixed)


def test_numbers_of_muon_that_a_matrix_does_not_have():
    numbers = optax.contrib.MuonDimensionNumbers
    stack = {"a": jnp.ones((3, 32, 8)), "b": jnp.ones((8, 8))}
    dims = lambda leaf: (0, 1, 2) if leaf.ndim == 3 else mylib.rules.PASS  # noqa: E731
    wrong = {"a": numbers(1, 2), "b": numbers()}
    for given in (wrong, lambda tree: wrong):
        optim = optax.contrib.muon(1.0, muon_weight_dimension_numbers=given)
        with pytest.raises(ValueError, match=r"give MuonDimensionNumbers\(0, 1\).* of \['a'\] at"):
            mylib.by_matrix(optim, KEPT, mesh=EIGHT, matrices=dims).init(stack)
    for given in (numbers(), {"a": numbers(-2, -1), "b": None}):
        optim = optax.contrib.muon(1.0, muon_weight_dimension_numbers=given)
        mylib.by_matrix(optim, KEPT, mesh=EIGHT, matrices=dims).init(stack)


def test_a_state_for_weights_of_other_shapes():
    params, turned = {"w": jnp.ones((16, 24))}, {"w": jnp.ones((24, 16))}
    optim = mylib.by_matrix(muon(), KEPT, mesh=EIGHT)
    state = optim.init(params)
    with pytest.raises(ValueError, match=r"plain\.mu\['w'\] is of shape \(24, 16\) .* \(16, 24\)"):
        mylib.by_matrix.from_plain(muon().init(turned), state)
    with pytest.raises(ValueError, match=r"anew, by init\(params\): updates\['w'\] is of shape"):
        optim.update(turned, state)
    with pytest.raises(ValueError, match=r"anew, by init\(params\): params\['w'\] is None"):
        optim.update(params, state, {"w": None})
    with pytest.raises(ValueError, match=r"updates is a dict with keys \['v'\] instead of .*'w'"):
        optim.update({"v": jnp.ones((16, 24))}, state)
    with pytest.raises(ValueError, match=r"plain\.mu is a dict with keys \['v'\] instead of"):
        mylib.by_matrix.from_plain(muon().init({"v": params["w"]}), state)


def like_the_weights():
    """Updates in the weights' dtypes, without their values."""
    cast = lambda updates, state, params: (  # noqa: E731
        jax.tree.map(lambda x, p: x.astype(p.dtype), updates, params),
        state,
    )
    return optax.chain(muon(), optax.GradientTransformation(optax.init_empty_state, cast))


def widened():
    return optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda x: x.astype(float), updates)),
        optax.trace(0.9),
        muon(),
    )


@pytest.mark.parametrize("count", [8, 3])
@pytest.mark.parametrize("transform", [muon(), like_the_weights(), widened()])
@pytest.mark.parametrize(
    ("grads", "weights"),
    [
        (["bfloat16"], "float32"),
        (["float32"], "bfloat16"),
        (["float64"], "float32"),
        (["float32", "float64"], "float64"),
    ],
)
def test_dtypes_are_those_of_the_transform(grads, weights, transform, count):
    params = [x.astype(weights) for x in random_like([(16, 24)] * count)]
    given = [x.astype(grads[i % len(grads)]) for i, x in enumerate(params)]
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    updates, state = optim.update(given, optim.init(params), params)
    expected, plain = transform.update(given, transform.init(params), params)
    types = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]  # noqa: E731
    assert types(updates) == types(expected)
    if len(grads) == 1:
        assert types(mylib.by_matrix.to_plain(state)) == types(plain)
    assert difference(updates, expected) < (0.02 if "bfloat16" in grads else 1e-5)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (optax.contrib.reduce_on_plateau(), "reduce_on_plateau"),
        (optax.chain(muon(), optax.contrib.momo()), "momo"),
        (optax.polyak_sgd(), "scale_by_polyak"),
    ],
)
def test_a_required_keyword(transform, name):
    optim = mylib.by_matrix(transform, KEPT, mesh=EIGHT)
    with pytest.raises(ValueError, match=rf"keyword outside, `optax\.chain.*{name}.*'value'"):
        optim.init(random_like(EVEN))


def test_an_optimiser_that_was_not_called():
    for wrong in (optax.contrib.muon, "muon"):
        with pytest.raises(TypeError, match=r"takes an optimiser: call muon\(\.\.\.\)"):
            mylib.by_matrix(wrong, KEPT)


@pytest.mark.parametrize("empty", [(0, 8), (0, 8, 8), (8, 0)])
def test_leaves_without_elements(empty):
    params = {"a": jnp.zeros(empty), "b": jnp.ones((16, 8))}
    dims = lambda leaf: (0, 1, 2) if leaf.ndim == 3 else mylib.rules.PASS  # noqa: E731
    options = {"mesh": EIGHT, "matrices": dims}
    assert max(compare(optax.trace(0.9), params, P(), over="data", **options)) < 1e-12
    if empty == (0, 8):  # Optax divides by the number of rows
        optim = mylib.by_matrix(optax.contrib.muon(1.0), P(), "data", **options)
        with pytest.raises(ValueError, match=r"leave \['a'\] out of the tree"):
            optim.init(params)


def labels(tree):
    """Adam for an embedding, and for what is no matrix."""
    return jax.tree.map(lambda x: "muon" if x.shape == (64, 64) else "adam", tree)


def both(muon, adam):
    return optax.partition({"muon": muon, "adam": adam}, labels)


@pytest.mark.parametrize("outs", ["rule", "none"])
@pytest.mark.parametrize("inside", [True, False])
def test_beside_adam_in_one_state(inside, outs):
    """`kept` is right for the whole state, and what need not be whole stays where it is."""
    adam = optax.scale_by_adam()
    optim = (
        mylib.by_matrix(both(muon(), adam), KEPT, mesh=EIGHT)
        if inside
        else both(mylib.by_matrix(muon(), KEPT, mesh=EIGHT), adam)
    )
    shapes = {"embedding": (256, 64), "layers": [(64, 64)] * 8, "bias": (64,)}
    params = mylib.filter_shard(random_like(shapes), KEPT, mesh=EIGHT)
    of_state = KEPT if outs == "rule" else None
    state = mylib.filter_jit(optim.init, out_shardings=KEPT, mesh=EIGHT)(params)
    options = {"out_shardings": (KEPT, of_state), "mesh": EIGHT}
    step = mylib.filter_jit(lambda g, s: optim.update(g, s), **options)
    report = mylib.audit(step, params, state)
    assert {x.scope for x in report.collectives} == {"by_matrix"}
    must = 2 * 8 * 64 * 64 * 7 / 64
    assert report.wire_bytes() == pytest.approx(8 * must, rel=0.01)
    updates, new = step(params, state)
    expected, plain = both(muon(), adam).update(params, both(muon(), adam).init(params))
    assert difference(updates, expected) < 1e-12
    assert difference(mylib.by_matrix.to_plain(new), plain) < 1e-12
    if of_state is not None:
        spots = zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in spots)
        whole = sum(x.nbytes for x in jax.tree.leaves(plain))
        assert sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(new)) < whole / 7
    step(updates, new)  # without a warning


def test_rules_leave_a_state_alone_wherever_it_is():
    params = mylib.filter_shard(random_like(EVEN), KEPT, mesh=EIGHT)
    state = mylib.by_matrix(muon(), KEPT, mesh=EIGHT).init(params)
    tree = {"weights": random_like(EVEN), "state": (1, [state])}
    placed = mylib.filter_shard(tree, KEPT, mesh=EIGHT)
    assert placed["weights"][0].sharding.num_devices == 8
    pairs = zip(jax.tree.leaves(placed["state"]), jax.tree.leaves(tree["state"]), strict=True)
    assert all(x is y for x, y in pairs)
    assert mylib.resolve(tree, KEPT, mesh=EIGHT)["state"][1][0].stacks == ((None,),)
