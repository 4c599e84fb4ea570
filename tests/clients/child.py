"""Runs the checks of one client, with Equinox's verbs or with ours: a process that run.py starts.

python tests/clients/child.py CLIENT equinox|mylib FILE

FILE gets a line of JSON for each check as it begins and as it ends. Checks that are in it already
are left out: after one that has ended the process, or has hung, the next process does the rest.
"""

import os
import sys

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

# isort: split
import faulthandler
import importlib
import json
import re
import traceback
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
from outcomes import records

# More than one check should ever take.
SECONDS = 180

client, verbs, file = sys.argv[1:]
calls = None
if verbs == "mylib":
    import verbs as ours

    ours.put_in_place()
    calls = ours.CALLS


def written(x: Any) -> Any:
    """A result in a form that can be compared in another process."""
    if isinstance(x, np.ndarray | np.generic):
        return [f"{x.dtype}{list(x.shape)}", "host", np.ravel(x).astype(np.float64).tolist()]
    if not isinstance(x, jax.Array):
        return re.sub(" at 0x[0-9a-f]+", "", repr(x))
    kind = f"{x.dtype}{list(x.shape)}"
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    spec = getattr(x.sharding, "spec", ())
    # P("data") and P("data", None) are one placement.
    while spec and spec[-1] is None:
        spec = spec[:-1]
    where = f"{tuple(spec)} of {len(x.sharding.device_set)} devices"
    return [kind, where, np.ravel(np.asarray(x)).astype(np.float64).tolist()]


def missing_calls(own: str | None) -> str | None:
    """Why what was run says nothing of our verbs."""
    if calls is None:
        return None
    if not calls:
        return "none of mylib's verbs was called"
    if own is not None and not any(caller == own for _, caller in calls):
        return f"{own} itself called none of mylib's verbs"
    return None


def main() -> None:
    begun = {record["check"] for record in records(Path(file))}
    with open(file, "a") as out:

        def write(check: str, about: str, error: str | None, results: Any) -> None:
            record = {"check": check, "about": about, "error": error, "results": results}
            print(json.dumps(record), file=out, flush=True)

        try:
            module = importlib.import_module(f"check_{client}")
        except Exception as error:
            traceback.print_exc()
            write("import", "", error_line(error), None)
            return
        for name, check in common.CHECKS.items():
            if name in begun:
                continue
            about = getattr(module, name.partition("[")[0]).__doc__.splitlines()[0]
            write(name, about, "the process died, or did not finish", None)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            if calls is not None:
                calls.clear()
            try:
                flat = jax.tree_util.tree_flatten_with_path(check())[0]
                results = {jax.tree_util.keystr(path): written(x) for path, x in flat}
                error = missing_calls(module.OWN)
            except Exception as raised:
                traceback.print_exc()
                results, error = None, error_line(raised)
            faulthandler.cancel_dump_traceback_later()
            write(name, about, error, results)


def error_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


if __name__ == "__main__":
    main()
