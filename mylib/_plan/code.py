"""The lines that do by hand what a plan does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .apply import Applying
from .fixes import MODEL, Spec
from .trace import POLICIES, role_of

_WIDTH = 88


def code_of(
    applying: Applying, axes: Mapping[str, int], is_sharded: bool, stacked: Sequence[str]
) -> str:
    """`stacked` are the paths of models with stacked layers."""
    sizes = ", ".join(f"{axis}={n}" for axis, n in axes.items())
    lines = [f"mesh = mylib.make_mesh({sizes})"]
    models = list(dict.fromkeys(applying.order))
    for model in models:
        lines += _of_model(applying, model, "data" if is_sharded else None, model in stacked)
    rows = [axis for axis in axes if axis != MODEL]
    entry = _text(rows[0] if len(rows) == 1 else tuple(rows))
    of_rows = f"batch({entry})" if rows else "replicated()"
    return "\n".join([*lines, f"rows = mylib.rules.{of_rows}"])


def _of_model(applying: Applying, model: str, over: str | None, is_stacked: bool) -> list[str]:
    name, layers = applying.called(model), applying.layered[model]
    classes = layers[0] if len(layers) == 1 else f"({', '.join(layers)})" if layers else None
    classes = classes or "lambda module, path: not path"
    specs = applying.used[model]
    split = [path for path, spec in specs.items() if spec]
    lines = _by_path("used", split, specs, "mylib.rules.replicated()")
    stacked = f", stacked={classes}" if is_stacked and layers else ""
    spread = f"mylib.rules.where_even(mylib.rules.fsdp({_text(over)}{stacked}))" if over else ""
    rest = f"used & {spread}" if split and spread else spread or "used"
    lines += _by_path("kept", applying.fixed_in(model), applying.kept(model).specs, rest)
    policy = POLICIES[applying.policy][0]
    texts = [name, classes, "kept", "used", "mesh=mesh"]
    texts += [f"dtype=jnp.{jnp.dtype(applying.dtype).name}"] if applying.dtype is not None else []
    texts += [f"policy={policy}"] if policy else []
    texts += [f"saved={spec_text(applying.saved)}"] if applying.saved else []
    lines.append("# in the loss:")
    target = name if name.isidentifier() else "model"
    call = f"{target} = mylib.fully_shard({', '.join(texts)})"
    if len(call) > _WIDTH:
        call = f"{target} = mylib.fully_shard(\n    " + ",\n    ".join(texts) + ",\n)"
    return [*lines, *call.splitlines()]


def _by_path(name: str, paths: Sequence[str], specs: Mapping[str, Spec], rest: str) -> list[str]:
    """A rule that places these of the paths of `specs`, and the others by `rest`."""
    if not paths:
        return [f"{name} = {rest}"]
    patterns, is_ordered = _patterns(paths, specs)
    lines = [f"        {_text(k)}: {spec_text(v)}," for k, v in patterns]
    end = ["    },", "    ordered=True,"] if is_ordered else ["    }"]
    return [f"{name} = mylib.rules.by_path(", "    {", *lines, *end, f") | {rest}"]


def _patterns(
    paths: Sequence[str], specs: Mapping[str, Spec]
) -> tuple[list[tuple[str, Spec]], bool]:
    """A pattern for each of the paths: one for all layers where they agree. As patterns match the
    ends of paths, others that end alike have their own, and the longest pattern counts.
    """
    alike: dict[str, set[tuple[Spec, bool]]] = {}
    for path, spec in specs.items():
        alike.setdefault(role_of(path), set()).add((spec, path in paths))
    pattern_of = {x: _pattern(role_of(x) if len(alike[role_of(x)]) == 1 else x) for x in specs}
    by_pattern = {pattern_of[path]: specs[path] for path in paths}
    others = {
        pattern_of[path]: spec
        for path, spec in specs.items()
        if any(spec != fixed and _ends(path, pattern) for pattern, fixed in by_pattern.items())
    }
    ordered = sorted({**by_pattern, **others}.items(), key=lambda x: (-x[0].count("."), x[0]))
    return ordered, bool(others)


def _ends(path: str, pattern: str) -> bool:
    parts = pattern.split(".")
    ends = _pattern(path).split(".")[-len(parts) :]
    return len(ends) == len(parts) and all(a in ("*", b) for a, b in zip(parts, ends, strict=True))


def _pattern(path: str) -> str:
    if _ODD.search(path):
        return path
    parts = path.replace("[", ".").replace("]", "").replace("'", "").split(".")
    return ".".join(part for part in parts if part)


# Keys of dicts with dots or brackets.
_ODD = re.compile(r"\['[^']*[.\[\]][^']*'\]")


def spec_text(spec: Spec) -> str:
    return f"P({', '.join(map(_text, spec))})"


def _text(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))})"
    return f'"{x}"' if isinstance(x, str) else repr(x)
