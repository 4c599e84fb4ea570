"""The eager transports: what they return, what they share, what they compile and let go."""

import gc
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    Sharding,
    SingleDeviceSharding,
)

import mylib

AUTO = (AxisType.Auto,)


def mesh_1d(types=AUTO, devices=None) -> Mesh:
    return Mesh(np.array(devices or jax.devices()), ("d",), axis_types=types)


def mesh_2d(types=AUTO * 2) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=types)


def shards_of(y: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in y.addressable_shards]


def shares_memory(y: jax.Array, source: np.ndarray) -> bool:
    return any(np.shares_memory(shard, source) for shard in shards_of(y))


def at_offset(offset: int, count: int) -> np.ndarray:
    """A NumPy array whose memory starts `offset` bytes behind a 64-byte boundary."""
    memory = np.zeros(count * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + count * 4].view(np.float32)


# --- keep ---------------------------------------------------------------------------------------


def test_an_equivalent_spec_is_there():
    mesh = mesh_1d()
    x = mylib.filter_shard(np.zeros((8, 2)), NamedSharding(mesh, P("d")))
    assert mylib.filter_shard(x, NamedSharding(mesh, P("d", None))) is x
    assert mylib.filter_shard(x, NamedSharding(mesh, P(("d",)))) is x


def test_an_uncommitted_array_is_not_there():
    x = jnp.arange(3.0)
    y = mylib.filter_shard(x, jax.devices()[0])
    assert y is not x and y.committed


@pytest.mark.parametrize(
    "other",
    [
        Mesh(np.array(jax.devices()), ("other_name",), axis_types=AUTO),
        Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Explicit,)),
    ],
    ids=["axis name", "axis type"],
)
def test_equivalent_meshes_are_not_the_same(other: Mesh):
    x = mylib.filter_shard(np.arange(8.0), NamedSharding(mesh_1d(), P("d")))
    y = mylib.filter_shard(x, NamedSharding(other, P(other.axis_names[0])))
    assert x.sharding.is_equivalent_to(y.sharding, 1)
    assert y.sharding.mesh == other
    y.block_until_ready()
    y.delete()
    np.testing.assert_array_equal(x, np.arange(8.0))


def test_an_explicit_axis_of_one_device_is_part_of_the_type():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",), axis_types=(AxisType.Explicit,))
    x = mylib.filter_shard(np.arange(8.0), NamedSharding(mesh, P("d")))
    assert jax.typeof(mylib.filter_shard(x, NamedSharding(mesh, P()))).sharding.spec == P(None)


def test_another_memory_kind_is_not_there():
    sharding = NamedSharding(mesh_1d(), P("d"))
    x = mylib.filter_device_put(np.arange(8.0), sharding.with_memory_kind("pinned_host"))
    y = mylib.filter_device_put(x, sharding)
    assert x.sharding.memory_kind == "pinned_host"
    assert y.sharding.memory_kind == jax.devices()[0].default_memory().kind


def test_another_layout_is_not_there():
    sharding = NamedSharding(mesh_1d(), P("d"))
    turned = Format(Layout((1, 0)), sharding)
    x = mylib.filter_device_put(np.arange(16.0).reshape(8, 2), sharding)
    y = mylib.filter_device_put(x, turned)
    assert y.format.layout.major_to_minor == (1, 0)
    assert mylib.filter_device_put(y, turned) is y
    assert mylib.filter_device_put(y, sharding) is y  # a sharding says nothing of layouts
    np.testing.assert_array_equal(y, x)


# --- put ----------------------------------------------------------------------------------------

TARGETS = {
    "device": SingleDeviceSharding(jax.devices()[0]),
    "other_device": SingleDeviceSharding(jax.devices()[5]),
    "sharded": NamedSharding(mesh_1d(), P("d")),
    "replicated": NamedSharding(mesh_1d(), P()),
    "explicit": NamedSharding(mesh_1d((AxisType.Explicit,)), P("d")),
}


@pytest.fixture(params=[*TARGETS, "other_backend"])
def target(request) -> Sharding:
    # Asked for here, so that this file is collected where JAX_PLATFORMS names "cpu" alone.
    if request.param == "other_backend":
        return NamedSharding(mesh_1d(devices=jax.devices("other")), P("d"))
    return TARGETS[request.param]


@pytest.mark.parametrize("count", [64, 65536], ids=["small", "large"])
def test_writing_to_a_numpy_source_changes_nothing(target, count):
    for offset in range(0, 64, 4):
        x = at_offset(offset, count)
        y = mylib.filter_shard(x, target)
        assert not shares_memory(y, x)
        x[:] = 1.0
        assert not np.asarray(y).any()


def test_donating_what_came_back_leaves_the_source_alone(target):
    sources = [
        jnp.arange(4096.0),
        jax.device_put(np.arange(4096.0, dtype=np.float32), jax.devices()[0]),
        jax.device_put(np.arange(4096.0, dtype=np.float32), TARGETS["replicated"]),
        jnp.float32(2.0) * jnp.ones(4096),
        jnp.asarray(2.0),  # weakly typed
    ]
    for x in sources:
        wanted = target if x.ndim else SingleDeviceSharding(jax.devices()[1])
        before = np.array(x)
        y = mylib.filter_shard(x, wanted)
        if y is x:
            continue
        assert not shares_memory(y, np.asarray(x))
        z = jax.jit(lambda v: v + 1, donate_argnums=0)(y)
        np.testing.assert_array_equal(np.asarray(z), before + 1)
        assert not x.is_deleted()
        np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("host", [True, False], ids=["numpy", "jax"])
def test_the_same_array_twice_can_be_donated(target, host):
    x = np.arange(4096.0, dtype=np.float32)
    x = x if host else jnp.asarray(x)
    a, b = mylib.filter_shard((x, x), target)
    if a is b:
        return  # already there
    c, d = jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(a, b)
    np.testing.assert_array_equal(c, np.arange(4096.0) + 1)
    np.testing.assert_array_equal(d, np.arange(4096.0) + 2)
    np.testing.assert_array_equal(x, np.arange(4096.0))


def test_replicas_do_not_change_each_other_when_donated():
    y = mylib.filter_shard(np.ones(4096, np.float32), TARGETS["replicated"])
    step = jax.jit(lambda v: v * 2, donate_argnums=0, out_shardings=TARGETS["replicated"])
    for _ in range(10):
        y = step(y)
    assert all((shard == 2.0**10).all() for shard in shards_of(y))


def test_one_device_to_a_mesh_compiles_nothing():
    leaves = [jnp.ones((8 * n, 3)) for n in range(1, 30)]
    jax.block_until_ready(leaves)
    with compilations() as compiled:
        placed = mylib.filter_shard(leaves, TARGETS["sharded"])
    assert not compiled
    assert all(y.sharding == TARGETS["sharded"] for y in placed)


def test_resharding_many_small_leaves_compiles_nothing():
    mesh = mesh_2d()
    leaves = [np.ones((8, 8 * n), np.float32) for n in range(1, 30)]
    placed = mylib.filter_shard(leaves, NamedSharding(mesh, P("a", "b")))
    with compilations() as compiled:
        swapped = mylib.filter_shard(placed, NamedSharding(mesh, P("b", "a")))
    assert not compiled
    for x, y in zip(leaves, swapped, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("put", [mylib.filter_shard, jax.device_put])
def test_guarded_transfers(put):
    """What is asked for may be moved where JAX forbids what happens by the way."""
    sharding, x = NamedSharding(mesh_1d(), P("d")), np.ones(8, np.float32)
    with jax.transfer_guard("disallow"):
        assert put(x, sharding).sharding == sharding
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed"):
        put(x, sharding)


def test_keys_are_placed_without_a_program():
    keys = jax.random.split(jax.random.key(3), 16)
    with compilations() as compiled:
        placed = mylib.filter_shard(keys, TARGETS["sharded"])
    assert not compiled
    assert placed.sharding.is_equivalent_to(TARGETS["sharded"], 1)
    assert jax.random.key_impl(placed) == jax.random.key_impl(keys)
    np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(keys))
    raw = mylib.filter_shard(jax.random.key_data(keys), TARGETS["sharded"])
    np.testing.assert_array_equal(raw, jax.random.key_data(keys))


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "uint4", "int8", "bfloat16", "float8_e4m3fn", "float16", "complex64"]
)
def test_every_dtype_keeps_its_bits(dtype, target):
    host = np.arange(8).astype(jnp.dtype(dtype))
    for x in (host, jnp.asarray(host)):
        y = mylib.filter_shard(x, target)
        assert y.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(y), host)


def test_sixty_four_bits_become_what_jax_holds():
    tree = {"f": np.arange(8.0), "i": np.arange(8), "c": np.ones(8, np.complex128)}
    placed = mylib.filter_shard(tree, TARGETS["sharded"])
    assert {name: x.dtype for name, x in placed.items()} == {
        name: jnp.asarray(x).dtype for name, x in tree.items()
    }
    with jax.enable_x64(True):
        wide = mylib.filter_shard(tree, TARGETS["sharded"])
        assert {name: x.dtype for name, x in wide.items()} == {n: x.dtype for n, x in tree.items()}
    # An array that has 64 bits keeps them, wherever it is moved from.
    assert mylib.filter_shard(wide["f"], TARGETS["replicated"]).dtype == np.float64


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_arrays_of_sixty_four_bits_keep_their_shards(dtype, target):
    with jax.enable_x64(True):
        alone = jnp.arange(16).astype(dtype)
        sources = [alone, *(jax.device_put(alone, there) for there in TARGETS.values())]
    narrow = np.arange(8.0)
    for source in sources:
        wide, others = mylib.filter_shard((source, narrow), target)
        assert {shard.data.dtype for shard in wide.addressable_shards} == {np.dtype(dtype)}
        np.testing.assert_array_equal(np.asarray(wide), np.arange(16))
        assert wide.dtype == dtype and others.dtype == np.float32


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1)])
def test_empty_and_scalar_arrays(shape):
    for x in (np.zeros(shape, np.float32), jnp.zeros(shape), np.zeros(shape).astype("i8")):
        y = mylib.filter_shard(x, TARGETS["replicated"])
        assert y.shape == shape and y.sharding == TARGETS["replicated"]


def test_numpy_scalars_and_strided_sources():
    assert mylib.filter_shard(np.float32(3), TARGETS["replicated"]).item() == 3.0
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for view in (x.T, x[::-1], x[:, ::2], np.asfortranarray(x), np.broadcast_to(x[0], (8, 8))):
        np.testing.assert_array_equal(mylib.filter_shard(view, TARGETS["sharded"]), view)


def test_weak_types_stay_weak():
    x = jnp.asarray(1.0)
    assert mylib.filter_shard(x, TARGETS["replicated"]).weak_type
    assert mylib.filter_device_put(x, TARGETS["replicated"], may_alias=True).weak_type


def test_a_jax_source_is_read_when_it_is_ready():
    x = jnp.ones((500, 500))
    for _ in range(10):
        x = x @ x / 500
    np.testing.assert_allclose(mylib.filter_shard(x, TARGETS["other_device"]), np.ones((500, 500)))


# --- the faster contracts -----------------------------------------------------------------------


def test_may_alias_shares_the_memory_of_a_numpy_source():
    x = at_offset(0, 65536)
    y = mylib.filter_device_put(x, jax.devices()[0], may_alias=True)
    assert shares_memory(y, x)
    # The same source, without: the test above can fail.
    assert not shares_memory(mylib.filter_device_put(x, jax.devices()[0]), x)


def test_flags_by_prefix():
    a, b = at_offset(0, 65536), at_offset(0, 65536)
    placed = mylib.filter_device_put(
        {"a": a, "b": b, "c": "static"},
        jax.devices()[0],
        may_alias={"a": True, "b": None, "c": None},
    )
    assert shares_memory(placed["a"], a) and not shares_memory(placed["b"], b)
    x, y = jnp.arange(8.0), jnp.arange(8.0)
    mylib.filter_device_put((x, y), jax.devices()[1], donate=(True, False))
    assert x.is_deleted() and not y.is_deleted()


def test_a_donated_source_is_gone_and_its_value_arrives(target):
    x = jnp.arange(4096.0) + 1
    y = mylib.filter_device_put(x, target, donate=True)
    assert x.is_deleted()
    np.testing.assert_array_equal(y, np.arange(4096.0) + 1)
    np.testing.assert_array_equal(
        jax.jit(lambda v: v * 2, donate_argnums=0)(y), np.arange(4096) * 2.0 + 2
    )


def test_a_donated_weak_scalar_arrives():
    x = jnp.asarray(3.0)
    y = mylib.filter_device_put(x, TARGETS["replicated"], donate=True)
    assert x.is_deleted() and y.weak_type
    assert [shard.item() for shard in shards_of(y)] == [3.0] * 8


def test_donating_numpy_shares_nothing():
    x = at_offset(0, 65536)
    y = mylib.filter_device_put(x, jax.devices()[0], donate=True)
    assert not shares_memory(y, x)


def test_a_donated_array_that_is_there_in_one_place_stays():
    x = mylib.filter_shard(np.arange(8.0), TARGETS["sharded"])
    kept, moved = mylib.filter_device_put(
        (x, x), (TARGETS["sharded"], TARGETS["replicated"]), donate=True
    )
    assert kept is x and not x.is_deleted()
    assert not any(shares_memory(moved, shard) for shard in shards_of(kept))
    np.testing.assert_array_equal(moved, kept)


@pytest.mark.slow
def test_donation_frees_memory():
    def live() -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    x = jnp.ones((1024, 1024))
    jax.block_until_ready(x)
    before = live()
    y = mylib.filter_device_put(x, TARGETS["sharded"], donate=True)
    assert live() == before
    assert y.shape == (1024, 1024)


def test_no_placement_means_the_default_device():
    x, y = np.arange(3.0), mylib.filter_shard(np.arange(8.0), TARGETS["sharded"])
    placed = mylib.filter_device_put({"x": x, "y": y, "name": "static", "none": None})
    assert isinstance(placed["x"], jax.Array) and not placed["x"].committed
    assert placed["x"].devices() == {jax.devices()[0]}
    assert placed["y"] is y and placed["name"] == "static" and placed["none"] is None
    with jax.default_device(jax.devices()[2]):
        assert mylib.filter_device_put(x).devices() == {jax.devices()[2]}


def test_a_mesh_without_a_placement_is_refused():
    with pytest.raises(mylib.PlacementError, match="without a placement there is no PartitionSpec"):
        mylib.filter_device_put(np.zeros(8), mesh=mesh_1d())


def test_a_check_without_a_placement():
    replicated = NamedSharding(mesh_1d(), P())
    shards = [jax.device_put(np.full(2, i), device) for i, device in enumerate(jax.devices())]
    differing = jax.make_array_from_single_device_arrays((2,), replicated, shards)
    assert mylib.filter_device_put(differing) is differing
    with pytest.raises(mylib.errors.ReplicaError):
        mylib.filter_device_put(differing, check=True)
    with pytest.raises(TypeError, match="check=True compares values"):
        jax.jit(lambda x: mylib.filter_device_put(x, check=True))(jnp.ones(2))


def test_nothing_that_stays_is_donated():
    # As in `jax.device_put`.
    x, y = jax.device_put(jnp.ones(8), jax.devices()[3]), np.ones(8)
    placed, made = mylib.filter_device_put((x, y), donate=True)
    assert placed is x and not x.is_deleted() and (made == y).all()
    with pytest.raises(mylib.PlacementError, match="a donated array can't share its memory"):
        mylib.filter_device_put(x, donate=True, may_alias=True)


def test_memory_kinds_there_and_back():
    sharding = NamedSharding(mesh_1d(), P("d"))
    x = np.arange(16.0, dtype=np.float32)
    for kind in ("pinned_host", "unpinned_host", "device"):
        y = mylib.filter_device_put(x, sharding.with_memory_kind(kind))
        assert y.sharding.memory_kind == kind
        z = mylib.filter_shard(y, TARGETS["replicated"])
        np.testing.assert_array_equal(z, x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_memory_kinds_inside_jit(axis_type):
    sharding = NamedSharding(mesh_1d((axis_type,)), P("d"))
    there = sharding.with_memory_kind("pinned_host")
    x = mylib.filter_shard(np.arange(16.0, dtype=np.float32), sharding)
    y = jax.jit(lambda x: mylib.filter_device_put(x * 2, there))(x)
    assert y.sharding.is_equivalent_to(there, 1)
    assert y.sharding.memory_kind == "pinned_host"
    z = jax.jit(lambda y: mylib.filter_device_put(y, sharding) + 1)(y)
    assert z.sharding.memory_kind == jax.devices()[0].default_memory().kind
    np.testing.assert_array_equal(z, np.arange(16.0) * 2 + 1)
    # Under vmap too, where the batch dimension is left alone.
    w = jax.jit(jax.vmap(lambda x: mylib.filter_device_put(x, there)))(jnp.ones((3, 16)))
    assert w.sharding.memory_kind == "pinned_host" and w.shape == (3, 16)


# --- differentiation ----------------------------------------------------------------------------


def test_src_says_where_cotangents_go():
    home = SingleDeviceSharding(jax.devices()[6])
    x = np.arange(8.0, dtype=np.float32)
    y, pull = jax.vjp(lambda x: mylib.filter_device_put(x, TARGETS["sharded"], src=home), x)
    assert pull(y)[0].sharding == home


@pytest.mark.parametrize("start", ["numpy", "uncommitted", "other_device", "sharded"])
def test_src_without_a_placement(start):
    x = np.arange(8.0, dtype=np.float32)
    if start != "numpy":
        x = jnp.asarray(x) if start == "uncommitted" else jax.device_put(x, TARGETS[start])
    home = SingleDeviceSharding(jax.devices()[6])

    def loss(x, put):
        return (put(x, src=home) ** 2).sum()

    assert_as_jax(jax.grad(loss)(x, mylib.filter_device_put), jax.grad(loss)(x, jax.device_put))
    # `jax.device_put` has it for the batch, too, and `filter_device_put` for each example.
    batch = np.stack([x, x])
    assert jax.vmap(jax.grad(loss), (0, None))(batch, mylib.filter_device_put).sharding == home
    in_program = jax.jit(jax.grad(loss), static_argnums=1)(x, mylib.filter_device_put)
    np.testing.assert_array_equal(in_program, 2 * np.arange(8.0))


def assert_as_jax(ours, theirs):
    assert (ours.sharding, ours.committed) == (theirs.sharding, theirs.committed)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_second_derivatives_and_nesting():
    x = jnp.arange(1.0, 9.0)

    def f(x):
        return jnp.sum(mylib.filter_shard(x, TARGETS["sharded"]) ** 3)

    np.testing.assert_allclose(jax.hessian(f)(x), np.diag(6 * np.arange(1.0, 9.0)))
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(f)(x).sum())(x), 6 * np.arange(1.0, 9.0))
    batch = jnp.stack([x, x + 1])
    per_example = jax.vmap(jax.grad(f))(batch)
    np.testing.assert_allclose(per_example, 3 * np.asarray(batch) ** 2)
    whole = jax.grad(lambda b: jax.vmap(f)(b).sum())(batch)
    np.testing.assert_allclose(whole, 3 * np.asarray(batch) ** 2)


def test_a_tree_with_traced_concrete_and_integer_leaves():
    weight, steps = jnp.arange(8.0), jnp.arange(8)

    def loss(weight):
        placed = mylib.filter_shard(
            {"w": weight, "steps": steps, "f": jnp.tanh}, TARGETS["sharded"]
        )
        assert placed["steps"].sharding == TARGETS["sharded"]
        return jnp.sum(placed["w"] * placed["steps"])

    np.testing.assert_array_equal(jax.grad(loss)(weight), np.arange(8.0))
    _, tangent = jax.jvp(
        lambda tree: mylib.filter_shard(tree, TARGETS["sharded"]),
        ({"w": weight, "n": steps},),
        ({"w": weight, "n": np.zeros(8, jax.dtypes.float0)},),
    )
    assert tangent["w"].sharding == TARGETS["sharded"]


def test_linearized_and_put_under_jit():
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), TARGETS["sharded"])
    y, linear = jax.linearize(lambda x: mylib.filter_shard(x, TARGETS["replicated"]) * 3, x)
    np.testing.assert_array_equal(jax.jit(linear)(x), 3 * np.arange(8.0))
    _, pull = jax.vjp(lambda x: mylib.filter_shard(x, TARGETS["replicated"]) * 3, x)
    np.testing.assert_array_equal(jax.jit(pull)(y)[0], 9 * np.arange(8.0))


def test_eager_vmap_with_spmd_axis_name():
    mesh = mesh_2d()
    x = jnp.ones((8, 4))
    y = jax.vmap(lambda x: mylib.filter_shard(x, NamedSharding(mesh, P("b"))), spmd_axis_name="a")(
        x
    )
    assert y.sharding.spec == P("a", "b") or y.sharding.spec == P(("a",), "b")


def test_eager_vmap_over_another_dimension():
    mesh = mesh_2d()
    x = mylib.filter_shard(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P(None, "a")))
    y = jax.vmap(
        lambda x: mylib.filter_shard(x, NamedSharding(mesh, P("b"))), in_axes=1, out_axes=1
    )(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("b", "a")), 2)
    np.testing.assert_array_equal(y, x)


def test_a_model_with_statics_and_shared_leaves():
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    model = eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.relu), linear])
    placed = mylib.filter_shard(model, NamedSharding(mesh_1d(), P("d")))
    assert placed[1].fn is jax.nn.relu
    assert eqx.tree_equal(
        jax.tree.map(np.asarray, eqx.filter(placed, eqx.is_array)),
        jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax.vmap(placed)(jnp.ones((4, 8))).shape == (4, 8)


# --- what the transports of accelerators do, on CPU ---------------------------------------------


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Takes CPU devices for accelerators, and every array for one that is worth a program: the
    paths that no machine without a GPU would take otherwise.
    """
    monkeypatch.setattr("mylib._moving.transfer.eager._on_cpu", lambda sharding: False)
    monkeypatch.setattr("mylib._moving.transfer.thresholds.WORTH_COMPILING", 0)


@pytest.mark.usefixtures("as_on_accelerators")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("target", [t for n, t in TARGETS.items() if n != "other_backend"])
def test_on_accelerators(target, donate):
    before = np.arange(4096.0, dtype=np.float32)
    for source in [*TARGETS.values(), None]:
        x = jnp.asarray(before) if source is None else mylib.filter_shard(before.copy(), source)
        y = mylib.filter_device_put(x, target, donate=donate)
        assert y.sharding.is_equivalent_to(target, 1) and y.committed
        if y is x:
            continue
        assert x.is_deleted() == donate
        z = jax.jit(lambda v: v + 1, donate_argnums=0)(y)
        np.testing.assert_array_equal(z, before + 1)
        if not donate:
            np.testing.assert_array_equal(x, before)


def test_a_donated_replica_is_cut_without_a_warning():
    x = mylib.filter_shard(np.ones((4096, 1024), np.float32), NamedSharding(mesh_1d(), P()))
    y = mylib.filter_device_put(x, NamedSharding(mesh_1d(), P("d")), donate=True)
    assert x.is_deleted() and float(y.sum()) == 4096 * 1024


def test_weak_arrays_compile_nothing():
    source = [jnp.broadcast_to(jnp.asarray(1.0), (8 * n, 3)) for n in range(1, 20)]
    jax.block_until_ready(source)
    assert all(x.weak_type for x in source)
    with compilations() as compiled:
        placed = mylib.filter_shard(source, TARGETS["sharded"])
    assert [y.weak_type for y in placed] == [x.weak_type for x in source]
    assert not compiled


def test_the_cotangent_of_an_uncommitted_array_is_uncommitted():
    x = jnp.arange(8.0)
    g = jax.grad(lambda x: jnp.sum(mylib.filter_shard(x, TARGETS["sharded"]) ** 2))(x)
    assert not g.committed
    placed = mylib.filter_shard(x, TARGETS["sharded"])
    np.testing.assert_array_equal(placed - g, -np.arange(8.0))
    with jax.set_mesh(mesh_1d()):
        jacobian = jax.jacrev(lambda x: mylib.filter_shard(x, P("d")) ** 2)(x)
    np.testing.assert_array_equal(jacobian, np.diag(2 * np.arange(8.0)))


def test_a_linear_part_put_under_jit_does_not_forget_the_kind_of_memory():
    there = TARGETS["sharded"].with_memory_kind("pinned_host")
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), TARGETS["sharded"])
    _, linear = jax.linearize(lambda x: mylib.filter_device_put(x, there), x)
    assert linear(x).sharding.memory_kind == "pinned_host"
    with pytest.raises(mylib.PlacementError, match="linearize inside of jit"):
        jax.jit(linear)(x)


def test_a_mesh_that_is_none():
    with pytest.raises(mylib.PlacementError, match="a str is not a mesh"):
        mylib.filter_shard(np.ones(8), P("d"), mesh="d")
