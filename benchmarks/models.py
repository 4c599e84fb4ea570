"""The models of examples/models on machines that are not here: memory, and bytes that are sent.

    python benchmarks/models.py --machine "h100 x 16" --write
    python benchmarks/models.py --machine "v5e 4x4" --only llama --write

Prints a row for each model and strategy, and writes it into the table of docs/models.md, whose
other rows stay. "By hand" is the same program with what JAX alone has, as MaxText writes it: each
layer in `jax.checkpoint`, its weights gathered by `jax.lax.with_sharding_constraint`.
"""

import argparse
import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib._text import show_bytes
from mylib.machines import Machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
PROGRAMS = (
    "llama",
    "experts",
    "long_context",
    "adapters",
    "vit",
    "state_space",
    "generate",
    "unet",
    "gan",
)
COLUMNS = (
    "model",
    "strategy",
    "machine",
    "memory",
    "temporaries",
    "sent",
    "by hand: memory",
    "sent",
)
BEGIN, END = "<!-- table of models -->", "<!-- end of the table -->"


class ByHand(eqx.Module):
    """A layer that gathers its weights with what JAX alone has. It may be one of a stack."""

    layer: Any
    used: tuple[NamedSharding, ...] = eqx.field(static=True)

    def __call__(self, *args: Any) -> Any:
        arrays, static = eqx.partition(self.layer, eqx.is_array)
        leaves, structure = jtu.tree_flatten(arrays)

        @jax.checkpoint
        def run(leaves: list[Any], args: Any) -> Any:
            whole = map(jax.lax.with_sharding_constraint, leaves, self.used)
            return eqx.combine(jtu.tree_unflatten(structure, whole), static)(*args)

        return run(leaves, args)


def by_hand(model: Any, layers: Any, kept: Any, used: Any, *, mesh: Any) -> Any:
    """In the place of `mylib.fully_shard`, for stacked layers."""
    targets = mylib.resolve(model, used, mesh=mesh)

    def is_layer(x: Any) -> bool:
        return isinstance(x, layers)

    def wrap(layer: Any, targets: Any) -> Any:
        if not is_layer(layer):
            return layer
        shardings = [
            NamedSharding(mesh, P(*sharding.spec[1:])) for sharding in jtu.tree_leaves(targets)
        ]
        return ByHand(layer, tuple(shardings))

    return jtu.tree_map(wrap, model, targets, is_leaf=is_layer)


class Row(NamedTuple):
    model: str
    strategy: str
    machine: str
    memory: str
    temporaries: str
    sent: str
    memory_by_hand: str = ""
    sent_by_hand: str = ""


def measured(name: str, strategy: str, machine: str, size: str = "LARGE") -> Row:
    """One row: compiled for the machine, not run."""
    module, found = program(name), Machine.of(machine)
    how = module.STRATEGIES[strategy]
    mesh, hand = found.mesh(**how.axes), None
    numbers = getattr(module if hasattr(module, size) else program("llama"), size)
    if hasattr(module, "task"):
        task = module.task(numbers, **how.options)
        report = program("running").report
        ours = report(task, how, mesh)
        hand = report(task, how, mesh, by_hand) if name in STACKED else None
    elif name == "generate":
        ours = module.report(how, mesh, numbers)
    else:
        ours = module.report(numbers, how, mesh)
    sums = [show_bytes(ours.memory.total), show_bytes(ours.memory.temporaries)]
    sums += [show_bytes(ours.wire_bytes())]
    if hand is not None:
        sums += [show_bytes(hand.memory.total), show_bytes(hand.wire_bytes())]
    return Row(name if size == "LARGE" else f"{name}, small", strategy, machine, *sums)


# Those that train stacked layers, which are also written by hand.
STACKED = ("llama", "experts", "adapters", "vit", "state_space")


def program(name: str) -> Any:
    """One of the programs as a module."""
    folder = str(ROOT / "examples" / "models")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def rows_of(text: str) -> Iterator[Row]:
    """The rows of the table in a page."""
    table = text[text.index(BEGIN) : text.index(END)]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (
            line.startswith("|")
            and len(cells) == len(COLUMNS)
            and cells[0] not in (COLUMNS[0], "---")
        ):
            yield Row(*cells)


def write(rows: list[Row]) -> None:
    text = PAGE.read_text()
    known = {row[:3]: row for row in (*rows_of(text), *rows)}
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * 8, *known.values())]
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: "\n".join([BEGIN, "", *lines, "", END]), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--strategy")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # a machine that is compiled for need not be here
    for name in PROGRAMS if options.only is None else [options.only]:
        for strategy in program(name).STRATEGIES:
            if options.strategy not in (None, strategy):
                continue
            start = time.perf_counter()
            row = measured(name, strategy, options.machine, "SMALL" if options.small else "LARGE")
            print("|", " | ".join(row), "|", f"{time.perf_counter() - start:.0f} s", flush=True)
            if options.write:
                write([row])


if __name__ == "__main__":
    main()
