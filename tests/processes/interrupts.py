"""Interrupts a refused call at each line of `mylib/_moving/processes`, in one of two processes.

    python -m mylib.testing launch -n 2 tests/processes/interrupts.py placement
    python -m mylib.testing launch -n 2 tests/processes/interrupts.py check_replicas 40 60

The call must fail in both, and the next ones, which are equal, must work. It begins with the line
that counts it (`CommonCall._begin`): what is interrupted before that has not been called. Numbers
repeat some lines.
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import mylib
from mylib._moving.processes import gather_messages

ROOM = str(Path(gather_messages.__code__.co_filename).parent)


class At:
    """Raises KeyboardInterrupt at the `count`th line of the room in a call that has begun."""

    def __init__(self, count: int):
        self.left, self.place, self.has_begun = count, "", False

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        self.has_begun |= frame.f_code.co_qualname == "CommonCall._begin"
        if event == "line" and self.has_begun:
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def outcome(call, trace=None) -> str:
    sys.settrace(trace)
    try:
        call()
        return "returned"
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.settrace(None)


def main(case: str, first: int = 1, last: int = 100_000) -> None:
    jax.distributed.initialize()
    me, everybody, mesh = jax.process_index(), (0, 1), mylib.make_mesh(d=-1)
    differs = np.full(4, me, np.float32)
    copies = mylib.filter_shard(differs, P(), mesh=mesh, check=False)
    calls = {
        "placement": lambda: mylib.filter_shard(differs, P(), mesh=mesh),
        "rows": lambda: mylib.filter_shard(differs, P("d"), mesh=mesh),
        "rule": lambda: mylib.filter_shard(differs, P("e" if me else "f"), mesh=mesh),
        "check_replicas": lambda: mylib.check_replicas(copies),
        "to_global": lambda: mylib.data.to_global(differs, P(), mesh=mesh, check=True),
    }
    wrong = []
    for number in range(first, last + 1):
        for who in everybody:
            gather_messages("interrupts", "", everybody, timeout=60)
            start, at = time.monotonic(), At(number)
            got = outcome(calls[case], at if who == me else None)
            seconds = time.monotonic() - start
            # Equal in both, and another one in each step.
            same = np.full(4, number, np.float32)
            then = [
                outcome(lambda x=same: mylib.filter_shard(x, P("d"), mesh=mesh)) for _ in range(2)
            ]
            mine = [got, round(seconds, 1), then, at.place]
            told = gather_messages("interrupts", mine, everybody, timeout=60)
            (hit, *_, place), (other, late, *_) = told[who], told[1 - who]
            fails = "PlacementError", "ReplicaError", "AbsentError"
            good = hit == "interrupted" or not place
            good &= other.split(":")[0] in fails and late < 3
            good &= all(x[2] == ["returned"] * 2 for x in told)
            if not good:
                wrong.append(number)
                if me == 0:
                    print(f"line {number} ({place}) in process {who}: {told}", flush=True)
        if not place:
            break
    assert number > first, "no line of the room was met"
    if me == 0:
        print(f"{case}: {number - first} lines in each process, wrong: {wrong}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
