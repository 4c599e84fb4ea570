"""The lines that do by hand what a plan does."""

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
    lines = ["used = mylib.rules.replicated()"]
    split = {path: spec for path, spec in applying.used[model].items() if spec}
    if split:
        lines = _by_path("used", _patterns(applying.used[model]), "mylib.rules.replicated()")
    stacked = f", stacked={classes}" if is_stacked and layers else ""
    spread = f"mylib.rules.where_even(mylib.rules.fsdp({_text(over)}{stacked}))" if over else ""
    rest = f"used & {spread}" if split and spread else spread or "used"
    fixed = [(_pattern(path), spec) for path, spec in applying.fixed_in(model).items()]
    lines += _by_path("kept", fixed, rest) if fixed else [f"kept = {rest}"]
    policy = POLICIES[applying.policy][0]
    given = [name, classes, "kept", "used", "mesh=mesh"]
    given += [f"dtype=jnp.{jnp.dtype(applying.dtype).name}"] if applying.dtype is not None else []
    given += [f"policy={policy}"] if policy else []
    given += [f"saved={spec_text(applying.saved)}"] if applying.saved else []
    lines.append("# in the loss:")
    target = name if name.isidentifier() else "model"
    call = f"{target} = mylib.fully_shard({', '.join(given)})"
    if len(call) > _WIDTH:
        call = f"{target} = mylib.fully_shard(\n    " + ",\n    ".join(given) + ",\n)"
    return [*lines, *call.splitlines()]


def _by_path(name: str, patterns: Sequence[tuple[str, Spec]], rest: str) -> list[str]:
    lines = [f"        {_text(k)}: {spec_text(v)}," for k, v in patterns]
    return [f"{name} = mylib.rules.by_path(", "    {", *lines, "    }", f") | {rest}"]


def _patterns(specs: Mapping[str, Spec]) -> list[tuple[str, Spec]]:
    """A pattern for each spec that splits something: one for all layers where they agree."""
    alike: dict[str, set[Spec]] = {}
    for path, spec in specs.items():
        alike.setdefault(role_of(path), set()).add(spec)
    found: dict[str, Spec] = {}
    for path, spec in specs.items():
        role = role_of(path)
        if spec:
            found[_pattern(role if len(alike[role]) == 1 else path)] = spec
    return sorted(found.items())


def _pattern(path: str) -> str:
    parts = path.replace("[", ".").replace("]", "").replace("'", "").split(".")
    return ".".join(part for part in parts if part)


def spec_text(spec: Spec) -> str:
    return f"P({', '.join(map(_text, spec))})"


def _text(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))})"
    return f'"{x}"' if isinstance(x, str) else repr(x)
