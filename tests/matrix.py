"""The matrix of the placement law: contexts x meshes x inputs x requests.

A cell is one combination. `legal` says which of them the law promises something about, and `check`
runs one and asserts what it promises: sharding, values, cotangents. In every cell the argument is
used a second time, and placed otherwise there: neither use may change the other. `test_matrix.py`
runs enough cells to cover every pair of choices; `run_matrix.py` runs them all, for ours and for
JAX's and Equinox's own functions.
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@dataclass(frozen=True)
class Cell:
    context: str
    mesh: str
    set_mesh: bool
    input: str
    request: str

    def __str__(self) -> str:
        context = f"{self.context}{'+set_mesh' if self.set_mesh else ''}"
        return f"{context}-{self.mesh}-{self.input}-{self.request}"


# --- what runs the programs --------------------------------------------------------------------


class Here:
    """The devices of this process, which run the programs."""

    devices = staticmethod(jax.devices)
    put = staticmethod(jax.device_put)
    program = staticmethod(jax.jit)
    runs = True


# Another one only compiles them (tests/machines/cells.py).
world: Any = Here


# --- meshes -------------------------------------------------------------------------------------

_MESHES: dict[str, tuple[tuple[int, ...], tuple[AxisType, ...], str]] = {
    "auto_1d": ((8,), (AUTO,), "all"),
    "auto_2d": ((4, 2), (AUTO, AUTO), "all"),
    "auto_3d": ((2, 2, 2), (AUTO,) * 3, "all"),
    "auto_one": ((1,), (AUTO,), "first"),
    "auto_permuted": ((4, 2), (AUTO, AUTO), "reversed"),
    "explicit_1d": ((8,), (EXPLICIT,), "all"),
    "explicit_2d": ((4, 2), (EXPLICIT, EXPLICIT), "all"),
    "explicit_3d": ((2, 2, 2), (EXPLICIT,) * 3, "all"),
    "explicit_one": ((1,), (EXPLICIT,), "first"),
    "explicit_permuted": ((4, 2), (EXPLICIT, EXPLICIT), "reversed"),
    "mixed_explicit_auto": ((4, 2), (EXPLICIT, AUTO), "all"),
    "mixed_auto_explicit": ((4, 2), (AUTO, EXPLICIT), "all"),
}


def mesh_named(name: str) -> Mesh:
    return _mesh_of(name, world)


@cache
def _mesh_of(name: str, world: Any) -> Mesh:
    sizes, types, which = _MESHES[name]
    everything = world.devices()
    devices = {"all": everything, "first": everything[:1], "reversed": everything[::-1]}
    grid = np.array(devices[which]).reshape(sizes)
    return Mesh(grid, ("a", "b", "c")[: len(sizes)], axis_types=types)


# --- inputs -------------------------------------------------------------------------------------

INPUTS = (
    "numpy",
    "uncommitted",
    "committed_elsewhere",
    "other_sharding",
    "other_half",
    "other_backend",
    "key",
    "bf16",
    "scalar",
    "abstract",
)
_NOT_DIFFERENTIABLE = {"key", "abstract"}


def host_value(kind: str) -> Any:
    if kind == "key":
        return jax.random.split(jax.random.key(0), (8, 8))
    if kind == "scalar":
        return np.float32(3.0)
    values = np.arange(1.0, 65.0, dtype=np.float32).reshape(8, 8)
    return values.astype(jnp.bfloat16) if kind == "bf16" else values


def make_input(kind: str, mesh: Mesh) -> Any:
    x = host_value(kind)
    if kind == "uncommitted":
        return jnp.asarray(x)
    if kind == "committed_elsewhere":
        return jax.device_put(x, jax.devices()[3])
    if kind == "other_sharding":
        return world.put(x, NamedSharding(mesh, P(None, mesh.axis_names[0])))
    if kind == "other_half":
        half = Mesh(np.array(jax.devices()[4:]), ("h",))
        return jax.device_put(x, NamedSharding(half, P("h")))
    if kind == "other_backend":
        return jax.device_put(x, jax.devices("other")[1])
    if kind == "abstract":
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x


# --- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What is asked for, and the sharding that it means."""

    placement: Any
    sharding: Any
    free: tuple[int, ...] = ()
    in_dict: bool = False

    @property
    def spec(self) -> P:
        return self.sharding.spec


REQUESTS = (
    "device",
    "single_device",
    "named",
    "spec",
    "tuple_axes",
    "replicated",
    "nothing",
    "unconstrained",
    "prefix",
    "rule",
    "memory_kind",
)


def make_request(kind: str, mesh: Mesh) -> Request:
    first, last = mesh.axis_names[0], mesh.axis_names[-1]
    second = world.devices()[1]

    def named(*entries: Any, **kwargs: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*entries), **kwargs)

    if kind == "device":
        return Request(second, SingleDeviceSharding(second))
    if kind == "single_device":
        return Request(SingleDeviceSharding(second), SingleDeviceSharding(second))
    if kind == "named":
        return Request(named(first), named(first))
    if kind == "spec":
        return Request(P(None, last), named(None, last))
    if kind == "tuple_axes":
        explicit_first = sorted(mesh.axis_names, key=lambda n: _type_of(mesh, n) != EXPLICIT)
        return Request(P(tuple(explicit_first)), named(tuple(explicit_first)))
    if kind == "replicated":
        return Request(P(), named())
    if kind == "nothing":
        return Request(None, None)
    if kind == "unconstrained":
        return Request(P(P.UNCONSTRAINED, last), named(None, last), free=(0,))
    if kind == "prefix":
        return Request({"x": P(first), "static": None}, named(first), in_dict=True)
    if kind == "rule":
        return Request(lambda leaf: P(first, *[None] * (leaf.ndim - 1)), named(first))
    assert kind == "memory_kind"
    asked = named(first, memory_kind="pinned_host")
    return Request(asked, asked)


def second_request(cell: Cell, mesh: Mesh) -> Request:
    """What is asked for the second use of the argument: something else, where that is possible."""
    if cell.context not in EAGER and cell.request in {"device", "single_device"}:
        # A program runs on one set of devices.
        return make_request(cell.request, mesh)
    if cell.input == "scalar" or cell.context == "shard_map_all":
        return make_request("replicated", mesh)
    if cell.request in {"spec", "unconstrained"}:
        # The first axis is taken in these contexts.
        taken = cell.context in {"shard_map_some", "jit_vmap_spmd"}
        return make_request("replicated" if taken else "named", mesh)
    return make_request("spec", mesh)


def _type_of(mesh: Mesh, name: str) -> AxisType:
    return mesh.axis_types[mesh.axis_names.index(name)]


# --- contexts -----------------------------------------------------------------------------------

Place = Callable[[Any], Any]


@dataclass(frozen=True)
class Uses:
    """The two uses of an argument; called, both."""

    place: Place
    other: Place

    def __call__(self, x: Any) -> tuple[Any, Any]:
        return self.place(x), self.other(x)


@dataclass(frozen=True)
class Outcome:
    """What a context gave back: the placed value, what became of the second use, and the cotangent
    of the input if there is one.

    `types_inside` are the specs that the values' types have inside `shard_map`.
    """

    value: Any
    other: Any
    cotangent: Any = None
    types_inside: Any = (None, None)


Run = Callable[[Uses, Any, Mesh], Outcome]


def _twice(x: Any) -> Any:
    """Another value where `x` is. A concrete one by way of the host: where a mesh is set, JAX adds
    nothing that lies elsewhere.
    """
    if isinstance(x, jax.core.Tracer):
        return x + x
    doubled = np.asarray(x) + np.asarray(x)
    if not isinstance(x, jax.Array):
        return doubled
    return jax.device_put(doubled, x.sharding) if x.committed else jnp.asarray(doubled)


def _eager_grad(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    # Of a NumPy array the cotangents stay where they are, and those of two places can't be added.
    y, pull, z = jax.vjp(uses, x, has_aux=True)
    return Outcome(y, z, pull(_twice(y))[0])


def _stack(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        spec = P(None, *x.sharding.spec)
        return world.put(jax.ShapeDtypeStruct((4, *x.shape), x.dtype), x.sharding.update(spec=spec))
    return jnp.stack([x] * 4) if isinstance(x, jax.Array) else np.stack([x] * 4)


def _eager_jvp(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    (y, z), (tangent, _) = jax.jvp(uses, (x,), (_twice(x),))
    return Outcome(y, z, tangent)


def _jit_grad(uses: Place, x: Any, mesh: Mesh) -> Outcome:
    def program(x: Any) -> Any:
        (y, z), pull = jax.vjp(uses, x)
        # The second use is of `-x`, so that this adds nothing to the cotangent but a third `x`.
        return y, z, pull((_twice(y), z))[0]

    return Outcome(*world.program(program)(x))


def _scan(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    # The start is placed, too: where it is told something else than the body, be it by another use
    # of the argument, the compiler has to choose.
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (uses(carry[0]), None), uses(x), length=2)[0]

    return Outcome(*world.program(loop)(x))


def _while_loop(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    def loop(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda carry: carry[0] < 2,
            lambda carry: (carry[0] + 1, uses(carry[1][0])),
            (jnp.int32(0), uses(x)),
        )[1]

    return Outcome(*world.program(loop)(x))


def _checkpoint(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    return _jit_grad(jax.checkpoint(uses), x, mesh)


def _custom_vjp(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return uses(x)

    f.defvjp(lambda x: (uses(x), x), lambda x, g: jax.vjp(uses, x)[1](g))
    return _jit_grad(f, x, mesh)


def _shard_map(manual: int | None) -> Run:
    def run(uses: Uses, x: Any, mesh: Mesh) -> Outcome:
        names = mesh.axis_names[:manual]
        types_inside: list[tuple[P, P]] = []

        def body(x: Any) -> Any:
            y, z = uses(x)
            types_inside.append((jax.typeof(y).sharding.spec, jax.typeof(z).sharding.spec))
            return y, z

        spec = P(names)
        f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(names))
        y, z = world.program(f)(world.put(x, NamedSharding(mesh, spec)))
        return Outcome(y, z, types_inside=types_inside[0])

    return run


CONTEXTS: dict[str, Run] = {
    "eager": lambda uses, x, mesh: Outcome(*uses(x)),
    "eager_grad": _eager_grad,
    "eager_vmap": lambda uses, x, mesh: Outcome(*jax.vmap(uses)(x)),
    "eager_jvp": _eager_jvp,
    "jit": lambda uses, x, mesh: Outcome(*world.program(uses)(x)),
    "jit_constant": lambda uses, x, mesh: Outcome(*world.program(lambda: uses(x))()),
    "nested_jit": lambda uses, x, mesh: Outcome(*world.program(jax.jit(uses))(x)),
    "jit_grad": _jit_grad,
    "jit_vmap": lambda uses, x, mesh: Outcome(*world.program(jax.vmap(uses))(x)),
    "jit_vmap_spmd": lambda uses, x, mesh: Outcome(
        *world.program(jax.vmap(uses, spmd_axis_name=mesh.axis_names[0]))(x)
    ),
    "scan": _scan,
    "while_loop": _while_loop,
    "cond": lambda uses, x, mesh: Outcome(
        *world.program(lambda x: jax.lax.cond(jnp.bool_(True), uses, uses, x))(x)
    ),
    "checkpoint": _checkpoint,
    "custom_vjp": _custom_vjp,
    "eval_shape": lambda uses, x, mesh: Outcome(*jax.eval_shape(uses, x)),
    "make_jaxpr": lambda uses, x, mesh: Outcome(jax.make_jaxpr(uses)(x), None),
    "shard_map_all": _shard_map(None),
    "shard_map_some": _shard_map(1),
}
EAGER = {"eager", "eager_grad", "eager_vmap", "eager_jvp"}
BATCHED = {"eager_vmap", "jit_vmap", "jit_vmap_spmd"}
DIFFERENTIATED = {"eager_grad", "eager_jvp", "jit_grad", "checkpoint", "custom_vjp"}
SHARD_MAPPED = {"shard_map_all", "shard_map_some"}


# --- which cells the law speaks of --------------------------------------------------------------


def legal(cell: Cell) -> bool:
    mesh = mesh_named(cell.mesh)
    return (
        _input_fits_context(cell)
        and _request_fits_mesh(cell, mesh)
        and _request_fits_context(cell, mesh)
        and (cell.input != "scalar" or cell.request in {"device", "replicated", "nothing"})
    )


def _input_fits_context(cell: Cell) -> bool:
    staged = cell.context not in EAGER
    if cell.input == "abstract":
        return cell.context == "eager"
    if cell.input in _NOT_DIFFERENTIABLE and cell.context in DIFFERENTIATED:
        return False
    if cell.input == "scalar" and cell.context in SHARD_MAPPED | BATCHED:
        return False
    if cell.context in SHARD_MAPPED:
        return cell.input in {"numpy", "bf16", "key"}
    if staged and cell.input in {"committed_elsewhere", "other_half", "other_backend"}:
        # A program runs on one set of devices, and JAX itself refuses arguments from others; not
        # constants, which it copies.
        return cell.context == "jit_constant" and cell.request != "nothing"
    return not (cell.context in BATCHED and cell.input in {"other_half", "other_backend"})


def _request_fits_mesh(cell: Cell, mesh: Mesh) -> bool:
    if cell.request == "tuple_axes":
        return len(mesh.axis_names) > 1
    if cell.request == "unconstrained":
        return AUTO in mesh.axis_types
    return True


def _request_fits_context(cell: Cell, mesh: Mesh) -> bool:
    staged = cell.context not in EAGER
    on_device = cell.request in {"device", "single_device"}
    if cell.context == "shard_map_all":
        return cell.request in {"nothing", "replicated"}
    if cell.context == "shard_map_some":
        return len(mesh.axis_names) > 1 and cell.request in {"nothing", "replicated", "spec"}
    if cell.context == "jit_vmap_spmd":
        # The axis of the batch can't be asked for again; on Explicit axes JAX wants the input to
        # be split over it already.
        return (
            _type_of(mesh, mesh.axis_names[0]) == AUTO
            and len(mesh.axis_names) > 1
            and cell.request in {"spec", "replicated", "nothing"}
        )
    if staged and cell.request == "memory_kind":
        return False
    if staged and on_device:
        # Only where the program may run on that device: no mesh around it, no sharded argument.
        return not cell.set_mesh and cell.input != "other_sharding"
    if (
        cell.set_mesh
        and cell.context in DIFFERENTIATED
        and on_device
        and EXPLICIT in mesh.axis_types
    ):
        # JAX can't write down a tangent without a mesh while one with Explicit axes is set.
        return not staged
    # JAX can't return a captured array that is all a program knows of an Explicit mesh.
    only_a_constant = cell.context == "jit_constant" and cell.input == "other_sharding"
    return not (
        only_a_constant
        and cell.request == "nothing"
        and EXPLICIT in mesh.axis_types
        and not cell.set_mesh
    )


def all_cells() -> list[Cell]:
    cells = (
        Cell(*choice) for choice in product(CONTEXTS, _MESHES, (False, True), INPUTS, REQUESTS)
    )
    return [cell for cell in cells if legal(cell)]


def pairwise(cells: list[Cell], seed: int = 0) -> list[Cell]:
    """A selection in which every pair of choices that occurs in `cells` occurs."""
    # Tens of thousands, each time that this file's tests are collected: so a pair is a bit, and a
    # cell that has none left is not looked at again.
    bits: dict[Any, int] = {}

    def pairs_of(cell: Cell) -> int:
        pairs = combinations(vars(cell).items(), 2)
        return sum(bits.setdefault(pair, 1 << len(bits)) for pair in pairs)

    left = [(cell, pairs_of(cell)) for cell in cells]
    random.Random(seed).shuffle(left)
    covered = 0
    chosen: list[Cell] = []
    for least in range(left[0][1].bit_count(), 0, -1):
        before, left = left, []
        for cell, pairs in before:
            new = pairs & ~covered
            if new.bit_count() >= least:
                chosen.append(cell)
                covered |= new
            elif new:
                left.append((cell, new))
    return chosen


# --- running a cell -----------------------------------------------------------------------------

Verb = Callable[[Any, Request, Mesh], Any]


def check(cell: Cell, verb: Verb) -> None:
    """Runs one cell with one verb and asserts what the law promises of it."""
    mesh = mesh_named(cell.mesh)
    request, second = make_request(cell.request, mesh), second_request(cell, mesh)
    x = make_input(cell.input, mesh)
    given = _stack(x) if cell.context in BATCHED else x
    # In a program the second use is of another value, which the compiler may put elsewhere. Outside
    # of one it is of `x` itself, as nothing is to be computed before it is placed.
    derived = cell.context not in EAGER | {"jit_constant"}

    def place(x: Any) -> Any:
        if not request.in_dict:
            return verb(x, request, mesh)
        placed = verb({"x": x, "static": "static"}, request, mesh)
        assert placed["static"] == "static"
        return placed["x"]

    uses = Uses(place, lambda x: verb(_turned(x) if derived else x, second, mesh))
    with jax.set_mesh(mesh) if cell.set_mesh else contextlib.nullcontext():
        outcome = CONTEXTS[cell.context](uses, given, mesh)
    if cell.context == "make_jaxpr":
        names = [eqn.primitive.name for eqn in outcome.value.jaxpr.eqns]
        assert set(names) & {"sharding_constraint", "reshard", "jit", "device_put"}, names
        return
    _assert_value(cell, outcome.value, request, given, outcome.types_inside[0])
    _assert_value(cell, outcome.other, second, given, outcome.types_inside[1], derived)
    _assert_cotangent(cell, outcome, given)


def _turned(x: Any) -> Any:
    if _is_key(x):
        return jax.random.wrap_key_data(~jax.random.key_data(x))
    return -x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _assert_value(
    cell: Cell, y: Any, request: Request, given: Any, type_inside: Any, derived: bool = False
) -> None:
    if cell.context == "eval_shape":
        assert (y.shape, y.dtype) == (given.shape, given.dtype)
        return
    if cell.input == "abstract":
        assert (
            request.sharding is None
            or request.free
            or y.sharding.is_equivalent_to(request.sharding, given.ndim)
        )
        return
    assert y.dtype == given.dtype
    if not world.runs:
        _assert_sharding(cell, y, request, given, type_inside)
        return
    expected = _bits(given)
    if derived:
        expected = ~expected if _is_key(given) else -expected
    np.testing.assert_array_equal(_bits(y), expected)
    _assert_sharding(cell, y, request, given, type_inside)


def _assert_sharding(cell: Cell, y: Any, request: Request, given: Any, type_inside: Any) -> None:
    if request.sharding is None:
        if cell.context == "eager":
            assert y is given
        return
    if cell.context == "shard_map_all":
        return
    if cell.context == "shard_map_some" and _type_of(request.sharding.mesh, "b") == EXPLICIT:
        # Asked of the type, since jax 0.10 forgets the Explicit axes of the result of a shard_map
        # that is manual over an Auto axis.
        wanted = [request.spec[1] if len(request.spec) > 1 else None]
        assert list(type_inside[1:2]) == wanted
        return
    batched = cell.context in BATCHED
    ignored = {0} if batched else set()
    ignored |= {dim + batched for dim in request.free}
    if cell.context == "shard_map_some":
        ignored |= {0}
    assert placed_as(y, request.sharding, ignored, batched), (y.sharding, request.sharding)
    if cell.context == "jit_vmap_spmd":
        assert y.sharding.spec[0] in ("a", ("a",))
    if cell.context in EAGER:
        assert y.committed
        assert _kind(y.sharding) == _kind(request.sharding)
        if isinstance(request.sharding, NamedSharding):
            assert y.sharding.mesh == request.sharding.mesh


def _kind(sharding: Any) -> str:
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


def placed_as(y: jax.Array, wanted: Any, ignored: set[int], batched: bool) -> bool:
    """Whether every device holds the part of `y` that `wanted` gives it, in all dimensions but the
    ignored ones.
    """
    shape = y.shape[1:] if batched else y.shape
    expected = wanted.devices_indices_map(shape)
    actual = y.sharding.devices_indices_map(y.shape)
    if expected.keys() != actual.keys():
        return False

    def bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
        return [part.indices(size) for part, size in zip(index, shape, strict=True)]

    for device, index in expected.items():
        want = ([None] if batched else []) + bounds(index, shape)
        have = bounds(actual[device], y.shape)
        if any(
            w != h for dim, (w, h) in enumerate(zip(want, have, strict=True)) if dim not in ignored
        ):
            return False
    return True


def _assert_cotangent(cell: Cell, outcome: Outcome, given: Any) -> None:
    if outcome.cotangent is None or not world.runs:
        return
    times = 2 if cell.context in EAGER else 3
    assert outcome.cotangent.dtype == given.dtype
    expected = sum([_bits(given)] * times)
    np.testing.assert_array_equal(_bits(outcome.cotangent), expected)
    if cell.context != "eager_grad" or not isinstance(given, jax.Array):
        return
    if cell.set_mesh and cell.input == "uncommitted" and cell.request == "nothing":
        # What is asked for nothing is used by JAX on the mesh that is set; cotangents are added
        # there.
        return
    # Eagerly, a cotangent comes back to where its primal is.
    assert outcome.cotangent.sharding.is_equivalent_to(given.sharding, given.ndim)
    if isinstance(given.sharding, NamedSharding):
        assert outcome.cotangent.sharding.mesh == given.sharding.mesh
