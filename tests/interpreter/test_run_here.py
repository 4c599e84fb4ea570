"""`run_here`: arguments, results and errors; and programs of tests/audit/texts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from known import text_of

import mylib
from mylib._programs.interpreter.here import run_text
from mylib._programs.interpreter.interpreter import Interpreter
from mylib.testing import run_here


def test_a_sum_that_a_tpu_scatters():
    """`lax.psum_scatter` over b, of arrays in tiles."""
    mesh = mylib.make_mesh(a=2, b=2, c=2)
    x = np.random.default_rng(0).normal(size=(8, 8, 512))
    there = NamedSharding(mesh, P("a", "b", "c"))
    result = (8, 4, 512), NamedSharding(mesh, P(("a", "b"), None, "c"))
    (found,) = run_text(text_of("tpu-0.10.2-iota_rs_b"), [(x, there)], [result])
    np.testing.assert_allclose(found, x.reshape(8, 2, 4, 512).sum(1))


class TestBroadcastOfAGpu:
    text = text_of("gpu-0.10.2-pbroadcast")
    x = np.random.default_rng(0).normal(size=(8, 512))

    def test_it_gives_all_devices_the_first_row(self):
        there = NamedSharding(mylib.make_mesh(data=8), P("data"))
        (found,) = run_text(self.text, [(self.x, there)], [(self.x.shape, there)])
        np.testing.assert_array_equal(found, np.broadcast_to(self.x[0], (8, 512)))

    def test_copies_that_differ_are_an_error(self):
        there, whole = (NamedSharding(mylib.make_mesh(data=8), spec) for spec in (P("data"), P()))
        groups = "replica_groups={{0,1,2,3,4,5,6,7}}"
        assert groups in self.text
        apart = self.text.replace(groups, "replica_groups={{0,1,2,3},{4,5,6,7}}")
        with pytest.raises(mylib.errors.ReplicaError, match="device 0"):
            run_text(apart, [(self.x, there)], [((1, 512), whole)])


def check_filter_jit(mesh):
    @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh, donate="all")
    def step(model, x, scale=2.0):
        x = eqx.error_if(x, x.sum() < 0, "negative")
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return {"loss": scale * loss, "model": eqx.apply_updates(model, grads)}

    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    x = np.random.default_rng(0).uniform(size=(16, 8))
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    compiled = step.lower(eqx.filter_eval_shape(lambda: model), shape).compile()
    found = run_here(compiled, model, x)
    wanted = step.__wrapped__(model, jnp.asarray(x, jnp.float32))
    assert found["loss"].dtype == np.float64
    is_array = lambda x: isinstance(x, np.ndarray | jax.Array)  # noqa: E731
    leaves = [filter(is_array, jax.tree.leaves(tree)) for tree in (found, wanted)]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="negative"):
        run_here(compiled, model, -x)


def check_jit(mesh):
    """With a key, an argument that isn't used, and a large constant."""
    key, numbers = jax.random.key(0), jnp.arange(800.0) ** 2
    places = [NamedSharding(mesh, spec) for spec in (P("data"), P())]
    args = (jnp.ones(800), key)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
        for x, there in zip(args, places, strict=True)
    ]

    def draw(x, key, unused):
        return jax.random.split(key), x + numbers + jax.random.normal(key)

    found = run_here(jax.jit(draw).lower(*shapes, 3).compile(), *args, 3)
    keys, wanted = draw(*args, 3)
    np.testing.assert_array_equal(found[0], jax.random.key_data(keys))
    np.testing.assert_allclose(found[1], wanted, rtol=1e-6)


def test_what_filter_jit_has_compiled():
    check_filter_jit(mylib.make_mesh(data=8))


def test_what_jit_has_compiled():
    check_jit(mylib.make_mesh(data=8))


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_what_is_compiled_for_machines(machine):
    mesh = machine.mesh(data=8)
    check_filter_jit(mesh)
    check_jit(mesh)


def test_a_number_of_python():
    compiled = jax.jit(lambda scale, x: scale * x).lower(0.0, jnp.ones(3)).compile()
    np.testing.assert_array_equal(run_here(compiled, 2.5, np.ones(3)), np.full(3, 2.5))


class TestCombiners:
    """The computations that scatters, windows and reductions name are run."""

    x = np.random.default_rng(0).integers(-3, 4, (4, 6))

    def check(self, f, *args):
        compiled = jax.jit(f).lower(*args).compile()
        wanted = compiled(*args)
        np.testing.assert_array_equal(run_here(compiled, *args), wanted)

    def test_of_a_window(self):
        def windows(x):
            both = lambda a, b: a + b + a * b  # noqa: E731
            return lax.reduce_window(x, 0, both, (2, 3), (1, 1), "SAME")

        self.check(windows, self.x.astype(np.int32))

    def test_of_several_arrays(self):
        def least(x):
            pair = lambda a, b: (jnp.minimum(a[0], b[0]), a[1] + b[1])  # noqa: E731
            return jnp.stack(lax.reduce_window((x, x), (9, 0), pair, (2, 2), (2, 2), "VALID"))

        self.check(least, self.x.astype(np.int32))

    def test_that_calls_a_function(self):
        add = jax.jit(lambda a, b: a + 2 * b - b, inline=False)
        self.check(lambda x: lax.reduce(x, 0, add, (1,)), self.x.astype(np.int32))


def test_a_window_begins_with_its_own_device_s_number():
    def windows(x):
        start = lax.axis_index("data").astype(jnp.float32) * 10
        return lax.reduce_window(x, start, lambda a, b: a + b, (1, 2), (1, 2), "VALID")

    mesh = mylib.make_mesh(data=4, devices=jax.devices()[:4])
    rows = P("data")
    split = jax.shard_map(windows, mesh=mesh, in_specs=rows, out_specs=rows)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    compiled = jax.jit(split).lower(x).compile()
    wanted = x.reshape(4, 3, 2).sum(-1) + 10 * np.arange(4)[:, None]
    np.testing.assert_array_equal(run_here(compiled, x), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int32"])
def test_the_largest_numbers(dtype):
    odd = [1, np.nan, -np.inf, np.inf, 3, -0.0, 0.0, 3]
    x = np.array(odd if "float" in dtype else [0, 1, 255, 7, 7, 0, 128, 255]).astype(dtype)
    compiled = jax.jit(lambda x: lax.top_k(x, 6)).lower(x).compile()
    for a, b in zip(run_here(compiled, x), compiled(x), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b, float))


@pytest.mark.parametrize("order", ["type=TOTALORDER", "order=TOTAL"])
def test_the_total_order(order):
    compared = one_operation(f"compare(%x, %x), direction=EQ, {order}", made="pred[4]{0}")
    less = compared.replace("compare(%x, %x), direction=EQ", "compare(%x, %z), direction=GT")
    less = less.replace("  ROOT", "  %z = f32[4]{0} negate(%x)\n  ROOT")
    x = np.array([[np.nan, 0.0, np.inf, -1.0]])
    assert Interpreter(compared)(x)[0].all()
    np.testing.assert_array_equal(Interpreter(less)(x), [[[True, True, True, False]]])


def test_a_tuple_in_a_tuple():
    """As fusions of several reductions return on GPUs. Every fifth element has its number."""
    pair = "(f32[2]{0}, f32[2]{0})"
    types = f"({', '.join(['f32[2]{0}'] * 5)}, /*index=5*/{pair})"
    text = f"""HloModule m

%fused (p: f32[2]) -> {types} {{
  %p = f32[2]{{0}} parameter(0)
  %two = f32[2]{{0}} add(%p, %p)
  %pair = {pair} tuple(%p, %two)
  ROOT %all = {types} tuple(%p, %p, %p, %p, %p, /*index=5*/%pair)
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0)
  %fusion = {types} fusion(%x), kind=kInput, calls=%fused
  %last = {pair} get-tuple-element(%fusion), index=5
  ROOT %second = f32[2]{{0}} get-tuple-element(%last), index=1
}}
"""
    np.testing.assert_array_equal(Interpreter(text)(np.ones((1, 2)))[0], [[2, 2]])


def one_operation(operation, given="f32[4]{0}", made="f32[4]{0}"):
    return f"""HloModule m

ENTRY %e (x: {given}) -> {made} {{
  %x = {given} parameter(0)
  ROOT %y = {made} {operation}
}}
"""


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (one_operation("cbrt(%x)", "c64[4]{0}", "c64[4]{0}"), "cbrt of complex128 is not known"),
        (one_operation("convert(%x)", made="f6e3m2[4]{0}"), "the type f6e3m2 is not known"),
        (one_operation("topk(%x), k=1, largest=false", made="(f32[1]{0}, s32[1]{0})"), "the least"),
        (one_operation("bitcast-convert(%x)", "s8[4]{0}", "s4[4,2]{1,0}"), "a bitcast of s8 to s4"),
    ],
)
def test_what_is_not_known_is_an_error(text, refused):
    numbers = np.ones((1, 4), complex if "c64" in text else float)
    with pytest.raises(mylib.errors.AuditError, match=refused):
        Interpreter(text)(numbers)


def test_what_it_refuses():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    compiled = jax.jit(jnp.linalg.eigh).lower(x).compile()
    with pytest.raises(mylib.errors.AuditError, match="the custom call lapack_ssyevd"):
        run_here(compiled, np.eye(4))
    with pytest.raises(TypeError, match=r"shape \(3, 4\) is given for float32\[4,4\]"):
        run_here(compiled, np.ones((3, 4)))
    with pytest.raises(TypeError, match="compiled for other arguments"):
        run_here(compiled, np.eye(4), np.eye(4))
    with pytest.raises(TypeError, match="is no compiled program"):
        run_here(jax.jit(jnp.sin), np.eye(4))
    with pytest.raises(mylib.errors.AuditError, match="without its numbers"):
        text = "HloModule m\n\nENTRY %e () -> f32[9] {\n  ROOT %c = f32[9]{0} constant({...})\n}\n"
        run_text(text, [], [])
