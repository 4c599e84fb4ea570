"""`filter_checkpoint` and its policy: what is kept for the backward pass, and what made again.

What a program communicates, keeps and computes is read from what XLA has compiled.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AXES, CONTEXTS, MESHES, MIXED, crossed
from hypothesis import example, given, settings, strategies as st
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P
from stacks import (
    AUTO,
    EXPLICIT,
    ROWS,
    Measured,
    Size,
    assert_close,
    gathered_activations,
    gathered_weights,
    measure,
    not_at_all,
    through_all,
)

import mylib
from mylib import PlacementError, filter_checkpoint, filter_shard, recompute_resharded
from mylib._core.compat import opened
from mylib._core.jaxprs import all_jaxprs, jaxprs_in

SIZE = Size(width=128, hidden=512, heads=4, depth=3, batch=16, time=16)
LONG = replace(SIZE, time=64)

BASES = {
    "everything": policies.everything_saveable,
    "dots": policies.dots_with_no_batch_dims_saveable,
    "nothing": policies.nothing_saveable,
}


@functools.cache
def of_weights(mode: str, stacking: str, base: str | None, recomputing: bool) -> Measured:
    checkpoint = not_at_all
    if base is not None:
        policy = recompute_resharded(BASES[base]) if recomputing else BASES[base]
        checkpoint = functools.partial(filter_checkpoint, policy=policy)
    return measure(*gathered_weights(SIZE, mode, stacking, checkpoint))


# One is enough where the test before has shown what differs between them.
MORE_MODES = [pytest.param(mode, marks=pytest.mark.thorough) for mode in ("explicit", "shard_map")]
# Unrolled layers take long to compile.
UNROLLED = pytest.param("unrolled", marks=pytest.mark.thorough)
STACKINGS = pytest.mark.parametrize("stacking", ["scan", UNROLLED])


SLOW = [("auto", "scan", "everything")]
THOROUGH = [
    ("shard_map", "scan", "everything"),
    ("auto", "scan", "nothing"),
    ("explicit", "scan", "dots"),
    ("explicit", "scan", "everything"),
    ("auto", "scan", "dots"),
    ("shard_map", "scan", "dots"),
    ("explicit", "scan", "nothing"),
    ("shard_map", "scan", "nothing"),
    *[(mode, "unrolled", "everything") for mode in ("auto", "explicit", "shard_map")],
]


@pytest.mark.parametrize(
    "mode, stacking, base",
    [
        *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
        *[pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH],
    ],
)
def test_weights_are_gathered_again_and_not_kept(mode, stacking, base):
    plain = of_weights(mode, stacking, None, False)
    theirs = of_weights(mode, stacking, base, False)
    ours = of_weights(mode, stacking, base, True)

    assert_close(ours.results, plain.results)
    assert (plain.gathers, plain.gathered_bytes) == (SIZE.matrices, SIZE.weights)
    if (mode, stacking) == ("shard_map", "unrolled") and jax.__version_info__ < (0, 11):
        # XLA's CPU compiler of then takes gathers that a barrier keeps apart for the same: it
        # removes the barrier first. When this fails, the version can be left out of here.
        assert (ours.gathers, ours.gathered_bytes) == (SIZE.matrices, SIZE.weights)
        return
    assert (ours.gathers, ours.gathered_bytes) == (2 * SIZE.matrices, 2 * SIZE.weights)
    assert ours.needed_bytes <= theirs.needed_bytes
    if base != "everything":
        # These don't keep what was gathered, whoever asks.
        assert ours.kept_bytes == theirs.kept_bytes
    else:
        # The shards in place of the whole.
        assert theirs.kept_bytes - ours.kept_bytes == pytest.approx(SIZE.weights * 7 / 8, rel=0.01)
        if stacking == "scan":
            # Unrolled it is a matter of the order in which the CPU's compiler computes: it has
            # gathered again before it must.
            assert theirs.needed_bytes - ours.needed_bytes > 0.95 * SIZE.weights
    assert ours.flops < 1.01 * theirs.flops


@pytest.fixture
def remat3():
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", *MORE_MODES])
def test_with_the_checkpoint_that_jax_will_have(remat3, mode):
    """It asks the policy about few operations, and computes the others again."""
    plain = of_weights(mode, "scan", None, False)
    checkpoint = functools.partial(filter_checkpoint, policy=recompute_resharded())
    ours = measure(*gathered_weights(SIZE, mode, "scan", checkpoint))
    assert_close(ours.results, plain.results)
    assert ours.gathered_bytes == 2 * SIZE.weights
    # In 0.10 it asks about names only.
    assert ours.flops < (1.01 if jax.__version_info__ >= (0, 11) else 1.25) * plain.flops
    assert ours.needed_bytes < plain.needed_bytes - 0.95 * SIZE.weights


@functools.cache
def of_activations(mode: str, stacking: str, how: str) -> Measured:
    checkpoint = functools.partial(filter_checkpoint, policy=recompute_resharded())
    return measure(
        *gathered_activations(
            LONG,
            mode,
            stacking,
            not_at_all if how == "plain" else checkpoint,
            pinned=how == "pinned",
        )
    )


@pytest.mark.slow
@STACKINGS
@pytest.mark.parametrize("mode", ["auto", MORE_MODES[0]])
def test_activations_are_gathered_again_and_not_kept(mode, stacking):
    plain = of_activations(mode, stacking, "plain")
    ours = of_activations(mode, stacking, "pinned")
    unpinned = of_activations(mode, stacking, "unpinned")
    # On Explicit axes the type says how a value is kept. On Auto axes the compiler would keep it as
    # it is used, and plainly it does as it likes.
    peer = plain if mode == "explicit" else unpinned

    assert_close(ours.results, plain.results)
    assert ours.gathers == peer.gathers + LONG.depth
    assert ours.flops < 1.01 * plain.flops
    whole = LONG.activations // 2  # along "data" it stays split
    assert ours.gathered_bytes == peer.gathered_bytes + whole
    spared = peer.kept_bytes - ours.kept_bytes
    if (mode, stacking) == ("auto", "scan"):
        # Here it is the backward pass that decides.
        spared = peer.needed_bytes - ours.needed_bytes
    assert spared == pytest.approx(whole * 3 / 4, rel=0.03)


@pytest.mark.slow
@STACKINGS
def test_on_explicit_axes_nothing_needs_to_be_pinned(stacking):
    with_pin, without = (
        of_activations("explicit", stacking, how) for how in ("pinned", "unpinned")
    )
    assert with_pin[1:] == without[1:]


def residuals(fun: Callable[..., Any], *args: Any) -> list[Any]:
    """The types of what is kept between the two passes, but for numbers."""
    types = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args)[1])(*args).out_avals
    return [x for x in types if x.ndim]


def kept(fun: Callable[..., Any], *args: Any) -> list[tuple[tuple[int, ...], str]]:
    return sorted((x.shape, str(x.dtype)) for x in residuals(fun, *args))


def computed(fun: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what is kept beside the arguments themselves."""
    program = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args)[1])(*args).jaxpr
    made_by = {y: eqn for eqn in program.eqns for y in eqn.outvars}

    def is_argument(x):
        # JAX rounds what it keeps to its type, to have the same bits in both passes.
        while x in made_by and made_by[x].primitive.name == "reduce_precision":
            (x,) = made_by[x].invars
        return x in program.invars

    return [x.aval.shape for x in program.outvars if x.aval.ndim and not is_argument(x)]


WEIGHT = jnp.arange(128.0).reshape(16, 8) / 100
INPUT = jnp.ones((4, 8))

# Each makes of a matrix with eight columns another one.
FORMS = {
    "transposed": lambda w: jnp.transpose(w).T,
    "in two": lambda w: jnp.concatenate(jnp.split(w, 2)[::-1]),
    "in rows": lambda w: jnp.stack(jnp.unstack(w)),
    "reshaped": lambda w: w.reshape(-1, 4)[None].reshape(w.shape),
    "reversed": lambda w: jnp.flip(w, 0),
    "repeated": lambda w: jnp.tile(w, (2, 1)),
    "broadcast": lambda w: jnp.broadcast_to(w, (2, *w.shape)).reshape(-1, 8),
    "copied": jnp.copy,
    "behind a barrier": jax.lax.optimization_barrier,
    "in halves": lambda w: jnp.concatenate([w[len(w) // 2 :], w[: len(w) // 2]]),
    "padded": lambda w: jnp.pad(w, ((0, 2), (0, 0))),
    "rolled": lambda w: jnp.roll(w, 3, axis=0),
    "put again": lambda w: jax.device_put(w, NamedSharding(AUTO, P())),
    "wider": lambda w: w.astype(jnp.float32),
    "named": lambda w: checkpoint_name(w, "gathered"),
    "placed again": lambda w: filter_shard(w, P(None, "data"), mesh=AUTO),
}


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=4),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
@example(["transposed"], jnp.float32)
@example(["wider", "named"], jnp.bfloat16)
@settings(max_examples=10)
def test_another_form_of_what_was_gathered_is_not_kept(names, dtype):
    def product(w, x):
        w = filter_shard(w, P(), mesh=AUTO)
        for name in names:
            w = FORMS[name](w)
        return jnp.sum(jnp.sin(x @ w.T))

    w, x = WEIGHT.astype(dtype), INPUT.astype(dtype)
    ours = filter_checkpoint(product, policy=recompute_resharded())
    # What the sine needs has as many rows as the input.
    assert {shape[0] for shape in computed(ours, w, x)} == {4}
    gradient, expected = jax.jit(jax.grad(ours))(w, x), jax.jit(jax.grad(product))(w, x)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED], ids=["auto", "explicit", "mixed"])
def test_weights_that_are_gathered_as_one(mesh):
    def attended(w, x):
        w = filter_shard(w, P(), mesh=mesh)
        q, k, v = x @ w[:16].T, x @ w[16:32].T, x @ jax.lax.stop_gradient(w[32:]).T
        return jnp.sum(jnp.sin(q) * jnp.sin(k) * jnp.sin(v))

    ours = filter_checkpoint(attended, policy=recompute_resharded())
    w = filter_shard(jnp.ones((48, 8)), ROWS, mesh=mesh)
    x = filter_shard(INPUT, P(), mesh=mesh)
    assert {shape[0] for shape in computed(ours, w, x)} == {4}


def test_a_small_part_is_kept_and_not_the_whole():
    def loss(x):
        last = jnp.sin(x)[-1:]
        return jnp.sum(last * last)

    ours = filter_checkpoint(loss, policy=recompute_resharded())
    assert all(shape[0] < 64 for shape, _ in kept(ours, jnp.ones((64, 8)))[:-1])


def test_what_is_resharded_to_something_smaller_is_kept():
    """On Explicit axes, where that is known: there is nothing to gain, and sums would be made
    again.
    """

    def loss(w, x, *specs):
        y = jnp.einsum("bi,oi->bo", x, w, out_sharding=NamedSharding(EXPLICIT, specs[0]))
        y = jax.sharding.reshard(y, NamedSharding(EXPLICIT, specs[1]))
        return jnp.sum(y * y)

    w = filter_shard(jnp.ones((16, 8)), P(None, "data"), mesh=EXPLICIT)
    x = filter_shard(jnp.ones((32, 8)), P(None, "data"), mesh=EXPLICIT)
    ours = filter_checkpoint(loss, policy=recompute_resharded())
    for before, after in [(P(), ROWS), (P(unreduced={"data"}), ROWS), (P(unreduced={"data"}), P())]:
        of_product = [
            t.sharding.spec
            for t in residuals(lambda w, x: ours(w, x, before, after), w, x)  # noqa: B023
            if t.shape == (32, 16)
        ]
        assert of_product == [P(*after, *[None] * (2 - len(after)))]


def test_a_narrower_type_is_kept_unless_it_comes_first():
    def cast_last(w, x):
        return jnp.sin(x @ filter_shard(w, P(), mesh=AUTO).astype(jnp.bfloat16).T)

    def cast_first(w, x):
        return jnp.sin(x @ filter_shard(w.astype(jnp.bfloat16), P(), mesh=AUTO).T)

    x = INPUT.astype(jnp.bfloat16)
    last, first = (
        kept(filter_checkpoint(f, policy=recompute_resharded()), WEIGHT, x)
        for f in (cast_last, cast_first)
    )
    # Either way it is one copy in bfloat16: here of the whole, there of what each device has.
    assert last.count(((16, 8), "bfloat16")) == first.count(((16, 8), "bfloat16")) == 1


def gathers(to):
    return lambda w: jax.lax.all_gather(w, "data", tiled=True, to=to)


# What a function that each device runs may do to have all of its weight.
WHOLE = {
    "all_gather": gathers("varying"),
    "to the same": gathers("invarying"),
    "to the same, varied": lambda w: jax.lax.pcast(gathers("invarying")(w), "data", to="varying"),
    "reduced": gathers("reduced"),
    "vary": lambda w: mylib.vary(gathers("invarying")(w), "data"),
}


@pytest.mark.parametrize("how", WHOLE)
def test_what_a_device_gathers_is_not_kept(how):
    @mylib.filter_shard_map(mesh=AUTO, in_specs=ROWS, out_specs=P())
    def loss(w, x):
        step = filter_checkpoint(
            lambda w, x: jnp.sin(x @ WHOLE[how](w).T), policy=recompute_resharded()
        )
        return jax.lax.psum(jnp.sum(step(w, x)), "data")

    x = jnp.ones((32, 8))
    # What differs between the devices is kept as one array, here of 8 x 16 rows.
    assert max(shape[0] for shape, _ in kept(loss, WEIGHT, x)) == 32
    parts = [opened(part) for part in all_jaxprs(jax.make_jaxpr(jax.grad(loss, (0, 1)))(WEIGHT, x))]
    names = [eqn.primitive.name for part in parts for eqn in part.eqns]
    assert len([name for name in names if name.startswith("all_gather")]) == 2
    assert_close(
        jax.jit(jax.grad(loss, (0, 1)))(WEIGHT, x),
        jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w.T)), (0, 1))(WEIGHT, x),
    )


@MESHES
def test_the_policy_knows_what_filter_shard_is_made_of(mesh):
    """When this fails, JAX has given its primitives other names: add them to `_RESHARDING`."""
    policy = recompute_resharded()
    shards = filter_shard(WEIGHT, ROWS, mesh=mesh)
    placing = jax.make_jaxpr(lambda x: filter_shard(x, P(), mesh=mesh))(shards)
    for part in all_jaxprs(placing):
        for eqn in opened(part).eqns:
            if not jaxprs_in(eqn):
                avals = [x.aval for x in eqn.invars]
                assert policy(eqn.primitive, *avals, **eqn.params) is False, eqn


def test_the_base_policy_decides_on_the_rest():
    def named(x):
        return checkpoint_name(jnp.sin(x), "sine") * checkpoint_name(jnp.cos(x), "cosine")

    def of(policy):
        return len(kept(filter_checkpoint(lambda x: jnp.sum(named(x) ** 2), policy=policy), INPUT))

    for base in (
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.save_only_these_names("sine"),
        policies.save_any_names_but_these("sine"),
        policies.save_anything_except_these_names("tangent"),
        policies.save_from_both_policies(
            policies.save_only_these_names("sine"), policies.dots_saveable
        ),
    ):
        assert of(recompute_resharded(base)) == of(base)


@pytest.mark.parametrize(
    "base", [policies.everything_saveable, policies.save_anything_except_these_names("x")]
)
def test_who_saves_everything_asks_for_no_name(base):
    def product(w, x):
        w = checkpoint_name(filter_shard(w, P(), mesh=AUTO), "gathered")
        return jnp.sum(jnp.sin(x @ w.T))

    def keeps_it(policy):
        ours = filter_checkpoint(product, policy=policy)
        return (16, 8) in computed(ours, WEIGHT, INPUT)

    assert not keeps_it(recompute_resharded(base))
    assert keeps_it(recompute_resharded(policies.save_only_these_names("gathered")))


def test_equal_policies_are_equal():
    """JAX keeps what it has worked out for a policy."""
    dots = policies.dots_saveable
    assert recompute_resharded(dots) == recompute_resharded(dots)
    assert hash(recompute_resharded(dots)) == hash(recompute_resharded(dots))
    assert recompute_resharded(dots) != recompute_resharded()


OFFLOADING = {
    "dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", *MORE_MODES])
@STACKINGS
@pytest.mark.parametrize("what", OFFLOADING)
def test_offloaded(mode, stacking, what):
    """On CPU all memory is the host's; that it is asked for is seen in the types. The rest is in
    test_gpu.py.
    """
    policy = recompute_resharded(OFFLOADING[what])
    checkpoint = functools.partial(filter_checkpoint, policy=policy)
    loss, *args = gathered_weights(SIZE, mode, stacking, checkpoint)
    offloaded = [x for x in residuals(loss, *args) if x.memory_space == jax.memory.Space.Host]
    # Of a block's six products with weights the last is not needed; one has a name.
    each = 5 if what == "dots" else 1
    assert len(offloaded) == (each if stacking == "scan" else each * SIZE.depth)
    if what == "dots":
        results = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
        assert_close(results, of_weights(mode, stacking, None, False).results)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_weights_in_host_memory_are_fetched_again(mesh):
    there = NamedSharding(mesh, ROWS, memory_kind="pinned_host")
    w = mylib.filter_device_put(WEIGHT, there)

    def loss(w, x):
        w = mylib.filter_device_put(w, P(), mesh=mesh)
        return jnp.sum(jnp.sin(x @ w.T))

    ours = filter_checkpoint(loss, policy=recompute_resharded())
    types = {x.shape: x.memory_space for x in residuals(ours, w, INPUT)}
    assert types.pop((16, 8)) == jax.memory.Space.Host
    assert set(types.values()) == {jax.memory.Space.Device}


def test_what_is_sent_to_the_host_is_kept_there():
    def loss(x):
        y = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
        y = jax.device_put(y, jax.memory.Space.Device)
        return jnp.sum(y * y)

    ours = filter_checkpoint(loss, policy=recompute_resharded())
    spaces = [x.memory_space for x in residuals(ours, INPUT)]
    assert sorted(spaces, key=str) == [jax.memory.Space.Device, jax.memory.Space.Host]


# Arguments, and where they are kept


def test_arguments_wait_as_in_shardings_says():
    """On Auto axes the compiler otherwise keeps them as they are used: here whole."""

    def chain(**kept):
        step = filter_checkpoint(
            lambda w, x: jnp.tanh(filter_shard(x, P(), mesh=AUTO) @ w),
            policy=recompute_resharded(),
            mesh=AUTO,
            **kept,
        )
        weights = [jnp.eye(SIZE.width)] * SIZE.depth
        return measure(lambda x: jnp.mean(through_all(step, weights, x) ** 2), x)

    x = filter_shard(jnp.ones((64, SIZE.width)), ROWS, mesh=AUTO)
    pinned, free = chain(in_shardings={"x": ROWS}), chain()
    assert_close(pinned.results, free.results)
    # Once, and from then on every device has all of it, and computes all.
    assert free.gathers == 1
    assert pinned.gathers == 2 * SIZE.depth - 1
    # Whichever of the two programs shows it: the second is free in how it hands on what it keeps.
    spared = max(free.needed_bytes - pinned.needed_bytes, free.kept_bytes - pinned.kept_bytes)
    assert spared >= (SIZE.depth - 1) * x.nbytes * 7 / 8


def product(w, x):
    return jnp.sin(w) * x


@crossed(context=[*CONTEXTS], mesh=AXES)
def test_in_every_context(mesh, context):
    x = jnp.arange(32.0).reshape(8, 4) / 32
    w = jnp.cos(x)
    ours = filter_checkpoint(
        lambda w, x: product(filter_shard(w, P(), mesh=mesh), x),
        policy=recompute_resharded(),
        in_shardings={"w": ROWS},
        mesh=mesh,
    )

    def call(fun):
        weighted = CONTEXTS[context](lambda w: fun(w, x), w)
        return weighted, CONTEXTS[context](lambda x: fun(w, x), x)

    expected = call(product)
    with jax.set_mesh(mesh):
        assert_close(call(ours), expected)


@pytest.mark.parametrize(
    "in_shardings",
    [ROWS, (ROWS, None), {"w": ROWS}, {"w": mylib.rules.fsdp("data", min_size=0)}],
    ids=["for all", "by position", "by name", "a rule"],
)
def test_what_in_shardings_may_be(in_shardings):
    seen = []

    def looking(w, x):
        jax.debug.inspect_array_sharding(w, callback=seen.append)
        return product(w, x)

    ours = filter_checkpoint(looking, in_shardings=in_shardings, mesh=AUTO)
    jax.jit(ours)(WEIGHT, jnp.ones((16, 8)))
    assert all(sharding.is_equivalent_to(NamedSharding(AUTO, ROWS), 2) for sharding in seen)
    assert seen


def test_eager_arguments_are_moved():
    one, other = jax.devices()[:2]
    w = jax.device_put(WEIGHT, one)
    ours = filter_checkpoint(lambda w, x: x @ w.T, in_shardings=other)
    gradient = jax.grad(lambda w: jnp.sum(ours(w, jax.device_put(INPUT, one))))(w)
    assert gradient.devices() == {one}
    assert ours(w, np.asarray(INPUT)).devices() == {other}


def test_on_explicit_axes_the_type_says_where_arguments_wait():
    def chain(**kept):
        step = filter_checkpoint(
            lambda w, x: jnp.tanh(filter_shard(x, P(), mesh=EXPLICIT) @ w), mesh=EXPLICIT, **kept
        )
        return lambda w, x: jnp.sum(step(w, step(w, x)))

    w, x = filter_shard((jnp.eye(8), jnp.ones((64, 8))), P(), mesh=EXPLICIT)

    def specs(fun):
        return [t.sharding.spec for t in residuals(fun, w, x) if t.shape == x.shape]

    assert specs(chain(in_shardings={"x": ROWS})) == [P("data", None)] * 2
    assert specs(chain()) == [P(None, None)] * 2


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
def test_arguments_do_not_wait_in_host_memory(kind, transform):
    there = NamedSharding(AUTO, ROWS, memory_kind=kind)
    ours = filter_checkpoint(lambda w: jnp.sum(w**2), in_shardings=there)
    with pytest.raises(
        PlacementError, match=f"(?s)w \\(16, 8\\).*programs can't compute in {kind}"
    ):
        transform(ours)(WEIGHT)


def test_every_argument_that_can_not_be_kept_so_is_named():
    model = eqx.nn.MLP(4, 6, 5, 1, key=jax.random.key(0))
    step = filter_checkpoint(
        lambda model, *, x: jax.vmap(model)(x),
        in_shardings={"model": P("data"), "x": P("dada")},
        mesh=AUTO,
    )
    for call in (step, eqx.filter_jit(step)):
        with pytest.raises(PlacementError) as error:
            call(model, x=jnp.ones((8, 4)))
        message = str(error.value)
        assert "model.layers[0].weight (5, 4)" in message
        assert "model.layers[1].bias (6,)" in message
        assert "x (8, 4)" in message and "has no axis 'dada'" in message


def test_parameters_that_are_not_there():
    with pytest.raises(TypeError, match="has no parameter 'y': it has x"):
        filter_checkpoint(lambda x: x, in_shardings={"y": P()}, mesh=AUTO)(INPUT)
    with pytest.raises(TypeError, match="in_shardings is a tuple of 2; positional .*: 1"):
        filter_checkpoint(lambda x: x, in_shardings=(P(), P()), mesh=AUTO)(INPUT)


def test_the_maker_of_policies_is_no_policy():
    with pytest.raises(TypeError, match="recompute_resharded"):
        jax.grad(filter_checkpoint(jnp.sin, policy=recompute_resharded))(1.0)
    for wrong in (None, recompute_resharded):
        with pytest.raises(TypeError, match="is no policy. Give one of jax.checkpoint_policies"):
            recompute_resharded(wrong)


# In place of `equinox.filter_checkpoint`


class Scale(eqx.Module):
    factor: jax.Array
    name: str = eqx.field(static=True)

    @filter_checkpoint
    def method(self, x, /, *, power=2):
        "Scales."
        return self.factor * x**power, self.name, power

    @filter_checkpoint(policy=policies.dots_saveable)
    def __call__(self, x):
        return self.factor * jnp.sin(x)


@pytest.mark.parametrize("checkpoint", [eqx.filter_checkpoint, filter_checkpoint])
def test_as_equinox_has_it(checkpoint):
    calls = []

    @checkpoint
    def fun(tree, *rest, flag, function):
        "What it does."
        calls.append(flag)
        y = function(tree["x"]) * len(rest)
        return {"y": y, "flag": flag, "function": function, "tree": tree}

    assert (fun.__name__, fun.__doc__) == ("fun", "What it does.")
    tree = {"x": jnp.ones(3), "text": "a", "number": 2, "none": None, "np": np.arange(3)}
    result = fun(tree, 1, None, flag=True, function=jnp.sin)
    np.testing.assert_allclose(result["y"], 2 * jnp.sin(jnp.ones(3)), rtol=1e-6)
    assert result["flag"] is True and result["function"] is jnp.sin
    assert {k: v for k, v in result["tree"].items() if k not in ("x", "np")} == {
        "text": "a",
        "number": 2,
        "none": None,
    }
    gradient = jax.grad(lambda x: fun({"x": x}, 1, flag=1, function=jnp.sin)["y"])(2.0)
    np.testing.assert_allclose(gradient, np.cos(2.0), rtol=1e-6)
    batched = eqx.filter_vmap(lambda x: fun({"x": x}, 1, flag=1, function=jnp.sin)["y"])
    np.testing.assert_allclose(batched(INPUT), jnp.sin(INPUT), rtol=1e-6)


def test_methods_and_modules():
    scale = Scale(jnp.array(3.0), "triple")
    value, name, power = scale.method(jnp.array(2.0), power=3)
    assert (float(value), name, power) == (24.0, "triple", 3)
    assert Scale.method.__doc__ == "Scales."

    @eqx.filter_grad
    def loss(scale, x):
        return scale(x) + scale.method(x)[0]

    np.testing.assert_allclose(loss(scale, 0.5).factor, np.sin(0.5) + 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, pytest.param(eqx.filter_jit, marks=pytest.mark.thorough), mylib.filter_jit],
)
def test_a_module_is_differentiated(transform):
    mlp = eqx.nn.MLP(1, 2, 5, 2, key=jax.random.key(0))

    def loss(mlp, x):
        return jnp.sum(mlp(x))

    def checkpointed(mlp, x):
        return jnp.sum(filter_checkpoint(mlp)(x))

    x = jnp.array([1.0])
    ours, theirs = (transform(eqx.filter_grad(f))(mlp, x) for f in (checkpointed, loss))
    assert_close(ours, theirs)
    # Its arrays are those of a tree, as an optimiser's are that is made for it.
    checkpoint = filter_checkpoint(mlp)
    again = jax.tree.map(lambda x: x, checkpoint)
    np.testing.assert_array_equal(again(x), mlp(x))
    assert jax.tree.structure(checkpoint) == jax.tree.structure(filter_checkpoint(mlp))


def test_what_a_module_holds_is_concrete():
    class Reshape(eqx.Module):
        shape: np.ndarray
        transpose: jax.Array

        def __call__(self, x):
            x = x.reshape(tuple(int(n) for n in self.shape))
            return x.T if self.transpose else x

    ours = filter_checkpoint(Reshape(np.array([2, 4]), jnp.array(True)))
    assert eqx.filter_jit(lambda x: ours(x))(jnp.ones(8)).shape == (4, 2)


def test_trees_of_one_structure():
    def make(key):
        layer = eqx.nn.Linear(3, 3, key=jax.random.key(key))
        policy = recompute_resharded(policies.save_only_these_names("a"))
        return filter_checkpoint(layer, policy=policy, in_shardings={"x": ROWS}, mesh=AUTO)

    one, other = make(0), make(1)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    arrays = [eqx.filter(x, eqx.is_array) for x in (one, other, copy.deepcopy(one))]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *arrays)
    assert stacked.fun.weight.shape == (3, 3, 3)


def test_made_anew_it_is_not_compiled_anew():
    traces = []

    def double(x):
        traces.append(x)
        return 2 * x

    call = eqx.filter_jit(lambda fun, x: fun(x))
    for _ in range(3):
        call(
            filter_checkpoint(double, policy=recompute_resharded(), in_shardings=P(), mesh=AUTO),
            INPUT,
        )
    assert len(traces) == 1


def test_only_the_arguments_are_kept_by_default():
    def loss(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    assert kept(filter_checkpoint(loss), INPUT) == [((4, 8), "float32")]
    assert len(kept(loss, INPUT)) > 1


def test_traced_once_a_call():
    traces = []

    @filter_checkpoint(policy=recompute_resharded(), in_shardings=P(), mesh=AUTO)
    def fun(x):
        traces.append(x)
        return jnp.sin(x)

    step = mylib.filter_jit(jax.grad(lambda x: jnp.sum(fun(x))))
    step(INPUT), step(INPUT + 1)
    assert len(traces) == 1


def test_checks_at_run_time_are_kept():
    @filter_checkpoint(policy=recompute_resharded())
    def positive(x):
        return jnp.sqrt(eqx.error_if(x, jnp.any(x < 0), "it is negative"))

    gradient = mylib.filter_jit(jax.grad(lambda x: jnp.sum(positive(x))))
    np.testing.assert_allclose(gradient(INPUT), 0.5)
    with pytest.raises(eqx.EquinoxRuntimeError, match="it is negative"):
        gradient(-INPUT)
