"""Random models and programs of `mylib.fully_shard`, against one device in float64.

By hand: `python tests/fsdp/random_layers.py --seeds 0-300` runs many, `--only 17` one, whose
program is printed, and `--only 17 --with way=batch kinds=Mlp` the same with other choices: to find
out which of them matter. With `--derivatives` they are other programs: on Explicit axes, with other
derivatives than a gradient, and of weights that are computed.
"""

import argparse
import ast
import collections
import contextlib
import faulthandler
import functools
import itertools
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    import conftest  # noqa: F401 # the devices and flags of the tests

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from layer_kinds import KINDS, ORDINARY, TIME, WIDTH, Author, Kind, each

import mylib
from mylib.rules import by_axes, fsdp, replicated

BATCH, VOCAB = 8, 16
MESHES = {"1": (1,), "8": (8,), "4x2": (4, 2), "2x2x2": (2, 2, 2)}
AXES = ("data", "model", "more")

# What `fully_shard` refuses, with the sentence. Another error is a failure.
REFUSED = {
    "prefetch= is for layers that aren't stacked": "the layers are stacked, and called",
    "options that contradict each other": r"prefetch= can't be combined with",
    "a policy for layers that aren't rematerialised": "checkpoint=False can't be combined",
    "a stack of small arrays, split by layer": "splits them by layer: each step of the loop",
    "the same on Explicit axes, by JAX": "0th dimension of all xs should be replicated",
    "derivatives of a loop on Explicit axes": "should match the (aval mesh|mesh of sharding)",
    "a narrower reduce_dtype": r"reduce_dtype=\w+ is narrower than dtype=",
    "layers of tied weights": r"its weights are tied \(eqx.nn.Shared\)",
}


@dataclass(frozen=True)
class Program:
    """What is drawn. Each field is a word, a number or a tuple of them."""

    seed: int
    mesh: str = "8"
    types: str = "a"  # of each axis: Auto or Explicit
    kinds: tuple[str, ...] = ("Mlp",)
    arrangement: str = "list"
    top: str = "linear"
    way: str = "batch"
    jit: str = "mylib"
    layers: str = "class"
    kept: str = "data"
    used: str = "replicated"
    dtype: str | None = None
    reduce_dtype: str | None = None
    checkpoint: bool = True
    policy: str | None = None
    in_turn: bool = True
    prefetch: int = 0
    saved: bool = False
    send_dtype: str | None = None
    optimiser: str = "none"
    donate: bool = False
    set_mesh: bool = True
    precision: str = "float64"
    x64: bool = True
    derivative: str = "gradient"
    weights: str = "placed"

    def __str__(self) -> str:
        plain = Program(self.seed)
        always = ("mesh", "types", "kinds", "arrangement", "way", "jit")
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and (
                field.name in always or value != getattr(plain, field.name)
            ):
                text = ",".join(value) if isinstance(value, tuple) else value
                words.append(f"{field.name}={text}")
        return " ".join(words)


def draw(seed: int) -> Program:
    rng = random.Random(seed)

    def often(usual: Any, share: float, *others: Any) -> Any:
        return usual if rng.random() < share else rng.choice(others)

    mesh = rng.choices(list(MESHES), [1, 5, 5, 3])[0]
    count = len(MESHES[mesh])
    types = often("a" * count, 0.45, "e" * count, "".join(rng.choices("ae", k=count)))
    arrangement = rng.choice(
        ["list", "list", "stack", "stack", "nested", "dict", "twice", "branch", "loop"]
        + ["jitted", "checkpointed"]
    )
    way = rng.choice(
        ["batch", "batch", "vmap", "vmap", "vmap spmd", "accumulate", "two models", "frozen"]
        + ["ensemble outside", "ensemble inside"]
    )
    # In a branch under `vmap` weights are batched, and JAX refuses to place them over an axis that
    # the batch has taken.
    if arrangement == "branch" and way.startswith("vmap") and (way != "vmap" or "e" in types):
        arrangement = "loop"
    if arrangement == "stack" and way.startswith("ensemble") and "e" in types:
        # The rule of ensembles knows of one stacked dimension: JAX refuses to scan over the other.
        arrangement = "list"
    # The second model takes what the first returns, which are no tokens.
    tops = ["linear", "linear", "embedding", "tied", "nothing"]
    top = rng.choice(tops[:2] if way == "two models" else tops)
    jit = often("mylib", 0.55, "mylib placed", "equinox", "jax", "eager")
    if jit == "eager" and arrangement == "branch" and way.startswith("vmap"):
        # The gradient is the result of an eager `cond`, which JAX places as it likes.
        arrangement = "loop"
    kinds = tuple(rng.choice(ORDINARY) for _ in range(rng.choice([1, 2, 2, 3])))
    if "e" in types and rng.random() < 0.3:
        kinds = (*kinds[1:], "Author")
    if way in ("vmap", "vmap spmd") and arrangement == "list" and rng.random() < 0.25:
        kinds = ("Batched", *kinds[1:])
    if arrangement not in ("list", "dict", "nested") or way not in ("batch", "vmap", "vmap spmd"):
        kinds = tuple("Mlp" if name in ("Batched", "Counting") else name for name in kinds)
    if arrangement == "stack":
        kinds = kinds[:1]
    if jit == "eager":  # each operation is a program
        kinds = kinds[:1]
    if arrangement in ("branch", "loop", "jitted", "checkpointed", "stack"):
        kinds = tuple("Mlp" if KINDS[k].takes or len(KINDS[k].methods) > 1 else k for k in kinds)
    if count > 1:
        # With a batch over one axis of several, XLA's gradient of grouped convolutions is wrong
        # (jax 0.10.2 and 0.12.0.1), in plain JAX too.
        kinds = tuple("Convolution" if name == "Depthwise" else name for name in kinds)
    layers = rng.choice(["class", "tuple", "mapping", "predicate"])
    if "Linears" in kinds and rng.random() < 0.5:
        layers = "inner"
    if "Codec" in kinds:
        layers = "mapping"
    x64 = rng.random() < 0.8 or any(KINDS[k].takes == "key" or k == "Noise" for k in kinds)
    precision = often("float64", 0.75, "float32") if x64 else "float32"
    options: dict[str, Any] = {
        "dtype": often(None, 0.6, "bfloat16", "float32"),
        "reduce_dtype": often(None, 0.7, "float32", "float64" if x64 else "float32"),
        "checkpoint": rng.random() < 0.85,
        "policy": often(None, 0.8, "everything_saveable", "dots_saveable", "nothing_saveable"),
        "in_turn": rng.random() < 0.8,
        "prefetch": often(0, 0.6, 1, 2),
    }
    if rng.random() < 0.95:  # else a contradiction is refused
        if options["prefetch"]:
            options |= {"checkpoint": True, "policy": None, "in_turn": True}
        if options["prefetch"] and arrangement == "stack":
            options["prefetch"] = 0
        if not options["checkpoint"]:
            options["policy"] = None
        narrow = options["dtype"] == "float32" or options["dtype"] is None
        if x64 and narrow and options["reduce_dtype"] is not None:
            options["reduce_dtype"] = "float64"
    if {"ComplexWeight", "Eigenvalues", "Spectrum"} & {*kinds}:
        # A policy that saves complex values is an error in plain JAX, too (jax 0.10.2, 0.12.0.1).
        options["policy"] = None
    if options["dtype"] == "bfloat16" and {"Algebra", "Spectrum", "Rounded"} & {*kinds}:
        options["dtype"] = None
    # On Explicit axes a product of split dimensions says where its result is.
    plain = {"Mlp", "Checkpointed"} & {*kinds}
    splits = "Author" in kinds and not plain if "e" in types else plain
    tensor = "tensor" if splits and count > 1 else "replicated"
    kept = rng.choice(["data", "data", "data", "all", "large", "unaware", "replicated", "last"])
    if kept == "all" and len(set(types)) > 1 and not jit.startswith("mylib"):
        # JAX places results by their types, which don't have a dimension's Auto axes as well.
        kept = "data"
    used = often("replicated", 0.6, tensor if "e" in types else "none", tensor)
    # From numbers of its own, so that seeds mean what they meant before there was this option.
    options["saved"] = (
        used == "tensor"
        and options["checkpoint"]
        and way in ("batch", "vmap")
        and layers != "inner"
        and random.Random(-1 - seed).random() < 0.6
    )
    in_8_bits = random.Random(-3 - seed)
    if in_8_bits.random() < 0.3:
        options["send_dtype"] = in_8_bits.choice(["float8_e4m3fn", "int8"])
    return Program(
        seed,
        mesh,
        types,
        kinds,
        arrangement,
        top,
        way,
        jit,
        layers,
        kept,
        used,
        **options,
        optimiser=rng.choice(["none", "sgd", "adam"]),
        donate=jit.startswith("mylib") and rng.random() < 0.3,
        set_mesh="e" in types or rng.random() < 0.5,
        precision=precision,
        x64=x64,
    )


def draw_derivative(seed: int) -> Program:
    """A program on Explicit axes, with another derivative, or of computed weights."""
    rng = random.Random(-2 - seed)
    programs = (draw(i) for i in itertools.count(10 * seed))
    program = next(
        x
        for x in programs
        # What rounds gradients to few bits has other ones if a sum has another order. And a state
        # can be used once.
        if "e" in x.types and x.jit != "eager" and not {"Rounded", "Counting"} & {*x.kinds}
    )
    changes: dict[str, Any] = {
        "seed": seed,
        "kinds": program.kinds[:1],
        "derivative": rng.choice([*DERIVATIVES]),
        "weights": rng.choice(["placed", "computed", "computed elsewhere"]),
        "dtype": None,
        "precision": "float64",
        "x64": True,
        "optimiser": "none",
        "donate": False,
        # Half of them save something, or are prefetched.
        "prefetch": 0,
        "policy": None,
        "checkpoint": True,
        "in_turn": True,
    }
    if program.reduce_dtype == "float32":
        changes["reduce_dtype"] = None
    options = [
        {"checkpoint": False},
        {"policy": "everything_saveable"},
        {"policy": "dots_saveable"},
    ]
    if program.arrangement != "stack" and program.way != "ensemble outside":
        options += [{"prefetch": 1}, {"prefetch": 2}]
    changes |= rng.choice([*options, {}, {}])
    if program.used == "tensor" and changes["kinds"] != ("Author",):
        changes |= {"used": "replicated", "saved": False}
    if not changes["checkpoint"]:
        changes["saved"] = False
    mapped = changes["derivative"].endswith("by scale") or program.way.startswith("ensemble")
    depends = program.top in ("embedding", "tied") or program.way == "two models"
    if program.arrangement == "branch" and mapped and depends:
        # The input of the branch depends on weights that are batched. So JAX computes both sides,
        # and selects between the sharded weights that they close over. It refuses that on Explicit
        # axes, in plain JAX, too.
        changes["arrangement"] = "loop"
    return replace(program, **changes)


# The model.


class Top(eqx.Module):
    """What is in no layer: an embedding, and a head."""

    embed: eqx.nn.Embedding | None = None
    head: eqx.nn.Linear | None = None
    shared: eqx.nn.Shared | None = None

    def __init__(self, what: str, key: Any):
        keys = jr.split(key)
        embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        outputs = VOCAB if what == "tied" else WIDTH
        head = eqx.nn.Linear(WIDTH, outputs, use_bias=what != "tied", key=keys[1])
        if what == "tied":
            weights = (lambda p: p[1].weight), (lambda p: p[0].weight)
            self.shared = eqx.nn.Shared((embed, head), *weights)
        else:
            self.embed = embed if what == "embedding" else None
            self.head = None if what == "nothing" else head

    def parts(self) -> Any:
        return (self.embed, self.head) if self.shared is None else self.shared()


class Group(eqx.Module):
    """Layers in a layer, called with what they take."""

    inner: list[Kind]

    def __call__(self, x, state, keys):
        for layer, key in zip(self.inner, keys, strict=True):
            x, state = call(layer, x, state, key)
        return x, state


def call(layer: Any, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
    if layer.takes == "state":
        return layer(x, state)
    if layer.takes == "tree":
        return layer({"x": x}, options={"times": 2.0, "unused": jnp.arange(3)})["y"], state
    y = layer(x, key=key) if layer.takes == "key" else layer(x)
    return (layer.decode(y) if "decode" in layer.methods else y), state


class Net(eqx.Module):
    top: Top
    body: Any
    arrangement: str = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)  # those that are Explicit

    def __call__(self, x, state, key):
        embed, head = self.top.parts()
        if embed is not None:
            x = self.looked_up(embed.weight, x)
        x, state = self.through(x, state, key)
        return (x if head is None else each(head, 1, x)), state

    def looked_up(self, table, x):
        if not self.axes:
            return table[x]
        return table.at[x].get(out_sharding=P(*jax.typeof(x).sharding.spec, None))

    def through(self, x, state, key):
        if self.arrangement == "stack":
            arrays, rest = eqx.partition(self.body, eqx.is_array)
            turn = lambda x, a: (same(call(eqx.combine(a, rest), x, None, key)[0], x), None)  # noqa: E731
            return jax.lax.scan(turn, x, arrays)[0], state
        if self.arrangement == "nested":
            return self.body["group"](x, state, list(jr.split(key, len(self.body["group"].inner))))
        layers = list(self.body.values()) if isinstance(self.body, dict) else self.body
        for i, layer in enumerate(layers * (2 if self.arrangement == "twice" else 1)):
            x, state = self.one(layer, x, state, jr.fold_in(key, i))
        return x, state

    def one(self, layer, x, state, key):
        run = lambda x: same(call(layer, x, state, key)[0], x)  # noqa: E731
        if self.arrangement == "branch":
            return jax.lax.cond(jnp.sum(x) > -1e9, run, lambda x: x, x), state
        if self.arrangement == "loop":
            return jax.lax.scan(lambda x, _: (run(x), None), x, length=2)[0], state
        if self.arrangement == "jitted":
            return eqx.filter_jit(lambda layer, x: layer(x))(layer, x), state
        if self.arrangement == "checkpointed":
            return eqx.filter_checkpoint(layer)(x), state
        return call(layer, x, state, key)


def same(y: Any, x: Any) -> Any:
    """In the dtype of a carry, which `dtype=` has no part in."""
    return y.astype(x.dtype)


def build(program: Program, seed: int, axes: Sequence[str]) -> tuple[Any, Any]:
    """A model in float64, and its state. `axes` are the Explicit ones."""

    def make(name: str, key: Any) -> Kind:
        return Author(key, tuple(axes)) if name == "Author" else KINDS[name](key)

    def net(key: Any) -> Net:
        keys = jr.split(key, 5)
        top = Top(program.top, keys[0])
        layers = [make(n, k) for n, k in zip(program.kinds, keys[1:], strict=False)]
        if program.arrangement == "stack":
            body = eqx.filter_vmap(functools.partial(make, program.kinds[0]))(jr.split(keys[1], 4))
        elif program.arrangement == "nested":
            body = {"group": Group(layers)}
        elif program.arrangement == "dict":
            body = {f"layer {i}": layer for i, layer in enumerate(layers)}
        else:
            body = layers
        return Net(top, body, program.arrangement, tuple(axes))

    key = jr.key(seed)
    if program.way.startswith("ensemble"):
        return eqx.filter_vmap(net)(jr.split(key, 2)), None
    return eqx.nn.make_with_state(net)(key)


def cast(tree: Any, dtype: Any) -> Any:
    """Floating-point arrays in another dtype. `dtype=` is about these only."""
    is_real = lambda x: eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_real(x) else x, tree)


def in_precision(tree: Any, precision: str) -> Any:
    """All inexact arrays with numbers of 32 or of 64 bits."""
    tree = cast(tree, jnp.dtype(precision))
    dtype = jnp.complex64 if precision == "float32" else jnp.complex128
    return jax.tree.map(
        lambda x: x.astype(dtype) if eqx.is_array(x) and jnp.iscomplexobj(x) else x, tree
    )


# The program.


def layers_of(program: Program) -> Any:
    classes = tuple(dict.fromkeys(KINDS[name] for name in program.kinds))
    if program.layers == "inner":
        return eqx.nn.Linear
    if program.layers == "class":
        return Group if program.arrangement == "nested" else Kind
    if program.layers == "tuple":
        return classes
    if program.layers == "mapping":
        return {cls: list(cls.methods) for cls in classes}
    return lambda module, path: isinstance(module, Kind) and ".body" in path


def rules_of(program: Program, within: bool = False) -> tuple[Any, Any]:
    """The rules of what is kept and used. `within`: of one model of an ensemble."""
    ensemble = program.way.startswith("ensemble") and not within
    stacked = (Net,) if ensemble else (Kind,) if program.arrangement == "stack" else ()
    rest = {
        "data": fsdp("data", min_size=0, stacked=stacked),
        "all": fsdp(explicit_first(program), min_size=0, stacked=stacked),
        "large": fsdp("data", min_size=64, stacked=stacked),
        "unaware": fsdp("data", min_size=0),  # of stacks without annotations
        "replicated": replicated(),
        "last": fsdp(AXES[len(MESHES[program.mesh]) - 1], min_size=0, stacked=stacked),
    }[program.kept]
    used = None if program.used == "none" else replicated()
    if program.used == "tensor":
        split = by_axes({"mlp": "model"})
        return split & rest, split | used
    return rest, used


def explicit_first(program: Program) -> tuple[str, ...]:
    """All axes, in the order in which one dimension can be split over them."""
    axes = AXES[: len(MESHES[program.mesh])]
    return tuple(sorted(axes, key=lambda axis: program.types[axes.index(axis)], reverse=True))


def mesh_of(program: Program) -> Mesh:
    shape = MESHES[program.mesh]
    types = tuple(AxisType.Explicit if t == "e" else AxisType.Auto for t in program.types)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, AXES[: len(shape)], axis_types=types)


Shard = Callable[[Any], Any]


def loss_of(program: Program, shard: Shard, models: Any, state: Any, x: Any, y: Any, key: Any):
    """The loss, and the state after it."""
    if program.way == "ensemble outside":
        nets = shard(models[0])
        found, _ = eqx.filter_vmap(lambda net: net(x, None, key))(nets)
        return distance(found, y), state
    if program.way == "ensemble inside":
        found, _ = eqx.filter_vmap(lambda net: shard(net)(x, None, key))(models[0])
        return distance(found, y), state
    for net in map(shard, models):
        if program.way.startswith("vmap"):
            x, state = by_example(program, net, x, state, key)
        else:
            x, state = net(x, state, key)
    return distance(x, y), state


def by_example(program: Program, net: Any, x: Any, state: Any, key: Any) -> Any:
    options = {"spmd_axis_name": "data"} if program.way == "vmap spmd" else {}
    # On Explicit axes the keys would have to be sharded as the examples are.
    of_keys = None if "e" in program.types else 0
    keys = key if of_keys is None else jr.split(key, BATCH)
    axes = {"in_axes": (0, None, of_keys), "out_axes": (0, None), "axis_name": "batch"}
    return jax.vmap(net, **axes, **options)(x, state, keys)


def distance(found: Any, y: Any) -> Any:
    return jnp.mean((found - jnp.mean(y)) ** 2) + jnp.mean(found[..., 0] * y[..., 0])


def learned(program: Program, models: Any) -> Any:
    """Which leaves have gradients: with frozen parts, every other array."""
    count = iter(range(1000))
    frozen = program.way == "frozen"
    return jax.tree.map(
        lambda x: eqx.is_inexact_array(x) and (next(count) % 2 == 0 or not frozen), models
    )


def step(program: Program, shard: Shard, key: Any, models: Any, state: Any, x: Any, y: Any):
    """Loss and state, gradients, and updated models."""
    if program.weights != "placed":
        models = jax.tree.map(lambda w: w * 1.25 if eqx.is_inexact_array(w) else w, models)
    varying, rest = eqx.partition(models, learned(program, models))

    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def value(varying: Any, x: Any, y: Any) -> Any:
        return loss_of(program, shard, eqx.combine(varying, rest), state, x, y, key)

    if program.way == "accumulate":
        (loss, state), grads = accumulated(value, varying, x, y)
    else:
        (loss, state), grads = value(varying, x, y)
    if program.derivative != "gradient":
        grads = DERIVATIVES[program.derivative](lambda model: value(model, x, y), varying)
    optim = {"none": None, "sgd": optax.sgd(0.1), "adam": optax.adam(0.1, eps=0.01)}
    chosen = optim[program.optimiser]
    if chosen is None:
        return (loss, state), grads, None
    updates, _ = chosen.update(grads, chosen.init(varying), varying)
    return (loss, state), grads, eqx.apply_updates(models, updates)


# Other derivatives than a gradient, as trees of the same kind. `value` returns the loss and its
# gradient.


def moved(model: Any) -> Any:
    return jax.tree.map(lambda w: jnp.cos(w) / 2, jax.lax.stop_gradient(model))


def forward_over_reverse(value: Any, model: Any) -> Any:
    return jax.jvp(lambda m: value(m)[1], (model,), (moved(model),))[1]


def reverse_over_reverse(value: Any, model: Any) -> Any:
    def slope(model: Any) -> Any:
        pairs = zip(*map(jax.tree.leaves, (value(model)[1], moved(model))), strict=True)
        return sum(jnp.sum((x * jnp.conj(y)).real) for x, y in pairs)

    return jax.grad(slope)(model)


def by_scale(derivative: Any) -> Any:
    """Under `vmap`, for weights that are smaller and larger."""

    def mapped(value: Any, model: Any) -> Any:
        def one(scale: Any) -> Any:
            return derivative(value, jax.tree.map(lambda w: w * scale.astype(w.dtype), model))

        return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(jnp.array([0.75, 1.5])))

    return mapped


def hessian(value: Any, model: Any) -> Any:
    """That of two numbers that weights are scaled by and moved by."""

    def loss(numbers: Any) -> Any:
        changed = jax.tree.map(lambda w: w * (1 + numbers[0]) + numbers[1] * jnp.sin(w), model)
        return value(changed)[0][0]

    found = jax.hessian(loss)(jnp.zeros(2))
    return jax.tree.map(lambda w: w * found.sum() + found[0, 1], model)


DERIVATIVES = {
    "gradient": None,
    "gradient by scale": by_scale(lambda value, model: value(model)[1]),
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "forward over reverse by scale": by_scale(forward_over_reverse),
    "reverse over reverse by scale": by_scale(reverse_over_reverse),
    "hessian": hessian,
}


def accumulated(value: Any, varying: Any, x: Any, y: Any) -> Any:
    def turn(carry: Any, batch: Any) -> Any:
        (loss, _), grads = value(varying, *batch)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    start = jnp.zeros((), y.dtype), jax.tree.map(jnp.zeros_like, varying)
    halves = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (x, y))
    (loss, grads), _ = jax.lax.scan(turn, start, halves)
    return (loss, None), grads


def data_of(program: Program) -> tuple[Any, Any]:
    rng = np.random.default_rng(program.seed)
    y = rng.normal(size=(BATCH, TIME, VOCAB if program.top == "tied" else WIDTH))
    if program.top in ("embedding", "tied"):
        return rng.integers(0, VOCAB, (BATCH, TIME)).astype(np.int32), y
    return rng.normal(size=(BATCH, TIME, WIDTH)), y


@dataclass
class Outcome:
    """`kind` is "passed", "refused" (`why` is a key of REFUSED), "failed", or "not mylib's": the
    program fails without `fully_shard`, too.
    """

    kind: str
    why: str = ""
    error: Exception | None = None


def inputs_of(program: Program, axes: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    count = 2 if program.way == "two models" else 1
    built = [build(program, program.seed + i, axes) for i in range(count)]
    models = tuple(model for model, _ in built)
    if program.send_dtype is not None:
        models = in_two_values(models)
    return models, built[0][1], *data_of(program)


def in_two_values(tree: Any) -> Any:
    """Weights that 8 bits have exactly: of one size, and two signs."""

    def rounded(x: Any) -> Any:
        if not eqx.is_array(x) or x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(x < 0, -0.3, 0.3)

    return jax.tree.map(rounded, tree)


def reference(program: Program) -> Any:
    """On one device, in float64. `dtype=` is a cast there, too."""
    shard: Shard = lambda net: net  # noqa: E731
    if program.dtype is not None:
        shard = functools.partial(cast, dtype=jnp.dtype(program.dtype))
    models, state, x, y = inputs_of(program, ())
    run = eqx.filter_jit(functools.partial(step, program, shard))
    return run(jr.key(program.seed), models, state, x, y)


def on_mesh(program: Program, mesh: Mesh, shard: Shard, kept: Any) -> Any:
    explicit = [a for a, t in zip(mesh.axis_names, program.types, strict=True) if t == "e"]
    models, state, x, y = inputs_of(program, explicit)
    models, state, x, y = in_precision((models, state, x, y), program.precision)
    key = jr.key(program.seed)
    if not program.x64:
        models, state, x, y, key = jax.tree.map(to_32, (models, state, x, y, key))
    with jax.enable_x64(program.x64), contextlib.ExitStack() as stack:
        if program.set_mesh:
            stack.enter_context(jax.set_mesh(mesh))
        given = replicated() if program.weights == "computed elsewhere" else kept
        models = mylib.filter_shard(models, given, mesh=mesh)
        state, key = mylib.filter_shard((state, key), replicated(), mesh=mesh)
        x, y = mylib.filter_shard((x, y), P("data"), mesh=mesh)
        found = call_step(program, mesh, kept, functools.partial(step, program, shard))(
            key, models, state, x, y
        )
        return jax.block_until_ready(found)


def to_32(x: Any) -> Any:
    if not eqx.is_array(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x).astype(jax.dtypes.canonicalize_dtype(x.dtype))


def call_step(program: Program, mesh: Mesh, kept: Any, run: Any) -> Any:
    if program.jit == "eager":
        return run
    if program.jit == "equinox":
        return eqx.filter_jit(run)
    out = (None, kept, kept)
    if program.jit == "jax":

        def jitted(*args: Any) -> Any:
            arrays, static = eqx.partition(args, eqx.is_array)
            rest = None

            def inner(arrays: Any) -> Any:
                nonlocal rest
                found, rest = eqx.partition(run(*eqx.combine(arrays, static)), eqx.is_array)
                return found

            return eqx.combine(jax.jit(inner)(arrays), rest)

        return jitted
    options: dict[str, Any] = {"out_shardings": out, "mesh": mesh}
    if program.jit == "mylib placed":
        given = replicated() if program.weights == "computed elsewhere" else kept
        options["in_shardings"] = {"models": given, "x": P("data"), "y": P("data")}
    if program.donate:
        options["donate"] = "all-except-first"

    def stepped(key: Any, models: Any, state: Any, x: Any, y: Any) -> Any:
        return run(key, models, state, x, y)

    return mylib.filter_jit(stepped, **options)


def saved_of(program: Program) -> P | None:
    if not program.saved:
        return None
    return P("data", "model") if program.way == "batch" else P("model")


def shards_of(program: Program, mesh: Mesh) -> tuple[Shard, Shard]:
    """`fully_shard`, and the same in plain JAX: weights are placed at the top."""
    kept, used = rules_of(program, within=program.way == "ensemble inside")
    dtypes = {
        name: None if value is None else jnp.dtype(value)
        for name in ("dtype", "reduce_dtype", "send_dtype")
        for value in (getattr(program, name),)
    }
    policy = None if program.policy is None else getattr(jax.checkpoint_policies, program.policy)
    options: dict[str, Any] = {
        "checkpoint": program.checkpoint,
        "policy": policy,
        "in_turn": program.in_turn,
        "prefetch": program.prefetch,
        "saved": saved_of(program),
    }

    def shard(net: Any) -> Any:
        return mylib.fully_shard(
            net, layers_of(program), kept, used, mesh=mesh, **dtypes, **options
        )

    def plain(net: Any) -> Any:
        net = net if program.dtype is None else cast(net, dtypes["dtype"])
        return mylib.filter_shard(net, used, mesh=mesh)

    return shard, plain


def run(program: Program) -> Outcome:
    """Runs a program on its mesh and on one device, and compares."""
    mesh = mesh_of(program)
    shard, plain = shards_of(program, mesh)
    kept, _ = rules_of(program)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        # Expected where a loop or a branch is around the call of a layer.
        warnings.simplefilter("ignore", mylib.errors.PrefetchWarning)
        found, error = attempt(lambda: on_mesh(program, mesh, shard, kept))
        reason = error and refusal(error)
        if reason is not None:
            return Outcome("refused", reason, error)
        expected, wrong = attempt(lambda: reference(program))
        if wrong is not None:
            return Outcome("not mylib's", "on one device: " + first_line(wrong), wrong)
        if error is None:
            _, error = attempt(lambda: check(program, mesh, kept, found, expected))
        if error is None:
            return Outcome("passed")

        def in_plain_jax() -> None:
            compare(program, on_mesh(program, mesh, plain, kept), expected)

        wrong = attempt(in_plain_jax)[1]
        if wrong is not None:
            return Outcome("not mylib's", "in plain JAX: " + first_line(wrong), error)
        return Outcome("failed", first_line(error), error)


def attempt(fun: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return fun(), None
    except Exception as error:  # whatever a program may raise is the subject here
        return None, error


def refusal(error: Exception) -> str | None:
    text = str(error)
    return next((why for why, told in REFUSED.items() if re.search(told, text)), None)


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"


def check(program: Program, mesh: Mesh, kept: Any, found: Any, expected: Any) -> None:
    compare(program, found, expected)
    asked = program.jit.startswith("mylib")
    _, grads, updated = found
    if program.weights == "computed elsewhere" and not asked:
        return  # their types say nothing of `kept`, and neither do those of their gradients
    if not asked:  # XLA replicates gradients without elements
        grads = jax.tree.map(lambda x: x if x.size else None, grads)
    # Without `out_shardings=`, `vmap` decides how gradients of an ensemble come out of it.
    if asked or program.way != "ensemble inside":
        mylib.testing.assert_placed(grads, kept, mesh=mesh)
    if asked:
        mylib.testing.assert_placed(updated, kept, mesh=mesh)


def compare(program: Program, found: Any, expected: Any) -> None:
    for what, x, y in zip(("loss", "gradients", "updated"), found, expected, strict=True):
        compare_all(what, x, y, tolerance(program))


def tolerance(program: Program) -> float:
    if program.dtype == "bfloat16":
        return 3e-2
    return 3e-4 if "float32" in (program.dtype, program.precision) else 1e-8


def compare_all(what: str, found: Any, expected: Any, rtol: float) -> None:
    share = 1 if rtol > 1e-2 else 0.01
    # Not the structures: which axes are Explicit is a static field.
    leaves, others = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (found, expected)
    )
    assert [*leaves] == [*others], f"{what} has the leaves {[*leaves]}, not {[*others]}"
    arrays = [name for name, y in others.items() if eqx.is_array(y)]
    numbers = [(name, as_numbers(leaves[name]), as_numbers(others[name])) for name in arrays]
    largest = max((np.max(np.abs(y), initial=0) for _, _, y in numbers), default=0)
    wrong = []
    for name, x, y in numbers:
        assert x.shape == y.shape, f"{what}{name} has shape {x.shape}, not {y.shape}"
        # What is zero but for rounding is small beside the others.
        scale = max(np.max(np.abs(y), initial=0), largest * share)
        off = np.max(np.abs(x - y), initial=0)
        if not off <= rtol * scale:
            wrong.append(f"{what}{name} is off by {off:.2g}, of {np.max(np.abs(y)):.2g}")
    assert not wrong, "; ".join(wrong)


def as_numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jr.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


# By hand.


def numbers_in(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return [int(first)] if not last else list(range(int(first), int(last)))


def changed(program: Program, changes: Sequence[str]) -> Program:
    """A program with `name=value` for some of its fields."""
    given: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name == "kinds":
            given[name] = tuple(value.split(","))
        elif isinstance(getattr(program, name), bool | int) or value == "None":
            given[name] = ast.literal_eval(value)
        else:
            given[name] = value
    if "mesh" in given and len(given.get("types", program.types)) != len(MESHES[given["mesh"]]):
        given.setdefault("types", program.types[0] * len(MESHES[given["mesh"]]))
    return replace(program, **given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-50", help="from and to, as in 0-300")
    parser.add_argument("--only", type=int, help="one seed, with its traceback")
    parser.add_argument("--derivatives", action="store_true", help="other derivatives")
    parser.add_argument("--mesh", choices=MESHES, help="only programs for this mesh")
    parser.add_argument("--with", nargs="*", default=[], dest="changes", metavar="NAME=VALUE")
    parser.add_argument(
        "--times", action="store_true", help="print each, with the CPU time that it took"
    )
    args = parser.parse_args()
    seeds = numbers_in(args.seeds) if args.only is None else [args.only]
    tally: dict[str, list[int]] = collections.defaultdict(list)
    for seed in seeds:
        drawn = draw_derivative(seed) if args.derivatives else draw(seed)
        program = changed(drawn, args.changes)
        if args.mesh not in (None, program.mesh):
            continue
        faulthandler.dump_traceback_later(300, exit=True)  # a deadlock between devices
        start = time.process_time()
        outcome = run(program)
        took = time.process_time() - start
        told = outcome.why if outcome.kind == "refused" else re.sub(r"\d+", "#", outcome.why)
        tally[f"{outcome.kind} {told[:100]}"].append(seed)
        if args.only is not None and outcome.error is not None:
            traceback.print_exception(outcome.error)
        if outcome.kind in ("failed", "not mylib's") or args.only is not None or args.times:
            print(f"{outcome.kind} {took:.1f} s, seed {program.seed}: {program}", flush=True)
            print("    " + outcome.why, flush=True)
        if seed % 25 == 24:  # memory, where there are many
            jax.clear_caches()
    faulthandler.cancel_dump_traceback_later()
    print("In all:")
    for told, found in sorted(tally.items()):
        listed = "" if told == "passed " else ", ".join(map(str, found))
        print(f"{len(found):5} {told} {listed}")
    return 1 if any(told.startswith("failed") for told in tally) else 0


if __name__ == "__main__":
    sys.exit(main())
