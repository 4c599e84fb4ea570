"""Calls that `opaque` can split: what `dims=` and `like=` say, in each context."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_kernels
import random_references
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib

RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(8, 16, 4, 8)).astype(np.float32) for _ in range(3))
COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")


def attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def on_host(function):
    def called(x, *others):
        return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *others)

    called.__name__ = function.__name__
    return called


def multiplied(x, scale):
    def kernel(x, scale, y):
        y[...] = x[...] * scale[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scale = jnp.broadcast_to(scale, x.shape)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, scale)


def seen_by(function, **options):
    """A function whose shapes are noted where it is called."""
    shapes = []

    def kernel(*args):
        shapes.append(args[0].shape)
        return function(*args)

    return mylib.opaque(kernel, **options), shapes


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def placed(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def splits_of(reference, *args):
    (eqn,) = random_kernels.kernels_in(
        jax.make_jaxpr(mylib.opaque(reference, like=reference))(*args)
    )
    return eqn.params["splits"]


def collectives(f, *args):
    return COLLECTIVE.findall(jax.jit(f).lower(*args).compile().as_text())


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


class TestDims:
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_kernel_is_called_with_the_parts_of_one_device(self, kind):
        f, shapes = seen_by(attention, dims="b t h k, b s h k, b s h d -> b t h d", whole=("t",))
        args = placed(mesh_of(kind), P("data", None, "model"), Q, K, V)
        result = jax.jit(f)(*args)
        near(result, attention(Q, K, V))
        assert shapes[-1] == (2, 16, 2, 8)
        assert result.sharding.is_equivalent_to(args[0].sharding, 4)
        assert collectives(f, *args) == []

    def test_what_is_in_no_result_is_gathered(self):
        f, shapes = seen_by(attention, dims="b t h k, b s h k, b s h d -> b t h d")
        args = placed(mesh_of(), P("data", "model"), Q, K, V)
        near(jax.jit(f)(*args), attention(Q, K, V))
        assert shapes[-1] == (2, 8, 4, 8)
        assert collectives(f, *args) == ["all-gather"] * 2

    def test_fewer_heads_share_a_letter(self):
        """Each device has as many whole groups of heads."""

        def grouped(q, k, v):
            return attention(q, *(jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v)))

        f, shapes = seen_by(grouped, dims="b t h k, b s h k, b s h d -> b t h d")
        args = placed(mesh_of(), P(None, None, "model"), Q, K[:, :, :2], V[:, :, :2])
        near(jax.jit(f)(*args), grouped(Q, K[:, :, :2], V[:, :, :2]))
        assert shapes[-1] == (8, 16, 2, 8)

    def test_trees_static_arguments_and_several_results(self):
        def kernel(x, weights, power, none, *, scale):
            assert none is None
            return {"y": x * weights["w"] ** power * scale}, x.sum(-1)

        f = mylib.opaque(kernel, dims="n d, d -> n d, n", whole="d")
        (x,) = placed(mesh_of(), P("data"), Q[:, :, 0, 0])
        args = {"w": jnp.arange(16.0)}, 2, None
        result = eqx.filter_jit(lambda x: f(x, *args, scale=3.0))(x)
        near(result, kernel(Q[:, :, 0, 0], *args, scale=3.0))

    @pytest.mark.parametrize(
        ("dims", "whole", "told"),
        [
            ("b t, d -> b t", (), "not a letter for each dimension of arguments"),
            ("b t h d -> b t", (), "not a letter for each dimension of results"),
            ("b t h d", (), "write the letters of each array"),
            ("b t h d -> b t h d", ("x",), "whole= has 'x', and the letters are"),
        ],
    )
    def test_what_doesnt_fit(self, dims, whole, told):
        with pytest.raises(TypeError, match=f"dims= of <lambda>: .*{told}"):
            mylib.opaque(lambda x: x, dims=dims, whole=whole)(Q)

    def test_letters_need_dims(self):
        with pytest.raises(TypeError, match="axes= and whole= name dimensions"):
            mylib.opaque(lambda x: x, axes={"b": "data"})

    def test_a_kernel_that_holds_arrays(self):
        with pytest.raises(TypeError, match="holds arrays, and bwd, like and dims speak"):
            mylib.opaque(eqx.nn.LayerNorm(8), dims="d -> d")


class TestLike:
    def test_what_may_be_split_is_read_from_the_reference(self):
        f, shapes = seen_by(attention, like=attention)
        args = placed(mesh_of(), P("data", None, "model"), Q, K, V)
        near(jax.jit(f)(*args), attention(Q, K, V))
        assert shapes == [(2, 16, 2, 8)]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_its_derivative_is_the_kernels(self, kind):
        f, _ = seen_by(attention, like=attention)
        args = placed(mesh_of(kind), P("data", None, "model"), Q, K, V)

        def gradient(f):
            return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))

        with jax.set_mesh(args[0].sharding.mesh):
            near(jax.jit(gradient(f))(*args), gradient(attention)(Q, K, V))
            assert collectives(gradient(f), *args) == []
            near(jax.jit(gradient(jax.checkpoint(f)))(*args), gradient(attention)(Q, K, V))
            tangents = jax.jit(lambda *xs: jax.jvp(f, xs, xs))(*args)
        near(tangents, jax.jvp(attention, (Q, K, V), (Q, K, V)))

    def test_only_arguments_are_saved(self):
        f = mylib.opaque(attention, like=attention)
        saved = jax.eval_shape(lambda *xs: jax.vjp(f, *xs)[1], Q, K, V)
        assert all(x.size <= Q.size for x in jax.tree.leaves(saved))

    @pytest.mark.parametrize(
        ("reference", "whole"),
        [
            (lambda x: jnp.cumsum(x, 1), 1),
            (lambda x: x * jnp.arange(x.shape[1])[:, None], 1),
            (lambda x: x + jnp.flip(x, 1), 1),
            (lambda x: x + jnp.sort(x, 1), 1),
            (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "SAME"), 1),
            (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], 1),
            (lambda x: jax.lax.top_k(x, x.shape[-1])[0], 2),
            (lambda x: x.at[:, jnp.array([1, 3])].add(1.0), 1),
            (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (0, 1, 2)),
            (lambda x: x * np.ones((16, 8), np.float32), (1, 2)),
            (lambda x: x + jnp.einsum("btd,bsd->bts", x, x)[..., :8], (1, 2)),
            (lambda x: jax.lax.scan(lambda h, x: (h + x, h + x), x[0], x)[1], 0),
            # What a loop goes on for.
            (lambda x: lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: x / 2, x), (0, 1, 2)),
            (jax.vmap(lambda x: lax.while_loop(lambda x: x[0, 0] > 0.1, jnp.sin, x)), (0, 1, 2)),
            (lambda x: lax.while_loop(lambda c: c[0, 0, 0] < 1, lambda c: c + 1, x), (0, 1, 2)),
            (lambda x: lax.dynamic_update_slice(x, 2 * x[:1], (1, 0, 0)), 0),
            (lambda x: lax.dynamic_update_index_in_dim(x, 2 * x[:, 0], 3, 1), 1),
            (lambda x: lax.fori_loop(0, 3, lambda i, x: x.at[:, i].mul(2), x), 1),
            # Also carried, or read by all iterations.
            (lambda x: lax.scan(lambda c, row: (c + row, None), x, x)[0], 0),
            (lambda x: lax.map(lambda row: jax.nn.softmax(row @ x[0].T) @ x[0], x), (0, 1, 2)),
            # What is made of one row twice isn't split over the devices of one.
            (lambda x: x + jnp.max(x[:, :, None] * x[:, None], 1), 1),
            # What a callback does is unknown, also in one branch.
            (
                lambda x: lax.cond(
                    jax.random.bits(jax.random.key(0)) > 9, on_host(np.sin), jnp.sin, x
                ),
                (0, 1, 2),
            ),
        ],
    )
    def test_where_places_matter_it_is_whole(self, reference, whole):
        splits = splits_of(reference, jnp.ones((4, 16, 8)))
        (letters,) = splits.operands
        wanted = {whole} if isinstance(whole, int) else {*whole}
        assert {i for i, x in enumerate(letters) if x not in splits.parts} == wanted

    @pytest.mark.parametrize("groups", [{"feature_group_count": 4}, {"batch_group_count": 4}])
    def test_grouped_convolutions(self, groups):
        def convolved(x, w):
            return lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **groups
            )

        width = 4 if "feature_group_count" in groups else 16
        splits = splits_of(convolved, jnp.ones((8, 16, 16)), jnp.ones((3, width, 16)))
        rows = {"a"} if "feature_group_count" in groups else set()
        assert set(splits.parts) == rows

    @pytest.mark.parametrize(
        "joined",
        [
            lambda a, b, x: jnp.stack([a[0], b[0]]) * x,
            lambda a, b, x: jnp.concatenate([a, b]) * x,
        ],
    )
    def test_what_is_joined_of_ones_is_whole(self, joined):
        x = Q[:2, :, 0, 0]
        (y,) = placed(mesh_of(), P("model"), x)
        near(jax.jit(mylib.opaque(joined, like=joined))(x[:1], x[1:], y), joined(x[:1], x[1:], x))

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_what_depends_on_sizes_is_found_by_the_first_call(self, kind):
        """Its operations treat each row by itself, and it divides by the number of rows."""

        def averaged(x, scale):
            return x * scale / x.shape[0]

        x, scale = *placed(mesh_of(kind), P("data"), Q[:, :, 0, 0]), np.ones(16, np.float32)
        f = mylib.opaque(averaged, like=averaged)
        told = (
            r"write whole=\[\(\"x\", 0\)\] for averaged.*with 'a' in 2 parts result 0 differs from "
            r"that of the whole \(by .*check=False leaves this check out"
        )
        with jax.set_mesh(x.sharding.mesh):
            for run in (f, jax.vmap(f, (2, None))):
                with pytest.raises(TypeError, match=told):
                    jax.jit(run)(x if run is f else x[..., None], scale)
        unchecked = mylib.opaque(averaged, like=averaged, check=False)
        near(jax.jit(unchecked)(x, scale), Q[:, :, 0, 0] / 2)
        if kind == AxisType.Auto:
            whole = mylib.opaque(averaged, like=averaged, whole=[("x", 0)])
            near(jax.jit(whole)(x, scale), Q[:, :, 0, 0] / 8)

    def test_a_reference_for_arrays_of_one_size(self):
        f = mylib.opaque(lambda x: x, like=lambda x: x + jnp.zeros((8, 16)))
        (x,) = placed(mesh_of(), P("data"), Q[:, :, 0, 0])
        with pytest.raises(TypeError, match="incompatible shapes") as caught:
            jax.jit(f)(x)
        assert "raised while like= of <lambda> was called for parts" in str(caught.value.__notes__)

    def test_large_references_are_checked_with_small_arrays(self):
        ran = []

        def reference(x):
            ran.append(x.shape)
            return attention(x, x, x)

        f = mylib.opaque(lambda x: x, like=reference)
        x = jax.ShapeDtypeStruct(
            (8, 4096, 4, 64), np.float32, sharding=NamedSharding(mesh_of(), P("data"))
        )
        jax.jit(f).lower(x)
        small = [(4, 4, 4, 4), (2, 4, 4, 4), (4, 4, 2, 4)]
        assert ran == [x.shape, x.shape, (4, 4096, 4, 64), *small]
        jax.jit(lambda x: f(x)).lower(x)
        assert len(ran) == 6

    def test_loops_that_may_not_end_are_not_run(self):
        def reference(x):
            return x * lax.while_loop(lambda n: n > 0, lambda n: n + 0.0, 1.0)

        jax.jit(mylib.opaque(lambda x: x, like=reference)).lower(*placed(mesh_of(), P("data"), Q))

    def test_a_reference_that_cant_be_read(self):
        sine = on_host(np.sin)
        with pytest.raises(TypeError, match='(?s)it calls pure_callback.*dims="a b -> c d"'):
            mylib.opaque(sine, like=sine)(jnp.ones((4, 4)))

    def test_what_a_partial_function_has_fixed_is_its_own(self):
        """Options of the kernel aren't those of the reference, and derivatives allow them."""

        def scaled(x, *, by, fast):
            return x * by * (1.0 if fast else 2.0)

        options = {"like": partial(scaled, by=3.0, fast=False)}
        f = mylib.opaque(partial(scaled, by=3.0, fast=True), **options)
        np.testing.assert_array_equal(f(Q), 3 * Q)
        np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(f(x)))(Q), np.full_like(Q, 6))
        np.testing.assert_array_equal(f(Q, by=4.0), 4 * Q)
        own = {"fwd": lambda x: (3 * x, None), "bwd": lambda _, given: (given * 7,)}
        g = mylib.opaque(partial(scaled, by=3.0, fast=True), **own)
        np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(g(x)))(Q), np.full_like(Q, 7))


class TestContexts:
    def test_under_vmap_there_is_a_new_letter(self):
        f, shapes = seen_by(attention, like=attention)
        args = placed(mesh_of(), P("data", None, "model"), Q, K, V)
        mapped = jax.vmap(lambda q, k, v: f(q[None], k[None], v[None])[0])
        near(jax.jit(mapped)(*args), attention(Q, K, V))
        assert collectives(mapped, *args) == []

    def test_inside_shard_map(self):
        """Plain kernels need not declare that their results vary."""
        f = mylib.opaque(lambda x: multiplied(x, 2.0), like=lambda x: 2 * x)
        mapped = mylib.filter_shard_map(f, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))
        near(jax.jit(mapped)(Q), 2 * Q)
        near(jax.jit(jax.grad(lambda x: mapped(x).sum()))(Q), np.full_like(Q, 2))

    def test_eager_calls_are_compiled_once(self):
        f, shapes = seen_by(attention, like=attention)
        args = placed(mesh_of(), P("data"), Q, K, V)
        near(f(*args), attention(Q, K, V))
        f(*args)
        assert shapes == [(2, 16, 4, 8)]

    def test_one_device(self):
        f, shapes = seen_by(attention, like=attention)
        assert "custom" not in jax.jit(f).lower(Q, K, V).as_text()
        assert shapes == [Q.shape]

    def test_forward_and_backward_kernels(self):
        whole = "b t h d, b s h d, b s h d"
        backward = mylib.opaque(
            lambda q, k, v, g: jax.vjp(attention, q, k, v)[1](g),
            dims=f"{whole}, b t h d -> {whole}",
            whole="t s d",
        )
        forward = mylib.opaque(attention, dims=f"{whole} -> b t h d", whole="t s d")
        f = mylib.opaque(
            attention,
            dims=f"{whole} -> b t h d",
            whole="t s d",
            fwd=lambda *xs: (forward(*xs), xs),
            bwd=lambda saved, g: backward(*saved, g),
        )
        args = placed(mesh_of(), P("data", None, "model"), Q, K, V)
        gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))
        wanted = jax.grad(lambda *xs: jnp.sum(jnp.sin(attention(*xs))), (0, 1, 2))(Q, K, V)
        near(jax.jit(gradient)(*args), wanted)
        assert collectives(gradient, *args) == []

    def test_without_a_derivative(self):
        f = mylib.opaque(on_host(np.sin), dims="n d -> n d")
        with pytest.raises(TypeError, match="sin has no derivative. Give fwd= and bwd="):
            jax.grad(lambda x: f(x).sum())(Q[0, :, 0])

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_derivative_of_its_own(self, kind):
        """Each device takes it for its parts. What an argument lacks is summed, so it is whole."""
        scaled = jax.custom_vjp(multiplied)
        scaled.defvjp(
            lambda x, scale: (scaled(x, scale), (x, scale)),
            lambda saved, g: (scaled(g, saved[1]), jnp.sum(scaled(g, saved[0]), 0)),
        )
        f = mylib.opaque(scaled, dims="n d, d -> n d")
        mesh, x = mesh_of(kind), Q[:, :, 0, 0]
        spec = P(None, "model")
        args = *placed(mesh, spec, x), *placed(mesh, P("model"), jnp.arange(16.0))

        def gradient(f):
            return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))

        near(jax.jit(gradient(f))(*args), gradient(jnp.multiply)(x, jnp.arange(16.0)))
        assert collectives(gradient(f), *args) == []
        mylib.testing.assert_split(f, x[:2, :2], jnp.arange(2.0))
        if kind == AxisType.Auto:
            f = mylib.opaque(scaled, dims="n d, d -> n d", axes={"n": "data", "d": "model"})
            near(jax.jit(gradient(f))(*args), gradient(jnp.multiply)(x, jnp.arange(16.0)))

    def test_a_kernel_in_a_derivative_is_opaque_itself(self):
        sine, cosine = on_host(np.sin), on_host(np.cos)
        for fwd, bwd, told in (
            (lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),), "fwd= of sin calls pure_call"),
            (lambda x: (jnp.sin(x), x), lambda x, g: (g * cosine(x),), "bwd= of sin calls pure_c"),
        ):
            f = mylib.opaque(sine, dims="n d -> n d", fwd=fwd, bwd=bwd)
            with pytest.raises(
                TypeError, match=told + r".*test_split_kernels.py.*opaque\(f, dims="
            ):
                jax.grad(lambda x, f=f: f(x).sum())(Q[0, :, 0])

    def test_checks_of_errors_in_a_derivative(self):
        sine = mylib.opaque(on_host(np.sin), dims="n d -> n d")

        def forward(x):
            return sine(eqx.error_if(x, jnp.any(x > 1e6), "large")), x

        f = mylib.opaque(
            on_host(np.sin), dims="n d -> n d", fwd=forward, bwd=lambda x, g: (g * jnp.cos(x),)
        )
        near(jax.jit(jax.grad(lambda x: f(x).sum()))(Q[0, :, 0]), np.cos(Q[0, :, 0]))


class TestErrors:
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_result_of_another_size(self, kind):
        f = mylib.opaque(lambda x: x[:, :4], like=lambda x: 2 * x)
        (x,) = placed(mesh_of(kind), P("data"), Q[:, :, 0, 0])
        told = r"returns float32\[{0}, 4\], and by like= or dims= these are float32\[{0}, 16\]"
        with pytest.raises(Exception, match=told.format(2) + r", of the whole float32\[8, 16\]"):
            jax.jit(f)(x)
        with pytest.raises(TypeError, match=told.format(8)):
            jax.jit(f)(np.asarray(x))

    def test_with_like_axes_name_arguments(self):
        """Letters that nobody has chosen may change."""
        args = placed(mesh_of(), P(None, "data"), Q, K, V)
        f = mylib.opaque(attention, like=attention, axes={("q", 0): "data", ("v", 2): "model"})
        result = jax.jit(f)(*args)
        near(result, attention(Q, K, V))
        assert result.sharding.is_equivalent_to(
            NamedSharding(mesh_of(), P("data", None, "model")), 4
        )
        for key in ("a", ("x", 0), ("q", 4), ("q", -1)):
            f = mylib.opaque(attention, like=attention, axes={key: "data"})
            with pytest.raises(TypeError, match="is no dimension of attention.*are: q, k, v"):
                f(Q, K, V)
        for axes in ({("k", 1): "data"}, {("q", 0): "data", ("k", 0): "model"}):
            f = mylib.opaque(attention, like=attention, axes=axes)
            with pytest.raises(TypeError, match=r'may be split.*: \("q", 0\), \("q", 1\), '):
                f(Q, K, V)

    def test_arguments_have_names(self):
        def scaled(x, *ys, weights, by):
            return x + sum(ys) * weights["up"] * by

        for key in (("ys[1]", 0), ("weights['up']", 0), ("x", 0)):
            f = mylib.opaque(scaled, like=scaled, axes={key: ("data", "model")})
            (x,) = placed(mesh_of(), P(), Q[:, 0, 0, 0])
            near(jax.jit(lambda x, f=f: f(x, x, x, weights={"up": x}, by=2))(x), x + 4 * x * x)

    def test_explicit_axes_that_dont_fit(self):
        f = mylib.opaque(attention, like=attention)
        args = placed(mesh_of(AxisType.Explicit), P("data", "model"), Q, K, V)
        with pytest.raises(mylib.PlacementError) as caught:
            jax.jit(f)(*args)
        assert "k (8, 16, 4, 8)" in str(caught.value)
        assert "needs this dimension whole" in str(caught.value)
        assert "mylib.filter_shard(k, P('data', None" in str(caught.value)

    def test_operands_that_disagree(self):
        f = mylib.opaque(lambda x, y: x + y, dims="a b, a b -> a b")
        mesh = mesh_of(AxisType.Explicit)
        x, y = placed(mesh, P("data"), Q[0, :8, 0])[0], placed(mesh, P("model"), Q[0, :8, 0])[0]
        with pytest.raises(mylib.PlacementError, match="another operand has 'a' split over data"):
            jax.jit(f)(x, y)

    def test_parts_that_the_kernel_cant_have(self):
        def tiled(x):
            if x.shape[0] % 4:
                raise ValueError(f"a tile has 4 rows, and there are {x.shape[0]}")
            return x

        f = mylib.opaque(tiled, dims="n d -> n d")
        (x,) = placed(mesh_of(AxisType.Explicit), P("data"), Q[:, :, 0, 0])
        with pytest.raises(ValueError, match="a tile has 4 rows") as caught:
            jax.jit(f)(x)
        assert "tiled was called for one device's parts, x: float32[2, 16]" in str(
            caught.value.__notes__
        )

    def test_of_the_compiler(self):
        """On Auto axes it asks when it compiles, and only the text of errors is left."""

        def tiled(x):
            if x.shape[1] % 4:
                raise ValueError(f"a tile has 4 columns, and there are {x.shape[1]}")
            return x

        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        x, few = Q[:, :8, 0, 0], Q[:, :2, 0, 0]

        def repeated(q, k):
            return q * jnp.repeat(k, q.shape[1] // k.shape[1], 1)

        f = mylib.opaque(tiled, dims="n d -> n d")
        for f, arrays, told in (
            (tiled, [x], r"a tile has 4 columns, and there are 2.*tiled was called for one device's"
             r" parts, x: float32\[4, 2\]"),
            (repeated, [x, few], r"q \(8, 8\).*dimension 1 \('d'\) over 'model', where repeated is "
             r"called.*4 devices don't divide 2.*filter_shard\(q, P"),
            (on_host(np.sin), [x], r"with a callback on Auto axes.*axes=\{\"n\": \"data\", "),
        ):  # fmt: skip
            f = mylib.opaque(f, dims=", ".join(["n d"] * len(arrays)) + " -> n d")
            args = placed(mesh, P("data", "model"), x), placed(mesh, P("data"), *arrays[1:])
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){told}"):
                jax.jit(f)(*args[0], *args[1])
            # `filter_jit` has the error itself.
            kind = RuntimeError if f.__wrapped__ is tiled else mylib.PlacementError
            with pytest.raises(kind, match=f"(?s)^[^/]*{told}"):
                mylib.filter_jit(f)(*args[0], *args[1])
            with pytest.raises(kind, match=f"(?s)^[^/]*{told}"):
                mylib.filter_jit(f).lower(*args[0], *args[1]).compile()

    def test_axes_are_checked(self):
        (x,) = placed(mesh_of(), P("data"), Q[:, :, 0, 0])
        with pytest.raises(TypeError, match='axes= splits \'d\'.*: "n", of dims="n d -> n d"'):
            mylib.opaque(lambda x: x, dims="n d -> n d", whole="d", axes={"d": "model"})(x)
        f = mylib.opaque(lambda x: x, dims="n d -> n d", axes={"n": "rows"})
        with pytest.raises(mylib.PlacementError, match="'rows' is no axis"):
            jax.jit(f)(x)

    def test_axes_are_obeyed_everywhere(self):
        f, shapes = seen_by(lambda x: x * 2, dims="n d -> n d", axes={"n": ("data", "model")})
        (x,) = placed(mesh_of(), P("data"), Q[:, :, 0, 0])
        near(jax.jit(f)(x), 2 * Q[:, :, 0, 0])
        assert shapes[-1] == (1, 16)

    def test_inside_a_shard_map_over_other_axes_axes_are_needed(self):
        mesh = mesh_of()

        def mapped(f):
            spec = P("data")
            return jax.jit(
                jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
            )

        f = mylib.opaque(lambda x: x * 2, dims="n h -> n h")
        with pytest.raises(mylib.PlacementError, match=r'axes=\{"n": "model"\}'):
            mapped(f)(Q[:, :, 0, 0])
        f = mylib.opaque(lambda x: x * 2, dims="n h -> n h", axes={"n": "model"})
        near(mapped(f)(Q[:, :, 0, 0]), 2 * Q[:, :, 0, 0])


class TestAssertSplit:
    def test_right_ones(self):
        mylib.testing.assert_split(mylib.opaque(attention, like=attention), Q, K, V)

    def test_a_wrong_reference(self):
        """The kernel normalises over both dimensions, its reference over one."""
        f = mylib.opaque(lambda x: x / jnp.sum(x), like=lambda x: x / jnp.sum(x, 1, keepdims=True))
        with pytest.raises(AssertionError, match="result 0 is not that of like="):
            mylib.testing.assert_split(f, abs(Q[:, :, 0, 0]))

    def test_a_letter_that_cant_be_split(self):
        f = mylib.opaque(lambda x: jax.nn.softmax(x), dims="n d -> n d")
        with pytest.raises(AssertionError, match=r"'d' in 2 parts.*write whole=\[\"d\"\]"):
            mylib.testing.assert_split(f, Q[:, :, 0, 0])

    def test_a_wrong_derivative(self):
        """What sums the rows' gradients is split over the rows."""
        backward = mylib.opaque(lambda x, g: (g * 2, jnp.sum(g * x, 0)), dims="n d, n d -> n d, d")
        forward = mylib.opaque(lambda x, w: x * w, dims="n d, d -> n d")
        f = mylib.opaque(
            lambda x, w: x * w,
            dims="n d, d -> n d",
            fwd=lambda x, w: (forward(x, w), x),
            bwd=lambda x, g: backward(x, g),
        )
        with pytest.raises(AssertionError, match="'n' in 2 parts result 1"):
            mylib.testing.assert_split(f, Q[:, :, 0, 0], jnp.ones(16))

    def test_no_kernel(self):
        with pytest.raises(TypeError, match="calls no function of mylib.opaque"):
            mylib.testing.assert_split(attention, Q, K, V)


@pytest.mark.parametrize("seed", range(14))
def test_random(seed):
    """More: `python tests/kernels/random_kernels.py --seeds 0-300`."""
    with jax.enable_x64(True):
        about, off = random_kernels.case(seed)
    assert off < 1e-11, about


@pytest.mark.parametrize("seed", range(12))
def test_random_references(seed):
    """More: `python tests/kernels/random_references.py --seeds 0-300`."""
    with jax.enable_x64(True):
        about, splits, told = random_references.case(seed)
    assert told is None, f"{about} [{splits}]: {told}"
