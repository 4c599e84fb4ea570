"""What `recompute_resharded` saves, and what it costs: memory, gathers and FLOPs of gradients.

    python benchmarks/checkpoint.py            every row, some minutes
    python benchmarks/checkpoint.py --quick    the scans only

Each pair of rows is one program under `equinox.filter_checkpoint` with one of JAX's policies, and
under `mylib.filter_checkpoint` with the same policy in `recompute_resharded`. Nothing is timed: all
is read from what XLA has compiled. "kept" is what a device holds from the forward to the backward
pass, beside the arguments; "temporary" what it needs at the most while the program runs. Of a
loop's FLOPs one turn is counted; gathers are counted as often as they run.
"""

import os
import sys
from pathlib import Path

# Accelerators compute in the order that needs the least memory; for this backend that is an option.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]
)
# By default as many threads as cores, and with fewer than devices JAX 0.10 may abort.
os.environ.setdefault("NPROC", "32")
# The programs are those of the tests, larger.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

# isort: split
import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jax import checkpoint_policies as policies
from side_by_side import print_header, print_row
from stacks import (
    Measured,
    Size,
    assert_close,
    gathered_activations,
    gathered_weights,
    measure,
    not_at_all,
)

import mylib

SIZE = Size(width=256, hidden=1024, heads=8, depth=8, batch=16, time=128)
POLICIES = {
    "everything_saveable": policies.everything_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": policies.nothing_saveable,
}
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the scans only")
    stackings = ["scan"] if parser.parse_args().quick else ["scan", "unrolled"]
    weights, activations = SIZE.weights / MIB, SIZE.activations / 2 / MIB
    where = (
        f"8 simulated CPU devices; {SIZE.depth} layers, of which a device holds {weights:.0f} MiB "
        f"of gathered weights, or {activations:.0f} MiB of gathered activations"
    )
    print_header(where, ["program", "kept", "temporary", "gathers", "GFLOP", "must hold", "ok"])
    for stacking in stackings:
        for mode in "auto", "explicit", "shard_map":
            for row in weights_rows(mode, stacking):
                print_row(row)
    for stacking in stackings:
        for mode in "auto", "explicit":
            for row in activations_rows(mode, stacking):
                print_row(row)


def weights_rows(mode: str, stacking: str) -> Iterator[list[str]]:
    program = partial(gathered_weights, SIZE, mode, stacking)
    plain = measure(*program(not_at_all))
    yield cells(f"weights, {mode}, {stacking}", plain)
    for name, policy in POLICIES.items():
        theirs = measure(*program(partial(by_equinox, policy=policy)))
        ours = measured_by_us(program, policy)
        yield cells(name, theirs)
        if (mode, stacking) == ("shard_map", "unrolled") and jax.__version_info__ < (0, 11):
            # This version's CPU backend merges the gathers again.
            yield cells("... recompute_resharded", ours)
        elif name == "everything_saveable":
            shards = 0 if stacking == "scan" else SIZE.weights // 8
            spare = SIZE.weights - shards
            yield cells("... recompute_resharded", ours, *spared(ours, theirs, spare, stacking))
            assert_close(ours.results, plain.results, rtol=1e-3)
        else:
            least = ours.needed_bytes <= 1.01 * theirs.needed_bytes
            yield cells("... recompute_resharded", ours, "no more", least)
            assert_close(ours.results, plain.results, rtol=1e-3)


def activations_rows(mode: str, stacking: str) -> Iterator[list[str]]:
    program = partial(gathered_activations, SIZE, mode, stacking)
    plain, policy = measure(*program(not_at_all)), policies.everything_saveable
    yield cells(f"activations, {mode}, {stacking}", plain)
    peer = measure(*program(partial(by_equinox, policy=policy)))
    yield cells("everything_saveable", peer)
    if mode == "auto":
        peer = measured_by_us(program, policy, pinned=False)
        yield cells("... recompute_resharded, not pinned", peer)
    ours = measured_by_us(program, policy)
    # Along "data" they are split all the time; of the rest a quarter stays.
    spare = SIZE.activations // 2 * 3 // 4
    yield cells("... recompute_resharded", ours, *spared(ours, peer, spare, stacking))
    assert_close(ours.results, plain.results, rtol=1e-3)


def by_equinox(fun: Callable[..., Any], *, policy: Any, prevent_cse: bool, **_: Any) -> Any:
    return eqx.filter_checkpoint(fun, policy=policy, prevent_cse=prevent_cse)


def measured_by_us(program: Callable[..., Any], policy: Any, **options: Any) -> Measured:
    policy = mylib.recompute_resharded(policy)
    return measure(*program(partial(mylib.filter_checkpoint, policy=policy), **options))


def spared(ours: Measured, peer: Measured, nbytes: int, stacking: str) -> tuple[str, bool]:
    """Whether what was gathered is gone, at less than a hundredth more FLOPs. In a loop it shows in
    what is needed. Unrolled, a CPU program needs the most at another time.
    """
    in_loop = stacking == "scan"
    column = "temporary" if in_loop else "kept"
    needed, kept = peer.needed_bytes - ours.needed_bytes, peer.kept_bytes - ours.kept_bytes
    gone = (needed if in_loop else kept) >= 0.98 * nbytes
    return (
        f"{column} -{nbytes / MIB:.0f} MiB, FLOPs ≤ 1.01",
        gone and ours.flops <= 1.01 * peer.flops,
    )


def cells(name: str, of: Measured, promise: str = "", ok: bool | None = None) -> list[str]:
    return [
        name,
        f"{of.kept_bytes / MIB:.1f} MiB",
        f"{of.needed_bytes / MIB:.1f} MiB",
        f"{of.gathers} of {of.gathered_bytes / MIB:.0f} MiB",
        f"{of.flops / 1e9:.2f}",
        promise,
        {None: "", True: "ok", False: "MISSED"}[ok],
    ]


if __name__ == "__main__":
    main()
