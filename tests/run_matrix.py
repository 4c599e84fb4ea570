"""Runs every legal cell of the placement law's matrix, or compares functions over it.

python tests/run_matrix.py                  every cell, filter_shard and filter_device_put
python tests/run_matrix.py --compare        the docs' table: ours beside JAX's and Equinox's
python tests/run_matrix.py --only scan      the cells whose name contains a text
"""

import argparse
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "transfer"))
sys.path.append(str(Path(__file__).parent.parent))

import conftest  # noqa: F401, I001  (sets the simulated devices up, before JAX starts)
import equinox as eqx
import jax
from matrix import EAGER, Cell, Request, Verb, all_cells, check, pairwise

from test_matrix import filter_device_put, filter_shard

_OURS: dict[str, Verb] = {
    "mylib.filter_shard": filter_shard,
    "mylib.filter_device_put": filter_device_put,
}


def _peer(function):
    def verb(x, request: Request, mesh):
        if request.sharding is None:
            return x
        # A peer is asked in its own words: no mesh beside the spec, no rules, no None.
        sharding = jax.sharding.NamedSharding(mesh, request.placement) if request.free else None
        if jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            # Inside shard_map JAX wants the bare spec.
            return function(x, request.spec)
        if request.in_dict:
            return {"x": function(x["x"], request.sharding), "static": x["static"]}
        return function(x, sharding or request.sharding)

    return verb


_PEERS: dict[str, Verb] = {
    "equinox.filter_shard": _peer(eqx.filter_shard),
    "jax.device_put": _peer(jax.device_put),
    "with_sharding_constraint": _peer(jax.lax.with_sharding_constraint),
    "jax.sharding.reshard": _peer(jax.sharding.reshard),
}


def _failure(cell: Cell, verb: Verb) -> BaseException | None:
    try:
        check(cell, verb)
    except Exception as error:
        return error
    return None


def run_all(cells: list[Cell]) -> int:
    failed = 0
    for name, verb in _OURS.items():
        for n, cell in enumerate(cells):
            if n % 500 == 0:
                print(f"{name}: {n} of {len(cells)} cells, {failed} failed", flush=True)
                # A program for each cell is kept otherwise.
                jax.clear_caches()
            error = _failure(cell, verb)
            if error is not None:
                failed += 1
                print(f"FAILED {name} {cell}", flush=True)
                traceback.print_exception(error, limit=-2)
    print(f"{len(cells) * len(_OURS) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _groups(cell: Cell) -> str:
    kind = cell.mesh.split("_")[0]
    context = "eager" if cell.context in EAGER else "staged"
    if cell.context.startswith("shard_map"):
        context = "in shard_map"
    elif "vmap" in cell.context:
        context += ", vmap"
    return f"{context}, {kind} axes"


def compare(cells: Iterable[Cell]) -> int:
    verbs = {**_OURS, **_PEERS}
    cells = [cell for cell in cells if cell.request != "nothing"]
    right: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for n, cell in enumerate(cells):
        if n % 500 == 0:
            jax.clear_caches()
        total[_groups(cell)] += 1
        for name, verb in verbs.items():
            right[_groups(cell)][name] += _failure(cell, verb) is None
    print("| context and mesh | cells | " + " | ".join(f"`{name}`" for name in verbs) + " |")
    print("|---|---|" + "---|" * len(verbs))
    for group in sorted(total):
        print(
            f"| {group} | {total[group]} | "
            + " | ".join(f"{right[group][n]}" for n in verbs)
            + " |"
        )
    sums = (str(sum(right[group][name] for group in total)) for name in verbs)
    print(f"| all | {total.total()} | " + " | ".join(sums) + " |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cells = [cell for cell in all_cells() if options.only in str(cell)]
    if options.compare:
        # Three selections, each of which covers every pair of choices.
        return compare(dict.fromkeys(cell for seed in range(3) for cell in pairwise(cells, seed)))
    return run_all(cells)


if __name__ == "__main__":
    sys.exit(main())
