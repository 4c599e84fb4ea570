"""FSDP of the MLP of `fsdp.py` as other libraries' documentation tells to write it. Each function
returns a loss, abstract parameters and their shardings, or raises ImportError.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

Loss = Callable[[Any, jax.Array], jax.Array]
Program = tuple[Loss, Any, Any]
DTYPE = jnp.bfloat16


def imported(name: str) -> Any:
    """A library that need not be installed. One that this JAX is too new for counts as missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(jnp.float32) ** 2)


def placed(params: Any, place: Callable[[tuple[int, ...]], P], mesh: Mesh) -> tuple[Any, Any]:
    where = jax.tree.map(lambda x: NamedSharding(mesh, place(x.shape)), params)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, where
    )
    return params, where


def on_embed(width: int, stacked: bool) -> Callable[[tuple[int, ...]], P]:
    """The dimension of the residual stream is sharded, as rules of logical axes have it."""

    def place(shape: tuple[int, ...]) -> P:
        return P(*("data" if n == width else None for n in shape))

    return place


def flax_nnx(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """`nnx.Linear`s whose kernels are placed by `jax.jit`, `nnx.remat`, `nnx.scan`."""
    nnx = imported("flax.nnx")

    class Dense(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            options = {"use_bias": False, "dtype": DTYPE, "param_dtype": DTYPE, "rngs": rngs}
            self.up = nnx.Linear(width, hidden, **options)
            self.down = nnx.Linear(hidden, width, **options)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jax.nn.relu(self.up(x)))

    class MLP(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            if stacked:
                make = nnx.vmap(Dense, in_axes=0, out_axes=0)
                self.layers = nnx.split_rngs(splits=depth)(make)(rngs)
            else:
                self.layers = nnx.List([Dense(rngs) for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            call = nnx.remat(lambda layer, x: layer(x))
            if stacked:
                turn = nnx.scan(
                    lambda x, layer: call(layer, x),
                    in_axes=(nnx.Carry, 0),
                    out_axes=nnx.Carry,
                )
                return turn(x, self.layers)
            for layer in self.layers:
                x = call(layer, x)
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: MLP(nnx.Rngs(0))))
    params, where = placed(state, on_embed(width, stacked), mesh)
    return lambda state, x: mean_square(nnx.merge(graph, state)(x)), params, where


def flax_linen(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """As MaxText has it: logical axes of weights, and activations that are constrained."""
    linen = imported("flax.linen")
    rules = [("batch", "data"), ("embed", "data"), ("mlp", None), ("layers", None)]

    def kernel(*axes: str) -> Any:
        return linen.with_logical_partitioning(linen.initializers.lecun_normal(), axes)

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, _: None = None) -> Any:
            x = linen.with_logical_constraint(x, ("batch", None))
            options = {"use_bias": False, "dtype": DTYPE, "param_dtype": DTYPE}
            y = linen.Dense(hidden, kernel_init=kernel("embed", "mlp"), **options)(x)
            y = jax.nn.relu(y)
            y = linen.Dense(width, kernel_init=kernel("mlp", "embed"), **options)(y)
            y = linen.with_logical_constraint(y, ("batch", None))
            return (y, None) if stacked else y

    class MLP(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = linen.remat(Dense, prevent_cse=not stacked)
            if stacked:
                turn = linen.scan(
                    layer,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=depth,
                    metadata_params={linen.PARTITION_NAME: "layers"},
                )
                return turn()(x, None)[0]
            for _ in range(depth):
                x = layer()(x)
            return x

    model = MLP()
    x = jax.ShapeDtypeStruct((mesh.size, width), DTYPE)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    specs = linen.get_partition_spec(variables)
    where = linen.logical_to_mesh_sharding(specs, mesh, rules)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        linen.unbox(variables),
        where,
    )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with mesh, linen.logical_axis_rules(rules):
            return mean_square(model.apply(params, x))

    return loss, params, where


def plain(depth: int, width: int, hidden: int, stacked: bool) -> Any:
    """The weights, as a dict, or a list of them."""
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    front = (depth,) if stacked else ()
    layer = {k: jax.ShapeDtypeStruct((*front, *s), DTYPE) for k, s in shapes.items()}
    return layer if stacked else [layer] * depth


def through(layers: Any, x: jax.Array, call: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
    call = jax.checkpoint(call, prevent_cse=isinstance(layers, list))
    if isinstance(layers, list):
        for layer in layers:
            x = call(layer, x)
        return x
    return jax.lax.scan(lambda x, layer: (call(layer, x), None), x, layers)[0]


def dense(layer: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ layer["up"]) @ layer["down"]


def scalax(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """Its rule for parameters, in and out of a `jax.jit`, which is what its `sjit` makes."""
    rule = imported("scalax.sharding").FSDPShardingRule("data", mesh.shape["data"])
    params, where = placed(
        plain(depth, width, hidden, stacked),
        lambda shape: rule.apply(jax.ShapeDtypeStruct(shape, DTYPE)),
        mesh,
    )
    return lambda params, x: mean_square(through(params, x, dense)), params, where


def haliax(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """`Stacked` or `BlockSeq`, and an axis mapping for parameters."""
    hax, equinox = imported("haliax"), imported("equinox")
    linear = imported("haliax.nn").Linear
    batch, embed = hax.Axis("batch", 1), hax.Axis("embed", width)
    mlp, layers = hax.Axis("mlp", hidden), hax.Axis("layers", depth)

    class Dense(equinox.Module):
        up: Any
        down: Any

        @staticmethod
        def init(*, key: jax.Array) -> "Dense":
            options = {"key": key, "use_bias": False}
            return Dense(linear.init(embed, mlp, **options), linear.init(mlp, embed, **options))

        def __call__(self, x: Any) -> Any:
            return self.down(hax.nn.relu(self.up(x)))

    kind = imported("haliax.nn.scan").Stacked if stacked else imported("haliax.nn.scan").BlockSeq
    keys = jax.ShapeDtypeStruct((depth,), jax.random.key(0).dtype)

    def make(keys: jax.Array) -> Any:
        made = kind.init(layers, Dense, gradient_checkpointing=True)(key=keys)
        return jax.tree.map(lambda x: x.astype(DTYPE), made)

    model = equinox.filter_eval_shape(make, keys)
    arrays, rest = equinox.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params, where = placed(arrays, on_embed(width, stacked), mesh)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with mesh, hax.axis_mapping({"batch": "data"}):
            x = hax.named(x, (batch.name, embed.name))
            y = equinox.combine(params, rest).fold(x)
            return mean_square(y.array)

    return loss, params, where


def explicit(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """Explicit axes, and `jax.sharding.reshard` in each layer."""
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)
    params, where = placed(plain(depth, width, hidden, stacked), on_embed(width, stacked), typed)

    def call(layer: Any, x: jax.Array) -> jax.Array:
        whole = jax.tree.map(lambda w: jax.sharding.reshard(w, P()), layer)
        return dense(whole, x)

    return lambda params, x: mean_square(through(params, x, call)), params, where


def shard_map(mesh: Mesh, depth: int, width: int, hidden: int, stacked: bool) -> Program:
    """The whole loss in `jax.shard_map`, and `all_gather` in each layer."""
    place = on_embed(width, stacked)
    params, where = placed(plain(depth, width, hidden, stacked), place, mesh)

    def call(layer: Any, x: jax.Array) -> jax.Array:
        def whole(name: str, dim: int) -> jax.Array:
            return jax.lax.all_gather(layer[name], "data", axis=dim, tiled=True)

        return dense({"up": whole("up", 0), "down": whole("down", 1)}, x)

    def part(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(mean_square(through(params, x, call)), "data")

    specs = jax.tree.map(lambda s: s.spec, where)
    return (
        jax.shard_map(part, mesh=mesh, in_specs=(specs, P("data")), out_specs=P()),
        params,
        where,
    )


PEERS: dict[str, Callable[..., Program]] = {
    "flax nnx, remat": flax_nnx,
    "flax linen, MaxText's pattern, remat": flax_linen,
    "haliax, checkpointed": haliax,
    "scalax's rule, remat": scalax,
    "Explicit axes, reshard in the layer": explicit,
    "jax.shard_map, all_gather in the layer": shard_map,
}
