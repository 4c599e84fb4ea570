"""`ReplicatedWarning`: all devices compute the same."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._core.products import Products, products_in
from mylib._training.advice import replicated
from mylib._training.jit import dispatcher

MESH = mylib.make_mesh(data=8)
ROWS = mylib.rules.batch("data")
FSDP = mylib.rules.fsdp("data", min_size=1)
WHOLE = jax.NamedSharding(MESH, P())
BATCH = np.ones((64, 32), np.float32)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Programs that compile fast have few products."""
    monkeypatch.setattr(replicated, "_FEW", 1)


def model_at(placement):
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    return mylib.filter_shard(model, placement, mesh=MESH)


def steps():
    """Each time others: a function is told once."""

    def step(model, batch):
        grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(batch) ** 2))(model)
        return eqx.apply_updates(model, grads)

    def gathered(model, batch):
        def loss(model):
            model = mylib.fully_shard(model, eqx.nn.Linear, FSDP, mesh=MESH)
            return jnp.sum(jax.vmap(model)(batch) ** 2)

        return eqx.apply_updates(model, eqx.filter_grad(loss)(model))

    def in_a_scan(model, batch):
        def turn(x, _):
            return jax.vmap(model)(x), None

        return jax.lax.scan(turn, batch, None, length=8, unroll=4)[0]

    return {"step": step, "gathered": gathered, "in_a_scan": in_a_scan}


def told(f, *args, calls=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            f(*args)
    return [str(w.message) for w in caught if w.category is mylib.errors.ReplicatedWarning]


class TestIsTold:
    @pytest.mark.parametrize("name", ["step", "in_a_scan"])
    def test_a_numpy_batch(self, name):
        (text,) = told(mylib.filter_jit(steps()[name]), model_at(P()), BATCH)
        assert f"{name}: all 8 devices compute the same" in text
        assert "as batch is a NumPy array, which is not placed. Write in_shardings=" in text
        assert "{'batch': mylib.rules.batch('data')}" in text

    def test_a_batch_that_is_whole(self):
        whole = jax.device_put(BATCH, WHOLE)
        (text,) = told(mylib.filter_jit(lambda batch: batch @ batch.T), whole)
        assert "batch is replicated on all devices" in text

    def test_a_batch_of_jax_that_is_not_placed(self):
        (text,) = told(mylib.filter_jit(steps()["step"]), model_at(P()), jnp.asarray(BATCH))
        assert "batch is not placed" in text

    @pytest.mark.parametrize("donate", ["none", ("model",)], ids=["none", "donated"])
    def test_nothing_is_compiled_for_it(self, donate):
        """JAX still has the program that the call compiled."""
        f, model = mylib.filter_jit(steps()["step"], donate=donate), model_at(P())
        before = dispatcher._counts.compiled
        assert len(told(f, model, BATCH, calls=1)) == 1
        assert dispatcher._counts.compiled == before + 1

    def test_is_told_once_a_function(self):
        f = mylib.filter_jit(steps()["step"])
        model = model_at(P())
        assert len(told(f, model, BATCH)) == 1
        assert told(f, model, BATCH[:32]) == []


class TestIsNotTold:
    def test_of_weights_that_are_split(self):
        """XLA divides the products as the weights are, though the batch is whole."""
        assert told(mylib.filter_jit(steps()["gathered"]), model_at(FSDP), BATCH) == []

    @pytest.mark.parametrize("name", ["gathered", "in_a_scan"])
    def test_of_a_batch_that_is_split(self, name):
        model, fun = model_at(FSDP if name == "gathered" else P()), steps()[name]
        placing = mylib.filter_jit(fun, in_shardings={"batch": ROWS}, mesh=MESH)
        assert told(placing, model, BATCH) == []
        assert told(mylib.filter_jit(fun), model, mylib.filter_shard(BATCH, ROWS, mesh=MESH)) == []

    def test_of_tensor_parallelism(self):
        model = eqx.nn.MLP(32, 32, 64, 1, use_bias=False, key=jax.random.key(0))
        rule = mylib.rules.tensor_parallel("data", column=["layers[0]"], row=["layers[1]"])
        model = mylib.filter_shard(model, rule, mesh=MESH)
        assert told(mylib.filter_jit(steps()["step"]), model, BATCH) == []

    def test_on_one_device(self):
        model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
        assert told(mylib.filter_jit(steps()["step"]), model, BATCH) == []

    def test_of_what_no_axis_divides(self):
        whole = jax.device_put(np.ones((9, 9)), WHOLE)
        assert told(mylib.filter_jit(lambda x: x @ x.T), whole) == []

    def test_of_a_function_for_each_device(self):
        f = mylib.filter_shard_map(
            lambda x: x @ x.T, mesh=MESH, in_specs=P("data"), out_specs=P("data")
        )
        assert told(f, BATCH) == []

    def test_of_few_products(self, monkeypatch):
        monkeypatch.undo()
        assert told(mylib.filter_jit(steps()["step"]), model_at(P()), BATCH) == []

    def test_of_other_work(self):
        def f(x):
            for _ in range(40):
                x = jnp.sin(x)
            return x @ x.T

        assert told(mylib.filter_jit(f), jax.device_put(BATCH[:8], WHOLE)) == []


class TestProducts:
    """As many as are computed, by hand."""

    @staticmethod
    def of(f, *args, each_turn=True):
        return products_in(jax.jit(f).trace(*args).jaxpr, each_turn)

    def test_of_a_product(self):
        found = self.of(jnp.matmul, jnp.ones((2, 3, 5)), jnp.ones((2, 5, 7)))
        assert found.products == 2 * 3 * 5 * 7

    @pytest.mark.parametrize(("each_turn", "times"), [(True, 6), (False, 2)])
    def test_of_a_loop(self, each_turn, times):
        def f(x):
            return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=6, unroll=2)[0]

        assert self.of(f, jnp.ones((4, 4)), each_turn=each_turn)[:2] == (times * 64, times * 64)

    def test_of_a_condition(self):
        def f(x):
            return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

        assert self.of(f, jnp.ones((4, 4))).products == 2 * 64

    def test_of_a_convolution(self):
        x, w = jnp.ones((2, 3, 8)), jnp.ones((5, 3, 3))
        one = self.of(lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME"), x, w)
        assert one.products == 2 * 5 * 3 * (8 * 3 - 2)

        def loss(x, w):
            return jnp.sum(jax.lax.conv_general_dilated(x, w, (2,), "SAME"))

        both = self.of(jax.grad(loss, (0, 1)), x, w)
        # Not the forward one, which nothing uses.
        assert both.products == 2 * 2 * 5 * 3 * (4 * 3 - 1)

    def test_of_calls(self):
        @jax.jit
        def two(x):
            return x @ x, x @ x @ x

        def f(x):
            return two(x)[0] + two(x)[0] + jax.checkpoint(lambda x: two(x)[1])(x)

        assert self.of(f, jnp.ones((4, 4))).products == 4 * 64

    def test_of_at_most_so_many(self):
        f = jax.jit(lambda x: jax.jit(lambda x: x @ x)(x) @ x).trace(jnp.ones((4, 4))).jaxpr
        assert products_in(f, True, at_most=2 * 64) == Products(2 * 64)
        assert products_in(f, True, at_most=2 * 64 - 1) is None

    def test_of_all_devices(self):
        f = jax.shard_map(lambda x: x @ x.T, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        assert self.of(f, jnp.ones((16, 4))).products == 8 * 2 * 2 * 4

    def test_of_what_is_unknown(self):
        def f(x):
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x)

        assert self.of(f, jnp.ones((4, 4))) is None
        assert self.of(lambda x: x + 1, jnp.ones(3)) == Products(0, 0, 3)


def test_audit_says_how_much_each_device_does():
    model, x = model_at(P()), mylib.filter_shard(BATCH, ROWS, mesh=MESH)
    report = mylib.audit(steps()["step"], model, x)
    assert report.share == pytest.approx(1 / 8)
    assert "  each device does 1/8 of the products" in str(report).splitlines()
    assert "1/8 of the products" in report._repr_html_()
    whole = mylib.audit(
        mylib.filter_jit(steps()["step"]), model, mylib.filter_shard(BATCH, P(), mesh=MESH)
    )
    assert "  each device does all of the products" in str(whole).splitlines()
    assert mylib.audit(jax.jit(lambda x: x @ x.T).lower(x).compile()).share is None
    assert "of the products" not in str(mylib.audit(lambda x: x + 1, x))


def _share(fun, *args):
    """Of arrays whose shapes and specs are given."""
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(MESH, spec))
        for shape, spec in args
    ]
    report = mylib.audit(jax.jit(fun), *args)
    return report.share, [line for line in str(report).splitlines() if "of the products" in line]


ROW, COLUMN, SQUARE = ((64, 1), P("data")), ((1, 64), P()), ((64, 64), P("data"))
DIVIDED = {
    "of vectors": (lambda x, y: jnp.einsum("i,j->ij", x, y), ((64,), P("data")), ((64,), P())),
    "of rank one": (lambda x, u, v: x + u @ v, SQUARE, ROW, COLUMN),
    "of rank one beside another": (lambda x, u, v: x.T @ x + u @ v, SQUARE, ROW, COLUMN),
    "by elements": (lambda x: jnp.einsum("ij,ij->ij", x, x + 1), SQUARE),
    "by rows": (lambda x: jnp.einsum("ij,ij->i", x, x + 1), SQUARE),
    "inner": (lambda x: jnp.vdot(x, x + 1), ((4096,), P("data"))),
    "of split rows": (lambda x, y: x @ y, ((64, 8), P(None, "data")), ((8, 64), P("data"))),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_products_that_the_compiler_takes_apart_are_counted(name):
    share, lines = _share(*DIVIDED[name])
    assert share == pytest.approx(1 / 8) and lines == ["  each device does 1/8 of the products"]


@pytest.mark.parametrize(
    "fun",
    [
        # XLA computes one of the two.
        lambda x: x.T @ x + jnp.sin(x.T @ x),
        lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(64)),
        lambda x: jax.scipy.linalg.solve_triangular(x, x @ x),
    ],
)
def test_the_part_of_what_a_compiler_changes_is_unknown(fun):
    assert _share(fun, SQUARE) == (None, [])
