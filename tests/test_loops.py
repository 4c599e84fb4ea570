"""`mylib.loops`: what is carried may come to differ; stopping is agreed; deadlocks are refused."""

import random
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, MESHES
from jax import lax
from jax.sharding import PartitionSpec as P
from scripts import printed_by

import mylib
from mylib.loops import scan, while_loop

CHECKED = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
X = np.arange(1.0, 9.0, dtype=np.float32)


ROWS = P("data")


class Pair(eqx.Module):
    first: Any
    second: Any
    name: str = eqx.field(static=True, default="pair")


class Program:
    """A random program for `scan`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        choice = self.random.choice
        rows = choice([0, 1, 4])
        dtypes = [jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16]
        matrix = jnp.arange(rows * 2).reshape(rows, 2).astype(choice(dtypes))
        tree = {"x": jnp.arange(rows), "none": None, "pair": Pair(np.arange(rows), matrix)}
        self.init, self.constant = self.value(), self.value()
        self.xs = choice([None, matrix, tree])
        length = rows if self.xs is None else choice([None, rows, rows, rows + 1])
        unroll = choice([1, 2, 3, True, False])
        self.options = {"length": length, "reverse": choice([False, True]), "unroll": unroll}
        self.change = choice(
            [
                lambda c, x: c,
                lambda c, x: c + 1,
                lambda c, x: c * 2.0,
                lambda c, x: jnp.asarray(c) * 2,
                lambda c, x: c + total(x),
                lambda c, x: 1,
            ]
        )
        self.result = choice(
            [
                lambda c, x: self.constant,
                lambda c, x: x,
                lambda c, x: (c, self.constant),
                lambda c, x: [total(x), self.constant, None],
            ]
        )

    def value(self, depth=0):
        leaves = [
            None, True, 0, 3, 0.0, 1.5, 1j, np.float32(2), np.int32(2), jnp.zeros(3),
            jnp.zeros((), jnp.bfloat16), jnp.ones((), jnp.bool_), np.arange(2, dtype=np.uint8),
        ]  # fmt: skip
        kind = self.random.choice(["leaf", "leaf", "list", "dict", "Pair"])
        if kind == "leaf" or depth == 2:
            return self.random.choice(leaves)
        first, second = self.value(depth + 1), self.value(depth + 1)
        return {"list": [first], "dict": {"a": first, "b": second}, "Pair": Pair(first, second)}[
            kind
        ]

    def __call__(self, scan):
        def f(carry, row):
            after = jax.tree.map(lambda c: self.change(c, row), carry)
            return after, self.result(carry, row)

        return scan(f, self.init, self.xs, **self.options)


def total(tree):
    zero = jnp.float32(0)
    return sum(
        (jnp.sum(jnp.asarray(x)).real.astype(zero.dtype) for x in jax.tree.leaves(tree)), zero
    )


def mapped(fun, mesh=AUTO, checked=True, out_specs=ROWS):
    return mylib.filter_shard_map(
        fun, mesh=mesh, in_specs=ROWS, out_specs=out_specs, check_vma=checked
    )


def halve_while(condition, **options):
    """Halves until the condition says stop, and counts."""

    def f(x):
        start = (x, 0, "static")
        y, n, static = while_loop(
            lambda s: condition(s[0]), lambda s: (s[0] / 2, s[1] + 1, s[2]), start, **options
        )
        assert static == "static"
        return y, n[None]

    return f


class TestWhileLoop:
    @MESHES
    @CHECKED
    def test_each_device_takes_its_own_number_of_turns(self, mesh, checked):
        f = mapped(halve_while(lambda x: jnp.max(x) > 1), mesh, checked)
        y, n = f(X)
        assert n.tolist() == [1, 2, 3, 3]
        np.testing.assert_allclose(y, X / 2.0 ** np.repeat(n, 2))

    @MESHES
    @CHECKED
    @pytest.mark.parametrize(("sync", "turns"), [("any", 3), ("all", 1)])
    def test_stopping_is_agreed(self, mesh, checked, sync, turns):
        f = mapped(halve_while(lambda x: jnp.max(x) > 1, sync=sync), mesh, checked)
        y, n = f(X)
        assert n.tolist() == [turns] * 4
        np.testing.assert_allclose(y, X / 2.0**turns)

    @pytest.mark.parametrize("sync", ["any", "all"])
    def test_what_is_agreed_costs_four_bytes(self, sync):
        f = mapped(halve_while(lambda x: jnp.max(x) > 1, sync=sync))
        (only,) = mylib.audit(f, X).collectives
        assert (only.kind, only.bytes) == ("all-reduce", 4)
        alike = mapped(halve_while(lambda x: lax.pmax(jnp.max(x), "data") > 1, sync=sync))
        assert len(mylib.audit(alike, X).collectives) == 1  # its own

    @CHECKED
    def test_turns_that_communicate(self, checked):
        def average(**options):
            def f(x):
                def turn(state):
                    x, n = state
                    return (x + lax.pmean(x, "data")) / 2, n + 1

                return while_loop(lambda s: jnp.max(jnp.abs(s[0])) > 5.5, turn, (x, 0), **options)

            return mapped(f, checked=checked, out_specs=(P("data"), P()))

        y, n = average(sync="any")(X)
        mean, expected, turns = X.reshape(4, 2).mean(0), X.reshape(4, 2), 0
        while expected.max() > 5.5:
            expected, turns = (expected + mean) / 2, turns + 1
        assert int(n) == turns > 2
        np.testing.assert_allclose(y, expected.ravel(), rtol=1e-5)
        words = "condition differs between" if checked else "check_vma=False it is unknown"
        with pytest.raises(ValueError, match=f"along 'data', and .*{words}.*\n.*sync='any'"):
            average()(X)

    @pytest.mark.slow
    def test_every_process_makes_the_same_program(self, checkout_env):
        """Whatever the order in which Python goes over its sets."""
        program = """
            import hashlib
            import jax
            import jax.numpy as jnp
            import mylib
            from jax.sharding import AxisType, PartitionSpec as P
            from mylib.loops import while_loop
            mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
            f = mylib.filter_shard_map(
                lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x, sync="any"),
                mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"),
            )
            print(hashlib.md5(f.lower(jnp.ones((4, 2))).as_text().encode()).hexdigest())
        """
        made = {
            printed_by("-c", textwrap.dedent(program), env={**checkout_env, "PYTHONHASHSEED": seed})
            for seed in ("0", "3")
        }
        assert len(made) == 1

    def test_a_condition_that_is_the_same_everywhere_may_communicate(self):
        def f(x):
            return while_loop(
                lambda s: s[1] < 3, lambda s: (s[0] + lax.pmean(s[0], "data"), s[1] + 1), (x, 0)
            )

        y, n = mapped(f, out_specs=(P("data"), P()))(X)
        assert int(n) == 3 and y.shape == (8,)

    def test_modules_are_carried(self):
        model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))

        def f(x):
            def shrink(model):
                return jax.tree.map(lambda w: w * x[0] / 9 if eqx.is_array(w) else w, model)

            out = while_loop(lambda m: jnp.abs(m.layers[0].weight).max() > 0.1, shrink, model)
            assert out.activation is model.activation
            return out.layers[0].weight[None]

        weight = model.layers[0].weight
        for i, found in enumerate(mapped(f)(X)):
            expected = weight
            while jnp.abs(expected).max() > 0.1:
                expected = expected * X[2 * i] / 9
            np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_outside_of_shard_map(self):
        assert int(while_loop(lambda n: n < 7, lambda n: n + 2, 0)) == 8
        assert int(jax.jit(lambda: while_loop(lambda n: n < 7, lambda n: n + 2, 0))()) == 8

    def test_one_inside_another(self):
        def f(x):
            def outer(state):
                total, n = state
                inner = while_loop(lambda v: v < x.sum() * n, lambda v: v + 1.0, 0.0)
                return total + inner, n + 1

            return while_loop(lambda s: s[1] < 3, outer, (0.0, 0))[0][None]

        expected = X.reshape(4, 2).sum(1)
        np.testing.assert_allclose(mapped(f)(X), expected * (0 + 1 + 2))

    def test_what_stays_must_stay(self):
        def f(x):
            return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, "b"), (0, "a"))[0]

        words = r"body_fun must not change leaves.*\[1\]: 'a', then 'b'"
        with pytest.raises(TypeError, match=words):
            mapped(f)(X)
        with pytest.raises(ValueError, match="sync='some' is none of"):
            while_loop(lambda s: s < 1, lambda s: s + 1, 0, sync="some")
        with pytest.raises(TypeError, match=r"It was a tuple of 1, then an array of shape \(2,\)"):
            mapped(lambda x: while_loop(lambda s: s[0][0] < 1, lambda s: s[0], (x,)))(X)
        with pytest.raises(TypeError, match=r"body_fun .*\['b'\] was a tuple of 1, then a list of"):
            while_loop(lambda s: s["a"] < 1, lambda s: {"a": 1, "b": [2]}, {"a": 0, "b": (1,)})
        one, other = (eqx.nn.LayerNorm(2, eps=eps) for eps in (0.1, 0.2))
        with pytest.raises(TypeError, match=r"\.eps was 0\.1, then 0\.2"):
            while_loop(lambda s: s.weight[0] < 1, lambda s: other, one)

    def test_jax_names_what_is_carried_in_another_type(self):
        def f(x):
            return while_loop(lambda s: s["n"] < 3, lambda s: {**s, "w": s["n"]}, {"n": 0, "w": x})

        with pytest.raises(TypeError, match=r"component carry\['w'\] has type float32\[2\]"):
            mapped(f)(X)


class TestScan:
    @MESHES
    @CHECKED
    def test_what_is_carried_may_come_to_differ(self, mesh, checked):
        def f(x):
            def turn(carry, row):
                total, previous, model = carry
                return (total + row.sum(), total, model), (previous, "static")

            start = (0.0, 0, {"f": jnp.sin, "w": jnp.ones(3)})
            (total, _, model), (seen, static) = scan(turn, start, x)
            assert model["f"] is jnp.sin and static == "static"
            return total[None], seen[None]

        rows = np.arange(24.0, dtype=np.float32).reshape(3, 8)
        total, seen = mylib.filter_shard_map(
            f, mesh=mesh, in_specs=P(None, "data"), out_specs=P("data"), check_vma=checked
        )(rows)
        parts = rows.reshape(3, 4, 2).sum(2)
        np.testing.assert_allclose(total, parts.sum(0))
        np.testing.assert_allclose(seen[:, 2], parts[0])

    @pytest.mark.slow
    @CHECKED
    def test_gradients(self, checked):
        def f(w, x):
            def turn(carry, row):
                return jnp.tanh(carry * w + row), None

            return lax.pmean(jnp.sum(scan(turn, jnp.zeros(()), x)[0]), "data")

        mean = mylib.filter_shard_map(
            f, mesh=AUTO, in_specs=(P(), P("data")), out_specs=P(), check_vma=checked
        )

        def plain(w, x):
            def one(part):
                return lax.scan(lambda c, r: (jnp.tanh(c * w + r), None), 0.0, part)[0]

            return jnp.mean(jax.vmap(one)(x.reshape(4, 2)))

        for argument in (0, 1):
            ours, theirs = (jax.grad(g, argument)(0.7, jnp.asarray(X)) for g in (mean, plain))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)

    def test_the_body_is_traced_once_where_nothing_changes(self):
        traces = []

        def f(x):
            def turn(carry, row):
                traces.append(1)
                return carry + row, None

            return scan(turn, x[0] * 0, x)[0][None]

        np.testing.assert_allclose(mapped(f)(X), X.reshape(4, 2).sum(1))
        assert len(traces) == 1

    @CHECKED
    def test_no_turn_at_all(self, checked):
        def f(x):
            keys = jax.random.split(jax.random.key(0), 0)
            carry, ys = scan(lambda c, r: (c, r[0]), x, (jnp.zeros((0, 3)), keys))
            return carry, jnp.zeros(2) + ys.sum()

        carry, total = mapped(f, checked=checked)(X)
        np.testing.assert_array_equal(carry, X)
        assert not total.any()

    def test_faults(self):
        with pytest.raises(TypeError, match="scan: f must return a pair.*returned"):
            mapped(lambda x: scan(lambda c, r: c, x, x))(X)
        with pytest.raises(TypeError, match="f must not change leaves"):
            scan(lambda c, _: ("b", None), "a", length=2)
        names = np.array(["a", "b"])

        def turn(carry, row):
            return (carry[0] + row, np.array(["a", "b"])), None

        def f(x):
            (total, found), _ = scan(turn, (0.0, names), x)
            return lax.psum(total, "data"), found

        total, found = mapped(f, out_specs=P())(X)
        assert float(total) == X.sum() and found is names

    # Every day, among others, loops of a length alone, and what is carried in reverse.
    @pytest.mark.parametrize("seed", range(90))
    @pytest.mark.everyday(*map(str, [*range(10), 17, 20, 84]), rest="thorough")
    def test_random_programs_as_in_jax(self, seed):
        program = Program(seed)
        try:
            expected = program(lax.scan)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                program(scan)
            return
        in_shard_map = mylib.filter_shard_map(
            lambda: program(scan), mesh=AUTO, in_specs=P(), out_specs=P()
        )
        for result in (program(scan), in_shard_map()):
            assert jax.tree.structure(result) == jax.tree.structure(expected)
            # JAX returns a number of `init` as it is if it unrolls the whole loop.
            pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
            for x, y in [(x, jnp.asarray(y)) for x, y in pairs]:
                assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
