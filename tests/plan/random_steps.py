"""Random training steps, written as for one device, and what they compute under a plan.

    python tests/plan/random_steps.py --first 0 --last 1000

runs more of them than the tests do, on 8 simulated devices, and prints each fault with its program.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

if __name__ == "__main__":
    # 8 simulated devices, as in the tests.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

from jax.sharding import NamedSharding, PartitionSpec as P
from random_models import PARTS, TIME, Images, Net, Train

import mylib
from mylib._planning.plan.candidates import priced
from mylib._planning.plan.fixes import FixedParts
from mylib._planning.plan.plan import plan_of
from mylib._planning.plan.price import with_figures
from mylib._planning.plan.trace import PlannedStep, trace

MESHES = {
    "8": {"data": 8}, "4x2": {"data": 4, "model": 2}, "2x4": {"data": 2, "model": 4},
    "1x8": {"model": 8}, "2x2x2": {"replica": 2, "data": 2, "model": 2},
}  # fmt: skip


def masked():
    return optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))


def parted():
    label = lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree)  # noqa: E731
    return optax.multi_transform({"a": optax.adam(1e-2), "b": optax.set_to_zero()}, label)


OPTIMISERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "masked": masked,
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "bfloat16": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    # A smaller eps makes the rounding of gradients that are zero, as before a norm, count.
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, eps=1e-6),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.5, centered=True),
    "scheduled": lambda: optax.inject_hyperparams(optax.adam)(
        optax.cosine_decay_schedule(1e-2, 10)
    ),
    "flat": lambda: optax.flatten(optax.adam(1e-2)),
    "parted": parted,
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lbfgs": lambda: optax.scale_by_lbfgs(memory_size=3),
}


@dataclass(frozen=True)
class Program:
    """What a step is made of. `draw` takes each of `OPTIONS`."""

    seed: int
    parts: tuple[str, ...] = ("Feed",)
    width: int = 16
    hidden: int = 32
    inputs: int = 16
    rows: int = 16
    batch: str = "rows"
    packed: str = "array"
    arrangement: str = "list"
    norm: bool = False
    head: str = "own"
    optim: str = "adamw"
    loss: str = "squared"
    over: str = "vmap"
    form: str = "plain"
    gradient: str = "filter_value_and_grad"
    returns: str = "loss"
    order: int = 0
    mesh: str = "4x2"
    policy: str = "full"
    layers: str = "found"
    start: str = "numpy"
    fixed: str = "nothing"


OPTIONS = {
    "width": (16, 16, 16, 64, 15, 24), "hidden": (32, 32, 64, 256, 21), "inputs": (16, 16, 40, 13),
    "rows": (16, 16, 16, 8, 24), "batch": ("rows", "rows", "tokens", "images"),
    "packed": ("array", "array", "dict", "tuple", "first last"),
    "arrangement": ("list", "list", "tuple", "stacked", "twice"),
    "norm": (False, False, False, True),
    "head": ("own", "own", "tied", "shared"),
    "optim": tuple(OPTIMISERS),
    "loss": ("squared", "entropy", "contrast", "largest", "weighted"),
    "over": ("vmap", "vmap", "filter_vmap", "map", "nested"),
    "form": (
        "plain", "plain", "partitioned", "captured", "ema", "teacher", "gan", "microbatches",
        "inner", "jitted", "train", "frozen", "list", "evaluate", "twice", "vjp", "remat",
    ),
    "gradient": ("filter_value_and_grad", "filter_grad", "value_and_grad"),
    "returns": ("loss", "metrics", "outputs", "nothing"), "order": range(6),
    "mesh": tuple(MESHES), "policy": ("full", "full", "dots", "all"),
    "layers": ("found", "found", "given", "Linear"), "start": ("numpy", "made", "jax"),
    "fixed": ("nothing", "nothing", "nothing", "kept", "batch", "used"),
}  # fmt: skip


def draw(seed):
    chance = random.Random(seed)
    count = chance.choice([1, 2, 2, 3])
    parts = tuple(chance.choice([*PARTS]) for _ in range(count))
    given = {name: chance.choice(options) for name, options in OPTIONS.items()}
    return Program(seed, parts, **given)


def data_of(program):
    rng = np.random.default_rng(program.seed)
    shape = (program.rows, TIME)
    if program.batch == "tokens":
        x = rng.integers(0, program.inputs, shape).astype(np.int32)
    elif program.batch == "images":
        x, shape = rng.normal(size=(program.rows, 3, 8, 8)), (program.rows, 1)
    else:
        x = rng.normal(size=(*shape, program.width))
    y = rng.integers(0, min(program.inputs, program.width), shape).astype(np.int32)
    weights = rng.uniform(size=program.rows)
    if program.packed == "dict":
        return {"y": y, "weights": weights, "x": x}
    if program.packed == "first last":
        return {"x": np.moveaxis(x, 0, -1), "weights": weights, "y": np.moveaxis(y, 0, -1)}
    return (x, y, weights) if program.packed == "tuple" else x


def unpacked(program, batch):
    if program.packed == "dict":
        return batch["x"], batch["y"], batch["weights"]
    if program.packed == "first last":
        return jnp.moveaxis(batch["x"], -1, 0), jnp.moveaxis(batch["y"], -1, 0), batch["weights"]
    if program.packed == "tuple":
        return batch
    time = 1 if program.batch == "images" else TIME
    y = jnp.arange(len(batch) * time).reshape(len(batch), time) % min(program.inputs, program.width)
    return batch, y, jnp.linspace(0, 1, len(batch))


def outputs_of(program, model, x, norms, key):
    """The model's outputs for all rows, and the state of its norms."""
    if program.norm:
        run = jax.vmap(model, axis_name="rows", in_axes=(0, None, None), out_axes=(0, None))
        return run(x, norms, key)
    keys = jax.random.split(key, len(x))
    one = lambda x, key: model(x, norms, key)[0]  # noqa: E731
    match program.over:
        case "vmap":
            return jax.vmap(one)(x, keys), norms
        case "filter_vmap":
            run = eqx.filter_vmap(lambda m, x, key: m(x, norms, key)[0], in_axes=(None, 0, 0))
            return run(model, x, keys), norms
        case "map":
            return jax.lax.map(lambda xs: one(*xs), (x, keys)), norms
        case "nested":
            halves = x.reshape(2, len(x) // 2, *x.shape[1:])
            y = jax.vmap(jax.vmap(one, in_axes=(0, None)), in_axes=(0, 0))(halves, keys[:2])
            return y.reshape(len(x), *y.shape[2:]), norms
    raise ValueError(program.over)


def loss_of(program, model, batch, norms, key):
    x, aim, weights = unpacked(program, batch)
    y, norms = outputs_of(program, model, x, norms, key)
    match program.loss:
        case "squared":
            loss = jnp.mean(y**2)
        case "entropy":
            loss = optax.softmax_cross_entropy_with_integer_labels(y, aim).mean()
        case "contrast":
            flat = y.reshape(len(y), -1)
            logits = flat @ flat.T / flat.shape[1]
            loss = -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))
        case "largest":
            loss = jnp.mean(jax.lax.top_k(jnp.mean(y**2, axis=(1, 2)), 3)[0]) + y.max()
        case "weighted":
            # Rows with a small weight are taken out, as of padding.
            each = jnp.where(weights[:, None, None] > 0.3, y**2, 0)
            loss = (each.mean((1, 2)) * weights).sum() / weights.sum()
        case _:
            raise ValueError(program.loss)
    return loss, (norms, y)


class Built(NamedTuple):
    """A step, the names and values of its arguments, and how the next call's are made."""

    step: Any
    args: dict[str, Any]
    again: Any


def build(program):
    optim = OPTIMISERS[program.optim]()
    make = Images if program.batch == "images" else Net
    model, norms = filled(
        lambda: eqx.nn.make_with_state(make)(program, jax.random.key(0)), program.seed
    )
    norms = norms if program.norm else None
    trained = jax.tree.map(eqx.is_inexact_array, model)
    if program.form == "frozen":
        leaves, tree = jax.tree.flatten(model)
        every_second = [eqx.is_inexact_array(x) and i % 2 == 0 for i, x in enumerate(leaves)]
        trained = jax.tree.unflatten(tree, every_second)
    init = eqx.filter_jit(optim.init)
    state = init(eqx.filter(model, trained))

    def graded(model, batch, norms, key, static=None):
        """The gradient of what is trained, the loss, and what else it gives."""
        diff, rest = eqx.partition(model, trained)

        def loss(diff, rest):
            found = eqx.combine(diff, rest)
            found = found if static is None else eqx.combine(found, static)
            return loss_of(program, found, batch, norms, key)

        if program.gradient == "filter_grad":
            grads, aux = eqx.filter_grad(loss, has_aux=True)(diff, rest)
            return grads, jnp.zeros(()), aux
        if program.gradient == "value_and_grad" and static is None:
            arrays, others = eqx.partition(rest, eqx.is_array)
            (value, aux), grads = jax.value_and_grad(
                lambda d: loss(d, eqx.combine(arrays, others)), has_aux=True
            )(diff)
            return grads, value, aux
        (value, aux), grads = eqx.filter_value_and_grad(loss, has_aux=True)(diff, rest)
        return grads, value, aux

    def updated(model, state, grads, value=None):
        updates, state = optim.update(grads, state, eqx.filter(model, trained))
        return eqx.apply_updates(model, updates), state

    def returned(model, state, norms, value, y):
        match program.returns:
            case "loss":
                return model, state, norms, value
            case "metrics":
                seen = {"loss": value, "norm": optax.tree.norm(eqx.filter(model, trained))}
                return {"model": model, "state": state, "norms": norms, "metrics": seen}
            case "outputs":
                return (y, jnp.argmax(y, -1)), norms, state, model
        return model, state, norms

    def taken(out, args):
        match program.returns:
            case "metrics":
                model, state, norms = (out[x] for x in ("model", "state", "norms"))
            case "outputs":
                _, norms, state, model = out
            case _:
                model, state, norms = out[:3]
        return {**args, "model": model, "state": state, "norms": norms}

    key = jax.random.key(1)
    args = {"batch": data_of(program), "model": model, "state": state, "norms": norms, "key": key}

    def plain(batch, model, state, norms, key):
        grads, value, (norms, y) = graded(model, batch, norms, key)
        return returned(*updated(model, state, grads), norms, value, y)

    step, again = plain, taken
    match program.form:
        case "plain" | "frozen":
            pass
        case "partitioned" | "captured":
            arrays, static = eqx.partition(model, eqx.is_array)
            args["model"] = arrays

            def step(batch, model, state, norms, key):  # noqa: F811
                grads, value, (norms, y) = graded(model, batch, norms, key, static)
                return returned(*updated(model, state, grads), norms, value, y)
        case "ema":
            args["slow"] = model

            def step(batch, model, state, norms, key, slow):
                grads, value, (norms, y) = graded(model, batch, norms, key)
                model, state = updated(model, state, grads)
                mixed = lambda a, b: 0.9 * a + 0.1 * b if eqx.is_inexact_array(a) else a  # noqa: E731
                slow = jax.tree.map(mixed, slow, model)
                after, _ = loss_of(program, slow, batch, norms, key)
                return returned(model, state, norms, value + after, y), slow

            again = lambda out, args: {**taken(out[0], args), "slow": out[1]}  # noqa: E731
        case "teacher":
            half = lambda x: x * 0.5 if eqx.is_inexact_array(x) else x  # noqa: E731
            args["slow"] = jax.tree.map(half, model)

            def step(batch, model, state, norms, key, slow):
                aim, _ = outputs_of(program, slow, unpacked(program, batch)[0], norms, key)

                def loss(m):
                    y, aux = outputs_of(program, m, unpacked(program, batch)[0], norms, key)
                    return jnp.mean((y - jax.lax.stop_gradient(aim)) ** 2), (aux, y)

                (value, (norms, y)), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
                return returned(*updated(model, state, grads), norms, value, y)
        case "gan":
            is_wide = program.head == "tied" and program.batch == "rows"
            size = program.width if is_wide else program.inputs
            critic = filled(lambda: eqx.nn.MLP(size, "scalar", program.hidden, 2, key=key), 7)
            args["critic"] = critic
            args["critic_state"] = init(eqx.filter(critic, eqx.is_inexact_array))

            def step(batch, model, state, norms, key, critic, critic_state):
                def fool(model, critic, norms):
                    x = unpacked(program, batch)[0]
                    y, norms = outputs_of(program, model, x, norms, key)
                    told = jax.vmap(jax.vmap(critic))(y)
                    return jnp.mean(jax.nn.softplus(-told)), (norms, y)

                (value, (norms, y)), grads = eqx.filter_value_and_grad(fool, has_aux=True)(
                    model, critic, norms
                )
                against = eqx.filter_grad(lambda c: -fool(model, c, norms)[0])(critic)
                updates, critic_state = optim.update(
                    against, critic_state, eqx.filter(critic, eqx.is_inexact_array)
                )
                critic = eqx.apply_updates(critic, updates)
                out = returned(*updated(model, state, grads), norms, value, y)
                return out, critic, critic_state

            again = lambda out, args: {  # noqa: E731
                **taken(out[0], args),
                "critic": out[1],
                "critic_state": out[2],
            }
        case "microbatches":

            def step(batch, model, state, norms, key):
                def cut(x):
                    if program.packed == "first last":
                        halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
                        return jnp.moveaxis(halves, -2, 0)
                    return x.reshape(2, x.shape[0] // 2, *x.shape[1:])

                packed = batch if program.packed != "array" else (batch,)

                def turn(carry, part):
                    grads, norms = carry
                    part = part if program.packed != "array" else part[0]
                    new, value, (norms, y) = graded(model, part, norms, key)
                    return (jax.tree.map(jnp.add, grads, new), norms), (value, y)

                zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, trained))
                (grads, norms), (values, y) = jax.lax.scan(
                    turn, (zeros, norms), jax.tree.map(cut, packed)
                )
                y = y.reshape(-1, *y.shape[2:])
                return returned(*updated(model, state, grads), norms, values.mean(), y)
        case "inner":

            def step(batch, model, state, norms, key):
                arrays, static = eqx.partition((model, state, norms), eqx.is_array)

                def turn(arrays, key):
                    model, state, norms = eqx.combine(arrays, static)
                    grads, value, (norms, y) = graded(model, batch, norms, key)
                    new = *updated(model, state, grads), norms
                    return eqx.filter(new, eqx.is_array), (value, y)

                arrays, (values, y) = jax.lax.scan(turn, arrays, jax.random.split(key, 2))
                model, state, norms = eqx.combine(arrays, static)
                return returned(model, state, norms, values[0], y[-1])
        case "jitted":
            step = eqx.filter_jit(plain)
        case "remat":

            def step(batch, model, state, norms, key):
                arrays, static = eqx.partition(model, eqx.is_array)

                @jax.checkpoint
                def loss(arrays, norms):
                    found = eqx.combine(arrays, static)
                    return loss_of(program, found, batch, norms, key)

                (value, (norms, y)), grads = eqx.filter_value_and_grad(loss, has_aux=True)(
                    eqx.filter(model, eqx.is_array), norms
                )
                grads = eqx.filter(grads, trained)
                return returned(*updated(model, state, grads), norms, value, y)
        case "train":
            args["train"] = Train(args.pop("model"), args.pop("state"), jnp.zeros((), int))

            def step(batch, norms, key, train):
                grads, value, (norms, y) = graded(
                    train.model, batch, norms, jax.random.fold_in(key, train.count)
                )
                model, state = updated(train.model, train.state, grads)
                return Train(model, state, train.count + 1), norms, value, y

            again = lambda out, args: {**args, "train": out[0], "norms": out[1]}  # noqa: E731
        case "list":
            args["both"] = [args.pop("model"), {"state": args.pop("state"), "norms": norms}]
            del args["norms"]

            def step(batch, key, both):
                model, rest = both
                grads, value, (norms, y) = graded(model, batch, rest["norms"], key)
                model, state = updated(model, rest["state"], grads)
                return [model, {"state": state, "norms": norms}], value

            again = lambda out, args: {**args, "both": out[0]}  # noqa: E731
        case "evaluate":
            del args["state"]

            def step(batch, model, norms, key):
                loss, (norms, y) = loss_of(program, model, batch, norms, key)
                return loss, y, norms

            again = lambda out, args: {**args, "norms": out[2]}  # noqa: E731
        case "twice":

            def step(batch, model, state, norms, key):
                before, _ = loss_of(program, model, batch, norms, key)
                grads, value, (norms, y) = graded(model, batch, norms, key)
                model, state = updated(model, state, grads)
                after, _ = loss_of(program, model, batch, norms, key)
                return returned(model, state, norms, value + before - after, y)
        case "vjp":

            def step(batch, model, state, norms, key):
                arrays, static = eqx.partition(model, trained)
                value, pull, (norms, y) = jax.vjp(
                    lambda a: loss_of(program, eqx.combine(a, static), batch, norms, key),
                    arrays, has_aux=True,
                )  # fmt: skip
                (grads,) = pull(jnp.ones_like(value))
                return returned(*updated(model, state, grads), norms, value, y)
        case _:
            raise ValueError(program.form)

    names = [*args]
    random.Random(program.order).shuffle(names)
    return Built(_with_order(step, names), {name: args[name] for name in names}, again)


def _with_order(step, names):
    """The step with positional arguments of these names, in this order."""
    scope = {"step": step}
    given = ", ".join(f"{name}={name}" for name in names)
    exec(f"def ordered({', '.join(names)}):\n    return step({given})", scope)
    return scope["ordered"]


def filled(make, seed):
    """What `make` returns, with random numbers."""
    rng = np.random.default_rng(seed)

    def one(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            # Variances of norms must be positive, and weights of many inputs small.
            small = x.ndim < 2
            made = rng.uniform(0.1, 0.9, x.shape) if small else rng.normal(size=x.shape)
            return jnp.asarray(made if small else made / np.sqrt(x.shape[-1]))
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(one, eqx.filter_eval_shape(make))


# --- what they compute ---


class Outcome(NamedTuple):
    """ "passed", "refused" with the sentence, or "failed" with what is wrong."""

    kind: str
    why: str = ""


def run(program, calls=2):
    """As many calls of the step, on one device and under the plan; with none it is planned only."""
    try:
        with jax.enable_x64(True):
            return _run(program, calls)
    except mylib.errors.PlanError as error:
        return Outcome("refused", str(error))
    except Exception:
        return Outcome("failed", traceback.format_exc())


def options_of(program, args):
    parts = tuple(PARTS[x] for x in program.parts)
    parts = parts[:1] if program.arrangement == "stacked" else parts
    layers = {"found": None, "given": parts, "Linear": eqx.nn.Linear}
    if program.batch == "images":
        layers["given"] = eqx.nn.Conv2d
    even = mylib.rules.where_present(P("data"))
    fixed = {
        "nothing": {},
        # Were it all weights, no dimension would be left for "model".
        "kept": {"kept": lambda leaf: even if fits(leaf, "head.weight") else mylib.rules.PASS},
        "batch": {"kept": {"batch": P()}},
        "used": {"used": lambda leaf: P() if fits(leaf, "up.weight") else mylib.rules.PASS},
    }
    return {"axes": MESHES[program.mesh], "layers": layers[program.layers], **fixed[program.fixed]}


def fits(leaf, end):
    """Whether a weight with this end of its name can be split over all devices."""
    return leaf.name.endswith(end) and leaf.shape[0] % 8 == 0


def _run(program, calls):
    step, args, again = build(program)
    options = options_of(program, args)
    shapes = eqx.filter_eval_shape(lambda: tuple(args.values()))
    plan = mylib.plan(step, *shapes, compile=0, policies=(program.policy,), **options)
    look_at(plan, args)
    alone = eqx.filter_jit(step)
    theirs, expected = dict(args), []
    for _ in range(calls):
        expected.append(alone(*theirs.values()))
        theirs = again(expected[-1], theirs)
    for one in some_of(plan, step, args, program) if calls else ():
        compare(one, step, args, again, expected, program)
    return Outcome("passed", plan.chosen.name)


def some_of(plan, step, args, program):
    """The plan that was chosen, and that of the last other candidate."""
    yield plan
    if not plan.others:
        return
    planned = PlannedStep.of(step, tuple(args.values()))
    options = options_of(program, args)
    traced = trace(planned, program.policy, plan.layers)
    target = mylib.machines.here()
    fixed = FixedParts(options.get("kept"), options.get("used"))
    found = priced(traced, with_figures(target)[0], float("inf"), options["axes"], fixed)
    name = random.Random(program.seed).choice(plan.others).name
    yield plan_of([x for x in found if x.name == name], [], target, float("inf"), True, None)


def look_at(plan, args):
    """What a plan tells, and that it can be saved."""
    text = plan.as_text()
    saved = mylib.Plan.of(text, layers=plan.layers)
    assert saved == plan and saved.as_text() == text
    assert repr(plan) and plan._repr_html_()
    assert "was chosen" in plan.why_not(plan.chosen.name)
    for x in (*plan.others, *plan.rejected):
        assert plan.why_not(x.name)
    for name, x in args.items():
        if jax.tree.leaves(eqx.filter(x, eqx.is_array)):
            mylib.explain(x, plan, argument=name).whole()
    names = {"mylib": mylib, "P": P, "jnp": jnp, "jax": jax, **args}
    names |= {cls.__name__: cls for cls in plan.layers}
    exec(plan.code(), names)
    model = plan.applying.order[-1] if len({*plan.applying.order}) == 1 else None
    if model is not None:
        number, rest = int(model[1 : model.index("]")]), model[model.index("]") + 1 :]
        module = eval(f"x{rest}", {"x": [*args.values()][number]})
        for name, ours in (("kept", plan.kept), ("used", plan.used)):
            ours = mylib.resolve(module, ours, mesh=plan.mesh)
            theirs = mylib.resolve(module, names[name], mesh=names["mesh"])
            pairs = zip(*(jtu.tree_leaves_with_path(x) for x in (ours, theirs)), strict=True)
            for (path, a), (_, b) in pairs:
                if isinstance(a, NamedSharding):
                    told = f"code(): {name} of {jtu.keystr(path)} is {b.spec}, not {a.spec}"
                    assert a.spec == b.spec, f"{told}\n{plan.code()}"


def compare(plan, step, args, again, expected, program):
    """Calls under the plan have the numbers of those on one device, where the plan says."""
    fun, ours = plan.jit(step), dict(args)
    if program.start == "made":
        names = tuple(name for name in args if has_arrays(args[name]))
        made = plan.make(
            lambda: tuple(args[name] for name in names) if len(names) > 1 else args[names[0]],
            arguments=names,
        )
        made = made if len(names) > 1 else (made,)
        ours |= dict(zip(names, made, strict=True))
    elif program.start == "numpy":
        copy = lambda x: np.asarray(x) if eqx.is_array(x) and not is_key(x) else x  # noqa: E731
        ours = {name: jax.tree.map(copy, x) for name, x in args.items()}
    else:
        copy = lambda x: jnp.array(x) if eqx.is_array(x) else x  # noqa: E731
        ours = {name: jax.tree.map(copy, x) for name, x in args.items()}
    for number, wanted in enumerate(expected):
        given = ours
        out = fun(*ours.values())
        told = f"{plan.chosen.name}, call {number}: "
        donated = number > 0 or program.start == "made"
        same(out, wanted, plan, told)
        for name in plan.applying.donated if donated else ():
            left = [
                jtu.keystr(path)
                for path, x in jtu.tree_leaves_with_path(given[name])
                # JAX leaves out arguments that are not used, such as a rate that is computed anew.
                if isinstance(x, jax.Array) and x.size > 1 and not x.is_deleted()
            ]
            assert not left, f"{told}{name}{left[0]} is not donated"
        ours = again(out, ours)


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def has_arrays(x):
    return bool(jax.tree.leaves(eqx.filter(x, eqx.is_array)))


def same(out, wanted, plan, told):
    ours, theirs = (jtu.tree_leaves_with_path(x) for x in (out, wanted))
    assert jax.tree.structure(out) == jax.tree.structure(wanted), f"{told}other trees"
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        name = f"{told}{jtu.keystr(path)}"
        if not eqx.is_array(b):
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name} is {a.aval}, not {b.aval}"
        near = 1e-8 if b.dtype == jnp.float64 else 1e-2
        pair = (jax.random.key_data(x) if is_key(b) else x for x in (a, b))
        x, y = (np.asarray(x).astype(float) for x in pair)
        scale = max(1.0, float(np.max(np.abs(y), initial=0)))
        off = float(np.max(np.abs(x - y), initial=0))
        assert off <= near * scale, f"{name} is off by {off:.3g}, of {scale:.3g}"
        assert np.isfinite(y).all(), f"{name} has numbers that are not finite"
        spec = NamedSharding(plan.mesh, P(*plan.results.specs[jtu.keystr(path)]))
        assert a.sharding.is_equivalent_to(spec, a.ndim), f"{name} is at {a.sharding}, not {spec}"


def simplest(program, calls):
    """The program with as many options as possible as in `Program`, that fails in the same way."""
    why = run(program, calls).why[-40:]
    plain = Program(program.seed)
    for field in fields(Program):
        other = replace(program, **{field.name: getattr(plain, field.name)})
        if other != program and run(other, calls).why[-40:] == why:
            program = other
    return program


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--last", type=int, default=100)
    options.add_argument("--calls", type=int, default=2)
    given = options.parse_args()
    outcomes, start = Counter(), time.monotonic()
    for seed in range(given.first, given.last):
        program = draw(seed)
        outcome = run(program, given.calls)
        outcomes[outcome.kind] += 1
        if outcome.kind == "refused":
            print(f"--- seed {seed}: {outcome.why}", flush=True)
        if outcome.kind == "failed":
            print(f"--- {program}\n{outcome.why}", flush=True)
            print(f"as simple as it can be: {simplest(program, given.calls)}", flush=True)
        if seed % 10 == 9:
            jax.clear_caches()
            print(f"{dict(outcomes)} after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
