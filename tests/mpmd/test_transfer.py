"""Arrays between processes that share no devices."""

import functools
import socket
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import all_equal, fails
from compilations import compilations
from jax.sharding import NamedSharding, PartitionSpec as P
from transfers import Transfers, X, assert_is, check_grad, mesh_of, two_meshes

import mylib
from mylib import mpmd
from mylib._core.compat import coordination_client, label_of
from mylib._moving.processes import comparison
from mylib.testing import assert_placed

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=4)


class TestTransfers(Transfers):
    """By connections."""


class TestPlaces:
    def test_a_mesh_of_both(self):
        x = mylib.filter_device_put(X, P("data"), mesh=mesh_of(*range(1, 7)))
        y = mpmd.transfer(x, P(None, "data"), mesh=mesh_of(6, 7))
        assert_is(y, X, NamedSharding(mesh_of(6, 7), P(None, "data")))

    def test_the_usual_verbs_do_the_same(self):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        for place in (mylib.filter_device_put, mylib.filter_shard):
            assert_is(place(x, P("model"), mesh=second), X, NamedSharding(second, P("model")))

    def test_on_one_mesh_others_get_handles(self):
        first, _ = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        assert_is(mylib.filter_shard(x, P(), mesh=first), X, NamedSharding(first, P()))
        one = jax.devices()[1]
        y = mylib.filter_device_put(x, one)
        assert y.sharding.device_set == {one}
        assert mpmd.is_remote(y) == (jax.process_index() == 1)

    def test_what_is_there_stays(self):
        first, _ = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        assert mpmd.transfer(x, P("data"), mesh=first) is x


class TestArrays:
    @pytest.mark.parametrize("out_shardings", [P(), None])
    def test_weak_types(self, out_shardings):
        """The same in all processes and in a single one, so they all compile the same programs."""
        first, second = two_meshes()
        two = mpmd.jit(lambda: jnp.asarray(2.0), mesh=first, out_shardings=out_shardings)()
        there = mpmd.transfer(two, P(), mesh=second)
        put = mylib.filter_device_put(jnp.asarray(2.0), P(), mesh=first)
        assert two.weak_type and there.weak_type and put.weak_type
        double = mpmd.jit(lambda n, x: n * x, mesh=second, out_shardings=out_shardings)
        x = mylib.filter_device_put(jnp.ones(4, jnp.bfloat16), P(), mesh=second)
        assert not x.weak_type and double(there, x).dtype == jnp.bfloat16
        np.testing.assert_array_equal(mpmd.fetch(double(there, x)), 2)

    @pytest.mark.parametrize("spec", [P(), P("data"), P(None)], ids=str)
    def test_keys_on_one_device_of_another_process(self, spec):
        keys = jax.random.split(jax.random.key(7), 4)
        for one in (mesh_of(1), mesh_of(5)):
            x = mylib.filter_device_put(keys, spec, mesh=one)
            assert x.sharding.is_equivalent_to(NamedSharding(one, spec), 1)
            there = mpmd.transfer(x, P(), mesh=mesh_of(2))
            value = jax.random.key_data(mpmd.fetch(there))
            np.testing.assert_array_equal(value, jax.random.key_data(keys))

    def test_modules_and_rules(self):
        first, second = two_meshes()
        model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
        here = mylib.filter_device_put(model, P(), mesh=first)
        there = mpmd.transfer(here, mylib.rules.fsdp("data"), mesh=second)
        assert there.activation is here.activation
        assert there.layers[0].weight.sharding.spec == P("data")
        value = mpmd.fetch(there)
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(a, b) if eqx.is_array_like(a) else None

    def test_donated_sources_are_deleted(self):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        y = mylib.filter_device_put(x, P("data"), mesh=second, donate=True)
        assert_is(y, X, NamedSharding(second, P("data")))
        assert x.is_deleted()

    def test_the_result_may_be_donated(self):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, P("data", "model"), mesh=first)
        y = mpmd.transfer(x, P("data", "model"), mesh=second)
        z = mpmd.jit(lambda y: y + 1, mesh=second, donate="all")(y)
        np.testing.assert_array_equal(mpmd.fetch(z), X + 1)
        np.testing.assert_array_equal(mpmd.fetch(x), X)


class TestOrder:
    def test_under_grad(self):
        first, second = two_meshes()
        a = mylib.filter_device_put(X, P("data"), mesh=first)
        f = mpmd.jit(lambda x: 2 * x, mesh=first)
        g = mpmd.jit(lambda x, y: (x * y**2).sum(), mesh=second)

        def loss(x, y):
            x = mpmd.transfer(f(x), P(), mesh=second)
            return g(x, mpmd.transfer(f(y), P(), mesh=second))

        b = mylib.filter_device_put(X + 1, P("data"), mesh=first)
        value, _ = jax.value_and_grad(loss)(a, b)
        assert float(mpmd.fetch(value)) == pytest.approx(float((2 * X * (2 * X + 2) ** 2).sum()))

    def test_arrays_of_each_process_in_between(self):
        first, second = two_meshes()
        for _ in range(2):
            x = mylib.filter_device_put(X, P("data"), mesh=second)
            mylib.filter_device_put(-X, jax.local_devices()[0])
            assert_is(mpmd.transfer(x, P(), mesh=first), X, NamedSharding(first, P()))

    def test_both_ways_at_once(self):
        first, second = two_meshes()
        meshes = [first, second]
        own = [mylib.filter_device_put(X + i, P("data"), mesh=m) for i, m in enumerate(meshes)]
        moved = mpmd.transfer(own, [NamedSharding(mesh, P()) for mesh in reversed(meshes)])
        for i in (0, 1):
            assert_is(moved[i], X + i, NamedSharding(meshes[1 - i], P()))

    def test_many_in_flight(self):
        first, second = two_meshes()
        x = mylib.filter_device_put(np.float32(0), P(), mesh=first)
        f = mpmd.jit(lambda x: x + 1, mesh=first)
        moved = []
        for _ in range(20):
            x = f(x)
            moved.append(mpmd.transfer(x, P(), mesh=second))
        assert [float(v) for v in mpmd.fetch(moved)] == list(range(1, 21))

    def test_the_same_array_twice(self):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        for _ in range(2):
            assert_is(mpmd.transfer(x, P(), mesh=second), X, NamedSharding(second, P()))

    def test_it_returns_at_once(self, multihost_tmp_path):
        """The receiver goes on before the sender has anything to send."""
        first, second = two_meshes()
        seen = multihost_tmp_path / "seen"

        def wait(x):
            until = time.monotonic() + 60
            while not seen.exists() and time.monotonic() < until:
                time.sleep(0.01)
            return x

        def slow(x):
            return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        x = mylib.filter_device_put(X, P(), mesh=first)
        y = mpmd.transfer(mpmd.jit(slow, mesh=first, out_shardings=P())(x), P(), mesh=second)
        if jax.process_index() == 1:
            assert not y.is_ready()
            seen.touch()
        np.testing.assert_array_equal(mpmd.fetch(y), X)


class TestTransformed:
    def test_grad(self):
        first, second = two_meshes()
        check_grad(first, second, P("model"))

    @pytest.mark.parametrize("numbers", [((0, 1), (1, 4, 5)), ((6, 7), (1, 6)), ((2,), (4, 2))])
    def test_grad_between_meshes_that_share_a_process(self, numbers):
        """All devices of the source belong to one process, which also has some of the target."""
        first, second = (mesh_of(*each) for each in numbers)
        check_grad(first, second, P("data"))

    def test_inside_jit_it_is_refused(self):
        _, second = two_meshes()
        with pytest.raises(TypeError, match="outside of the compiled function"):
            jax.jit(lambda x: mpmd.transfer(x, P(), mesh=second))(X)


class TestJit:
    def test_a_program_of_two_meshes(self):
        first, second = two_meshes()
        f = mpmd.jit(lambda x, plus=1: 2 * x + plus, mesh=first, out_shardings=P("data"))
        g = mpmd.jit(jnp.sum, mesh=second)
        y = f(X, plus=3)
        assert y.sharding == NamedSharding(first, P("data"))
        assert mpmd.is_remote(y) == (jax.process_index() == 1)
        loss = g(mpmd.transfer(y, P("model"), mesh=second))
        assert mpmd.is_remote(loss) == (jax.process_index() == 0)
        value = mpmd.fetch(loss)
        assert float(value) == (2 * X + 3).sum()
        all_equal(float(value))

    @pytest.mark.parametrize("spec", [P("data", None), P(None), P(("data",)), P("model")], ids=str)
    @pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
    def test_specs_that_are_written_in_another_way(self, spec, shape):
        first, second = two_meshes(shape)
        y = mpmd.jit(lambda x: x + 1, mesh=first, out_shardings=spec)(X)
        np.testing.assert_array_equal(mpmd.fetch(mpmd.transfer(y, P(), mesh=second)), X + 1)

    def test_methods(self):
        first, _ = two_meshes()

        class Layer(eqx.Module):
            scale: float

            @functools.partial(mpmd.jit, mesh=first)
            def __call__(self, x):
                return self.scale * x

        np.testing.assert_array_equal(mpmd.fetch(Layer(3.0)(X)), 3 * X)

    def test_models_are_born_where_they_belong(self):
        _, second = two_meshes()
        make = mpmd.jit(eqx.nn.MLP, mesh=second, out_shardings=mylib.rules.fsdp("data"))
        model = make(64, 64, 64, 1, key=jax.random.key(0))
        weight = model.layers[0].weight
        assert weight.sharding == NamedSharding(second, P("data"))
        assert mpmd.is_remote(weight) == (jax.process_index() == 0)
        expected = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
        np.testing.assert_allclose(mpmd.fetch(weight), expected.layers[0].weight, rtol=1e-6)

    def test_without_arguments(self):
        _, second = two_meshes()
        y = mpmd.jit(lambda: jnp.arange(4), mesh=second)()
        assert y.sharding.device_set == set(second.devices.flat)
        assert mpmd.fetch(y).tolist() == [0, 1, 2, 3]

    def test_processes_elsewhere_compile_nothing_if_the_results_are_placed(self):
        first, _ = two_meshes()
        f = mpmd.jit(lambda x: jnp.cos(x) + 41, mesh=first, out_shardings=P("data"))
        x = mylib.filter_device_put(X, P(), mesh=first)
        with compilations() as found:
            f(x)
            f(x)
        assert not found or jax.process_index() == 0

    def test_numbers_of_other_types_give_other_results_elsewhere_too(self):
        first, _ = two_meshes()
        f = mpmd.jit(lambda x, n: jnp.full(3, n) + x, mesh=first, out_shardings=P())
        x = mylib.filter_device_put(np.int8(0), P(), mesh=first)
        dtypes = [str(f(x, n).dtype) for n in (1, 1.0, True)]
        all_equal(dtypes)
        assert dtypes == ["int8", "float32", "int8"]

    def test_arguments_on_other_meshes(self):
        first, second = two_meshes()
        f = mpmd.jit(lambda model, x: x, mesh=second)
        model = mylib.filter_device_put(eqx.nn.Linear(4, 4, key=jax.random.key(0)), P(), mesh=first)
        text = fails(mylib.PlacementError, f, model, X)
        assert "model.weight (4, 4)" in text and "model.bias (4,)" in text
        assert "on devices" in text and "mpmd.transfer" in text and "process 1" in text
        f = mpmd.jit(lambda model: model, mesh=second, in_shardings=P())
        with pytest.raises(mylib.PlacementError, match="are not those of this function's mesh"):
            f(model)

    def test_a_check_that_fails_where_it_runs(self):
        first, second = two_meshes()
        f = mpmd.jit(lambda x: eqx.error_if(x, x.sum() > 0, "too large"), mesh=first)
        if jax.process_index() == 0:
            with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
                f(X)
        else:
            assert mpmd.is_remote(f(X))

    def test_values_elsewhere(self):
        first, _ = two_meshes()
        x = mylib.filter_device_put(X, P("data"), mesh=first)
        if jax.process_index() == 1:
            with pytest.raises(RuntimeError, match="non-addressable"):
                np.asarray(x)
        tree = mpmd.fetch({"x": x, "n": 3, "own": np.ones(2)})
        np.testing.assert_array_equal(tree["x"], X)
        assert tree["n"] == 3 and tree["own"].sum() == 2


def test_what_others_hold_is_described_or_refused_with_its_place():
    """By everything of ours that would need its value; NumPy's error is JAX's."""
    first, second = two_meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    is_there = jax.process_index() == 0
    assert "(12, 4)" in str(mylib.show({"x": x}))
    assert "(12, 4)" in str(mylib.explain({"x": x}, P("data"), mesh=second))
    assert mylib.audit(mylib.filter_jit(lambda x: x + 1), x).collectives == ()
    assert_placed(x, P("data"), mesh=first)
    mylib.check_replicas({"x": x})
    everywhere = mesh_of(*range(8))
    for place in (mylib.filter_device_put, mylib.filter_shard):
        with pytest.raises(mylib.PlacementError, match="process 0"):
            place(x[:8], P("data"), mesh=everywhere)
    if not is_there:
        with pytest.raises(mylib.PlacementError, match="already an array on process 0"):
            mylib.data.to_global(x, P("data"), mesh=second)
    assert mpmd.is_remote(mylib.filter_jit(lambda x: x + 1)(x)) == (not is_there)


def test_tracers_are_remote_where_their_arrays_are():
    first, _ = two_meshes()
    seen: list[bool] = []

    def fun(x):
        seen.append(mpmd.is_remote(x))
        return x

    x = mylib.filter_device_put(X, P("data"), mesh=first)
    jax.linearize(fun, x)
    jax.jit(fun)(np.ones(3))
    assert seen == [jax.process_index() == 1, False]
    jax.grad(lambda n: n * (not mpmd.is_remote(n)))(2.0)


def test_origins_stay_short():
    first, second = two_meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    for _ in range(20):
        x = mpmd.transfer(mpmd.transfer(x, P(), mesh=second), P("data"), mesh=first)
    assert_is(x, X, NamedSharding(first, P("data")))
    assert len(label_of(x)) < 300


def test_how_they_travel():
    assert mpmd.transport() == "links"


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind(("::1", 0))
        except OSError:
            return False
        return True


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6")
THOROUGH_ADDRESSES = [
    pytest.param("127.0.0.1", marks=pytest.mark.thorough),
    pytest.param("::1", marks=[pytest.mark.thorough, NEEDS_IPV6]),
]


@pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)
@pytest.mark.parametrize(
    "address", ["localhost", pytest.param("[::1]", marks=NEEDS_IPV6), *THOROUGH_ADDRESSES]
)
def test_addresses_are_of_this_host(address, monkeypatch):
    """The address that others find is never that of all networks, whatever stands for it."""
    for wrong in ("0.0.0.0", "::", "", "192.0.2.7", "no-such-host.invalid"):
        with pytest.raises(ValueError, match="is not an address of this host"):
            mpmd.initialize(address=wrong)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    mpmd.initialize(address=address)
    x = mylib.filter_device_put(X, P("data"), mesh=mesh_of(0, 1))
    np.testing.assert_array_equal(mpmd.fetch(x), X)
    coordination_client().wait_at_barrier("both have told theirs", 60_000)
    found = coordination_client().key_value_dir_get("mylib/links/addresses/")
    expected = "[::1]:" if ":" in address else "127.0.0.1:"
    assert len(found) == 2 and all(told.startswith(expected) for _, told in found)


def test_nothing_is_kept():
    """Of calls that all processes are known to have made, and of arrays that have arrived."""
    first, second = two_meshes()
    f = mpmd.jit(lambda x: x + 1, mesh=first)
    x = f(X)
    for _ in range(30):
        x = f(x)
        mpmd.fetch(mpmd.transfer(x, P(), mesh=second))
    until = time.monotonic() + 60
    while not comparison().is_idle() and time.monotonic() < until:
        time.sleep(0.05)
    assert comparison().is_idle()
