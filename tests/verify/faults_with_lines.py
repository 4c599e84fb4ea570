"""Steps with one fault each, whose line is marked: does `verify` name it?

    python tests/verify/faults_with_lines.py [name ...]

Of the functions the undecorated ones are right, and are references; the others are steps, with a
mark at the line of their fault. Most are written differently from their reference, as users do.
"""

import inspect
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    # 8 simulated devices, as in the tests.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib.testing import VerifyError, verify

MESH = mylib.make_mesh(data=8)
BOTH = mylib.make_mesh(data=4, model=2)
MARK = "# wrong"
FAULTS = {}
# Written so differently from their reference that a line can't be shown to be wrong.
UNKNOWN = ("second_moment_of_own_rows", "adam_with_the_negative")


def arrays(*shapes):
    random = np.random.default_rng(len(shapes))
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


X, W, V, Y = arrays((16, 8), (8, 8), (8, 8), (16, 8))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 12, (16, 6)))


def fault(reference, *args, **kwargs):
    """The step that is decorated has one."""

    def add(step):
        wrapped = jax.jit(step) if not kwargs else mylib.filter_shard_map(step, **kwargs)
        FAULTS[step.__name__] = (wrapped, step, reference, args)
        return step

    return add


def mapped(reference, *args, specs, out=None, mesh=MESH):
    out = P() if out is None else out
    return fault(reference, *args, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


ROWS = P("data")

# --- statistics over rows -------------------------------------------------------------------------


def centred(x, w):
    hidden = jnp.tanh(x @ w)
    return hidden - jnp.mean(hidden, 0)


@mapped(centred, X, W, specs=(ROWS, P()), out=ROWS)
def mean_of_own_rows(x, w):
    h = jnp.tanh(x @ w)
    return h - jnp.mean(h, 0)  # wrong


@mapped(centred, X, W, specs=(ROWS, P()), out=ROWS)
def summed_in_place_of_mean(x, w):
    h = jnp.tanh(x @ w)
    m = lax.psum(jnp.mean(h, 0), "data")  # wrong
    return h - m


def scaled(x, w):
    hidden = jnp.sin(x @ w)
    centred = hidden - jnp.mean(hidden, 0)
    return centred / jnp.sqrt(jnp.var(hidden, 0) + 1e-3)


@mapped(scaled, X, W, specs=(ROWS, P()), out=ROWS)
def variance_of_own_rows(x, w):
    h = jnp.sin(x @ w)
    m = lax.pmean(jnp.mean(h, 0), "data")
    d = h - m
    v = jnp.mean(d * d, 0)  # wrong
    return d / jnp.sqrt(v + 1e-3)


@mapped(scaled, X, W, specs=(ROWS, P()), out=ROWS)
def mean_of_variances(x, w):
    h = jnp.sin(x @ w)
    m = lax.pmean(jnp.mean(h, 0), "data")
    v = lax.pmean(jnp.var(h, 0), "data")  # wrong
    return (h - m) / jnp.sqrt(v + 1e-3)


@mapped(scaled, X, W, specs=(ROWS, P()), out=ROWS)
def other_epsilon(x, w):
    h = jnp.sin(x @ w)
    m = lax.pmean(jnp.mean(h, 0), "data")
    d = h - m
    v = lax.pmean(jnp.mean(d * d, 0), "data")
    return d / jnp.sqrt(v + 1e-1)  # wrong


@mapped(scaled, X, W, specs=(ROWS, P()), out=ROWS)
def second_moment_of_own_rows(x, w):
    h = jnp.sin(x @ w)
    m = lax.pmean(jnp.mean(h, 0), "data")
    s = h**2
    e = jnp.mean(s, 0)  # wrong
    v = e - m**2
    return (h - m) / jnp.sqrt(v + 1e-3)


def softmax(x, w):
    return jax.nn.softmax(x @ w, axis=0)


@mapped(softmax, X, W, specs=(ROWS, P()), out=ROWS)
def softmax_of_own_rows(x, w):
    s = x @ w
    return jax.nn.softmax(s, axis=0)  # wrong


@mapped(softmax, X, W, specs=(ROWS, P()), out=ROWS)
def sum_of_own_exponentials(x, w):
    s = x @ w
    e = jnp.exp(s - lax.pmax(jnp.max(s, 0), "data"))
    return e / jnp.sum(e, 0)  # wrong


@mapped(softmax, X, W, specs=(ROWS, P()), out=ROWS)
def largest_of_own_rows(x, w):
    s = x @ w
    e = jnp.exp(s - jnp.max(s, 0))  # wrong
    return e / lax.psum(jnp.sum(e, 0), "data")


# --- losses ---------------------------------------------------------------------------------------


def loss(x, w, y):
    out = jnp.tanh(x @ w)
    return jnp.mean((out - y) ** 2)


@mapped(loss, X, W, Y, specs=(ROWS, P(), ROWS))
def loss_of_own_rows(x, w, y):
    out = jnp.tanh(x @ w)
    return jnp.mean((out - y) ** 2)  # wrong


@mapped(loss, X, W, Y, specs=(ROWS, P(), ROWS))
def loss_summed(x, w, y):
    out = jnp.tanh(x @ w)
    return lax.psum(jnp.mean((out - y) ** 2), "data")  # wrong


@mapped(loss, X, W, Y, specs=(ROWS, P(), ROWS))
def divided_by_own_rows(x, w, y):
    out = jnp.tanh(x @ w)
    total = lax.psum(jnp.sum((out - y) ** 2), "data")
    return total / y.size  # wrong


@mapped(loss, X, W, Y, specs=(ROWS, P(), ROWS))
def absolute_in_place_of_squared(x, w, y):
    out = jnp.tanh(x @ w)
    error = jnp.abs(out - y)  # wrong
    return lax.pmean(jnp.mean(error), "data")


@mapped(loss, X, W, Y, specs=(ROWS, P(), ROWS))
def rows_of_a_neighbour(x, w, y):
    out = jnp.tanh(x @ w)
    y = lax.ppermute(y, "data", [(i, (i + 1) % 8) for i in range(8)])  # wrong
    return lax.pmean(jnp.mean((out - y) ** 2), "data")


# --- weights that are split -----------------------------------------------------------------------


def two_layers(x, w, v):
    hidden = jax.nn.relu(x @ w)
    return jnp.sin(hidden @ v)


COLUMNS = P(None, "model")


@mapped(two_layers, X, W, V, specs=(ROWS, COLUMNS, P("model")), out=ROWS, mesh=BOTH)
def product_not_summed(x, w, v):
    h = jax.nn.relu(x @ w)
    out = h @ v  # wrong
    return jnp.sin(out)


@mapped(two_layers, X, W, V, specs=(ROWS, COLUMNS, P("model")), out=ROWS, mesh=BOTH)
def product_summed_over_rows(x, w, v):
    h = jax.nn.relu(x @ w)
    out = lax.psum(h @ v, "data")  # wrong
    return jnp.sin(out)


@mapped(two_layers, X, W, V, specs=(ROWS, COLUMNS, P("model")), out=ROWS, mesh=BOTH)
def product_averaged(x, w, v):
    h = jax.nn.relu(x @ w)
    out = lax.pmean(h @ v, "model")  # wrong
    return jnp.sin(out)


@mapped(two_layers, X, W, V, specs=(ROWS, COLUMNS, P("model")), out=ROWS, mesh=BOTH)
def nonlinear_before_the_sum(x, w, v):
    h = jax.nn.relu(x @ w)
    return lax.psum(jnp.sin(h @ v), "model")  # wrong


@mapped(two_layers, X, W, V, specs=(ROWS, ROWS, P()), out=ROWS)
def gathered_backwards(x, w, v):
    whole = lax.all_gather(w, "data", tiled=True)[::-1]  # wrong
    h = jax.nn.relu(x @ whole)
    return jnp.sin(h @ v)


@mapped(two_layers, X, W, V, specs=(ROWS, ROWS, P()), out=ROWS)
def gathered_from_the_first(x, w, v):
    whole = jnp.tile(lax.all_gather(w, "data", tiled=True)[:1], (8, 1))  # wrong
    h = jax.nn.relu(x @ whole)
    return jnp.sin(h @ v)


@mapped(two_layers, X, W, V, specs=(ROWS, P(), P()), out=ROWS)
def transposed(x, w, v):
    h = jax.nn.relu(x @ w)
    return jnp.sin(h @ v.T)  # wrong


@mapped(two_layers, X, W, V, specs=(ROWS, P(), P()), out=ROWS)
def device_number_added(x, w, v):
    h = jax.nn.relu(x @ w)
    h = h + 0.1 * lax.axis_index("data")  # wrong
    return jnp.sin(h @ v)


# --- scans ----------------------------------------------------------------------------------------

STEPS = jnp.stack([W, V, W.T, V.T]) / 3


def recurrent(x, ws):
    def turn(carry, w):
        new = jnp.tanh(carry @ w)
        return new + 0.5 * carry, jnp.mean(new)

    return lax.scan(turn, x, ws)


@mapped(recurrent, X, STEPS, specs=(ROWS, P()), out=(ROWS, P()))
def mean_of_own_rows_in_a_scan(x, ws):
    def turn(c, w):
        n = jnp.tanh(c @ w)
        mean = jnp.mean(n)  # wrong
        return n + 0.5 * c, mean

    return lax.scan(turn, x, ws)


@mapped(recurrent, X, STEPS, specs=(ROWS, P()), out=(ROWS, P()))
def carry_scaled_in_a_scan(x, ws):
    def turn(c, w):
        n = jnp.tanh(c @ w)
        m = lax.pmean(jnp.mean(n), "data")
        kept = 0.4 * c  # wrong
        return n + kept, m

    return lax.scan(turn, x, ws)


@mapped(recurrent, X, STEPS, specs=(ROWS, P()), out=(ROWS, P()))
def nonlinearity_in_a_scan(x, ws):
    def turn(c, w):
        p = c @ w
        n = jnp.sin(p)  # wrong
        return n + 0.5 * c, lax.pmean(jnp.mean(n), "data")

    return lax.scan(turn, x, ws)


def totals(x):
    def turn(carry, row):
        total = carry + jnp.sum(row)
        return total, jnp.sin(total)

    return lax.scan(turn, jnp.zeros(()), x)


@mapped(totals, X, specs=(P(None, "data"),))
def own_columns_in_a_scan(x):
    def turn(c, row):
        s = jnp.sum(row)
        t = c + s  # wrong
        return t, jnp.sin(t)

    return lax.scan(turn, jnp.zeros(()), x)


@mapped(totals, X, specs=(P(None, "data"),))
def late_in_a_scan(x):
    def turn(c, row):
        t = c + lax.psum(jnp.sum(row), "data")
        out = jnp.sin(t)
        return jnp.where(t > 2, t - 1, t), out  # wrong

    return lax.scan(turn, jnp.zeros(()), x)


@fault(totals, X)
def limit_in_a_scan(x):
    def turn(c, row):
        t = c + jnp.sum(row)
        t = jnp.minimum(t, 3.0)  # wrong
        return t, jnp.sin(t)

    return lax.scan(turn, jnp.zeros(()), x)


def nested(x, ws):
    def outer(carry, w):
        def inner(c, _):
            return jnp.tanh(c @ w), None

        return lax.scan(inner, carry, None, length=3)[0], jnp.mean(carry)

    return lax.scan(outer, x, ws)


@mapped(nested, X, STEPS, specs=(ROWS, P()), out=(ROWS, P()))
def inside_of_two_scans(x, ws):
    def outer(carry, w):
        def inner(c, _):
            p = c @ w
            p = p - jnp.mean(p, 0)  # wrong
            return jnp.tanh(p), None

        return lax.scan(inner, carry, None, length=3)[0], lax.pmean(jnp.mean(carry), "data")

    return lax.scan(outer, x, ws)


@mapped(nested, X, STEPS, specs=(ROWS, P()), out=(ROWS, P()))
def outside_of_the_inner_scan(x, ws):
    def outer(carry, w):
        def inner(c, _):
            return jnp.tanh(c @ w), None

        mean = jnp.mean(carry)  # wrong
        return lax.scan(inner, carry, None, length=3)[0], mean

    return lax.scan(outer, x, ws)


# --- integers and booleans ------------------------------------------------------------------------


def counted(tokens):
    counts = jnp.zeros(12, jnp.int32).at[tokens.reshape(-1)].add(1)
    return counts, jnp.argmax(counts)


@mapped(counted, TOKENS, specs=(ROWS,))
def counts_of_own_tokens(tokens):
    counts = jnp.zeros(12, jnp.int32).at[tokens.reshape(-1)].add(1)  # wrong
    return counts, jnp.argmax(counts)


@mapped(counted, TOKENS, specs=(ROWS,))
def counts_averaged(tokens):
    counts = jnp.zeros(12, jnp.int32).at[tokens.reshape(-1)].add(1)
    counts = lax.psum(counts, "data") // 8  # wrong
    return counts, jnp.argmax(counts)


def shifted(tokens):
    is_new = tokens[1:] != tokens[:-1]
    changes = jnp.cumsum(is_new, 0)
    return changes * 2 + 1


@fault(shifted, TOKENS)
def equal_in_place_of_unequal(tokens):
    new = tokens[1:] == tokens[:-1]  # wrong
    total = jnp.cumsum(new, 0)
    return total * 2 + 1


@fault(shifted, TOKENS)
def summed_along_the_other_dimension(tokens):
    new = tokens[1:] != tokens[:-1]
    total = jnp.cumsum(new, 1)  # wrong
    return total * 2 + 1


def looked_up(tokens, table):
    rows = table[tokens]
    mask = tokens > 3
    return jnp.sum(jnp.where(mask[..., None], rows, 0.0), 1)


TABLE = jnp.asarray(np.random.default_rng(3).normal(size=(12, 4)), jnp.float32)


@mapped(looked_up, TOKENS, TABLE, specs=(ROWS, P()), out=ROWS)
def another_mask(tokens, table):
    rows = table[tokens]
    m = tokens > 4  # wrong
    return jnp.sum(jnp.where(m[..., None], rows, 0.0), 1)


@mapped(looked_up, TOKENS, TABLE, specs=(ROWS, P()), out=ROWS)
def another_token(tokens, table):
    after = (tokens + 1) % 12  # wrong
    rows = table[after]
    m = tokens > 3
    return jnp.sum(jnp.where(m[..., None], rows, 0.0), 1)


@mapped(looked_up, TOKENS, TABLE, specs=(ROWS, P()), out=ROWS)
def mask_inverted(tokens, table):
    rows = table[tokens]
    m = tokens > 3
    m = ~m  # wrong
    return jnp.sum(jnp.where(m[..., None], rows, 0.0), 1)


def best(x, w):
    scores = x @ w
    chosen = jnp.argmax(scores, 1)
    return jax.nn.one_hot(chosen, 8) * scores


@mapped(best, X, W, specs=(ROWS, P()), out=ROWS)
def least_in_place_of_best(x, w):
    s = x @ w
    c = jnp.argmin(s, 1)  # wrong
    return jax.nn.one_hot(c, 8) * s


@mapped(best, X, W, specs=(ROWS, P()), out=ROWS)
def own_offset_of_indices(x, w):
    s = x @ w
    c = jnp.argmax(s, 1)
    c = (c + lax.axis_index("data")) % 8  # wrong
    return jax.nn.one_hot(c, 8) * s


# --- training -------------------------------------------------------------------------------------


def trained(x, w, y):
    value, grad = jax.value_and_grad(loss, 1)(x, w, y)
    return w - 0.1 * grad, value


def per_device(x, w, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


STEP = {"specs": (ROWS, P(), ROWS)}


@mapped(trained, X, W, Y, **STEP)
def gradient_not_summed(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    return w - 0.1 * g, lax.pmean(v, "data")  # wrong


@mapped(trained, X, W, Y, **STEP)
def gradient_summed(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    g = lax.psum(g, "data")  # wrong
    return w - 0.1 * g, lax.pmean(v, "data")


@mapped(trained, X, W, Y, **STEP)
def gradient_added(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    g = lax.pmean(g, "data")
    return w + 0.1 * g, lax.pmean(v, "data")  # wrong


@mapped(trained, X, W, Y, **STEP)
def another_rate(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    g = lax.pmean(g, "data")
    return w - 0.2 * g, lax.pmean(v, "data")  # wrong


@mapped(trained, X, W, Y, **STEP)
def metric_of_one_device(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    g = lax.pmean(g, "data")
    v = lax.psum(jnp.where(lax.axis_index("data") == 0, v, 0.0), "data")  # wrong
    return w - 0.1 * g, v


def clipped(x, w, y):
    value, grad = jax.value_and_grad(loss, 1)(x, w, y)
    norm = jnp.sqrt(jnp.sum(grad**2))
    return w - 0.1 * grad / jnp.maximum(1.0, 4 * norm), value


@mapped(clipped, X, W, Y, **STEP)
def norm_of_own_gradient(x, w, y):
    v, g = jax.value_and_grad(per_device, 1)(x, w, y)
    n = lax.pmean(jnp.sqrt(jnp.sum(g**2)), "data")  # wrong
    g = lax.pmean(g, "data")
    return w - 0.1 * g / jnp.maximum(1.0, 4 * n), lax.pmean(v, "data")


ADAM = optax.adam(1e-2)


def adam(x, w, y, state):
    grad = jax.grad(loss, 1)(x, w, y)
    updates, state = ADAM.update(grad, state)
    return optax.apply_updates(w, updates), state


STATE = eqx.filter_jit(ADAM.init)(W)


@mapped(adam, X, W, Y, STATE, specs=(ROWS, P(), ROWS, P()))
def adam_with_the_negative(x, w, y, state):
    g = lax.pmean(jax.grad(per_device, 1)(x, w, y), "data")
    u, state = ADAM.update(-g, state)  # wrong
    return optax.apply_updates(w, u), state


# --- roundings ------------------------------------------------------------------------------------


@fault(two_layers, X, W, V)
def cast_of_one_value(x, w, v):
    h = jax.nn.relu(x @ w)
    h = h.astype(jnp.bfloat16).astype(x.dtype)  # wrong
    return jnp.sin(h @ v)


def rounded(x, w, v):
    hidden = jax.nn.relu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return jnp.sin(hidden.astype(x.dtype) @ v)


@mapped(rounded, X, W, V, specs=(ROWS, P(), P()), out=ROWS)
def negated_after_a_cast(x, w, v):
    h = jax.nn.relu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    h = -h  # wrong
    return jnp.sin(h.astype(x.dtype) @ v)


def marked(step):
    lines, start = inspect.getsourcelines(step)
    return [start + i for i, line in enumerate(lines) if MARK in line]


def look(name):
    """`right`, `wrong`, `unknown` or `missed`, and what the error says of the line."""
    run, step, reference, args = FAULTS[name]
    try:
        verify(run, *args, reference=reference)
    except VerifyError as error:
        line = error.report.line
        spots = [f"faults_with_lines.py:{number} " for number in marked(step)]
        named = line.count("faults_with_lines.py:")
        if not named or "isn't known" in line:
            return "unknown", line
        return ("right" if any(spot in line for spot in spots) else "wrong"), line
    return "missed", ""


def main(chosen):
    counts = Counter()
    for name in chosen or FAULTS:
        kind, line = look(name)
        counts[kind] += 1
        if kind != "right" or chosen:
            print(f"{name}: {kind}: marked {marked(FAULTS[name][1])}: {line}", flush=True)
        jax.clear_caches()
    print(len(FAULTS), dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
