"""Which weight a leaf belongs to: one answer, by whoever asks."""

import inspect
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._core.belongs import Owners, owner_by_flow, places_of
from mylib._core.tree import parts_in
from mylib._planning.plan.replaced import Replaced
from mylib._planning.plan.trace import PlannedStep, trace
from mylib._programs.contracts.roles import Roles
from mylib._training.matrices.belongs import belonging

WEIGHTS = ".layers[0].weight", ".layers[1].weight", ".weight", "[0].layers[0].weight"


def owners(paths, forms=None):
    keys = {path: parts_in(path) for path in paths}
    return Owners(keys, (lambda path: None) if forms is None else forms.__getitem__)


@pytest.mark.parametrize(
    ("path", "all_"),
    [
        (".layers[0].weight", [".layers[0].weight"]),
        ("state[0].mu.layers[1].weight", [".layers[1].weight"]),
        # The longest end, and no part of a name.
        ("state.trace.weight", [".weight"]),
        ("state.overweight", []),
        # Keys inside of a path, only if no end is one.
        ("[0][1].mu.layers[0].weight", [".layers[0].weight"]),
    ],
)
def test_by_path(path, all_):
    assert list(owners(WEIGHTS).of(parts_in(path)).all) == all_


def test_keys_inside_of_a_path():
    models = owners(["[0].w", "[1].w"])
    found = models.of(parts_in("[1][0].mu.w"))
    assert found.only == "[1].w" and "but for keys inside" in found.why
    assert models.of(parts_in("[2][0].mu.w")).only is None
    assert owners(["['gen'].w", "['other'].w"]).of(parts_in("['gen'].mu[0].w")).only == "['gen'].w"


def test_forms_come_before_paths():
    shapes = {".a.w": (2,), ".w": (3,)}
    assert owners(shapes, shapes).of(("mu", "a", "w"), (3,)).only == ".w"
    found = owners(shapes, shapes).of(("mu", "a", "w"), (4,))
    assert found.only is None and found.why == "what has its path has another form"
    assert owners(shapes, shapes).of(("mu", "b")).why == "no path is, or ends, like its own"


def test_what_is_equal_in_all_is_unknown():
    both = Owners({"model": ("w",), "anchor": ("w",)})
    found = both.of(("w",))
    assert found.all == ("model", "anchor") and found.only is None
    assert both.of(("w",), near={"anchor", "bias"}).only == "anchor"
    assert both.of(("w",), outside=True).all == ()


def test_by_flow():
    assert owner_by_flow([3]).only == 3
    assert owner_by_flow([3, 4]).only is None and "on 2 of them" in owner_by_flow([3, 4]).why


def test_by_form_and_then_by_path():
    shapes = {"a.w": (2,), "b.v": (2,), "b.w": (3,)}
    assert owners(shapes, shapes).alike(("c", "v"), (2,)).only == "b.v"
    assert owners(shapes, shapes).alike(("c", "u"), (3,)).only == "b.w"
    assert owners(shapes, shapes).alike(("c", "u"), (2,)).all == ("a.w", "b.v")
    assert owners(shapes, shapes).alike(("c", "u"), (4,)).all == ()


def test_list_indices_alone():
    model = owners(["[0]"])
    assert model.of(("mu", "0")).only == "[0]"
    assert model.of(("1", "0"), is_field=lambda i: False).only is None


def test_places_of_trees():
    model = {("w",): (2,), ("b",): (3,)}
    tree = {("0", "w"): (2,), ("0", "b"): (3,), ("1", "w"): (2,), ("1", "b"): (4,)}
    assert list(places_of(model, tree)) == [("0",)]


# --- what each of them answers for the steps that people have ---


class Net(eqx.Module):
    layers: list
    head: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(16, 16, key=x) for x in keys[:2]]
        self.head = jax.random.normal(keys[2], (16, 4))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x @ self.head


class Named(eqx.Module):
    p: dict

    def __call__(self, x):
        return jnp.tanh(x @ self.p["w"]) @ self.p["v"]


class Normed(eqx.Module):
    w: eqx.nn.Linear
    bn: eqx.nn.BatchNorm

    def __init__(self, key):
        self.w = eqx.nn.Linear(16, 16, key=key)
        self.bn = eqx.nn.BatchNorm(16, "b", mode="batch")

    def __call__(self, x, s):
        return self.bn(self.w(x), s)


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


def grads_of(model, x):
    return eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)


def moved(model, grads):
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))


def optax_step(optim):
    def step(x, model, state):
        updates, state = optim.update(grads_of(model, x), state, arrays(model))
        return eqx.apply_updates(model, updates), state

    return step


def averaged(x, model, state, ema):
    model, state = optax_step(ADAM)(x, model, state)
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, arrays(ema), arrays(model))
    return model, state, eqx.combine(mean, ema)


def two_models(x, models, states):
    pairs = [optax_step(ADAM)(x, *pair) for pair in zip(models, states, strict=True)]
    return tuple(model for model, _ in pairs), tuple(state for _, state in pairs)


def with_statistics(x, model, stats):
    def loss(model, stats):
        y, stats = jax.vmap(model, axis_name="b", in_axes=(0, None), out_axes=(0, None))(x, stats)
        return jnp.mean(y**2), stats

    grads, stats = eqx.filter_grad(loss, has_aux=True)(model, stats)
    return moved(model, grads), stats


def named_alike(batch, model):
    return moved(model, grads_of(model, batch["p"]["w"]))


def gradients_beside(x, model):
    grads = grads_of(model, x)
    return moved(model, grads), grads


def anchored(x, anchor, model):
    far = jax.tree.map(jnp.subtract, arrays(model), arrays(anchor))
    return moved(model, jax.tree.map(jnp.add, grads_of(model, x), far))


def bare_moments(x, model, mu):
    mu = jax.tree.map(lambda a, b: 0.9 * a + b, mu, grads_of(model, x))
    return moved(model, mu), mu


ADAM = optax.adam(1e-3)
KINDS = {"matrix": optax.adam(1e-3), "rest": optax.sgd(1e-2, momentum=0.9)}
OPTIMISERS = {
    "adam": ADAM,
    "multi_transform": optax.multi_transform(
        KINDS, lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", tree)
    ),
    "MultiSteps": optax.MultiSteps(ADAM, 2),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}
X = np.ones((8, 16), np.float32)
NET = Net(jax.random.key(0))
HEAD, FIRST, BIAS = ".head", ".layers[0].weight", ".layers[1].bias"


class Case(NamedTuple):
    """A step and its arguments. Of some of its leaves: which weight `like`, contracts, plans and
    `by_matrix` say that they belong to, None if unknown.

    - `replaced`: for a result, the argument that contracts take it for the new value of.
    - `donated`: what plans donate.
    - `extra`: the arguments other than the model that a sum of gradients is combined with.
    """

    step: Any
    args: tuple[Any, ...]
    leaves: dict[str, tuple[str | None, ...]]
    replaced: dict[str, str | None]
    donated: tuple[str, ...]
    optim: Any = None
    extra: frozenset[str] = frozenset()


def of_optax(name, leaves, replaced):
    optim = OPTIMISERS[name]
    args = X, NET, optim.init(arrays(NET))
    return Case(optax_step(optim), args, leaves, replaced, ("model", "state"), optim)


def alike(*paths):
    """Leaves of which all say the same."""
    return {path: (weight,) * 4 for path, weight in paths}


def cases():
    none = (None,) * 4
    model = {"[0].head": "model.head"}
    yield (
        "adam",
        of_optax(
            "adam",
            alike(("[0].mu.head", HEAD), ("[0].nu.layers[1].bias", BIAS), ("[0].count", None)),
            {**model, "[1][0].mu.head": "state[0].mu.head", "[1][0].count": "state[0].count"},
        ),
    )
    inner = ".inner_states['matrix'].inner_state[0].mu.head"
    rest = ".inner_states['rest'].inner_state[0].trace.layers[1].bias"
    yield (
        "multi_transform",
        of_optax(
            "multi_transform",
            alike((inner, HEAD), (rest, BIAS)),
            {**model, f"[1]{inner}": f"state{inner}"},
        ),
    )
    yield (
        "MultiSteps",
        of_optax(
            "MultiSteps",
            alike((".acc_grads.head", HEAD), (".inner_opt_state[0].mu.head", HEAD)),
            {**model, "[1].acc_grads.head": "state.acc_grads.head"},
        ),
    )
    # Factored moments have other shapes, so they can't be kept like their weights; contracts and
    # by_matrix follow the path and the flow.
    yield (
        "adafactor",
        of_optax(
            "adafactor",
            {
                "[0].v_row.layers[0].weight": (None, FIRST, None, FIRST),
                "[0].v.head": (HEAD,) * 4,
                "[0].v.layers[1].bias": (BIAS,) * 4,
                # What stands in place of a moment.
                "[0].v_row.layers[1].bias": none,
            },
            {**model, "[1][0].v_row.layers[0].weight": "state[0].v_row.layers[0].weight"},
        ),
    )
    yield (
        "ema",
        Case(
            averaged,
            (X, NET, ADAM.init(arrays(NET)), NET),
            {"state[0].mu.head": (HEAD,) * 3, "ema.head": (HEAD,) * 3},
            # The new model is computed from the model alone, the mean from both.
            {**model, "[2].head": "model.head"},
            ("state",),
            extra=frozenset({"ema"}),
        ),
    )
    nets = NET, Net(jax.random.key(1))
    yield (
        "two models",
        Case(
            two_models,
            (X, nets, tuple(ADAM.init(arrays(net)) for net in nets)),
            {
                "states[0][0].mu.head": ("[0].head",) * 3,
                "states[1][0].nu.layers[1].bias": ("[1].layers[1].bias",) * 3,
            },
            {"[0][1].head": "models[1].head", "[1][1][0].mu.head": "states[1][0].mu.head"},
            ("models", "states"),
        ),
    )
    net, stats = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    yield (
        "nn.State",
        Case(
            with_statistics,
            (X, net, stats),
            {"stats[<flat index 1>][0]": (None,) * 3},
            {"[0].bn.weight": "model.bn.weight", "[1][<flat index 0>]": "stats[<flat index 0>]"},
            ("model", "stats"),
        ),
    )
    yield (
        "batch named as a weight",
        Case(
            named_alike,
            (
                {"p": {"w": np.ones((16, 16), np.float32)}},
                Named({"w": X.T @ X, "v": X.T @ X[:, :4]}),
            ),
            # `like` knows neither the program nor which argument is the batch.
            {"batch['p']['w']": (".p['w']", None, None)},
            {".p['w']": "model.p['w']"},
            ("model",),
        ),
    )
    yield (
        "gradients beside",
        Case(gradients_beside, (X, NET), {}, {**model, "[1].head": "model.head"}, ("model",)),
    )
    yield (
        "anchor",
        Case(
            anchored,
            (X, NET, NET),
            {"anchor.head": (HEAD,) * 3},
            {".head": "model.head"},
            (),
            extra=frozenset({"anchor"}),
        ),
    )
    # Data flow tells the moments, which have the model's own paths.
    yield (
        "bare moments",
        Case(
            bare_moments,
            (X, NET, jax.tree.map(jnp.zeros_like, arrays(NET))),
            {"mu.head": (HEAD,) * 3},
            {**model, "[1].head": "mu.head"},
            (),
            extra=frozenset({"mu"}),
        ),
    )


CASES = dict(cases())
MESH = mylib.make_mesh(data=8)


def described(tree, spec):
    sharding = jax.NamedSharding(MESH, spec)
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if eqx.is_array(x) else x
        ),
        tree,
    )


def like(model, tree):
    """For each leaf of a tree: the keys of the weight that it is like."""
    rule, found = mylib.rules.like(described(model, P())), {}

    def note(leaf):
        owner = rule._owner(leaf).only
        found[parts_in(leaf.name)] = owner and owner[0]

    mylib.filter_shard(described(tree, P()), note, mesh=MESH)
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_say_the_same(name):
    case = CASES[name]
    names = list(inspect.signature(case.step).parameters)
    at = next(i for i, name in enumerate(names) if name.startswith("model"))
    traced = trace(PlannedStep.of(case.step, case.args), "full", (eqx.nn.Linear,))
    specs = [P("data"), *[P()] * len(names)]
    report = mylib.audit(case.step, *map(described, case.args, specs[: len(names)]))
    roles, paths = Roles(report, names[at]), [p.path for p in report.parameters]
    state = {paths[i]: w if w is None else paths[w] for i, w in roles.state.items()}
    for leaf, said in case.leaves.items():
        text = leaf if leaf[0] not in ".[" else names[at + 1] + leaf
        number = names.index(parts_in(text)[0])
        path = text[len(names[number]) :]
        by_like, by_contracts, by_plan = (weight and parts_in(weight) for weight in said[:3])
        assert like(case.args[at], case.args[number])[parts_in(path)] == by_like
        assert state.get(text) == (by_contracts and names[at] + said[1])
        assert traced.followed.get(f"[{number}]{path}") == (by_plan and f"[{at}]{said[2]}")
        if case.optim is not None:
            assert owned(case.optim)[path] == said[3]
    returned = {report.results[i].path: paths[number] for i, number in roles.returned.items()}
    assert {path: returned.get(path) for path in case.replaced} == case.replaced
    assert Replaced(traced).donated == case.donated
    combined = {parts_in(path)[0] for c in report.collectives for path in c.gradients}
    assert combined == {names[at]} | case.extra


def owned(optim):
    weights = arrays(NET)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(weights)[0]]
    owner = belonging(optim, weights, paths, []).owner
    return {jtu.keystr(path): i if i is None else paths[i] for path, i in owner.items()}
