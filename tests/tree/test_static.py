"""What is static: which arguments share a program, how many programs are kept, and a word where a
number makes too many.
"""

import collections
import dataclasses
import gc
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mylib
from mylib._training.jit import dispatcher


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float


class Point(collections.namedtuple("Point", "x")):  # a leaf, when it stands in a static field
    pass


class Box(eqx.Module):
    value: object = eqx.field(static=True)


class ByName:
    """Equal if the names are, whatever else there is."""

    def __init__(self, name, more):
        self.name, self.more = name, more

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


PAIRS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ((1, 2), (1.0, 2)),
    ((0.0,), (-0.0,)),
    ({"a": 1}, {"a": 1.0}),
    ({1: 2}, {1.0: 2}),
    ([1], [True]),
    (frozenset({1}), frozenset({1.0})),
    (frozenset({(1, "a")}), frozenset({(1.0, "a")})),
    (Config(1), Config(1.0)),
    (Config((1, 2)), Config((1, 2.0))),
    (Point(1), Point(1.0)),
    ({"a": [frozenset({0})]}, {"a": [frozenset({False})]}),
]


def hashable(x):
    try:
        hash(x)
    except TypeError:
        return False
    return jax.tree_util.all_leaves([x])


class TestSharing:
    @pytest.mark.parametrize(("a", "b"), PAIRS, ids=map(str, PAIRS))
    @pytest.mark.parametrize("where", ["field", "leaf"])
    def test_equal_but_of_other_types(self, a, b, where):
        if where == "leaf" and not hashable(a):
            a, b = Box(a), Box(b)
        seen = []

        def f(x, box):
            seen.append(box)
            return x, box

        jitted = mylib.filter_jit(f)
        for given in (a, b, a, b):
            given = Box(given) if where == "field" else given
            _, out = jitted(jnp.ones(()), given)
            assert repr(out) == repr(given)
        assert len(seen) == 2

    def test_a_dtype_that_follows(self):
        f = mylib.filter_jit(lambda x, s: x * next(iter(s)))
        x = jnp.ones((), int)
        assert f(x, frozenset({1})).dtype == x.dtype
        assert f(x, frozenset({1.0})).dtype == jnp.float32

    @pytest.mark.parametrize("make", [lambda: (1, "a", 2.5), lambda: {"k": [1, {2}]}, lambda: 1000])
    def test_what_is_the_same_is_compiled_once(self, make):
        traces = []
        f = mylib.filter_jit(lambda x, box: (traces.append(1), x)[1])
        for _ in range(3):
            f(jnp.ones(()), Box(make()))
        assert len(traces) == 1

    def test_an_equality_of_their_own(self):
        traces = []
        f = mylib.filter_jit(lambda x, name: (traces.append(1), x)[1])
        for i in range(3):
            f(jnp.ones(()), ByName("a", i))
        assert len(traces) == 1

    def test_equal_functions(self):
        def f(x, config):
            return x * config.rate

        x = jnp.ones((), int)
        for rate, dtype in ((2, x.dtype), (2.0, jnp.float32), (2, x.dtype)):
            assert mylib.filter_jit(eqx.Partial(f, config=Config(rate)))(x).dtype == dtype

    def test_keys_of_dicts(self):
        f = mylib.filter_jit(lambda tree: [type(k).__name__ for k in tree])
        x = jnp.ones(())
        assert [f({k: x}) for k in (1, 1.0, True)] == [["int"], ["float"], ["bool"]]


class TestBound:
    @pytest.mark.slow
    def test_programs_are_let_go(self, monkeypatch):
        monkeypatch.setattr(dispatcher, "_MOST", 256)

        class Name:
            pass

        f = mylib.filter_jit(lambda x, name: x + 1)
        names = [Name() for _ in range(300)]
        gone = [weakref.ref(name) for name in names]
        for name in names:
            f(jnp.ones(()), name)
        f(jnp.ones(()), names[45])
        for _ in range(3):
            f(jnp.ones(()), Name())
        kept = len(f.dispatcher.variants)
        del names, name
        gc.collect()
        left = [i for i, ref in enumerate(gone) if ref() is not None]
        assert kept <= 256 and len(left) <= 256
        # The one that was used again is younger than its neighbours.
        assert 45 in left and 46 not in left and 299 in left

    def test_what_was_compiled_ahead_of_time_stays_of_use(self):
        g = mylib.filter_jit(lambda x, name: x + len(name))
        compiled = g.lower(jnp.ones(()), "ab").compile()
        for i in range(300):
            g.dispatcher.prepare([], (jnp.ones(()), f"{i}"), {})
        assert compiled(jnp.ones(()), "ab") == 3


class TestNumbersThatChange:
    def run(self, f, values):
        for value in values:
            f(jnp.ones(()), value)

    def test_it_is_told_once_and_by_name(self):
        f = mylib.filter_jit(lambda x, step: x + step["n"])
        with pytest.warns(mylib.errors.StaticNumberWarning) as caught:
            self.run(f, [{"n": i} for i in range(25)])
        (warning,) = caught
        text = str(warning.message)
        assert "have new values each time: step['n']. Convert them" in text
        assert "jnp.asarray" in text
        assert warning.filename == __file__

    @pytest.mark.parametrize(
        "values",
        [
            [1, 2, 3] * 10,
            [x for i in range(20) for x in (i, 0)],
            [f"{i}" for i in range(20)],
            [*range(9), "a", *range(9, 18)],
            [bool(i % 2) for i in range(20)],
        ],
        ids=["a few", "now and then", "texts", "two rows", "flags"],
    )
    def test_it_is_not_told_of_others(self, values):
        f = mylib.filter_jit(lambda x, y: x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.run(f, values)

    def test_arrays_do_not_count(self):
        f = mylib.filter_jit(lambda x, y: x + y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.run(f, map(jnp.asarray, range(30)))
        assert len(f.dispatcher.variants) == 1

    @pytest.mark.parametrize(
        ("make", "names"),
        [
            (lambda i: {"lr": i, "m": 2 * i}, "y['lr'], y['m']"),
            (lambda i: [i, 7, 2 * i], "y[*], 2 leaves"),
            (lambda i: [{"a": i}, {"a": 2 * i}], "y[0..1]['a']"),
        ],
        ids=["two", "a list", "a list of dicts"],
    )
    def test_several_are_named(self, make, names):
        f = mylib.filter_jit(lambda x, y: x)
        with pytest.warns(mylib.errors.StaticNumberWarning) as caught:
            self.run(f, map(make, range(12)))
        (warning,) = caught
        assert f"each time: {names}. Convert them" in str(warning.message)

    def test_a_batch_that_is_a_list_is_told_at_once(self):
        f = mylib.filter_jit(lambda x, batch: x)
        with pytest.warns(mylib.errors.StaticNumberWarning) as caught:
            self.run(f, ([[i + j + 0.5 for j in range(48)]] * 16 for i in range(2)))
        assert "each time: batch[0..15][0..47]. Convert them, or the lists" in str(
            caught[0].message
        )
