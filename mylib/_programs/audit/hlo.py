"""Parses the text of a compiled program into computations and instructions."""

import math
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..._core.errors import AuditError
from .opcodes import OPCODES, Meaning
from .targets import KERNEL, TARGETS

# `%name (parameters) -> results {` begins a computation.
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{\s*$")
# `%name = f32[8,4]{1,0} opcode(operands), attributes`, or a tuple of types.
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_FORMS = ("start", "update", "done")
_NAME = re.compile(r"%([\w.\-#]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_TILED = re.compile(r"[\d,]*:T\(([\d,]+)\)")
# The order of the dimensions; then tiles, the kind of memory, and what changes no size. Other words
# may change it.
_LAYOUT = re.compile(
    r"[\d,]*(?::(?:T(?:\([\d,*]+\))+|S\(\d+\)|[ELM]\(\d+\)|D\([^()]*\)|[#*]\(\w+\))*)?"
)
_NUMBERED = re.compile(r"(\d+) (.*)$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]++|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*"')
# A string that doesn't end goes to the end of the text.
_PUNCTUATION = re.compile(r'"(?:[^"\\]++|\\.)*(?:"|$)|[][(){},]', re.DOTALL)
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NARROW = re.compile(r"f(\d)(e\d+m\d+\w*)")  # f8e4m3fn, f4e2m1fn
_DTYPES = {"bf16": "bfloat16", "pred": "bool"}
_WORDS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128,
    **{f"{sign}{n}": n for sign in "su" for n in (1, 2, 4, 8, 16, 32, 64)},
    **{f"f{n}": n for n in (16, 32, 64)},
}  # fmt: skip


class Array(NamedTuple):
    """The type of an array in a program."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Without the padding of a tiled layout. Types smaller than a byte are packed."""
        return -(-self.size * bits_of(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """With the padding of a tiled layout, `{1,0:T(8,128)}`: whole tiles of the last
        dimensions in the order in which they lie in memory.
        """
        match = _TILED.match(self.layout)
        if match is None:
            return self.bytes
        tile, sizes = numbers(match[1]), [self.shape[i] for i in self.order]
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        whole = sizes[: len(sizes) - len(tile)]
        padded = [-(-n // t) * t for n, t in zip(sizes[len(whole) :], tile, strict=True)]
        return math.prod(whole + padded) * bits_of(self.dtype) // 8

    @property
    def order(self) -> list[int]:
        """The dimensions in the order in which they lie in memory, the outermost first."""
        order = numbers(self.layout.partition(":")[0])
        return order[::-1] if len(order) == len(self.shape) else [*range(len(self.shape))]

    @property
    def jax_dtype(self) -> str:
        """JAX's name of its dtype."""
        narrow = _NARROW.fullmatch(self.dtype)
        if narrow is not None:
            return f"float{narrow[1]}_{narrow[2]}"
        return _DTYPES.get(self.dtype) or _WORDS.get(self.dtype[0], "") + self.dtype[1:]

    @property
    def on_host(self) -> bool:
        return "S(5)" in self.layout


def numbers(text: str) -> list[int]:
    """The whole numbers in a text, without signs."""
    return [int(n) for n in re.findall(r"\d+", text)]


def bits_of(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    narrow = _NARROW.fullmatch(dtype)
    if narrow is None:
        raise AuditError(f"the program has arrays of type {dtype!r}, whose size is not known here")
    return int(narrow[1])


def arrays_of(type_: str) -> list[Array]:
    """The arrays of a type, which may be a tuple."""
    return [
        Array(dtype, tuple(numbers(dims)), _known(layout))
        for dtype, dims, layout in _ARRAY.findall(type_)
    ]


@lru_cache(maxsize=1000)
def _known(layout: str) -> str:
    if _LAYOUT.fullmatch(layout) is None:
        raise AuditError(f"the layout {{{layout}}} of an array is not known, nor its size")
    return layout


def elements_of(type_: str) -> list[str]:
    """The types of the elements of a tuple."""
    type_ = re.sub(r"/\*.*?\*/", "", type_)  # numbers of some of them
    depths = _depths(type_, 0)
    ends = [i for i, depth in depths if depth == 0 or (depth == 1 and type_[i] == ",")]
    parts = [type_[begin + 1 : end].strip() for begin, end in pairwise([0, *ends])]
    return [part for part in parts if part]


class Instruction:
    """One instruction. Its attributes and its type are parsed when they are first asked for."""

    def __init__(self, computation: "Computation", match: re.Match[str]):
        self.computation = computation
        self.name: str
        self.type: str
        self.opcode: str
        self.does: str
        self.form: str
        self.name, self.type, self.opcode, rest = match.group("name", "type", "opcode", "rest")
        # `-start`, `-update` and `-done` are forms of an opcode.
        does, _, form = self.opcode.rpartition("-")
        self.does, self.form = (does, form) if form in _FORMS else (self.opcode, "")
        end = _closing(rest)
        self.rest: str = rest[:end]  # the text in the parentheses
        self.text: str = rest[end + 1 :]
        self.operands: list[str] = [] if self.opcode == "constant" else _NAME.findall(self.rest)
        # The computations that it calls: of a loop the condition, then the body; of a condition its
        # branches.
        self.calls: list[Computation] = []

    @cached_property
    def row(self) -> Meaning:
        """What its opcode does; of a custom call, what its target does."""
        if self.does == "custom-call":
            return TARGETS.get(self.target, KERNEL)
        if self.does not in OPCODES:
            raise AuditError(
                f"{self}: the opcode {self.opcode!r} is not known, so it is not known either "
                "whether it moves data between devices"
            )
        return OPCODES[self.does]

    @property
    def sends(self) -> str | None:
        """The kind of the collective that it is, or starts."""
        return None if self.waits else self.row.sends

    @property
    def waits(self) -> bool:
        """Whether it goes on with what another instruction has started."""
        return self.form in ("update", "done")

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result, which may be a tuple."""
        return arrays_of(self.type)

    def operand(self, index: int) -> "Instruction":
        return self.computation.named[self.operands[index]]

    def inputs(self) -> "list[Instruction]":
        return [self.computation.named[name] for name in self.operands]

    @property
    def users(self) -> "list[Instruction]":
        """The instructions that use its result."""
        return self.computation.users[self.name]

    @property
    def called(self) -> "Computation":
        """The only computation that it calls."""
        (only,) = self.calls
        return only

    @property
    def adds(self) -> bool:
        """Whether what it does with each pair of elements is to add them."""
        return [computation.result.opcode for computation in self.calls] == ["add"]

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The texts of its attributes, such as `{0,1}` or `7`."""
        return attributes_of(self.text, self)

    def attribute(self, name: str) -> str:
        """The text of an attribute that it must have."""
        if name not in self.attributes:
            raise AuditError(f"{self} has no attribute {name}")
        return self.attributes[name]

    def dims(self, name: str = "dimensions") -> list[int]:
        """The numbers in an attribute that it must have."""
        return numbers(self.attribute(name))

    def dims_if_any(self, name: str) -> list[int]:
        """The numbers in an attribute that is left out where there are none."""
        return numbers(self.attributes.get(name, ""))

    @cached_property
    def slices(self) -> list[range]:
        """The indices that a slice takes of each dimension."""
        bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", self.attribute("slice"))
        if len(bounds) != len(self.arrays[0].shape):
            raise AuditError(f"the bounds of {self} are not understood")
        return [range(int(first), int(last), int(step or 1)) for first, last, step in bounds]

    @property
    def channel(self) -> tuple[str, str | None]:
        """What all instructions of one collective have in common."""
        return self.does, self.attributes.get("channel_id")

    @property
    def index(self) -> int:
        """Which element of a tuple it takes."""
        text = self.attribute("index")
        if not text.isdigit():
            raise AuditError(f"index={text} of {self} is not a number")
        return int(text)

    @property
    def target(self) -> str:
        """The target of a custom call; empty for others."""
        is_call = self.does == "custom-call" and not self.waits
        return self.attribute("custom_call_target").strip('"') if is_call else ""

    @cached_property
    def op_names(self) -> list[str]:
        """JAX's names for its origin. Merged instructions have several."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return re.sub(r"\\(.)", r"\1", match[1]).split(";") if match else []

    @property
    def is_root(self) -> bool:
        return self.computation.result is self

    def named_computations(self) -> list[tuple[str, str]]:
        """The names that it has outside its operands, with the attributes that have them: each is
        of a computation that it calls.
        """
        if "%" not in self.text:
            return []
        return [
            (attribute, name)
            for attribute, value in self.attributes.items()
            if "%" in value and attribute != "control-predecessors"
            for name in _NAME.findall(_STRING.sub("", value))
        ]

    def __repr__(self) -> str:
        return f"%{self.name} = {self.type} {self.opcode}(...) in %{self.computation.name}"


def attributes_of(text: str, of: object) -> dict[str, str]:
    """The attributes in a text that is empty, or begins with a comma."""
    ends = [
        i
        for i, depth in _depths(text, 0)
        # The devices of a mesh come after one: `mesh['a'=2], device_ids=(1,0) {'a'}`.
        if depth == 0 and text[i] == "," and not text.startswith(", device_ids=(", i)
    ]
    pieces = [text[i + 1 : end].strip() for i, end in pairwise([*ends, len(text)])]
    pairs = [piece.partition("=") for piece in pieces]
    found = {name: value for name, _, value in pairs}
    if text[: ends[0] if ends else None].strip() or len(found) < len(pairs):
        raise AuditError(f"the attributes of {of} are not understood: {text[:80]}")
    return found


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one before the beginning of the text."""
    end = text.find(")")
    if end < 0:
        raise AuditError(f"a parenthesis is not closed: {text[:80]}")
    if "(" not in text[:end] and '"' not in text[:end]:
        return end
    return next(i for i, depth in _depths(text, 1) if depth == 0)


def _depths(text: str, depth: int) -> Iterator[tuple[int, int]]:
    """Each bracket and comma outside strings, with the number of open brackets after it."""
    for match in _PUNCTUATION.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        yield match.start(), depth
    if depth:
        raise AuditError(f"a bracket is not closed: {text[:80]}")


class Computation:
    """A named list of instructions, in the order in which they run."""

    result: Instruction

    def __init__(self, module: "HloModule", name: str):
        self.module = module
        self.name = name
        self.instructions: list[Instruction] = []
        self.named: dict[str, Instruction] = {}
        # The instructions that call it.
        self.callers: list[Instruction] = []

    @property
    def fusions(self) -> list[Instruction]:
        """Those that it is the computation of."""
        return [caller for caller in self.callers if caller.does == "fusion"]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.rest): x for x in self.instructions if x.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each instruction."""
        users: dict[str, list[Instruction]] = {x.name: [] for x in self.instructions}
        for x in self.instructions:
            for name in dict.fromkeys(x.operands):
                users[name].append(x)
        return users


class HloModule:
    """A compiled program."""

    def __init__(self, text: str):
        headers = re.findall(r"^HloModule .*$", text, re.MULTILINE)
        if len(headers) != 1:
            raise AuditError(_NOT_ONE_PROGRAM.format(len(headers)))
        head, _, attributes = headers[0].removeprefix("HloModule ").partition(", ")
        # The name of the function that was compiled.
        self.name: str = head.split(" ")[0].removeprefix("jit_")
        self.attributes: dict[str, str] = attributes_of(
            f", {attributes}" if attributes else "", headers[0][:80]
        )
        self.text = text
        self.computations: dict[str, Computation] = {}
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self._stacks: dict[int, list[str]] = {}
        entry = self._read(text)
        if entry is None:
            raise AuditError("the program has no ENTRY computation: the text is cut off")
        self.entry: Computation = entry
        self._check()
        # XLA leaves them out where they are 1.
        self.partitions: int = int(self.attributes.get("num_partitions", 1))
        self.replicas: int = int(self.attributes.get("replica_count", 1))
        self.devices: int = max(self.partitions, self.replicas)

    def _read(self, text: str) -> Computation | None:
        """Reads the lines, and returns the computation that the program begins with."""
        table: dict[int, str] | None = None
        current: Computation | None = None
        entry: Computation | None = None
        for line in _whole_lines(text):
            if current is not None and (match := _INSTRUCTION.match(line)):
                x = Instruction(current, match)
                current.instructions.append(x)
                current.named[x.name] = x
                if match["root"]:
                    current.result = x
            elif current is not None and line.startswith("}"):
                current = None
            elif current is None and line in self._tables:
                table = self._tables[line]
            elif current is None and line.endswith("{") and (match := _HEADER.match(line)):
                current = Computation(self, match["name"])
                if current.name in self.computations:
                    raise AuditError(f"there are two computations %{current.name}")
                self.computations[current.name] = current
                entry = current if match["entry"] else entry
            elif current is None and table is not None and (match := _NUMBERED.match(line)):
                table[int(match[1])] = match[2]
            elif line.strip() and not line.startswith("HloModule "):
                raise AuditError(f"a line is not understood: {line.strip()[:120]}")
        if current is not None:
            raise AuditError(f"the computation %{current.name} is not closed: the text is cut off")
        return entry

    def _check(self) -> None:
        """Checks that what instructions name is there, and that all of it is understood."""
        for computation in self.computations.values():
            if len(computation.named) != len(computation.instructions):
                raise AuditError(f"%{computation.name} has two instructions of one name")
            if not hasattr(computation, "result"):
                raise AuditError(f"%{computation.name} has no ROOT: the text is damaged")
        for x in self.instructions():
            for name in x.operands:
                if name not in x.computation.named:
                    raise AuditError(f"{x} uses %{name}, which is not in the text")
            if not x.operands and x.rest and x.opcode not in ("constant", "parameter"):
                raise AuditError(f"the operands of {x} are not understood: ({x.rest[:80]})")
            self._check_form(x)
            if not x.waits:  # what is waited for has the attributes
                for name in x.row.requires:
                    x.attribute(name)
                self._link(x)
        reached = dict.fromkeys([self.entry])
        queue = [self.entry]
        for computation in queue:
            new = dict.fromkeys(y for x in computation.instructions for y in x.calls)
            queue += [y for y in new if y not in reached]
            reached |= new
        # Its collectives would be missed, under whatever name it is called.
        for computation in self.computations.values():
            if computation not in reached:
                raise AuditError(f"%{computation.name} is called by nothing that is understood")

    def _check_form(self, x: Instruction) -> None:
        row = x.row  # an error if there is none
        if x.form == "start" and not row.starts:
            raise AuditError(f"{x} starts something that is not understood")
        if x.waits:
            start = x.operand(0)
            if not start.opcode.endswith(("-start", "-update")) and start.does not in _TWO_ENDS:
                raise AuditError(f"{x} waits for {start}, which starts nothing")

    def _link(self, x: Instruction) -> None:
        """Finds what an instruction calls."""
        names = x.named_computations()
        for _, name in names:
            if name not in self.computations:
                raise AuditError(f"{x} calls %{name}, which is not in the text")
        x.calls = [self.computations[name] for name in _in_order(x, names)]
        counts = {"run": (1,), "loop": (2,), "": (0,)}.get(x.row.calls)
        # A custom call may have a reducer; others that have one must.
        fits = len(names) in counts if counts else bool(names) or x.does == "custom-call"
        if not fits:
            raise AuditError(f"{x} calls {len(names)} computations, which is not understood")
        for computation in x.calls:
            computation.callers.append(x)

    @cached_property
    def donated(self) -> list[int]:
        """The results, by their number, that are written into the memory of arguments."""
        aliases = self.attributes.get("input_output_alias", "")
        return [int(index or 0) for index in re.findall(r"\{(\d*)\}: \(\d+, ", aliases)]

    def frames(self, x: Instruction) -> list[str]:
        """The lines of Python of its traceback, as `path:line`, the innermost first."""
        match = _FRAME.search(x.attributes.get("metadata", ""))
        return [] if match is None else self._stack(int(match[1]))

    def _stack(self, frame: int) -> list[str]:
        if frame not in self._stacks:
            entry = self._fields("StackFrames", frame)
            path, line = self._line(entry.get("file_location_id", 0))
            lines = self._stacks[frame] = [f"{path}:{line}"] if path else []
            # The text numbers parents from 1, and 1 means none.
            lines += self._stack(entry["parent_frame_id"] - 1) if "parent_frame_id" in entry else []
        return self._stacks[frame]

    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions

    def origins(self) -> Iterator[tuple[str, str]]:
        """Its lines of Python, as paths and numbers, and the names of its arguments."""
        yield from map(self._line, self._tables["FileLocations"])
        for x in self.entry.parameters.values():
            yield from ((name, "") for name in x.op_names)

    def _line(self, location: int) -> tuple[str, str]:
        fields = self._fields("FileLocations", location)
        path = self._tables["FileNames"].get(fields.get("file_name_id", 0), "")
        return path.strip('"'), str(fields.get("line", 0))

    def _fields(self, table: str, row: int) -> dict[str, int]:
        pairs = re.findall(r"(\w+)=(\d+)", self._tables[table].get(row, ""))
        return {name: int(value) for name, value in pairs}


_TWO_ENDS = ("send", "recv")
_NOT_ONE_PROGRAM = (
    "this is not the text of one compiled program: it has {} lines that begin with HloModule. Pass "
    "what `jax.jit(f).lower(*args).compile()` returns, or its `as_text()`"
)


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a program, with each instruction in one: a kernel's metadata spans several."""
    begun: list[str] = []
    left = 0
    for line in text.splitlines():
        begun.append(line)
        left += _left_open(line) if begun[0].startswith(" ") else 0  # instructions are indented
        if left <= 0:
            yield " ".join(begun)
            begun, left = [], 0
    if begun:
        raise AuditError(f"a bracket is not closed: {begun[0].strip()[:120]}")


def _left_open(line: str) -> int:
    """How many more braces a line opens than it closes."""
    if line.count("{") == line.count("}"):  # as in nearly all lines
        return 0
    line = _STRING.sub("", line)
    return line.count("{") - line.count("}")


def _in_order(x: Instruction, named: list[tuple[str, str]]) -> list[str]:
    """The names of what an instruction calls, in the order of their roles, which the types tell
    where they can, and else only the attributes.
    """
    module, names = x.computation.module, [name for _, name in named]
    order: tuple[str, ...] = ()
    if x.row.calls == "loop":
        types = {name: module.computations[name].result.type for name in names}
        tests = [name for name in names if types[name].startswith("pred[]")]
        if len(tests) == 1:  # a body returns it, too, only if it is all that the loop carries
            return [*tests, *(name for name in names if name not in tests)]
        order = "condition", "body"
    elif x.row.calls == "branch" and len({attribute for attribute, _ in named}) > 1:
        order = "true_computation", "false_computation"
    by_attribute = dict(named)
    if order and by_attribute.keys() != set(order):
        raise AuditError(f"it is not understood when {x} runs {', '.join(names)}")
    return [by_attribute[attribute] for attribute in order] or names
