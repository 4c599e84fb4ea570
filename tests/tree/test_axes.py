"""The axis names that jaxtyping annotations give to leaves, as a rule sees them."""

import dataclasses
import functools
import operator
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    NamedTuple,
    NewType,
    Optional,
    TypeVar,
    Union,
)

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from _postponed import Postponed, WithUnknownName
from hypothesis import given, strategies as st
from jax import Array
from jaxtyping import Float, Int, Key, PRNGKeyArray, Scalar, Shaped
from typing_extensions import TypeAliasType

import mylib


def axes(tree):
    """The axes of every array leaf of a tree, by name."""
    seen = {}

    def note(leaf):
        seen[leaf.name] = leaf.axes

    mylib.resolve(tree, note)
    return seen


def axes_of_field(annotation, value):
    class Layer(eqx.Module):
        field: annotation

    (only,) = axes(Layer(value)).values()
    return only


class Linear(eqx.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None


def linear():
    return Linear(jnp.zeros((2, 3)), jnp.zeros(2))


LINEAR = {".weight": ("out", "in"), ".bias": ("out",)}


def under(prefix, names=LINEAR):
    return {prefix + name: axes for name, axes in names.items()}


@pytest.mark.parametrize(
    ("dims", "ndim", "expected"),
    [
        ("out in", 2, ("out", "in")),
        ("", 0, ()),
        # Anonymous dimensions, sizes and expressions are no names.
        ("_ a", 2, (None, "a")),
        ("_hidden a", 2, (None, "a")),
        ("3 a", 2, (None, "a")),
        ("n n-1", 2, ("n", None)),
        ("a 2*a", 2, ("a", None)),
        ("min(a,b) b", 2, (None, "b")),
        ("heads=4 a", 2, ("heads", "a")),
        # What is said beside a name doesn't change it.
        ("#a b", 2, ("a", "b")),
        ("?a b", 2, ("a", "b")),
        ("rows=a b", 2, ("a", "b")),
        # Several dimensions at once have no name of their own.
        ("*batch a", 1, ("a",)),
        ("*batch a", 3, (None, None, "a")),
        ("a *rest", 3, ("a", None, None)),
        ("a *rest b", 4, ("a", None, None, "b")),
        ("#*batch a", 2, (None, "a")),
        ("batch=*b a", 3, (None, None, "a")),
        ("... a", 3, (None, None, "a")),
        ("...", 2, (None, None)),
        # `vmap` has added dimensions, which are in front.
        ("out in", 3, (None, "out", "in")),
        ("", 2, (None, None)),
        ("a 2*a", 3, (None, "a", None)),
        # The annotation is of another array.
        ("out in", 1, None),
        ("a 2*a", 1, None),
        ("a *rest b", 1, None),
    ],
)
def test_dimensions(dims, ndim, expected):
    assert axes_of_field(Float[Array, dims], jnp.zeros((2,) * ndim)) == expected


names = st.sampled_from(["a", "b", "heads", "d_model"])
named = st.one_of(
    names.map(lambda name: (name, name)),
    names.map(lambda name: (f"#{name}", name)),
    names.map(lambda name: (f"{name}=4", name)),
    names.map(lambda name: (f"_{name}", None)),
    names.map(lambda name: (f"{name}+1", None)),
    names.map(lambda name: (f"3*{name}", None)),
    st.sampled_from([("_", None), ("7", None)]),
)
several = st.sampled_from(["...", "*batch", "*_", "#*batch", "*#batch", "_*batch"])


@given(st.lists(named, max_size=3), st.none() | several, st.lists(named, max_size=3), st.data())
def test_every_dimension_has_its_own_name_whatever_is_around_it(before, middle, after, data):
    extra = data.draw(st.integers(0, 2))
    dims = [*before, *([(middle, None)] if middle else []), *after]
    expected = [name for _, name in before]
    expected[len(before) if middle else 0 : 0] = [None] * extra
    expected += [name for _, name in after]
    annotation = Float[Array, " ".join(text for text, _ in dims)]
    assert axes_of_field(annotation, np.zeros((1,) * len(expected))) == tuple(expected)


T = TypeVar("T", bound=Float[Array, "out in"])
Free = TypeVar("Free")
Weight = TypeAliasType("Weight", Float[Array, "out in"])


@pytest.mark.parametrize(
    "annotation",
    [
        Float[Array, "out in"],
        Float[Array, "out in"] | None,
        Optional[Float[Array, "out in"]],  # noqa: UP045
        Union[None, Float[Array, "out in"], str],  # noqa: UP007
        Int[Array, "out in"] | Float[np.ndarray, "out in"],
        Float[Array | np.ndarray, "out in"],
        Shaped[Any, "out in"],
        Float[Float[Array, "in"], "out"],
        Annotated[Float[Array, "out in"], "the weight"],
        Annotated[Float[Array, "out in"] | None, "the weight"],
        Final[Float[Array, "out in"]],
        NewType("NewWeight", Float[Array, "out in"]),
        "Float[Array, 'out in']",
        Optional["Float[Array, 'out in']"],  # noqa: UP045
        T,
        Weight,
    ],
)
def test_spellings_of_an_annotation(annotation):
    assert axes_of_field(annotation, jnp.zeros((2, 3))) == ("out", "in")


@pytest.mark.parametrize("annotation", [Array, Any, "Array", Array | None, Free, int, PRNGKeyArray])
def test_annotations_without_names(annotation):
    assert axes_of_field(annotation, jnp.zeros((2, 3))) in (None, (None, None))


def test_of_several_annotations_the_best_fit_counts():
    either = Float[Array, "only"] | Float[Array, "out in"] | Float[Array, "*more a b"]
    assert axes_of_field(either, jnp.zeros(2)) == ("only",)
    assert axes_of_field(either, jnp.zeros((2, 3))) == ("out", "in")
    assert axes_of_field(either, jnp.zeros((2, 3, 4))) == (None, "a", "b")


def test_keys_and_scalars():
    keys = jax.random.split(jax.random.key(0), 3)
    assert axes_of_field(Key[Array, "n"], keys) == ("n",)
    assert axes_of_field(Scalar, jnp.zeros(())) == ()
    assert axes_of_field(Scalar, jnp.zeros(4)) == (None,)
    assert axes_of_field(PRNGKeyArray, jax.random.key(0)) == ()


def test_numpy_and_abstract_arrays_have_axes_too():
    model = Linear(np.zeros((2, 3)), jax.ShapeDtypeStruct((2,), jnp.float32))
    assert axes(model) == LINEAR
    assert axes(eqx.filter_eval_shape(linear)) == LINEAR


def test_a_field_that_is_none_is_no_leaf():
    assert axes(Linear(jnp.zeros((2, 3)), None)) == {".weight": ("out", "in")}


def test_a_bare_array_has_no_axes():
    assert axes(jnp.zeros((2, 3))) == {"": None}
    assert axes([jnp.zeros(2), {"a": jnp.zeros(3)}]) == {"[0]": None, "[1]['a']": None}


@pytest.mark.parametrize(
    ("container", "prefixes"),
    [
        (lambda m: [m, m], ["[0]", "[1]"]),
        (lambda m: (m, [m]), ["[0]", "[1][0]"]),
        (lambda m: {"a": m}, ["['a']"]),
        (lambda m: {3: m, 4: [m]}, ["[3]", "[4][0]"]),
        (lambda m: OrderedDict(a=m), ["['a']"]),
        (lambda m: eqx.nn.Sequential([m, m]), [".layers[0]", ".layers[1]"]),
        (lambda m: jtu.Partial(max, m), ["[<flat index 0>][0]"]),
        (lambda m: eqx.Partial(max, x=m), [".keywords['x']"]),
    ],
)
def test_modules_inside_of_containers(container, prefixes):
    expected = functools.reduce(operator.or_, map(under, prefixes))
    assert axes(container(linear())) == expected


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (list[Float[Array, "a b"]], [0, 0], [("a", "b")] * 2),
        (Sequence[Float[Array, "a b"]], [0], [("a", "b")]),
        (Collection[Float[Array, "a b"]], (0,), [("a", "b")]),
        (dict[str, Float[Array, "a b"]], {"x": 0}, [("a", "b")]),
        (Mapping[str, Float[Array, "a b"]], {"x": 0}, [("a", "b")]),
        (tuple[Float[Array, "a b"], ...], (0, 0), [("a", "b")] * 2),
        (tuple[Float[Array, "a b"], Float[Array, "c d"]], (0, 0), [("a", "b"), ("c", "d")]),
        (tuple[Float[Array, "a b"]], (0, 0), [("a", "b"), None]),
        (list[Float[Array, "a b"]] | None, [0], [("a", "b")]),
        (list[Float[Array, "a b"] | None], [None, 0], [("a", "b")]),
        (dict[str, list[Float[Array, "a b"]]], {"x": [0]}, [("a", "b")]),
        (list, [0], [None]),
        (dict[str, Any], {"x": 0}, [None]),
        (Float[Array, "a b"], [0], [None]),
    ],
)
def test_containers_say_what_their_elements_are(annotation, value, expected):
    class Layer(eqx.Module):
        field: annotation

    full = jax.tree.map(lambda _: jnp.zeros((2, 3)), value)
    assert list(axes(Layer(full)).values()) == expected


def test_the_innermost_annotation_counts():
    class Net(eqx.Module):
        first: Linear
        rest: list[Linear]
        stack: "Float[Array, 'not mine']"

    net = Net(linear(), [linear()], linear())
    assert axes(net) == under(".first") | under(".rest[0]") | under(".stack")


def test_inherited_fields():
    class Base(eqx.Module):
        weight: Float[Array, "out in"]
        extra: Float[Array, "before"]

    class Derived(Base):
        extra: Float[Array, "after"]
        own: Float[Array, "own"]

    derived = Derived(weight=jnp.zeros((2, 3)), extra=jnp.zeros(2), own=jnp.zeros(2))
    assert axes(derived) == {
        ".weight": ("out", "in"),
        ".extra": ("after",),
        ".own": ("own",),
    }


def test_abstract_fields():
    class Base(eqx.Module):
        weight: eqx.AbstractVar[Float[Array, "not yet"]]

    class Concrete(Base):
        weight: Float[Array, "out in"]

    assert axes(Concrete(jnp.zeros((2, 3)))) == {".weight": ("out", "in")}


def test_generic_modules():
    class Generically(eqx.Module, Generic[T, Free]):
        weight: Float[Array, "out in"]
        bound: T
        free: Free

    array = jnp.zeros((2, 3))
    for cls in (Generically, Generically[Float[Array, "a b"], Float[Array, "c d"]]):
        assert axes(cls(array, array, linear())) == {
            ".weight": ("out", "in"),
            ".bound": ("out", "in"),
            **under(".free"),
        }


def test_annotations_written_as_text():
    layer = Postponed(jnp.zeros((2, 3)), jnp.zeros(2), [jnp.zeros(4)])
    assert axes(layer) == {
        ".weight": ("out", "in"),
        ".bias": ("out",),
        ".parts[0]": ("rows",),
    }


def test_text_that_means_nothing_costs_no_other_field_its_names():
    layer = WithUnknownName(jnp.zeros((2, 3)), jnp.zeros(2), jnp.zeros(2))
    assert axes(layer) == {".weight": ("out", "in"), ".other": None, ".nonsense": None}


def test_dataclasses_and_named_tuples():
    @jtu.register_dataclass
    @dataclasses.dataclass
    class Batch:
        x: Float[Array, "batch features"]

    class Pair(NamedTuple):
        x: Float[Array, "batch features"]

    assert axes(Batch(jnp.zeros((2, 3)))) == {".x": ("batch", "features")}
    assert axes(Pair(jnp.zeros((2, 3)))) == {".x": ("batch", "features")}


def test_nodes_whose_keys_are_not_how_they_are_read():
    @jtu.register_pytree_with_keys_class
    class Odd:
        def __init__(self, *children):
            self.children = children

        def tree_flatten_with_keys(self):
            keys = jtu.GetAttrKey("hidden"), jtu.SequenceKey(1), jtu.DictKey("c"), "custom"
            return list(zip(keys, self.children, strict=True)), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    layers = axes(Odd(linear(), linear(), linear(), linear()))
    assert list(layers.values()) == [("out", "in"), ("out",)] * 4


def test_vmapped_modules():
    def make(key):
        del key
        return linear()

    ensemble = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 4))
    assert axes(ensemble) == {".weight": (None, "out", "in"), ".bias": (None, "out")}


def test_parts_of_a_partition():
    model = linear()
    spec = eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: True, model), False)
    trained, frozen = eqx.partition(model, spec)
    assert axes(trained) == {".weight": ("out", "in")}
    assert axes(frozen) == {".bias": ("out",)}


def test_optimiser_states_have_the_axes_of_the_model():
    model = [linear(), linear()]
    adam = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    got = axes(adam.init(model))
    for moment in ("mu", "nu"):
        for i in range(2):
            assert under(f"[1][0].{moment}[{i}]").items() <= got.items()
    assert got["[1][0].count"] is None


def test_axes_under_transformations():
    seen = []

    def f(model):
        seen.append(axes(model))
        return model.weight.sum()

    model = linear()
    jax.jit(f)(model)
    jax.grad(f)(model)
    jax.vmap(f)(jax.tree.map(lambda x: x[None], model))
    assert seen == [LINEAR] * 3


def test_a_leaf_made_by_hand_has_no_axes():
    path = (jtu.GetAttrKey("weight"),)
    assert mylib.Leaf(path, (2, 3), np.dtype("float32"), None).axes is None
