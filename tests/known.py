"""Programs whose collectives are known: what is asked of them, exactly."""

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib

# What compilers wrote for programs, kept as text.
TEXTS = Path(__file__).parent / "audit" / "texts"
# (kind, axes, bytes, times) of each collective, in any order.
Answer = list[tuple[str, tuple[str, ...], int, int | None]]
AXES = ("a", "b", "c")
# The order of the devices in a permuted mesh.
PERMUTED = [3, 1, 0, 2, 7, 5, 6, 4]
SUBSETS = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("c", "a"), AXES]
# On one device, 4 x 4 x 256 float32.
LOCAL = 4 * 4 * 256 * 4


@dataclass(frozen=True)
class Case:
    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh
    answer: Answer
    # Compilers that can't compile it, and why.
    without: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.name


def text_of(name: str) -> str:
    return gzip.decompress((TEXTS / f"{name}.hlo.gz").read_bytes()).decode()


def answer_of(report: mylib.results.Report) -> list[tuple[Any, ...]]:
    return sorted((c.kind, c.axes, c.bytes, c.times) for c in report.collectives)


def abstract(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))


def mesh_of(devices: list[Any], shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    size = int(np.prod(shape))
    axis_types = (AxisType.Auto,) * len(shape)
    return Mesh(np.array(devices[:size]).reshape(shape), names, axis_types=axis_types)


def meshes(devices: list[Any]) -> tuple[Mesh, Mesh]:
    """One with the axis data, one with data and model."""
    return mesh_of(devices, (8,), ("data",)), mesh_of(devices, (4, 2), ("data", "model"))


def mapped(mesh: Mesh, spec: P, fun: Callable[..., Any], out: P | None = None) -> Any:
    out = spec if out is None else out
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)


def cases(devices: list[Any]) -> Iterator[Case]:
    for name, order in (("iota", range(8)), ("permuted", PERMUTED)):
        mesh = mesh_of([devices[i] for i in order], (2, 2, 2), AXES)
        yield from _primitives(name, mesh)
        yield from _inserted(name, mesh)
    yield from _loops(mesh_of(devices, (8,), ("d",)))
    yield from _dtypes(mesh_of(devices, (8,), ("d",)))
    yield from _others(devices)


def _primitives(name: str, mesh: Mesh) -> Iterator[Case]:
    spec = P(*AXES)
    x = abstract(mesh, spec, (8, 8, 512))

    def case(what: str, fun: Any, kind: str, axes: tuple[str, ...], size: int) -> Case:
        named = tuple(sorted(axes))
        answer: Answer = [(kind, named, size, 1)]
        return Case(f"{name} {what} {'+'.join(axes)}", mapped(mesh, spec, fun), (x,), mesh, answer)

    for axes in SUBSETS:
        n = 2 ** len(axes)
        yield case("psum", lambda x, a=axes: lax.psum(x, a), "all-reduce", axes, LOCAL)
        yield case(
            "all_gather",
            lambda x, a=axes: lax.all_gather(x, a, axis=0, tiled=True),
            "all-gather",
            axes,
            LOCAL * n,
        )
        if n < 8:  # else less than a row is left of it
            yield case(
                "psum_scatter",
                lambda x, a=axes: lax.psum_scatter(x, a, tiled=True),
                "reduce-scatter",
                axes,
                LOCAL,
            )
            yield case(
                "all_to_all",
                lambda x, a=axes: lax.all_to_all(x, a, 0, 0, tiled=True),
                "all-to-all",
                axes,
                LOCAL,
            )
    for axis in AXES:
        yield case("pmax", lambda x, a=axis: lax.pmax(x, a), "all-reduce", (axis,), LOCAL)
        yield case(
            "ppermute",
            lambda x, a=axis: lax.ppermute(x, a, [(0, 1), (1, 0)]),
            "collective-permute",
            (axis,),
            LOCAL,
        )


def _inserted(name: str, mesh: Mesh) -> Iterator[Case]:
    x = abstract(mesh, P(*AXES), (8, 8, 512))

    def gathered(spec: P) -> Any:
        return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    answer: Answer
    for axis, spec in (("a", P(None, "b", "c")), ("b", P("a", None, "c")), ("c", P("a", "b"))):
        answer = [("all-gather", (axis,), 2 * LOCAL, 1)]
        yield Case(f"{name} inserted gather {axis}", gathered(spec), (x,), mesh, answer)
    w = abstract(mesh, P("c"), (512, 256))
    answer = [("all-reduce", ("c",), 4 * 4 * 256 * 4, 1)]
    yield Case(f"{name} matmul", lambda x, w: x @ w, (x, w), mesh, answer)


def _loops(mesh: Mesh) -> Iterator[Case]:
    x = abstract(mesh, P("d"), (8, 512))
    size = 512 * 4

    def case(name: str, fun: Any, answer: Answer) -> Case:
        return Case(name, mapped(mesh, P("d"), fun), (x,), mesh, answer)

    def psum(x: Any, _: Any) -> Any:
        return lax.psum(x, "d") * 0.1, None

    def scan(body: Any, length: int, **options: Any) -> Any:
        return lambda x: lax.scan(body, x, None, length=length, **options)[0]

    for outer, inner in ((5, 3), (2, 7), (4, 1)):
        nested = scan(lambda x, _, n=inner: (scan(psum, n)(x), None), outer)
        times = [("all-reduce", ("d",), size, outer * inner)]
        yield case(f"scan {outer} of {inner}", nested, times)
    third = scan(lambda x, _: (scan(lambda x, _: (scan(psum, 4)(x), None), 3)(x), None), 2)
    yield case("scan 2 of 3 of 4", third, [("all-reduce", ("d",), size, 24)])
    twice: Answer = [("all-reduce", ("d",), size, 3)] * 2
    yield case("scan 6 unrolled by 2", scan(psum, 6, unroll=2), twice)
    yield case(
        "fori_loop",
        lambda x: lax.fori_loop(2, 9, lambda i, x: psum(x, None)[0], x),
        [("all-reduce", ("d",), size, 7)],
    )
    yield case(
        "fori_loop downwards",
        lambda x: lax.while_loop(
            lambda c: c[0] > 3, lambda c: (c[0] - 2, psum(c[1], None)[0]), (12, x)
        )[1],
        [("all-reduce", ("d",), size, 5)],
    )
    yield case(
        "fori_loop to an argument",
        lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, x: psum(x, None)[0], x),
        [("all-reduce", ("d",), size, None)],
    )
    yield case(
        "while_loop on data",
        lambda x: lax.while_loop(lambda x: lax.psum(x.sum(), "d") < 100, lambda x: x + 1, x),
        [("all-reduce", ("d",), 4, None)],
    )
    yield case(
        "cond",
        lambda x: lax.cond(
            x.sum() > 0, lambda x: lax.psum(x, "d"), lambda x: lax.ppermute(x, "d", [(0, 1)]), x
        ),
        [("all-reduce", ("d",), size, 1), ("collective-permute", ("d",), size, 1)],
    )


def _dtypes(mesh: Mesh) -> Iterator[Case]:
    for dtype, size in (("int8", 1), ("bool", 1), ("int32", 4), ("uint16", 2)):
        x = abstract(mesh, P("d"), (8, 512), dtype)
        fun = mapped(mesh, P("d"), lambda x: lax.all_gather(x, "d", tiled=True), P())
        answer: Answer = [("all-gather", ("d",), 8 * 512 * size, 1)]
        yield Case(f"all_gather {dtype}", fun, (x,), mesh, answer)


def _others(devices: list[Any]) -> Iterator[Case]:
    mesh = mesh_of(devices, (8,), ("d",))
    x = abstract(mesh, P("d"), (8, 512))
    size = 512 * 4

    def case(name: str, fun: Any, answer: Answer, **options: Any) -> Case:
        return Case(name, mapped(mesh, P("d"), fun), (x,), mesh, answer, **options)

    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    yield case(
        "half of an axis",
        lambda x: lax.psum(x, "d", axis_index_groups=halves),
        [("all-reduce", ("d:(2)4",), size, 1)],
    )
    yield case(
        "groups that are no part of the mesh",
        lambda x: lax.psum(x, "d", axis_index_groups=[[0, 1, 2, 4], [3, 5, 6, 7]]),
        [("all-reduce", ("~d",), size, 1)],
    )
    yield case(
        "ring",
        lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
        [("collective-permute", ("d",), size, 1)],
    )
    yield case("each by itself", lambda x: x + lax.axis_index("d"), [])
    yield Case(
        "a tuple",
        mapped(mesh, P("d"), lambda x: lax.psum((x, x.sum()), "d"), P()),
        (x,),
        mesh,
        [("all-reduce", ("d",), size + 4, 1)],
    )
    yield case(
        "broadcast",
        lambda x: lax.pbroadcast(x, "d", 0),
        [("broadcast", ("d",), size, 1)],
        without=("cpu", "tpu"),
    )

    def ragged(x: Any) -> Any:
        i, one = jnp.arange(8, dtype=jnp.int32), jnp.ones(8, jnp.int32)
        me = lax.axis_index("d").astype(jnp.int32) * one
        x = jnp.broadcast_to(x, (8, 512))
        return lax.ragged_all_to_all(x, 0 * x, i, one, me, one, axis_name="d")

    yield case(
        "ragged_all_to_all",
        ragged,
        [("ragged-all-to-all", ("d",), 8 * size, 1)],
        without=("cpu",),
    )
    odd = mesh_of(devices, (3, 2), ("a", "b"))
    yield Case(
        "6 devices",
        mapped(odd, P("a", "b"), lambda x: lax.psum(x, "a")),
        (abstract(odd, P("a", "b"), (6, 512)),),
        odd,
        [("all-reduce", ("a",), 2 * 256 * 4, 1)],
    )
