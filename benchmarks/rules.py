"""What choosing placements by rule costs, beside raw regular expressions over the paths.

    python benchmarks/rules.py            every row, a minute
    python benchmarks/rules.py --quick    fewer repeats, for a rough look

The times are those of one leaf of an abstract transformer; no device is touched. The peer is the
least that one could write by hand: the first regular expression that is found in the text of a path
gives the spec. It checks nothing. How ours and the peer are timed is told in side_by_side.py.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from side_by_side import Row, compare, print_header, print_row, race, show

import mylib
from mylib.rules import by_axes, by_path, fsdp, replicated

MESH = AbstractMesh((128, 8), ("data", "model"))
PATTERNS = {
    "attention.query_proj.weight": P("model"),
    "attention.key_proj.weight": P("model"),
    "attention.value_proj.weight": P("model"),
    "attention.output_proj.weight": P(None, "model"),
    "up.weight": P("model"),
    "up.bias": P("model"),
    "down.weight": P(None, "model"),
}


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear


NAMES = {Block: {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}}
AXES = {"heads": "model", "mlp": "model"}
RULES = {
    "by_path, the rest replicated": by_path(PATTERNS) | replicated(),
    "by_path, filled by fsdp": by_path(PATTERNS) & fsdp("data"),
    "by_axes, the rest replicated": by_axes(AXES, names=NAMES) | replicated(),
    "fsdp": fsdp("data"),
    "a plain function": lambda leaf: P(),
}
# The limits are on the ratio at the largest size.
LIMITS = {
    "by_path, the rest replicated": 6.0,
    "by_path, filled by fsdp": 8.0,
    "by_axes, the rest replicated": 15.0,
    "fsdp": 4.0,
}
LEAVES_OF_A_BLOCK = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    effort = 0.2 if parser.parse_args().quick else 1.0
    print_header("no devices")
    for name, rule in RULES.items():
        print_rows(f"resolved by {name}", resolving(rule), LIMITS.get(name), effort)
    print_rows("explained, by_path, filled by fsdp", explaining, None, effort)


Asking = Callable[[Any], Any]


def resolving(rule: Any) -> Asking:
    return lambda model: mylib.resolve(model, rule, mesh=MESH)


def explaining(model: Any) -> Any:
    return mylib.explain(model, RULES["by_path, filled by fsdp"], MESH)


def print_rows(work: str, ours: Asking, limit: float | None, effort: float) -> None:
    for row in rows(work, ours, limit, effort):
        print_row(row.cells())


def rows(work: str, ours: Asking, limit: float | None, effort: float) -> Iterator[Row]:
    each: dict[int, float] = {}
    for count in 100, 1000, 10000:
        tree = blocks(count // LEAVES_OF_A_BLOCK)
        leaves = len(jax.tree.leaves(mylib.resolve(tree, P(), mesh=MESH)))
        calls = [lambda _, tree=tree: ours(tree), lambda _, tree=tree: by_hand(tree)]
        times = race(calls, min(101, 100_000 / count) * effort, wait=False)
        times = [[seconds / leaves for seconds in turns] for turns in times]
        (row,) = compare(f"each of {leaves} leaves, {work}", times, ["regular expressions"])
        each[count] = sorted(times[0])[len(times[0]) // 2]
        if count == 10000 and limit is not None:
            linear = each[count] <= 1.5 * each[1000]
            kept = linear and row.ratio <= limit
            row = row._replace(promise=f"≤ {limit:g}, and ≤ {show(1.5 * each[1000])}", kept=kept)
        yield row


def blocks(count: int) -> list[Block]:
    """So many blocks of a transformer, ten leaves each."""

    def block() -> Block:
        keys = jax.random.split(jax.random.key(0), 3)
        return Block(
            eqx.nn.LayerNorm(4096),
            eqx.nn.MultiheadAttention(32, 4096, key=keys[0]),
            eqx.nn.Linear(4096, 16384, key=keys[1]),
            eqx.nn.Linear(16384, 4096, key=keys[2]),
        )

    abstract = eqx.filter_eval_shape(block)
    return [abstract] * count


EXPRESSIONS = [(re.compile(re.escape(end) + "$"), spec) for end, spec in PATTERNS.items()]


def by_hand(model: Any) -> list[NamedSharding]:
    found: list[NamedSharding] = []
    for path, x in jax.tree_util.tree_flatten_with_path(model)[0]:
        if isinstance(x, jax.ShapeDtypeStruct):
            name = jax.tree_util.keystr(path)
            spec = next((spec for end, spec in EXPRESSIONS if end.search(name)), P())
            found.append(NamedSharding(MESH, spec))
    return found


if __name__ == "__main__":
    main()
