"""The models of examples/models on machines that are not here: memory, and bytes that are sent.

    python benchmarks/models.py --machine "h100 x 16" --write
    python benchmarks/models.py --machine "v5e 4x4" --only llama --write

Prints a row for each model and strategy, and writes it into benchmarks/results/models.md, whose
other rows stay. Models have few layers and are narrow, so that a row takes about a minute; stacked
layers are compiled once, however many there are. `--full` compiles what a program compiles itself.

"By hand" is the same program with what JAX alone has, as MaxText writes it: each layer in
`jax.checkpoint`, its weights gathered by `jax.lax.with_sharding_constraint`. Generating has no
layers to gather: by hand it is `jax.jit`, with a sharding for each leaf.
"""

import argparse
import importlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib._core.text import show_bytes
from mylib.machines import Machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "models.md"
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


# What differs from the size that the program compiles itself.
_LLAMA = {
    "layers": 4,
    "width": 1024,
    "heads": 16,
    "groups": 4,
    "hidden": 4096,
    "vocab": 8192,
    "time": 512,
    "rows": 32,
}
SIZES = {
    "llama": _LLAMA,
    "adapters": _LLAMA,
    "generate": _LLAMA,
    "experts": {
        "layers": 2,
        "width": 512,
        "heads": 8,
        "hidden": 2048,
        "vocab": 8192,
        "time": 256,
        "rows": 32,
    },
    "long_context": {"layers": 2, "width": 512, "heads": 4, "vocab": 8192, "time": 4096},
    "vit": {"layers": 4, "width": 512, "heads": 8, "image": 112},
    "state_space": {
        "layers": 2,
        "width": 512,
        "states": 512,
        "vocab": 8192,
        "time": 512,
        "rows": 32,
    },
    "unet": {"image": 32},
    "gan": {"width": 2048, "rows": 16384},
}


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
    """In the place of `mylib.fully_shard`. All layers are stacked but those of `eqx.nn.MLP` and of
    the U-Net.
    """
    targets = mylib.resolve(model, used, mesh=mesh)
    stacked = int(hasattr(model, "blocks"))

    def is_layer(x: Any) -> bool:
        return isinstance(x, layers)

    def wrap(layer: Any, targets: Any) -> Any:
        if not is_layer(layer):
            return layer
        specs = (sharding.spec[stacked:] for sharding in jtu.tree_leaves(targets))
        return ByHand(layer, tuple(NamedSharding(mesh, P(*spec)) for spec in specs))

    return jtu.tree_map(wrap, model, targets, is_leaf=is_layer)


def generated_by_hand(how: Any, mesh: Any, size: Any) -> mylib.results.Report:
    """Generating, compiled by `jax.jit` alone."""
    module = program("generate")
    with jax.set_mesh(mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        model = eqx.filter_eval_shape(program("llama").Llama, size, key)
        arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        rows = NamedSharding(mesh, P(how.rows))

        def run(arrays: Any, prompts: jax.Array) -> jax.Array:
            return module.generate(eqx.combine(arrays, static), prompts, size.time // 2)

        shardings = mylib.resolve(arrays, how.used, mesh=mesh), rows
        compiled = jax.jit(run, in_shardings=shardings, out_shardings=rows)
        prompts = jax.ShapeDtypeStruct((size.rows, size.time // 2), "int32")
        return mylib.audit(compiled, arrays, prompts)


class Row(NamedTuple):
    model: str
    strategy: str
    machine: str
    memory: str
    temporaries: str
    sent: str
    memory_by_hand: str = ""
    sent_by_hand: str = ""


def reports(
    name: str, strategy: str, machine: str, full: bool = False, hand: bool = True
) -> tuple[mylib.results.Report, mylib.results.Report | None]:
    """Ours, and by hand where weights are gathered: compiled for the machine, not run."""
    module, how = program(name), program(name).STRATEGIES[strategy]
    mesh = Machine.of(machine).mesh(**how.axes)
    size = (module if hasattr(module, "LARGE") else program("llama")).LARGE
    size = replace(size, **({} if full else SIZES[name]))
    if name == "generate":
        other = generated_by_hand(how, mesh, size) if hand else None
        return module.report(how, mesh, size), other
    if hasattr(module, "task"):
        report = partial(program("running").report, module.task(size, **how.options))
    else:
        report = partial(module.report, size)
    gathers = hand and how.kept != how.used
    return report(how, mesh), report(how, mesh, by_hand) if gathers else None


def measured(name: str, strategy: str, machine: str, full: bool = False, hand: bool = True) -> Row:
    ours, other = reports(name, strategy, machine, full, hand)
    sums = [ours.memory.total, ours.memory.temporaries, ours.wire_bytes()]
    sums += [] if other is None else [other.memory.total, other.wire_bytes()]
    return Row(f"{name}, full size" if full else name, strategy, machine, *map(show_bytes, sums))


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


def _place(row: Row) -> tuple[int, bool, str, int]:
    name = row.model.removesuffix(", full size")
    strategies = list(program(name).STRATEGIES)
    is_full = name != row.model
    return PROGRAMS.index(name), is_full, row.machine, strategies.index(row.strategy)


def write(rows: list[Row]) -> None:
    text = PAGE.read_text()
    known = {row[:3]: row for row in (*rows_of(text), *rows)}
    table = COLUMNS, ["---"] * len(COLUMNS), *sorted(known.values(), key=_place)
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: "\n".join([BEGIN, "", *lines, "", END]), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--strategy")
    parser.add_argument("--full", action="store_true", help="of full size: minutes for a row")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # a machine that is compiled for need not be here
    for name in PROGRAMS if options.only is None else [options.only]:
        for strategy in program(name).STRATEGIES:
            if options.strategy not in (None, strategy):
                continue
            start = time.perf_counter()
            row = measured(name, strategy, options.machine, options.full)
            print("|", " | ".join(row), "|", f"{time.perf_counter() - start:.0f} s", flush=True)
            if options.write:
                write([row])


if __name__ == "__main__":
    main()
