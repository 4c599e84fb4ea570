"""`mylib.testing.verify`: a step on many devices against itself on one."""

import re
from pathlib import Path

import casts
import equinox as eqx
import faults_with_lines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import seeded_faults
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib._core.known_faults import KNOWN_FAULTS
from mylib._planning.verify.judge import compare
from mylib.testing import VerifyError, verify

MESH = mylib.make_mesh(data=8)
KEPT = mylib.rules.fsdp("data", min_size=0)
OPTIM = optax.adamw(1e-2)


def model():
    return eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))


def batch():
    return jax.random.normal(jax.random.key(1), (16, 8))


@mylib.filter_jit(
    in_shardings={"model": KEPT, "state": KEPT, "x": P("data")}, mesh=MESH, donate="all"
)
def train(model, state, x):
    def loss(model):
        model = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=MESH, dtype=jnp.bfloat16)
        return jnp.mean(jax.vmap(model)(x) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIM.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def step_with(optim, rows=None):
    """A step that trains with some of the rows of a batch."""

    def step(model, state, x):
        value, grads = eqx.filter_value_and_grad(loss)(model, x[:rows])
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    return step


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_a_step_that_trains():
    trained, x = model(), batch()
    state = OPTIM.init(eqx.filter(trained, eqx.is_array))
    report = verify(train, trained, state, x)
    assert not report.differs
    assert "train: 14 results agree with one device: " in str(report)
    assert report.wide is not None and max(r.difference for r in report.wide) < 1e-12
    # The reference casts as `dtype=` does.
    assert max(r.difference for r in report.own) < 1e-3
    assert not x.is_deleted()


def test_abstract_arguments_are_drawn():
    args = eqx.filter_eval_shape(
        lambda: (m := model(), OPTIM.init(eqx.filter(m, eqx.is_array)), batch())
    )
    report = verify(train, *args)
    assert min(r.largest for r in report.own) > 0


def test_integers_need_a_limit():
    @mylib.filter_jit(in_shardings={"tokens": P("data")}, mesh=MESH)
    def look_up(table, tokens):
        return table[tokens]

    shapes = jnp.ones((32, 4)), jax.ShapeDtypeStruct((16,), jnp.int32)
    with pytest.raises(TypeError, match=r"high=.* \[1\] int32\[16\]"):
        verify(look_up, *shapes)
    assert not verify(look_up, *shapes, high=32).differs


@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 32))],
)
def test_a_fault_is_found(seed):
    result = seeded_faults.look(seed, MESH)
    assert result is None or result[0] == "line", result


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_casts_hide_no_fault_and_are_none(seed, wrong):
    good, text = casts.look(seed, wrong)
    assert good, text


EVERYDAY = "mean_of_own_rows", "late_in_a_scan", "mask_inverted"


class TestLines:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(x, marks=() if x in EVERYDAY else pytest.mark.slow)
            for x in faults_with_lines.FAULTS
        ],
    )
    def test_none_is_wrong(self, name):
        kind, line = faults_with_lines.look(name)
        assert kind == ("unknown" if name in faults_with_lines.UNKNOWN else "right"), line

    def test_few_are_unknown(self):
        assert len(faults_with_lines.FAULTS) >= max(40, 8 * len(faults_with_lines.UNKNOWN))


def test_equal_rows_are_rounded_alike():
    """What they differ by adds up, as in a batch of zeros."""

    @mylib.filter_jit(in_shardings=(None, P("data")), mesh=MESH)
    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    for seed in range(2):
        rng = np.random.default_rng(seed)
        w, row = (rng.normal(size=size).astype(np.float32) for size in ((32, 64), (1, 32)))
        assert not verify(gradient, w, np.tile(row, (32768, 1))).differs


def test_products_without_elements():
    assert not verify(lambda x: (x[:0] @ x.T, jnp.sum(x)), batch()).differs


@pytest.mark.parametrize("fill", [float(jnp.finfo(jnp.float32).min), -1e30])
@pytest.mark.parametrize("times", [2, -1])
def test_each_number_has_its_own_rounding(fill, times):
    def masked(x, w):
        return jnp.where(x > 0, x @ w, fill)

    @mylib.filter_jit(in_shardings=(P("data"), None), mesh=MESH)
    def wrong(x, w):
        return jnp.where(x > 0, times * (x @ w), fill)

    with pytest.raises(VerifyError, match="numbers off by up to"):
        verify(wrong, batch(), jnp.ones((8, 8)), reference=masked)


def test_dtypes_of_results_are_compared():
    with pytest.raises(VerifyError, match=r"the result, for float32\[16, 8\] bfloat16\[16, 8\]"):
        verify(lambda x: x.astype(jnp.bfloat16), batch(), reference=lambda x: x)


def test_what_is_captured_is_rounded():
    table = jax.random.normal(jax.random.key(0), (32, 64))

    @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    def step(tokens):
        return jnp.sum(table[tokens]) - jnp.sum(table[tokens][::-1])

    assert not verify(step, jnp.arange(16) % 7).differs


def test_what_is_captured_keeps_its_dtype():
    table = jax.random.normal(jax.random.key(0), (8, 8))
    shards = mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    (product,) = verify(shards(lambda x: jnp.sum(x @ table)), batch()).wide
    (of_two,) = verify(shards(lambda x: jnp.sum(x @ (table @ table))), batch()).wide
    assert product.rounding < 1e-12 and 1e-12 < of_two.rounding < 1e-3


def test_copies_that_differ():
    @jax.jit
    def different(x):
        def part(x):
            return jnp.sum(x) + jax.lax.axis_index("data").astype(x.dtype)

        # A sum that is said to be equal everywhere, and is not.
        return jax.shard_map(part, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)(x)

    with pytest.raises(VerifyError, match="differ") as error:
        verify(different, jnp.ones(8), reference=jnp.sum)
    assert error.value.report.replicas


class TestReference:
    def test_jaxs_own_constraints_need_one(self):
        @jax.jit
        def constrained(x):
            return jax.lax.with_sharding_constraint(2 * x, NamedSharding(MESH, P("data")))

        with pytest.raises(TypeError, match=r"test_verify.py:\d+.*reference="):
            verify(constrained, jnp.ones(8))
        assert not verify(constrained, jnp.ones(8), reference=lambda x: 2 * x).differs

    def test_a_program_for_each_device(self):
        @mylib.filter_shard_map(mesh=MESH, in_specs=P("data"), out_specs=P())
        def mean(x):
            return jax.lax.pmean(jnp.mean(x), "data")

        with pytest.raises(NameError) as error:
            verify(mean, batch())
        assert "reference=" in str(error.value)
        assert not verify(mean, batch(), reference=jnp.mean).differs

        @mylib.filter_shard_map(mesh=MESH, in_specs=P("data"), out_specs=P())
        def total(x):
            return jax.lax.psum(jnp.mean(x), "data")

        with pytest.raises(VerifyError, match="total: 1 of 1 result differs"):
            verify(total, batch(), reference=jnp.mean)

    def test_other_results(self):
        with pytest.raises(TypeError, match="its reference returns"):
            verify(lambda x: (x, x), batch(), reference=lambda x: x)


def test_what_wraps_a_step_is_a_part_of_it():
    def loss(model, x):
        return jnp.mean(jax.vmap(model)(mylib.filter_shard(x, P("data"), mesh=MESH)) ** 2)

    report = verify(eqx.filter_value_and_grad(loss), model(), batch())
    assert not report.differs and len(report.own) == 5


class TestPlan:
    @staticmethod
    def step(x, model):
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    @pytest.mark.parametrize("machine", [pytest.param(None, marks=pytest.mark.slow), "h100 x 4"])
    def test_verifies_itself(self, machine):
        plan = mylib.plan(self.step, batch(), model(), machine=machine, compile=0)
        report = plan.verify()
        assert report.name == "step" and not report.differs
        drawn = plan.verify(seed=1).own[-1].largest
        given = plan.verify(batch(), model()).own[-1].largest
        assert len({report.own[-1].largest, drawn, given}) == 3

    @pytest.mark.slow
    def test_with_whole_matrices(self):
        optim = mylib.by_matrix(optax.contrib.muon(1e-2), None)
        shapes = eqx.filter_eval_shape(
            lambda: (m := model(), optim.init(eqx.filter(m, eqx.is_array)), batch())
        )
        plan = mylib.plan(step_with(optim), *shapes, axes={"data": 8}, compile=0)
        # Muon's coefficients are in its state, and random ones make large weights.
        assert all(r.difference < 1e-12 * max(1, r.largest) for r in plan.verify().wide)

    def test_read_from_text_it_has_no_step(self):
        plan = mylib.plan(self.step, batch(), model(), compile=0)
        saved = mylib.Plan.of(plan.as_text(), layers=plan.layers)
        assert saved == plan
        with pytest.raises(mylib.errors.PlanError, match=r"verify\(plan.jit\(step\)"):
            saved.verify(batch(), model())
        assert not verify(saved.jit(self.step), batch(), model()).differs

    def test_a_machine_with_more_devices_than_are_here(self):
        args = jax.ShapeDtypeStruct((64, 8), jnp.float32), model()
        plan = mylib.plan(self.step, *args, machine="h100 x 64", compile=0)
        with pytest.raises(ValueError, match="64 devices.*there are 8"):
            plan.verify()


def test_a_callback():
    """It runs in a thread of XLA's, which must know of float64, too."""

    @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    def step(x):
        y = jax.pure_callback(np.asarray, jax.typeof(x), x, vmap_method="expand_dims")
        return jnp.sum(y**2)

    x = jax.random.normal(jax.random.key(0), (16, 8))
    assert verify(step, x).wide
    assert jnp.ones(1).dtype == jnp.float32
    with jax.enable_x64(True):
        verify(step, x)
    assert jnp.ones(1).dtype == jnp.float32


def test_gradients_of_integers():
    @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    def step(x, counts):
        return jax.grad(lambda x, n: jnp.sum(x * n), (0, 1), allow_int=True)(x, counts)

    assert len(verify(step, jnp.ones((16, 8)), jnp.arange(16)[:, None]).own) == 1


def test_numbers_that_one_device_has_not_either():
    @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    def logs(x):
        return jnp.log(x), jnp.sin(x)

    assert "(NaN or infinite on one device, too: [0])" in str(verify(logs, batch()))


def test_no_number_at_all():
    """A fault would hide behind it."""

    @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
    def masked(x):
        scores = jnp.where(x > 0, x, jnp.finfo(x.dtype).min).astype(jnp.float8_e4m3fn)
        return jnp.sum(scores.astype(x.dtype)), jnp.arange(8)

    with pytest.raises(ValueError, match="masked returns no finite number, also on one device"):
        verify(masked, batch())


def test_what_float64_breaks_is_compared_in_its_own_dtypes():
    def step(x):
        # In float64 the carry would change its type.
        return jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(8, jnp.float32), x)[0]

    report = verify(step, batch())
    assert report.wide is None and "not compared in float64" in str(report)


class Attention(eqx.Module):
    """The gradient of its keys' bias is zero, and its rounding is not."""

    queries: eqx.nn.Linear
    keys: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.queries, self.keys = [eqx.nn.Linear(8, 8, key=key) for key in keys]

    def __call__(self, x):
        scores = jax.vmap(self.queries)(x) @ jax.vmap(self.keys)(x).T
        return jax.nn.softmax(scores) @ x


class TestOptimisersThatTakeSigns:
    """They make whole steps of the rounding of a gradient near zero."""

    def test_only_where_rounding_turns_a_sign_around(self):
        want, other_run, same, many = np.ones((4, 100))
        other_run[50:60], same[52:55], many[:55] = -1, -1, -1
        (found,) = compare(["a"], [same], [want], [[other_run]])
        assert not found.differs and found.difference == 2
        (found,) = compare(["a"], [many], [want], [[other_run]])
        assert found.differs and str(found) == (
            "a float64[100]: 50 numbers off by up to 2, where the largest number is 1; rounding "
            "explains 0"
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["sign_sgd", "lion", "adam"])
    def test_rounding_is_no_fault_and_faults_are_found(self, name):
        optim = getattr(optax, name)(1e-2)
        options = {"in_shardings": (None, None, P("data")), "mesh": MESH}
        step = mylib.filter_jit(step_with(optim), **options)
        args = Attention(), optim.init(eqx.filter(Attention(), eqx.is_array))
        for seed in range(3):
            x = jax.random.normal(jax.random.key(seed), (16, 4, 8))
            assert not verify(step, *args, x).differs
        # As if the rows of one device of 8 were left out.
        short = mylib.filter_jit(step_with(optim, rows=14), **options)
        with pytest.raises(VerifyError) as error:
            verify(short, *args, x, reference=step.__wrapped__)
        wrong = {x.name for x in error.value.report.wide if x.differs}
        assert {"[0].queries.weight", "[0].keys.weight"} <= wrong


@pytest.mark.slow
def test_steps_of_by_matrix():
    optim = mylib.by_matrix(optax.contrib.muon(1e-2), KEPT, mesh=MESH, dtype=jnp.bfloat16)
    step = mylib.filter_jit(step_with(optim), in_shardings=(KEPT, None, P("data")), mesh=MESH)
    trained = mylib.filter_shard(model(), KEPT, mesh=MESH)
    state = optim.init(eqx.filter(trained, eqx.is_array))
    for args in (trained, state), eqx.filter_eval_shape(lambda: (trained, state)):
        report = verify(step, *args, batch())
        assert max(r.difference for r in report.wide) < 1e-12
        assert max(r.difference for r in report.own) < 1e-1


def test_known_faults_of_compilers_are_named():
    @mylib.filter_jit(in_shardings=(None, P("data")), mesh=mylib.make_mesh(data=4, model=2))
    def gradient(layer, x):
        return eqx.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(x) ** 2))(layer)

    layer = eqx.nn.Conv2d(8, 8, 3, padding=1, groups=2, key=jax.random.key(0))
    told = "a known fault: XLA's gradient of a convolution's weights is wrong"
    with pytest.raises(VerifyError, match=told):
        verify(gradient, layer, jax.random.normal(jax.random.key(1), (16, 8, 8, 8)))


def test_the_page_has_all_known_faults():
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    rows = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)
    for fault in KNOWN_FAULTS:
        assert f"| {fault.what}" in rows and all(x in rows for x in fault.versions), fault.what
