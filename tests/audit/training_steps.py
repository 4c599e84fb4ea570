"""Training steps of real models under the usual strategies, right and sabotaged.

A step is chosen by names: a model, a strategy, and how it is trained. What is wrong with it is a
name, too.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import known
import optax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array
from models import Block, Transformer

import mylib
from mylib import contracts
from mylib.contracts import Contract
from mylib.rules import Rule, by_axes, by_path, fsdp as divided, like, replicated

WIDTH, HIDDEN, HEADS, VOCAB, LENGTH, ROWS = 32, 64, 4, 64, 8, 64
KEPT = divided("data", min_size=128)


def _through(layers: Any, x: Array) -> Array:
    """Layers in a list, or stacked."""
    if isinstance(layers, list):
        for layer in layers:
            x = layer(x)
        return x
    arrays, rest = eqx.partition(layers, eqx.is_array)
    return jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)[0]


class Gpt(Transformer):
    """A language model, whose table may be tied to its head."""

    def __init__(self, stacked: bool, tied: bool, *, key: Any):
        super().__init__(WIDTH, HIDDEN, HEADS, VOCAB, 2, scanned=stacked, key=key)
        self.unembed = None if tied else self.unembed

    def __call__(self, tokens: Array) -> Array:
        if self.unembed is not None:
            return super().__call__(tokens)
        head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=jax.random.key(0))
        head = eqx.tree_at(lambda h: h.weight, head, self.embed.weight)
        return Transformer.__call__(
            eqx.tree_at(lambda m: m.unembed, self, head, is_leaf=_none), tokens
        )


def _none(x: Any) -> bool:
    return x is None


class Adapted(eqx.Module):
    """A pair of frozen products, and narrow trained ones beside the first."""

    up: Array
    down: Array
    first: Array
    second: Array

    def __init__(self, n: int, *, key: Any):
        keys = jax.random.split(key, 3)
        self.up = jax.random.normal(keys[0], (n, 2 * n)) / n**0.5
        self.down = jax.random.normal(keys[1], (2 * n, n)) / n**0.5
        self.first, self.second = jax.random.normal(keys[2], (n, 8)), jnp.zeros((8, 2 * n))

    def __call__(self, x: Array) -> Array:
        return x + jnp.tanh(x @ self.up + x @ self.first @ self.second) @ self.down


class Pair(eqx.Module):
    """Two products with biases, and a norm before them."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, n: int, *, key: Any):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(n)
        self.up = eqx.nn.Linear(n, 2 * n, key=keys[0])
        self.down = eqx.nn.Linear(2 * n, n, key=keys[1])

    def __call__(self, x: Array) -> Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Vision(eqx.Module):
    """Images, whose patches are the tokens of blocks."""

    patches: eqx.nn.Conv2d
    layers: list[Block] | Block
    head: eqx.nn.Linear

    def __init__(self, stacked: bool, *, key: Any):
        keys = jax.random.split(key, 3)
        self.patches = eqx.nn.Conv2d(8, WIDTH, 4, 4, key=keys[0])
        blocks = Transformer(WIDTH, HIDDEN, HEADS, VOCAB, 2, scanned=stacked, key=keys[1])
        self.layers = blocks.layers
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[2])

    def __call__(self, image: Array) -> Array:
        x = self.patches(image).reshape(WIDTH, -1).T
        return self.head(jnp.mean(_through(self.layers, x), axis=0))


class Experts(eqx.Module):
    """Each example is computed by all experts, weighed by a router."""

    router: Array
    up: Array
    down: Array

    def __init__(self, n: int, *, key: Any):
        keys = jax.random.split(key, 3)
        self.router = jax.random.normal(keys[0], (n, 4))
        self.up = jax.random.normal(keys[1], (4, n, 2 * n)) / n**0.5
        self.down = jax.random.normal(keys[2], (4, 2 * n, n)) / n**0.5

    def __call__(self, x: Array) -> Array:
        hidden = jax.nn.gelu(jnp.einsum("i,eij->ej", x, self.up))
        made = jnp.einsum("ej,ejk->ek", hidden, self.down)
        return x + jax.nn.softmax(x @ self.router) @ made


class Deep(eqx.Module):
    """Layers of one class between two products."""

    inner: list[Any] | Any
    head: eqx.nn.Linear

    def __init__(self, layer: Callable[..., Any], stacked: bool, *, key: Any):
        keys = jax.random.split(key, 3)
        make = functools.partial(layer, WIDTH)
        self.inner = (
            eqx.filter_vmap(lambda k: make(key=k))(keys[:2])
            if stacked
            else [make(key=k) for k in keys[:2]]
        )
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[2])

    def __call__(self, x: Array) -> Array:
        return self.head(_through(self.inner, x))


class Convolutions(eqx.Module):
    """Images; the statistics of the batch are state."""

    convs: list[eqx.nn.Conv2d]
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: Any):
        keys = jax.random.split(key, 3)
        self.convs = [
            eqx.nn.Conv2d(8, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
        ]
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.head = eqx.nn.Linear(32, VOCAB, key=keys[2])

    def __call__(self, image: Array, state: Any) -> tuple[Array, Any]:
        image, state = self.norm(self.convs[0](image), state)
        image = jax.nn.relu(self.convs[1](jax.nn.relu(image)))
        return self.head(jnp.mean(image, axis=(1, 2))), state


# Megatron's: of a pair of products the first is divided by columns, the second by rows.
_NAMES = {Block: {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}}
_BLOCKS = by_axes({"heads": "model", "mlp": "model"}, names=_NAMES)
_GPT = by_path({"unembed.weight": P("model")}) | _BLOCKS
_TIED = by_path({"embed.weight": P("model")}) | _BLOCKS


def _pair(stacked: bool, **specs: P) -> Rule:
    """Layers, and the head behind them."""
    layers = {
        f"inner{'' if stacked else '.*'}.{k}": P(None, *p) if stacked else p
        for k, p in specs.items()
    }
    return by_path({**layers, "head.weight": P("model"), "head.bias": P("model")})


@dataclass(frozen=True)
class Kind:
    """A model: how it is made, its layers, and the weight that sabotage is about."""

    make: Callable[[bool, Any], Any]
    layer: Any
    tensor: Callable[[bool], Rule]
    guilty: Callable[[Any], Any]
    shape: tuple[int, ...] = (WIDTH,)
    trained: Callable[[str], bool] = lambda path: True


def _layer(model: Any) -> Any:
    layers = model.layers if hasattr(model, "layers") else model.inner
    return layers[0] if isinstance(layers, list) else layers


MODELS = {
    "gpt": Kind(
        lambda s, k: Gpt(s, False, key=k), Block, lambda s: _GPT, lambda m: _layer(m).up.weight
    ),
    "tied": Kind(
        lambda s, k: Gpt(s, True, key=k), Block, lambda s: _TIED, lambda m: _layer(m).up.weight
    ),
    "experts": Kind(
        lambda s, k: Deep(Experts, s, key=k),
        Experts,
        lambda s: _pair(s, up=P("model"), down=P("model")),
        lambda m: _layer(m).up,
    ),
    "adapters": Kind(
        lambda s, k: Deep(Adapted, s, key=k),
        Adapted,
        lambda s: _pair(s, up=P(None, "model"), second=P(None, "model"), down=P("model")),
        lambda m: _layer(m).second,
        trained=lambda path: path.endswith((".first", ".second")),
    ),
    "convolutions": Kind(
        lambda s, k: eqx.nn.make_with_state(Convolutions)(key=k),
        eqx.nn.Conv2d,
        lambda s: by_path(
            {"convs.0.*": P("model"), "convs.1.weight": P(None, "model"), "head.*": P("model")}
        ),
        lambda m: m.convs[1].weight,
        shape=(8, 8, 8),
    ),
    "mlp": Kind(
        lambda s, k: Deep(Pair, s, key=k),
        Pair,
        lambda s: _pair(s, **{"up.weight": P("model"), "down.weight": P(None, "model")}),
        lambda m: _layer(m).up.weight,
    ),
    "vision": Kind(
        lambda s, k: Vision(s, key=k),
        Block,
        lambda s: by_path({"head.*": P("model"), "patches.weight": P(None, "model")}) | _BLOCKS,
        lambda m: _layer(m).up.weight,
        shape=(8, 8, 8),
    ),
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
}
STRATEGIES = {
    "data_parallel": ((8,), ("data",)),
    "fsdp": ((8,), ("data",)),
    "fsdp_tp": ((4, 2), ("data", "model")),
    "hsdp": ((2, 4), ("replica", "data")),
}
SABOTAGES = ("unsummed", "twice", "weight", "state", "activation", "no fully_shard")


@dataclass(frozen=True)
class Step:
    """A training step. `wrong` is one of the sabotages, or nothing."""

    model: str
    strategy: str
    optimizer: str = "adamw"
    stacked: bool = False
    clipped: bool = False
    pieces: int = 1
    dtype: str = "float32"
    wrong: str = ""

    def __str__(self) -> str:
        parts = [self.model, self.strategy, self.optimizer, "scan" if self.stacked else "list"]
        parts += ["clipped"] * self.clipped + [f"{self.pieces} pieces"] * (self.pieces > 1)
        parts += ["bf16"] * (self.dtype == "bfloat16") + [self.wrong] * bool(self.wrong)
        return "-".join(parts)

    @property
    def kind(self) -> Kind:
        return MODELS[self.model]

    def mesh(self, devices: list[Any]) -> Mesh:
        return known.mesh_of(devices, *STRATEGIES[self.strategy])

    @property
    def batch(self) -> P:
        axes = ("replica", "data") if self.strategy == "hsdp" else "data"
        return P(None, axes) if self.pieces > 1 else P(axes)

    @property
    def used(self) -> Rule:
        tensor = self.kind.tensor(self.stacked) | replicated()
        return tensor if self.strategy == "fsdp_tp" else replicated()

    @property
    def kept(self) -> Rule:
        if self.strategy == "data_parallel":
            return replicated()
        # Over two axes, XLA moves the rows of a batch for the gradient of a table that is sharded.
        table = self.strategy == "fsdp_tp" and self.model == "gpt"
        return by_path({"embed.weight": P()}) | (self.used & KEPT) if table else self.used & KEPT

    @property
    def contract(self) -> list[Contract]:
        # Statistics of a batch, and the weights of experts.
        some: Any = {"activations": "8 KiB"} if self.model in ("convolutions", "experts") else {}
        # XLA gathers the rows that are added to a table over two axes.
        if (self.model, self.strategy) == ("tied", "fsdp_tp"):
            some = {"activations": "32 KiB"}
        if self.strategy == "data_parallel":
            return [contracts.data_parallel("data", pieces=self.pieces, **some)]
        if self.strategy == "fsdp_tp":
            return [contracts.two_d("data", "model", **some)]
        if self.strategy == "hsdp":
            whole = contracts.data_parallel("replica", pieces=self.pieces, **some)
            return [contracts.fsdp("data", **some), whole]
        return [contracts.fsdp("data", **some)]

    def audit(self, devices: list[Any]) -> mylib.results.Report:
        return mylib.audit(*_Made(self, self.mesh(devices)).lowered())

    @property
    def placed(self) -> Rule:
        """How the weights are kept, with one that is wrongly whole."""
        if self.wrong != "weight":
            return self.kept
        return by_path({self.guilty().removeprefix("model").lstrip("."): P()}) | self.kept

    def guilty(self) -> str:
        """The path of the weight that is sabotaged."""
        model = _model(self)[0]
        wanted = self.kind.guilty(model)
        leaves = jax.tree_util.tree_flatten_with_path(model)[0]
        (path,) = [path for path, x in leaves if x is wanted]
        return f"model{jax.tree_util.keystr(path)}"


def _model(step: Step) -> tuple[Any, Any]:
    """The model and its state, as shapes."""
    made = eqx.filter_eval_shape(step.kind.make, step.stacked, jax.random.key(0))
    return made if isinstance(made, tuple) else (made, None)


class _Made:
    """A step on a mesh."""

    def __init__(self, step: Step, mesh: Mesh):
        self.step, self.mesh = step, mesh
        optimizer = OPTIMIZERS[step.optimizer]()
        clip = optax.clip_by_global_norm(1.0)
        self.optimizer = optax.chain(clip, optimizer) if step.clipped else optimizer

    def lowered(self) -> tuple[Any, ...]:
        step, path = self.step, self.step.guilty().removeprefix("model").lstrip(".")
        model, state = _model(step)
        kept = step.placed
        of_state = like(mylib.filter_shard(model, kept, mesh=self.mesh)) | (
            replicated() if step.strategy == "data_parallel" else KEPT
        )
        if step.wrong == "state":
            of_state = by_path({f"*.{path}": P()}) | of_state
        moments = eqx.filter_eval_shape(lambda m: self.optimizer.init(self._trained(m)[0]), model)
        run = mylib.filter_jit(
            self._run,
            in_shardings=(kept, of_state, P(), step.batch, step.batch),
            out_shardings=(kept, of_state, P(), P()),
            mesh=self.mesh,
        )
        rows = (step.pieces, ROWS // step.pieces) if step.pieces > 1 else (ROWS,)
        tokens = step.model in ("gpt", "tied")
        shape = (LENGTH,) if tokens else step.kind.shape
        x = jax.ShapeDtypeStruct((*rows, *shape), jnp.int32 if tokens else jnp.float32)
        y = jax.ShapeDtypeStruct((*rows, *((LENGTH,) if tokens else ())), jnp.int32)
        return run, model, moments, state, x, y

    def _trained(self, model: Any) -> tuple[Any, Any]:
        flags = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                (eqx.is_inexact_array(x) or isinstance(x, jax.ShapeDtypeStruct))
                and self.step.kind.trained(jax.tree_util.keystr(path))
            ),
            model,
        )
        return eqx.partition(model, flags)

    def _run(self, model: Any, moments: Any, state: Any, x: Any, y: Any) -> Any:
        loss, state, gradients = self._gradients(model, state, x, y)
        gradients = self._sabotaged(gradients, model, state, x, y)
        updates, moments = self.optimizer.update(gradients, moments, self._trained(model)[0])
        return eqx.apply_updates(model, updates), moments, state, loss

    def _gradients(self, model: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        trained, rest = self._trained(model)

        def loss(trained: Any, state: Any, x: Any, y: Any) -> Any:
            return self._loss(eqx.combine(trained, rest), state, x, y, self.mesh)

        each = eqx.filter_value_and_grad(loss, has_aux=True)
        if self.step.pieces == 1:
            (value, state), gradients = each(trained, state, x, y)
            return value, state, gradients

        def one(carry: Any, piece: Any) -> Any:
            total, state, summed = carry
            (value, state), gradients = each(trained, state, *piece)
            return (total + value, state, jax.tree.map(jnp.add, summed, gradients)), None

        zero = jax.tree.map(jnp.zeros_like, trained)
        return jax.lax.scan(one, (jnp.zeros(()), state, zero), (x, y))[0]

    def _loss(self, model: Any, state: Any, x: Any, y: Any, mesh: Mesh | None) -> Any:
        step = self.step
        shards = step.strategy != "data_parallel" and mesh is not None
        if step.dtype == "bfloat16" and not shards:
            model = jax.tree.map(
                lambda w: w.astype(step.dtype) if eqx.is_inexact_array(w) else w, model
            )
        if shards and step.wrong != "no fully_shard":
            dtype = jnp.bfloat16 if step.dtype == "bfloat16" else None
            model = mylib.fully_shard(
                model, step.kind.layer, step.placed, step.used, mesh=mesh, dtype=dtype
            )
        if state is None:
            scores = jax.vmap(model)(x)
        else:
            scores, state = jax.vmap(
                model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )(x, state)
        if step.wrong == "activation" and mesh is not None:
            scores = mylib.filter_shard(scores, P(), mesh=mesh)
        scores = jax.nn.log_softmax(scores.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1)), state

    def _sabotaged(self, gradients: Any, model: Any, state: Any, x: Any, y: Any) -> Any:
        step, where = self.step, self.step.kind.guilty
        if step.wrong not in ("unsummed", "twice"):
            return gradients
        right = where(gradients)
        spec = where(mylib.resolve(_model(step)[0], step.kept, mesh=self.mesh)).spec
        arrays, rest = eqx.partition(model, eqx.is_array)
        state_arrays, state_rest = eqx.partition(state, eqx.is_array)

        def unsummed(arrays: Any, state: Any, x: Any, y: Any) -> Any:
            trained, frozen = self._trained(eqx.combine(arrays, rest))

            def loss(trained: Any) -> Any:
                whole = eqx.combine(trained, frozen)
                return self._loss(whole, eqx.combine(state, state_rest), x, y, None)[0]

            return self._own_part(where(eqx.filter_grad(loss)(trained)), spec)

        options: Any = {"mesh": self.mesh, "out_specs": spec, "check_vma": False}
        if step.wrong == "unsummed":
            specs = (P(), P(), step.batch, step.batch)
            made = jax.shard_map(unsummed, in_specs=specs, **options)(arrays, state_arrays, x, y)
        else:
            made = jax.shard_map(
                lambda g: self._own_part(jax.lax.psum(g, "data"), spec), in_specs=P(), **options
            )(right)
        return eqx.tree_at(where, gradients, made)

    def _own_part(self, whole: Any, spec: P) -> Any:
        for i, axis in enumerate(spec):
            if axis is not None:
                size = whole.shape[i] // self.mesh.shape[axis]
                at = jax.lax.axis_index(axis) * size
                whole = jax.lax.dynamic_slice_in_dim(whole, at, size, i)
        return whole
