"""Parses the text of a compiled program into computations and instructions."""

import math
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .._errors import AuditError

# `%name (parameters) -> results {` begins a computation.
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{\s*$")
# `%name = f32[8,4]{1,0} opcode(operands), attributes`, or a tuple of types.
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_TILED = re.compile(r"(?P<order>[\d,]*):T\((?P<tile>[\d,]+)\)")
_NUMBERED = re.compile(r"(\d+) (.*)$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]++|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*"')
# A string that doesn't end goes to the end of the text.
_PUNCTUATION = re.compile(r'"(?:[^"\\]++|\\.)*(?:"|$)|[][(){},]', re.DOTALL)
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Attributes that name computations, in the order of the text.
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|"
    r"called_computations|async_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
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
        order = [int(n) for n in match["order"].split(",") if n]
        tile = [int(n) for n in match["tile"].split(",")]
        sizes = [self.shape[i] for i in reversed(order)]
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        whole = sizes[: len(sizes) - len(tile)]
        padded = [-(-n // t) * t for n, t in zip(sizes[len(whole) :], tile, strict=True)]
        return math.prod(whole + padded) * bits_of(self.dtype) // 8

    @property
    def on_host(self) -> bool:
        return "S(5)" in self.layout


def bits_of(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    narrow = re.fullmatch(r"f(\d)e\d+m\d+\w*", dtype)  # f8e4m3fn, f4e2m1fn
    if narrow is None:
        raise AuditError(f"the program has arrays of type {dtype!r}, whose size is not known here")
    return int(narrow[1])


def arrays_of(type_: str) -> list[Array]:
    """The arrays of a type, which may be a tuple."""
    return [
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout or "")
        for dtype, dims, layout in _ARRAY.findall(type_)
    ]


def elements_of(type_: str) -> list[str]:
    """The types of the elements of a tuple."""
    depths = _depths(type_, 0)
    ends = [i for i, depth in depths if depth == 0 or (depth == 1 and type_[i] == ",")]
    return [type_[begin + 1 : end] for begin, end in pairwise([0, *ends])]


class Instruction:
    """One instruction. Only its name, type, opcode and operands are parsed immediately."""

    def __init__(self, computation: "Computation", match: re.Match[str]):
        self.computation = computation
        self.name: str
        self.type: str
        self.opcode: str
        self.name, self.type, self.opcode, rest = match.group("name", "type", "opcode", "rest")
        end = _closing(rest)
        self.rest: str = rest[:end]  # the text in the parentheses
        self.attributes: str = rest[end + 1 :]
        self.operands: list[str] = [] if self.opcode == "constant" else _NAME.findall(self.rest)
        # The computations that it calls, with the attributes that name them.
        self.calls: list[tuple[str, Computation]] = []

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

    def called(self, role: str) -> "Computation":
        """The computation that an attribute names."""
        for name, computation in self.calls:
            if name == role:
                return computation
        raise AuditError(f"{self} has no {role}")

    def attribute(self, name: str) -> str:
        """The text of an attribute, such as `{0,1}` or `7`; empty if it has none."""
        # The first match: strings come later, in metadata and the backend's settings.
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        if match is None:
            return ""
        return self.attributes[match.end() : _end_of_value(self.attributes, match.end())]

    @property
    def index(self) -> int:
        """Which element of a tuple it takes."""
        text = self.attribute("index") or "0"
        if not text.isdigit():
            raise AuditError(f"index={text} of {self} is not a number")
        return int(text)

    @property
    def target(self) -> str:
        """The target of a custom call; empty for others."""
        is_call = self.opcode == "custom-call"
        return self.attribute("custom_call_target").strip('"') if is_call else ""

    @cached_property
    def op_names(self) -> list[str]:
        """JAX's names for its origin. Merged instructions have several."""
        start = self.attributes.find('op_name="')
        match = _OP_NAME.match(self.attributes, start) if start >= 0 else None
        return re.sub(r"\\(.)", r"\1", match[1]).split(";") if match else []

    @property
    def is_root(self) -> bool:
        return self.computation.result is self

    def __repr__(self) -> str:
        return f"%{self.name} = {self.type} {self.opcode}(...) in %{self.computation.name}"


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one before the beginning of the text."""
    end = text.find(")")
    if end < 0:
        raise AuditError(f"a parenthesis is not closed: {text[:80]}")
    if "(" not in text[:end] and '"' not in text[:end]:
        return end
    return next(i for i, depth in _depths(text, 1) if depth == 0)


def _end_of_value(text: str, start: int) -> int:
    """The end of a value that begins at `start`: a comma outside all brackets."""
    for i, depth in _depths(text, 0, start):
        # The devices of a mesh come after one: `mesh['a'=2], device_ids=(1,0) {'a'}`.
        if depth == 0 and text[i] == "," and not text.startswith(", device_ids=(", i):
            return i
    return len(text)


def _depths(text: str, depth: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Each bracket and comma outside strings, with the number of open brackets after it."""
    for match in _PUNCTUATION.finditer(text, start):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        yield match.start(), depth
    if depth:
        raise AuditError(f"a bracket is not closed: {text[start : start + 80]}")


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
        self.header: str = headers[0]
        self.text = text
        self.computations: dict[str, Computation] = {}
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self._stacks: dict[int, list[str]] = {}
        entry = self._read(text)
        if entry is None:
            raise AuditError("the program has no ENTRY computation: the text is cut off")
        self.entry: Computation = entry
        self._check()
        numbers = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", self.header))
        self.partitions: int = int(numbers.get("num_partitions", 1))
        self.replicas: int = int(numbers.get("replica_count", 1))
        self.devices: int = max(self.partitions, self.replicas)

    def _read(self, text: str) -> Computation | None:
        """Reads the lines, and returns the computation that the program begins with."""
        table: dict[int, str] | None = None
        current: Computation | None = None
        entry: Computation | None = None
        for line in _whole_lines(text):
            if current is not None:
                match = _INSTRUCTION.match(line)
                if match is not None:
                    x = Instruction(current, match)
                    current.instructions.append(x)
                    current.named[x.name] = x
                    if match["root"]:
                        current.result = x
                elif line.startswith("}"):
                    current = None
                elif line.strip():
                    raise AuditError(f"a line is not understood: {line.strip()[:120]}")
            elif line in self._tables:
                table = self._tables[line]
            elif line.endswith("{") and (match := _HEADER.match(line)):
                current = Computation(self, match["name"])
                if current.name in self.computations:
                    raise AuditError(f"there are two computations %{current.name}")
                self.computations[current.name] = current
                entry = current if match["entry"] else entry
            elif table is not None and (match := _NUMBERED.match(line)):
                table[int(match[1])] = match[2]
            elif line.strip() and not line.startswith("HloModule "):
                raise AuditError(f"a line is not understood: {line.strip()[:120]}")
        if current is not None:
            raise AuditError(f"the computation %{current.name} is not closed: the text is cut off")
        return entry

    def _check(self) -> None:
        """Checks that what instructions name is there, and finds what they call."""
        for computation in self.computations.values():
            named = computation.named
            if len(named) != len(computation.instructions):
                raise AuditError(f"%{computation.name} has two instructions of one name")
            if not hasattr(computation, "result"):
                raise AuditError(f"%{computation.name} has no ROOT: the text is damaged")
            for x in computation.instructions:
                for name in x.operands:
                    if name not in named:
                        raise AuditError(f"{x} uses %{name}, which is not in the text")
                if not x.operands and x.rest and x.opcode not in ("constant", "parameter"):
                    raise AuditError(f"the operands of {x} are not understood: ({x.rest[:80]})")
                for role, name in _calls_in(x.attributes):
                    if name not in self.computations:
                        raise AuditError(f"{x} calls %{name}, which is not in the text")
                    x.calls.append((role, self.computations[name]))
                    self.computations[name].callers.append(x)

    @cached_property
    def donated(self) -> list[int]:
        """The results, by their number, that are written into the memory of arguments."""
        start = self.header.find("input_output_alias={")
        if start < 0:
            return []
        begin = start + len("input_output_alias=")
        aliases = self.header[begin : _end_of_value(self.header, begin)]
        return [int(index or 0) for index in re.findall(r"\{(\d*)\}: \(\d+, ", aliases)]

    @property
    def name(self) -> str:
        """The name of the function that was compiled."""
        return re.split(r"[ ,]", self.header)[1].removeprefix("jit_")

    def frames(self, x: Instruction) -> list[str]:
        """The lines of Python of its traceback, as `path:line`, the innermost first."""
        match = _FRAME.search(x.attributes)
        return [] if match is None else self._stack(int(match[1]))

    def _stack(self, frame: int) -> list[str]:
        if frame not in self._stacks:
            lines: list[str] = []
            self._stacks[frame] = lines
            entry = self._fields("StackFrames", frame)
            path, line = self._line(entry.get("file_location_id", 0))
            lines += [f"{path}:{line}"] if path else []
            # The text numbers parents from 1, and 1 means none.
            lines += self._stack(entry["parent_frame_id"] - 1) if "parent_frame_id" in entry else []
        return self._stacks[frame]

    def instructions(self) -> Iterator[Instruction]:
        """Those of all computations."""
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


def _calls_in(attributes: str) -> list[tuple[str, str]]:
    """The names of computations, with the attributes that name them."""
    if "=%" not in attributes and "={%" not in attributes:
        return []
    metadata = attributes.find(", metadata={")
    before_metadata = attributes if metadata < 0 else attributes[:metadata]
    return [
        (role, name)
        for role, names in _CALLS.findall(before_metadata)
        for name in re.findall(r"[\w.\-]+", names)
    ]
