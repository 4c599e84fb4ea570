"""Random products, elementwise programs and changes of sharding, and a second, simple reader of
what the compiler makes of them: each line that starts a collective, counted as it stands.

By hand: `python tests/audit/random_programs.py --seeds 0-300` reads many on the CPU, with
`--machine "h100 x 8"` what XLA's compiler for that writes, and `--only 17` one, whose text is
printed.
"""

import argparse
import collections
import itertools
import math
import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib

MESHES = {"8": {"a": 8}, "4x2": {"a": 4, "b": 2}, "2x2x2": {"a": 2, "b": 2, "c": 2}}
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
# Each takes two matrices of one shape, and a third that has the same sharding as the first.
BODIES: dict[str, Callable[..., Any]] = {
    "product": lambda x, w, z: x @ w,
    "product and sum": lambda x, w, z: x @ w + z,
    "product by rows": lambda x, w, z: x @ w.T,
    "product by columns": lambda x, w, z: x.T @ w,
    "two products": lambda x, w, z: jnp.tanh(x @ w) @ w.T,
    "two equal products": lambda x, w, z: (x @ w, z @ w),
    "gradient": jax.grad(lambda x, w, z: jnp.sum(jnp.tanh(x @ w) * z), argnums=(0, 1)),
    "outer product": lambda x, w, z: jnp.einsum("i,j->ij", x[:, 0], w[0]),
    "elementwise": lambda x, w, z: jnp.sin(x) * 1.5 + w,
    "moved": lambda x, w, z: x * 1.5,
    "transposed": lambda x, w, z: x.T + w,
    "sum": lambda x, w, z: jnp.sum(x * w),
    "sum of rows": lambda x, w, z: jnp.sum(x, 0)[None] + w,
    "mean and maximum": lambda x, w, z: x - jnp.max(x, 1, keepdims=True) + jnp.mean(w),
    "rolled": lambda x, w, z: jnp.roll(x, 8, 0) + w,
    "halves": lambda x, w, z: jnp.concatenate([x[32:], w[:32]]),
    "reversed": lambda x, w, z: x[::-1] @ w,
}


@dataclass(frozen=True)
class Program:
    body: str
    mesh: str
    dtype: str
    specs: tuple[P, P]
    between: P | None
    result: P | None

    def compiled(self, devices: Sequence[Any]) -> tuple[jax.stages.Compiled, Mesh]:
        axes = MESHES[self.mesh]
        placed = np.array(devices[:8]).reshape(*axes.values())
        mesh = Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        first, second = (
            jax.ShapeDtypeStruct((64, 64), self.dtype, sharding=NamedSharding(mesh, spec))
            for spec in self.specs
        )

        def fun(x: Any, w: Any, z: Any) -> Any:
            if self.between is not None:
                constrained = NamedSharding(mesh, self.between)
                x = jax.lax.with_sharding_constraint(jnp.sin(x), constrained)
            result = BODIES[self.body](x, w, z)
            if self.result is None:
                return result
            return jax.tree.map(lambda y: self._placed(y, mesh), result)

        return jax.jit(fun).lower(first, second, first).compile(), mesh

    def _placed(self, y: Any, mesh: Mesh) -> Any:
        spec = self.result if y.ndim else P()
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, spec))


def draw(seed: int) -> Program:
    choose = random.Random(seed)
    mesh = choose.choice([*MESHES, "2x2x2", "4x2"])

    def spec() -> P:
        names = list(MESHES[mesh])
        choose.shuffle(names)
        used = names[: choose.randint(0, len(names))]
        rows = choose.randint(0, len(used))
        return P(*(tuple(part) or None for part in (used[:rows], used[rows:])))

    return Program(
        choose.choice([*BODIES, "product", "moved", "product"]),
        mesh,
        choose.choice(["float32", "float32", "bfloat16"]),
        (spec(), spec()),
        spec() if choose.random() < 0.3 else None,
        spec() if choose.random() < 0.8 else None,
    )


@dataclass(frozen=True)
class Line:
    """A collective as it stands in the text. `groups` are those of devices; of a permutation its
    pairs. `arrays` are the bytes of each of its results; of a reduce-scatter of its operands.
    """

    kind: str
    groups: frozenset[frozenset[int]] | frozenset[tuple[int, int]]
    arrays: tuple[int, ...]


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(
    rf"^\s+(?:ROOT )?%(\S+) = (.*?) ({_KINDS})(?:-start)?\(((?:%[\w.\-]+(?:, )?)+)\), (.*)$", re.M
)
_RESULT = re.compile(r"^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) [a-z][a-z\-]*\((?:%([\w.\-]+))?", re.M)


def lines_of(text: str) -> list[Line]:
    """The collectives of a program without loops."""
    text = re.sub(r"/\*index=\d+\*/", "", text)
    types = {name: type_ for name, type_, _ in _RESULT.findall(text)}
    ended = {operand: type_ for name, type_, operand in _RESULT.findall(text) if "-done" in name}
    lines: list[Line] = []
    for name, type_, kind, operands, rest in _LINE.findall(text):
        result = ended.get(name, type_)
        if kind == "reduce-scatter":
            result = " ".join(types[x.lstrip("%")] for x in operands.split(", "))
        arrays = tuple(
            SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
            for dtype, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        )
        if kind == "collective-permute":
            match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
            pairs = [tuple(map(int, x)) for x in re.findall(r"(\d+),(\d+)", match[1])]
            groups = frozenset((a, b) for a, b in pairs if a != b)
        else:
            groups = frozenset(map(frozenset, _groups(rest)))
            groups = frozenset(group for group in groups if len(group) > 1)
        if groups:
            lines.append(Line(kind, groups, arrays))
    return lines


_PART = re.compile(r"'(\w+)':\((\d+)\)(\d+)")


def _groups(rest: str) -> list[list[int]]:
    """The groups of devices: a list, `[4,2]<=[2,4]T(1,0)`, or axes of a mesh."""
    if match := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", rest):
        return [[*map(int, x.split(","))] for x in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        sizes = [*map(int, match[3].split(","))]
        order = [*map(int, match[4].split(","))] if match[4] else range(len(sizes))
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return ids.reshape(int(match[1]), int(match[2])).tolist()
    pattern = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)(?:T\((.*?)\))?\))? \{(.*?)\}"
    match = re.search(pattern, rest)
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", match[1])}
    ids = np.arange(math.prod(sizes.values()))
    if match[3]:  # a shape, and the order of its dimensions
        ids = ids.reshape([*map(int, match[2].strip("[]").split(","))])
        ids = ids.transpose([*map(int, match[3].split(","))])
    elif match[2]:
        ids = np.array([*map(int, match[2].split(","))])
    # An axis is divided into what comes before the part that is used, that part, and the rest.
    parts = {name: (int(before), int(n)) for name, before, n in _PART.findall(match[4])}
    names = re.findall(r"'(\w+)'", match[4])
    inside, sides = {}, []
    for name, size in sizes.items():
        before, used = parts.get(name, (1, size if name in names else 1))
        inside[name] = len(sides) + 1
        sides += [before, used, size // before // used]
    at = [inside[name] for name in names]
    order = [i for i in range(len(sides)) if i not in at]
    several = math.prod(sides[i] for i in at)
    return ids.reshape(sides).transpose(*order, *at).reshape(-1, several).tolist()


def axes_of(line: Line, axes: dict[str, int]) -> tuple[str, ...]:
    """The axes along which its devices differ, with `~` if they are not all of those."""
    places = {i: place for i, place in enumerate(itertools.product(*map(range, axes.values())))}
    groups = [[places[i] for i in group] for group in line.groups]
    differ = [
        name
        for i, name in enumerate(axes)
        if any(len({place[i] for place in group}) > 1 for group in groups)
    ]
    whole = math.prod(axes[name] for name in differ) == len(groups[0])
    is_pair = line.kind == "collective-permute"
    return tuple(name if whole or is_pair else f"~{name}" for name in differ)


def faults_of(report: mylib.results.Report, text: str) -> list[str]:
    """Where a report differs from its program's text."""
    axes, lines = report.axes, lines_of(text)
    counted, told = collections.Counter[Any](), collections.Counter[Any]()
    for line in lines:
        counted[line.kind, axes_of(line, axes), "bytes"] += sum(line.arrays)
        counted[line.kind, axes_of(line, axes), "times"] += 1
    combined = any(len(line.arrays) > 1 for line in lines)
    faults: list[str] = []
    for c in report.collectives:
        kind = c.kind
        if c.spelling.startswith("all-reduce"):
            # What is kept of a sum is for the reader of `dynamic-slice`.
            kind = "all-reduce"
            faults += [] if "dynamic-slice" in text else ["nothing is sliced"]
        elif c.spelling not in ("", "gathered, then split otherwise"):
            faults.append(f"{c.kind} is spelled {c.spelling!r}")
        named = tuple(f"~{x.split(':')[0]}" if ":" in x else x for x in c.axes or ("?",))
        told[kind, named, "bytes"] += c.bytes
        told[kind, named, "times"] += c.times
    if combined:  # several sums in one may be kept in different ways, and are then several
        counted, told = (
            collections.Counter({key: n for key, n in each.items() if key[-1] == "bytes"})
            for each in (counted, told)
        )
    if counted != told:
        faults.append(f"the text has {dict(counted)}, the report {dict(told)}")
    return faults


def check(program: Program, devices: Sequence[Any]) -> list[str]:
    compiled, mesh = program.compiled(devices)
    return faults_of(mylib.audit(compiled, mesh=mesh), compiled.as_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-50", help="from and to, as in 0-300")
    parser.add_argument("--only", type=int, help="one seed, with the text of its program")
    parser.add_argument("--machine", help='such as "h100 x 8"; by default the CPU')
    args = parser.parse_args()
    devices = jax.devices()
    if args.machine:
        devices = list(mylib.machines.Machine.of(args.machine).devices)
    first, last = map(int, args.seeds.split("-"))
    failed = collectives = 0
    for seed in range(first, last) if args.only is None else [args.only]:
        program = draw(seed)
        try:
            compiled, mesh = program.compiled(devices)
            text = compiled.as_text()
            report = mylib.audit(compiled, mesh=mesh)
            faults = faults_of(report, text)
            str(report)
            collectives += len(report.collectives)
        except Exception:  # what fails is a finding like any other
            faults = [traceback.format_exc()]
        if args.only is not None:
            print(text, report)
        failed += bool(faults)
        for fault in faults:
            print(f"{seed}: {program}\n  {fault}", flush=True)
    print(f"{failed} failed; {collectives} collectives")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
