"""`audit`: reads a compiled program."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._core.compat import cudnn_as_described, is_filter_jit, without_dead_code
from ..._core.errors import AuditError
from ..._core.placement import AnyMesh, axis_names
from ..._core.products import products_in
from ..._core.status import StatusLine
from ..._core.tree import Made, is_array, outlined, signature_of
from ..machines import Argument
from .as_written import read
from .attribution import Names, is_gradient, name_of, origin_of, source_of
from .collectives import Transfer, is_split_again, transfers
from .entries import Collective, ProgramArray
from .flow import Flow
from .gradients import gradients_among
from .groups import MeshAxes, axes_in
from .hlo import Array, HloModule
from .joined import instructions_of
from .memory import compiled_for, memory_of
from .moments import is_overlapped
from .report import Report
from .work import Work, work_of


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
    those that you don't have (see `mylib.machines`).

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

    A `mylib.results.Report`. `print` shows it as a table.

    **Raises:**

    `mylib.errors.AuditError` if something in the program is not understood.

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
    program: Any = fun
    names: Names = str
    traced, lowered = None, None
    compiled = isinstance(getattr(fun, "compiled", fun), jax.stages.Compiled)
    if compiled or isinstance(fun, str) or hasattr(fun, "as_text"):
        if args or kwargs:
            raise TypeError("audit: what is compiled already takes no arguments")
    elif callable(fun) or hasattr(fun, "lower"):
        with cudnn_as_described():
            traced, lowered, names = _lowered(fun, args, kwargs)
        with StatusLine(f"compiling {getattr(fun, '__name__', 'the program')}"):
            program = lowered.compile()
    else:
        raise TypeError(
            f"audit: a {type(fun).__name__} is no function and no compiled program. Give the "
            "function and its arguments, audit(step, batch, model), not what it returned"
        )
    if hasattr(program, "audit"):  # one of ours knows its arguments' names, and its mesh
        return program.audit(mesh=mesh, local=local)
    text_or_compiled = getattr(program, "compiled", program)
    if not isinstance(text_or_compiled, str | jax.stages.Compiled):
        raise TypeError(f"audit: compile it first: {type(program).__name__} is no compiled program")
    jaxpr = None if traced is None else traced.jaxpr
    lowered = getattr(lowered, "lowered", lowered)
    return report_of(text_or_compiled, names, mesh=mesh, local=local, traced=jaxpr, lowered=lowered)


def _lowered(fun: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Names]:
    """A function traced, where that is known, and lowered; and the names of its arguments."""
    if hasattr(fun, "lower") and not hasattr(fun, "trace") and not is_filter_jit(fun):
        return None, fun.lower(*args, **kwargs), str
    # Of `jax.jit` if it has `trace`.
    is_jit = hasattr(fun, "trace")
    traced, names = (fun.trace(*args, **kwargs), str) if is_jit else _traced(fun, args, kwargs)
    return traced, traced.lower(), names


def _traced(fun: Any, args: Any, kwargs: Any) -> tuple[jax.stages.Traced, Names]:
    """A function, traced for these arguments, and their names. One of `equinox.filter_jit` is
    called in a program, as it takes shapes for static by itself; what it donates, this donates.
    """
    bound = signature_of(fun).bind(*args, **kwargs)
    tree = fun, dict(bound.arguments)
    arrays, rest = outlined(tree, abstract=True)
    leaves = jtu.tree_flatten_with_path(tree)[0]
    paths = [path for path, x in leaves if is_array(x, abstract=True)]
    donated = _donated(fun, bound.args[:1], arrays)

    def called(*arrays: Any) -> tuple[Made]:
        function, bound.arguments = rest.fill(arrays)
        # In a tuple, other than that of filter_jit: JAX's cache of compiled programs doesn't tell
        # programs apart that differ in their arguments' names alone.
        return (Made.of(function(*bound.args, **bound.kwargs)),)

    called.__name__ = called.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
    name_of = {f"arrays[{i}]": _called(path) for i, path in enumerate(paths)}
    given = [i for i, gives in enumerate(donated) if gives]
    return jax.jit(called, donate_argnums=given).trace(*arrays), lambda x: name_of.get(x, x)


def _donated(fun: Any, first: Any, arrays: Sequence[Any]) -> list[bool]:
    """Whether `equinox.filter_jit` donates each array: those of the first argument, or others."""
    if not is_filter_jit(fun):
        return [False] * len(arrays)
    firsts = {id(x) for x in jtu.tree_leaves(first)}
    return [fun.donate_first if id(x) in firsts else fun.donate_rest for x in arrays]


def _called(path: Any) -> str:
    """The name of a leaf at this path in (function, arguments by name)."""
    if path[0].idx == 0:
        return f"the function{jtu.keystr(path[1:])}"
    return f"{path[1].key}{jtu.keystr(path[2:])}"


def _meshes_of(compiled: jax.stages.Compiled | None) -> list[AnyMesh]:
    """The meshes of a program's arguments and results, and the one in force."""
    shardings: list[Any] = []
    if compiled is not None:
        shardings = jtu.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return [mesh for mesh in dict.fromkeys(meshes) if not mesh.empty]


def report_of(
    program: str | jax.stages.Compiled,
    names: Names = str,
    *,
    mesh: AnyMesh | None,
    local: Iterable[str],
    traced: Any = None,
    lowered: jax.stages.Lowered | None = None,
    options: dict[str, Any] | None = None,
) -> Report:
    """`audit` for a compiled program. `names` maps the arguments' names in the program to their
    paths; `traced` and `lowered` are the program before it was compiled with these `options`, if
    it is known.
    """
    if isinstance(program, str):
        compiled, module = None, HloModule(program)
    else:
        compiled, module = read(program, lowered, options)
    meshes = [mesh] if mesh is not None else _meshes_of(compiled)
    candidates = [axes for axes in map(MeshAxes.of, meshes) if axes.size == module.devices]
    if mesh is not None and not candidates and module.devices > 1:
        raise AuditError(
            f"the program runs on {module.devices} devices, and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}"
        )
    # Meshes of the program's arrays come first: those in its text may have the compiler's names.
    candidates = candidates or [x for x in axes_in(module.text) if x.size == module.devices]
    sent = transfers(module, frozenset(local))
    flow = Flow(module, sent, _devices_of(meshes, module.devices))
    parameters = _parameters(module, names, compiled)
    results = _results(module, compiled)
    work = work_of(module, sent)
    arguments = [Argument(p.path, p.shape, p.bytes) for p in parameters]
    return Report(
        collectives=tuple(
            _collective(i, t, flow, candidates, names, parameters, results)
            for i, t in enumerate(sent)
        ),
        memory=None if compiled is None else memory_of(compiled, module, arguments),
        axes=dict(zip(candidates[0].names, candidates[0].sizes, strict=True)) if candidates else {},
        name=module.name,
        parameters=parameters,
        work=work,
        results=results,
        flow=flow,
        share=_share(work, traced, module.devices),
        platform="" if compiled is None else compiled_for(compiled)[0],
    )


def _devices_of(meshes: Sequence[AnyMesh], count: int) -> tuple[int, ...]:
    """The numbers of a program's devices, in its order: that of its mesh."""
    known = (mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size == count)
    mesh = next(known, None)
    return tuple(range(count)) if mesh is None else tuple(mesh.device_ids.ravel().tolist())


def _share(work: Work, traced: Any, devices: int) -> float | None:
    """The part of a traced program's products that each device computes. Unknown if the compiled
    program has fewer than the traced one, on all devices together: then the compiler has merged
    some, or written them as something that is not known as a product.
    """
    if traced is None or work.unknown:
        return None
    total = products_in(without_dead_code(traced), each_turn=True)
    if total is None or not total.products or total.factors:
        return None
    share = sum(work.flops.values()) / (2 * total.products)
    # A guess: less than 2 % may be missing, such as products that the compiler has simplified.
    return share if share * devices > 0.98 else None


def _parameters(
    module: HloModule, names: Names, compiled: jax.stages.Compiled | None
) -> tuple[ProgramArray, ...]:
    used = [x for _, x in sorted(module.entry.parameters.items())]
    paths = [names(name_of(x)) for x in used]
    # Those of arguments that the program doesn't use are None, which is no leaf.
    shardings = [] if compiled is None else jtu.tree_leaves(compiled.input_shardings)
    # JAX doesn't always know those of all arguments. Then contracts say that they are unknown.
    if len(shardings) != len(used):
        shardings = [None] * len(used)
    return _described(paths, [array for x in used for array in x.arrays], shardings)


def _results(module: HloModule, compiled: jax.stages.Compiled | None) -> tuple[ProgramArray, ...]:
    arrays = module.entry.result.arrays
    shardings = [] if compiled is None else jtu.tree_leaves(compiled.output_shardings)
    if compiled is None or len(shardings) != len(arrays):
        return ()
    return _described(_paths_of(compiled.out_tree), arrays, shardings)


def _described(
    paths: Sequence[str], arrays: Sequence[Array], shardings: Sequence[Sharding | None]
) -> tuple[ProgramArray, ...]:
    parts = zip(paths, arrays, map(_dividing, shardings), strict=True)
    return tuple(ProgramArray(path, a.dtype, a.shape, a.bytes, axes) for path, a, axes in parts)


def _paths_of(structure: Any) -> list[str]:
    """The paths of a program's results in what the function returns."""
    marks = [object() for _ in range(structure.num_leaves)]
    tree = jtu.tree_unflatten(structure, marks)
    match tree:
        case Made() | (Made(),):
            result = tree if isinstance(tree, Made) else tree[0]
            tree = result.tree() if result.failed is None else (result.tree(), [result.failed])
    paths = {id(x): jtu.keystr(path) for path, x in jtu.tree_flatten_with_path(tree)[0]}
    return [paths.get(id(mark), f"result {i}") for i, mark in enumerate(marks)]


def _dividing(sharding: Sharding | None) -> tuple[str, ...] | None:
    if sharding is not None and sharding.is_fully_replicated:
        return ()
    if not isinstance(sharding, NamedSharding):
        return None
    return tuple(str(name) for entry in sharding.spec.partitions for name in axis_names(entry))


def _collective(
    number: int,
    transfer: Transfer,
    flow: Flow,
    meshes: Sequence[MeshAxes],
    names: Names,
    parameters: Sequence[ProgramArray],
    results: Sequence[ProgramArray],
) -> Collective:
    gradients: tuple[str, ...] = ()
    if is_gradient(transfer.first):
        updated, returned = flow.updated(number)
        paths = [names(name_of(flow.module.entry.parameters[i])) for i in updated]
        arrays = [results[i] for i in returned] if results else []
        gradients = gradients_among(paths, arrays, parameters)
    loops = transfer.runs[0].loops if transfer.runs else ()
    again = "gathered, then split otherwise" if is_split_again(transfer) else ""
    return Collective(
        kind=transfer.kind,
        axes=_axes_of(transfer, meshes),
        times=transfer.times,
        bytes=transfer.bytes,
        wire_bytes=transfer.wire_bytes,
        dtype="/".join(sorted({array.dtype for array in transfer.arrays})),
        gradients=gradients,
        overlapped=any(map(is_overlapped, flow.windows[number])),
        sometimes=any(run.branches for run in transfer.runs),
        loops=tuple(source_of(loop) for loop in loops),
        devices=transfer.groups.shape[1],
        spelling=", ".join(filter(None, (transfer.spelling, again))),
        branches=transfer.runs[0].branches if len(transfer.runs) == 1 else (),
        instructions=instructions_of(flow.windows[number]),
        **origin_of(transfer.first, names),
    )


def _axes_of(transfer: Transfer, meshes: Sequence[MeshAxes]) -> tuple[str, ...] | None:
    """The names in the first mesh in which it goes over whole axes, else in the first mesh."""
    pairs = transfer.kind == "collective-permute"
    named = [
        axes.along(transfer.groups) if pairs else axes.named(transfer.groups) for axes in meshes
    ]
    whole = [names for names in named if not any("~" in n or ":" in n for n in names)]
    return next(iter([*whole, *named]), None)
