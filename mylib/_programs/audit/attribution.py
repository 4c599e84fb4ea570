"""The arguments that a collective moves, and the line of Python that it comes from."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..._core.compat import names as jax_names
from ..._core.lines import innermost, spot
from .hlo import HloModule, Instruction
from .opcodes import Likeness
from .targets import CALLBACKS, TUNED
from .values import behind, done_of, inputs_here, uses_in

# `transpose(jvp(vmap(eqx.nn.Linear)))`: all that is around a scope but calls of functions.
_TRANSFORMED = re.compile(rf"^(?:(?!{jax_names.JIT}\()\w+\()+([^()]*)\)+$")
_STRUCTURE = {
    *jax_names.STRUCTURE,
    jax_names.SCOPE_BODY,
    jax_names.SCOPE_CHECKPOINT,
    jax_names.SCOPE_CONDITION,
    jax_names.STACK_RECOMPUTED,
}
# All that is written around a name.
_TRANSFORMATIONS = {
    jax_names.JIT,
    jax_names.STACK_JVP,
    jax_names.STACK_TRANSPOSE,
    jax_names.STACK_VMAP,
}
# The most instructions that are looked at. Programs of large models have many thousands, and each
# of their collectives begins such a search.
_FAR = 2000
_NEAR = 4  # the most users whose line an instruction may have

# The phase of what doesn't say where it is from.
UNKNOWN = "unknown"

# From an argument's name in the program to its path.
Names = Callable[[str], str]


def origin_of(x: Instruction, names: Names) -> dict[str, Any]:
    """Where a collective comes from, as fields of `Collective`. They are empty if the program
    doesn't contain them.
    """
    named, primitive = _origin_names(x), own_primitive_of(x)
    # The partitioner inserts some under the name of a collective that the function calls.
    generated = 'is_spmd_generated="true"' in x.text
    written = re.sub(r"_(start|done)$", "", primitive) in jax_names.COLLECTIVES and not generated
    # An inserted one has often no name, or only that of a loop around it. What it is for is known
    # of its user; of a gradient's sum, which only the result uses, of what it is given.
    informed = x if named and primitive not in jax_names.STRUCTURE else next(_informed_users(x), x)
    if not _origin_names(informed):
        informed = _informed_input(x)
    around = _origin_names(informed)
    at = named if written else around
    return dict(
        arrays=tuple(dict.fromkeys(map(names, _arrays(x, written)))),
        primitive=_primitive(at),
        scope=_scope(at[0] if at else ""),
        source=source_of(x if written else informed) or source_of(x),
        phase=phase_of([*named, *around]),
        inserted=not written if named or generated else None,
    )


def name_of(argument: Instruction) -> str:
    """The name of an argument of the program; only its number if it has none."""
    return next(iter(argument.op_names), f"argument {argument.rest}")


def is_gradient(x: Instruction) -> bool:
    """Whether a collective is of the backward pass, or given what this computes."""
    return "backward" in (phase_of(_origin_names(y)) for y in (x, _informed_input(x)))


def _origin_names(x: Instruction) -> list[str]:
    """JAX's names for its origin, without names of arguments."""
    return [name for name in x.op_names if name.startswith(f"{jax_names.JIT}(") or "/" in name]


def own_primitive_of(x: Instruction) -> str:
    """The JAX primitive of an instruction, if it has one itself."""
    return _primitive(_origin_names(x))


def is_of_dot(x: Instruction) -> bool:
    """Whether it is a product of JAX, or a part of one."""
    return any(name.endswith(f"/{jax_names.DOT}") for name in x.op_names)


def origin(x: Instruction) -> tuple[str, str, str]:
    """The line and the primitive that compute a value, and the phase."""
    informed = x if _origin_names(x) else _informed_input(x)
    return source_of(informed), own_primitive_of(informed), phase_of(_origin_names(informed))


def place_of(x: Instruction) -> tuple[str, str, str]:
    """The scope, the pass and the line of an instruction, or of the nearest one that has them."""
    near = [x, *islice(_informed_users(x), _NEAR), _informed_input(x)]
    names = next(filter(None, map(_origin_names, near)), [])
    source = next(filter(None, map(source_of, near)), "")
    return _scope(names[0] if names else ""), phase_of(names), source


def primitive_of(x: Instruction) -> str:
    """The JAX primitive of an instruction, or of the nearest one that has one."""
    return own_primitive_of(x) or own_primitive_of(next(_informed_users(x), x))


def _primitive(names: Sequence[str]) -> str:
    # Merged ones: `jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)`.
    return re.split(r"[/:]", names[0].rstrip(")"))[-1].split("[")[0] if names else ""


def _scope(name: str) -> str:
    """The scopes of `jax.named_scope`; each of Equinox's layers is in one."""
    parts = (_TRANSFORMED.sub(r"\1", part) for part in name.split("/")[:-1])
    scopes = [
        x for x in parts if x not in ("", *_STRUCTURE) and not x.startswith(jax_names.SCOPE_BRANCH)
    ]
    # Several names that were merged into one have a colon.
    return "/".join(x for x in scopes if set(x).isdisjoint("(:"))


def phase_of(names: Sequence[str]) -> str:
    """`"forward"`, `"backward"` or `"recomputed"`; empty in what is not differentiated; `UNKNOWN`
    without names, or if they tell of a transformation that isn't known.
    """
    # Before the others: what is recomputed is inside the backward pass.
    if any(jax_names.STACK_RECOMPUTED in name for name in names):
        return "recomputed"
    if any(f"{jax_names.STACK_TRANSPOSE}(" in name for name in names[:1]):
        return "backward"
    if not names or not _TRANSFORMATIONS.issuperset(re.findall(r"(\w+)\(", names[0])):
        return UNKNOWN
    return "forward" if f"{jax_names.STACK_JVP}(" in names[0] else ""


def phases_in(module: HloModule) -> set[str]:
    """The phases of the instructions that say where they are from."""
    return {phase_of(names) for x in module.instructions() if (names := _origin_names(x))}


def source_of(x: Instruction) -> str:
    """The innermost line in the user's own files."""
    frames = x.computation.module.frames(x)
    found = innermost(frames, lambda line: line.rpartition(":")[0])
    file, _, line = (found or "").rpartition(":")
    return spot(file, line) if line else ""


def _informed_users(x: Instruction) -> Iterator[Instruction]:
    """The users of the result whose origin is known, the nearest first."""
    queue, seen = [x], {id(x)}
    for at in queue:
        if len(queue) > _FAR:
            return
        if at is not x and _origin_names(at) and own_primitive_of(at) not in jax_names.STRUCTURE:
            yield at
            continue
        for user in _users(at):
            if id(user) not in seen:
                seen.add(id(user))
                queue.append(user)


def _users(x: Instruction) -> Iterator[Instruction]:
    for user in x.users:
        if user.opcode == "fusion":
            for parameter in uses_in(user, x):
                yield from parameter.users
        else:
            yield user
    if x.is_root:
        yield from (done_of(x) for x in x.computation.callers if x.row.calls == "run")


def _informed_input(x: Instruction) -> Instruction:
    """The nearest instruction behind it whose origin is known; itself if there is none."""
    return next(filter(_origin_names, islice(behind(x.inputs(), inputs_here), _FAR)), x)


def _arrays(x: Instruction, written: bool) -> Iterator[str]:
    """The names of the arguments that are moved unchanged, or after a cast, a slice, or a gather
    over another axis; and, unless the user has written a collective, of the argument that what is
    gathered is computed from alone, as weights in 8 bits and their scales are.
    """
    # The other operands of a ragged one are the result's memory, and where rows begin.
    computed = x.row.sends == "all-gather" and not written
    operands = x.inputs()[:1] if x.opcode.startswith("ragged") else x.inputs()
    for operand in operands:
        moved = [name_of(x) for x in islice(behind([operand], _moved_by), _FAR) if _is_argument(x)]
        yield from moved or (_only_argument(operand) if computed else ())


def _is_argument(x: Instruction) -> bool:
    return x.opcode == "parameter" and x.computation is x.computation.module.entry


def _only_argument(operand: Instruction) -> set[str]:
    """The name of the argument that a value is computed from, if there is no other."""
    names = set[str]()
    for number, x in enumerate(behind([operand], Instruction.inputs)):
        names |= {name_of(x)} if _is_argument(x) else set()
        if len(names) > 1 or number >= _FAR:
            return set()
    return names


def _moved_by(x: Instruction) -> list[Instruction]:
    """The arrays that an instruction only moves."""
    moves = x.row.like >= Likeness.PART or x.row.gathers
    return x.inputs()[: x.row.data] if moves else []


def callbacks_of(program: HloModule) -> str:
    """The functions of Python that a compiled program calls."""
    return _listed(program, lambda x: x.target in CALLBACKS)


def tuned_kernels_of(program: HloModule) -> str:
    """The kernels that the compiler for GPUs chooses by measuring."""
    return _listed(program, lambda x: TUNED.search(x.text) is not None)


def _listed(program: HloModule, chosen: Callable[[Instruction], bool]) -> str:
    """Some instructions of a program, by their primitives and lines, in a line each."""
    lines = (origin(x) for x in program.instructions() if chosen(x))
    texts = (f"{primitive} at {line}" if line else primitive for line, primitive, _ in lines)
    return "".join(f"\n  {text}" for text in dict.fromkeys(texts))
