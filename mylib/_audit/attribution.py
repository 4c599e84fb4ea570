"""The arguments that a collective moves, and the line of Python that it comes from."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .._compat import names as known
from .hlo import HloModule, Instruction, calls_of, short
from .targets import CALLBACKS
from .values import MOVES, Value, computed, done_of, target_of, unchanged

_MOVED = MOVES | {"concatenate", "all-gather", "all-to-all", "collective-permute"}
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
# `transpose(jvp(vmap(eqx.nn.Linear)))`: all that is around a scope but calls of functions.
_TRANSFORMED = re.compile(rf"^(?:(?!{known.JIT}\()\w+\()+([^()]*)\)+$")
_STRUCTURE = {
    *known.STRUCTURE,
    known.SCOPE_BODY,
    known.SCOPE_CHECKPOINT,
    known.SCOPE_CONDITION,
    known.STACK_RECOMPUTED,
}
# Calls whose result is that of the computation.
_RESULTS = ("fusion", "call", "call-start", "async-start")
_FAR = 400  # the most instructions that are looked at

# From an argument's name in the program to its path.
Names = Callable[[str], str]


class Origin(NamedTuple):
    """Where a collective comes from. Fields are empty if the program doesn't contain them."""

    arrays: tuple[str, ...]
    is_gradient: bool
    primitive: str
    scope: str
    source: str
    phase: str
    inserted: bool


def origin_of(x: Instruction, names: Names) -> Origin:
    named = _own_names(x)
    primitive = _primitive(named[0]) if named else ""
    generated = 'is_spmd_generated="true"' in x.attributes
    written = _is_written(primitive) and not generated
    informed = x if named and primitive not in known.STRUCTURE else next(_informed_users(x), x)
    if not _own_names(informed):
        informed = next(_informed_inputs(x), x)
    around = _own_names(informed)
    made_by = next(_informed_inputs(x), x)
    at = (named if written else around or [""])[0]
    return Origin(
        arrays=tuple(dict.fromkeys(map(names, _arrays(x)))),
        is_gradient="backward" in (phase_of(named), phase_of(_own_names(made_by))),
        primitive=_primitive(at),
        scope=_scope(at),
        source=source_of(x if written else informed) or source_of(x),
        phase=phase_of([*named, *around]),
        inserted=not written,
    )


def _own_names(x: Instruction) -> list[str]:
    """JAX's names for its origin, without names of arguments."""
    return [name for name in x.op_names if name.startswith(f"{known.JIT}(") or "/" in name]


def _is_written(primitive: str) -> bool:
    return re.sub(r"_(start|done)$", "", primitive) in known.COLLECTIVES


def own_primitive_of(x: Instruction) -> str:
    """The JAX primitive of an instruction, if it has one itself."""
    named = _own_names(x)
    return _primitive(named[0]) if named else ""


def line_and_primitive(x: Instruction) -> tuple[str, str]:
    """The line and the primitive that compute a value."""
    informed = x if _own_names(x) else next(_informed_inputs(x), x)
    return source_of(informed), own_primitive_of(informed)


def primitive_of(x: Instruction) -> str:
    """The JAX primitive of an instruction, or of the nearest one that has one."""
    for informed in (x, next(_informed_users(x), x)):
        if names := _own_names(informed):
            return _primitive(names[0])
    return ""


def _primitive(name: str) -> str:
    # Merged ones: `jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)`.
    last = re.split(r"[/:]", name.rstrip(")"))[-1]
    return last.split("[")[0]


def _scope(name: str) -> str:
    """The scopes of `jax.named_scope`; each of Equinox's layers is in one."""
    parts = (_TRANSFORMED.sub(r"\1", part) for part in name.split("/")[:-1])
    return "/".join(part for part in parts if part and not _is_structure(part))


def _is_structure(part: str) -> bool:
    # Several names that were merged into one have a colon.
    return part in _STRUCTURE or part.startswith(known.SCOPE_BRANCH) or bool(set(part) & set("(:"))


def phase_of(names: Sequence[str]) -> str:
    """`"forward"`, `"backward"` or `"recomputed"`; empty in what is not differentiated."""
    if any(known.STACK_RECOMPUTED in name for name in names):
        return "recomputed"
    if any(f"{known.STACK_TRANSPOSE}(" in name for name in names[:1]):
        return "backward"
    return "forward" if any(f"{known.STACK_JVP}(" in name for name in names[:1]) else ""


def source_of(x: Instruction) -> str:
    """The innermost line in the user's own files."""
    frames = list(x.computation.module.frames(x))
    in_user_code = [f for f in frames if "site-packages" not in f and not f.startswith(_PACKAGE)]
    return short((in_user_code or frames or [""])[0])


def _informed_users(x: Instruction) -> Iterator[Instruction]:
    """The users of the result whose origin is known, the nearest first."""
    queue, seen = [x], {id(x)}
    for at in queue:
        if len(queue) > _FAR:
            return
        if (
            at is not x
            and (names := _own_names(at))
            and _primitive(names[0]) not in known.STRUCTURE
        ):
            yield at
            continue
        for user in _users(at):
            if id(user) not in seen:
                seen.add(id(user))
                queue.append(user)


def _users(x: Instruction) -> Iterator[Instruction]:
    computation = x.computation
    for user in computation.users[x.name]:
        if user.opcode == "fusion":
            called = computation.module.computations[calls_of(user)[0][1]]
            for number, name in enumerate(user.operands):
                if name == x.name:
                    yield from called.users[called.parameters[number].name]
        else:
            yield user
    if x.is_root:
        yield from (done_of(x) for x in computation.callers if x.opcode in _RESULTS)


def _informed_inputs(x: Instruction) -> Iterator[Instruction]:
    queue = [Value(operand) for operand in x.inputs()]
    for start in queue:
        if len(queue) > _FAR:
            return
        copies = list(unchanged(start))
        informed = next((value.made_by for value in copies if _own_names(value.made_by)), None)
        if informed is not None:
            yield informed
        elif (made_by := copies[-1].made_by).opcode not in ("parameter", "while", "conditional"):
            queue += [Value(operand) for operand in made_by.inputs()]


def _arrays(x: Instruction) -> Iterator[str]:
    """The names of the arguments that are moved unchanged, or after a cast, a slice, or a gather
    over another axis.
    """
    for made_by in _sources(x.inputs()[: _operands(x)]):
        yield (made_by.op_names or [made_by.name])[0]


def _sources(values: Iterable[Instruction]) -> Iterator[Instruction]:
    queue = [Value(x) for x in values]
    for value in queue:
        if len(queue) > _FAR:
            return
        made_by = computed(value).made_by
        module = made_by.computation.module
        if made_by.opcode == "parameter" and made_by.computation is module.entry:
            yield made_by
        elif _is_moved(made_by):
            data = made_by.inputs()
            # The start of a slice is not data.
            queue += [Value(y) for y in (data[:1] if "slice" in made_by.opcode else data)]


def _is_moved(x: Instruction) -> bool:
    if x.opcode == "custom-call":  # arrays that the TPU's compiler copies to fast memory in pieces
        return target_of(x) == "ConcatBitcast"
    return x.opcode.removesuffix("-start").removesuffix("-done") in _MOVED


def _operands(x: Instruction) -> int:
    return 1 if x.opcode.startswith("ragged") else len(x.operands)


def callbacks_of(text: str) -> list[str]:
    """The functions of Python that a compiled program calls, by their primitives and lines."""
    calls = (
        line_and_primitive(x)
        for computation in HloModule(text).computations.values()
        for x in computation.instructions
        if target_of(x) in CALLBACKS
    )
    return [f"{primitive} at {line}" if line else primitive for line, primitive in calls]
