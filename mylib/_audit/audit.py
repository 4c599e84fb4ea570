"""`audit`: reads a compiled program."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._compat import argument_of_filter_jit, is_filter_jit, without_dead_code
from .._errors import AuditError
from .._products import products_in
from .._tree import Made, is_array, outlined, signature_of
from ..machines import Argument
from .attribution import Names, origin_of, source_of
from .collectives import Transfer, is_overlapped, is_split_again, transfers
from .flow import Flow
from .gradients import gradients_of
from .groups import Axes, axes_in
from .hlo import HloModule
from .memory import ProgramMemory
from .report import Collective, Parameter, Report
from .work import Work, work_of

AnyMesh = Mesh | AbstractMesh


def audit(
    fun: Any,
    /,
    *args: Any,
    mesh: AnyMesh | None = None,
    local: Iterable[str] = (),
    **kwargs: Any,
) -> Report:
    """Reports the collectives and the memory of a compiled program.

    Nothing is run. The compiler's output is read: for the CPU, for GPUs and for TPUs, including
    those that are not here (see `mylib.machines`).

    **Arguments:**

    - `fun`: a function, also one made by `mylib.filter_jit`, `jax.jit` or `equinox.filter_jit`,
        which is compiled for the arguments; or a compiled program, or its text.
    - `args`, `kwargs`: the arguments. Any array may be a `jax.ShapeDtypeStruct`. Leave them out if
        `fun` is compiled already.
    - `mesh`: the mesh whose axes are named; by default that of the program's arguments and results,
        else that of `jax.set_mesh`.
    - `local`: targets of custom calls that don't communicate. Their code isn't part of the program,
        so unknown targets are an error.

    **Returns:**

    A [`mylib.Report`][]. `print` shows it as a table.

    **Raises:**

    [`mylib.AuditError`][] if something in the program is not understood.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_jit
        def loss(w, x):
            return jnp.mean((x @ w) ** 2)


        x = jax.ShapeDtypeStruct(
            (64, 16), "float32", sharding=jax.NamedSharding(mesh, P("data"))
        )
        w = jax.ShapeDtypeStruct(
            (16, 4), "float32", sharding=jax.NamedSharding(mesh, P())
        )
        report = mylib.audit(loss, w, x)
        assert report.count("all-reduce", "data") == 1
        assert report.bytes() == 4  # one float32
        ```
    """
    if isinstance(fun, str):
        _no_arguments(args, kwargs)
        return report_of(fun, mesh=mesh, local=local)
    inner = getattr(fun, "compiled", fun)
    if not isinstance(inner, jax.stages.Compiled) and not hasattr(fun, "as_text"):
        if not callable(fun) and not hasattr(fun, "lower"):
            raise TypeError(
                f"audit: a {type(fun).__name__} is no function and no compiled program. Give the "
                "function and its arguments, audit(step, batch, model), not what it returned"
            )
        if not hasattr(fun, "lower"):
            compiled, names, traced = _compiled(fun, args, kwargs)
            return report_of(compiled, names, mesh=mesh, local=local, traced=traced)
        jitted: Any = fun
        if hasattr(fun, "trace"):  # of jax.jit
            traced = jitted.trace(*args, **kwargs)
            compiled = traced.lower().compile()
            return report_of(compiled, mesh=mesh, local=local, traced=traced.jaxpr)
        compiled = jitted.lower(*args, **kwargs).compile()
        if is_filter_jit(jitted):
            names = _names_of_equinox(jitted, args, kwargs)
            return report_of(compiled.compiled, names, mesh=mesh, local=local)
        fun = compiled
    else:
        _no_arguments(args, kwargs)
    if hasattr(fun, "audit"):
        return fun.audit(mesh=mesh, local=local)
    fun = getattr(fun, "compiled", fun)
    if not isinstance(fun, jax.stages.Compiled):
        raise TypeError(f"audit: compile it first: a {type(fun).__name__} is no compiled program")
    return report_of(fun, mesh=mesh, local=local)


def _no_arguments(args: Any, kwargs: Any) -> None:
    if args or kwargs:
        raise TypeError("audit: what is compiled already takes no arguments")


def _plain(name: str) -> str:
    return name


def _compiled(fun: Any, args: Any, kwargs: Any) -> tuple[jax.stages.Compiled, Names, Any]:
    """A function, compiled for these arguments, their names, and the traced program."""
    bound = signature_of(fun).bind(*args, **kwargs)
    tree = fun, dict(bound.arguments)
    arrays, rest = outlined(tree, abstract=True)

    def called(arrays: list[Any]) -> tuple[Made]:
        function, bound.arguments = rest.fill(arrays)
        # In a tuple, other than that of filter_jit: JAX's cache of compiled programs doesn't tell
        # programs apart that differ in their arguments' names alone.
        return (Made.of(function(*bound.args, **bound.kwargs)),)

    called.__name__ = called.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
    paths = [path for path, x in jtu.tree_flatten_with_path(tree)[0] if is_array(x, abstract=True)]
    name_of = {f"arrays[{i}]": _called(path) for i, path in enumerate(paths)}
    traced = jax.jit(called).trace(arrays)
    return traced.lower().compile(), lambda name: name_of.get(name, name), traced.jaxpr


def _called(path: Any) -> str:
    """The name of a leaf at this path in (function, arguments by name)."""
    if path[0].idx == 0:
        return f"the function{jtu.keystr(path[1:])}"
    return f"{path[1].key}{jtu.keystr(path[2:])}"


def _names_of_equinox(jitted: Any, args: Any, kwargs: Any) -> Names:
    """The names of the leaves that `equinox.filter_jit` numbers."""
    bound = signature_of(jitted).bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, list[str]] = {"rest": [], "fun": _leaves_of("", jitted)}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        several = kind is inspect.Parameter.VAR_POSITIONAL
        each = value if several else list(value.values()) if kind is _KEYWORDS else [value]
        prefixes = [f"{name}[{i}]" for i in range(len(each))] if several else [name]
        prefixes = list(value) if kind is _KEYWORDS else prefixes
        for prefix, one in zip(prefixes, each, strict=True):
            part = "rest" if "first" in named or kind in _BY_NAME else "first"
            named.setdefault(part, []).extend(_leaves_of(prefix, one))
    return lambda own: _numbered(own, named)


_KEYWORDS = inspect.Parameter.VAR_KEYWORD
_BY_NAME = (_KEYWORDS, inspect.Parameter.KEYWORD_ONLY)


def _leaves_of(name: str, tree: Any) -> list[str]:
    return [name + jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(tree)[0]]


def _numbered(name: str, named: dict[str, list[str]]) -> str:
    part, number = argument_of_filter_jit(name) or ("", 0)
    names = named.get(part, [])
    return names[number] if number < len(names) else name


def _meshes_of(compiled: jax.stages.Compiled) -> list[AnyMesh]:
    shardings = jtu.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    return list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))


def _context() -> list[AnyMesh]:
    mesh = jax.sharding.get_abstract_mesh()
    return [] if mesh.empty else [mesh]


def report_of(
    program: str | jax.stages.Compiled,
    names: Names = _plain,
    *,
    mesh: AnyMesh | None,
    local: Iterable[str],
    traced: Any = None,
) -> Report:
    """`audit` for a compiled program. `names` maps the arguments' names in the program to their
    paths; `traced` is the program before it was compiled, if it is known.
    """
    compiled = None if isinstance(program, str) else program
    module = HloModule(program if isinstance(program, str) else program.as_text() or "")
    meshes = [mesh] if mesh is not None else _context()
    if mesh is None and compiled is not None:
        meshes = [*_meshes_of(compiled), *meshes]
    devices = max(module.partitions, module.replicas)
    candidates = [axes for axes in map(Axes.of, meshes) if axes.size == devices]
    if mesh is not None and not candidates and devices > 1:
        raise AuditError(
            f"the program runs on {devices} devices, and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}"
        )
    candidates = candidates or [axes for axes in axes_in(module.text) if axes.size == devices]
    sent = transfers(module, frozenset(local))
    flow = Flow(module, sent)
    parameters = tuple(_parameters(module, names, compiled))
    work = work_of(module, sent)
    arguments = [Argument(p.path, p.shape, p.bytes) for p in parameters]
    return Report(
        collectives=tuple(_collective(i, t, flow, candidates, names) for i, t in enumerate(sent)),
        memory=None if compiled is None else ProgramMemory.of(compiled, module, arguments),
        axes=dict(zip(candidates[0].names, candidates[0].sizes, strict=True)) if candidates else {},
        name=module.name,
        parameters=parameters,
        work=work,
        results=tuple(_results(module, compiled)),
        flow=flow,
        share=_share(work, traced),
    )


def _share(work: Work, traced: Any) -> float | None:
    """The part of a traced program's products that each device computes."""
    if traced is None or work.unknown:
        return None
    found = products_in(without_dead_code(traced), each_turn=True)
    return sum(work.flops.values()) / (2 * found.products) if found and found.products else None


def _parameters(
    module: HloModule, names: Names, compiled: jax.stages.Compiled | None
) -> Iterator[Parameter]:
    used = [x for _, x in sorted(module.entry.parameters.items())]
    shardings = [] if compiled is None else _shardings_of(compiled)
    # JAX doesn't always know the shardings of all arguments.
    divided = list(map(_dividing, shardings)) if len(shardings) == len(used) else [None] * len(used)
    for x, axes in zip(used, divided, strict=True):
        (array,) = x.arrays
        path = names((x.op_names or [x.name])[0])
        yield Parameter(path, array.dtype, array.shape, array.bytes, axes)


def _results(module: HloModule, compiled: jax.stages.Compiled | None) -> Iterator[Parameter]:
    root = module.entry.result
    shardings = [] if compiled is None else jtu.tree_leaves(compiled.output_shardings)
    if compiled is None or len(shardings) != len(root.arrays):
        return
    paths = _paths_of(compiled.out_tree)
    for path, array, sharding in zip(paths, root.arrays, shardings, strict=True):
        yield Parameter(path, array.dtype, array.shape, array.bytes, _dividing(sharding))


def _paths_of(structure: Any) -> list[str]:
    """The paths of a program's results in what the function returns."""
    numbers = list(map(_ResultNumber, range(structure.num_leaves)))
    tree = jtu.tree_unflatten(structure, numbers)
    match tree:
        case Made() | (Made(),):
            made = tree if isinstance(tree, Made) else tree[0]
            tree = made.tree() if made.failed is None else (made.tree(), [made.failed])
    paths = {
        x.number: jtu.keystr(path)
        for path, x in jtu.tree_flatten_with_path(tree)[0]
        if isinstance(x, _ResultNumber)
    }
    return [paths.get(i, f"result {i}") for i in range(len(numbers))]


@dataclass(frozen=True)
class _ResultNumber:
    """Stands for a result of this number."""

    number: int


def _shardings_of(compiled: jax.stages.Compiled) -> list[jax.sharding.Sharding]:
    """The shardings of the arguments that the program uses; the others are None, and dropped."""
    return jtu.tree_leaves(compiled.input_shardings)


def _dividing(sharding: jax.sharding.Sharding) -> tuple[str, ...] | None:
    if sharding.is_fully_replicated:
        return ()
    if not isinstance(sharding, NamedSharding):
        return None
    entries = [entry for entry in sharding.spec if entry is not None]
    return tuple(
        str(name) for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))
    )


def _collective(
    number: int, transfer: Transfer, flow: Flow, meshes: Sequence[Axes], names: Names
) -> Collective:
    x = transfer.first
    module = x.computation.module
    origin = origin_of(x, names)
    loops = transfer.runs[0].loops if transfer.runs else ()
    again = "gathered, then split otherwise" if is_split_again(transfer) else ""
    return Collective(
        kind=transfer.kind,
        axes=_axes_of(transfer, meshes),
        times=transfer.times,
        bytes=transfer.bytes,
        wire_bytes=transfer.wire_bytes,
        dtype="/".join(sorted({array.dtype for array in transfer.arrays})),
        arrays=origin.arrays,
        gradients=gradients_of(number, flow, module, names) if origin.is_gradient else (),
        primitive=origin.primitive,
        scope=origin.scope,
        source=origin.source,
        phase=origin.phase,
        inserted=origin.inserted,
        overlapped=is_overlapped(transfer),
        sometimes=any(run.branches for run in transfer.runs),
        loops=tuple(source_of(loop) for loop in loops),
        devices=transfer.groups.shape[1],
        spelling=", ".join(filter(None, (transfer.spelling, again))),
        branches=transfer.runs[0].branches if len(transfer.runs) == 1 else (),
    )


def _axes_of(transfer: Transfer, meshes: Sequence[Axes]) -> tuple[str, ...] | None:
    """The names in the first mesh in which it goes over whole axes, else in the first mesh."""
    pairs = transfer.kind == "collective-permute"
    named = [
        axes.along(transfer.groups) if pairs else axes.named(transfer.groups) for axes in meshes
    ]
    whole = [names for names in named if not any("~" in n or ":" in n for n in names)]
    return next(iter([*whole, *named]), None)
