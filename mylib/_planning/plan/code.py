"""The lines that do by hand what a plan does."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._core.text import show_spec
from ..._core.tree import Pattern, joined, parts_in
from .apply import Applying
from .fixes import MODEL, Spec
from .trace import POLICIES, role_of

# A call that is longer has one argument a line, as Black and Ruff write it by default.
_WIDTH = 88


def code_of(
    applying: Applying, axes: Mapping[str, int], is_sharded: bool, stacked: Sequence[str]
) -> str:
    """`stacked` are the paths of models with stacked layers."""
    sizes = ", ".join(f"{axis}={n}" for axis, n in axes.items())
    rows = [axis for axis in axes if axis != MODEL]
    entry = _text(rows[0] if len(rows) == 1 else tuple(rows))
    of_rows = f"batch({entry})" if rows else "replicated()"
    lines = [f"mesh = mylib.make_mesh({sizes})", f"rows = mylib.rules.{of_rows}"]
    imports, named = _imported(applying.layers)
    over = "data" if is_sharded else None
    for model, end in _endings(applying).items():
        layers = [named[applying.layers[i]] for i in applying.layered[model]]
        classes = layers[0] if len(layers) == 1 else f"({', '.join(layers)})"
        # A model without layers is one layer.
        classes = classes if layers else "lambda module, path: not path"
        is_stacked = model in stacked and bool(layers)
        lines += _of_model(applying, model, over, classes, is_stacked, end)
    if applying.by_matrix:
        kept = " or ".join(f"kept{end}" for end in _endings(applying).values())
        lines += [f"# the optimiser: mylib.by_matrix(transform, {kept}, mesh=mesh)"]
    text = "\n".join(lines)
    imports += [line for pattern, line in _IMPORTS.items() if re.search(pattern, text)]
    imports.sort(key=lambda line: (not line.startswith("import"), line))
    return "\n".join([*imports, "", text]).rstrip()


# What is imported if it occurs.
_IMPORTS = {
    r"\bjax\.": "import jax",
    r"\bjnp\.": "import jax.numpy as jnp",
    r"\bmylib\.": "import mylib",
    r"\bP\(": "from jax.sharding import PartitionSpec as P",
}


def _endings(applying: Applying) -> dict[str, str]:
    """For the path of each model: the end of the names of what is its own."""
    models, ends = list(dict.fromkeys(applying.order)), dict[str, str]()
    for model in models if len(models) > 1 else ():
        end = re.sub(r"\W+", "_", f"_{applying.called(model)}").rstrip("_")
        while end in ends.values():
            end += "_"
        ends[model] = end
    return ends or {models[0]: ""}


def _imported(classes: Iterable[type]) -> tuple[list[str], dict[type, str]]:
    """The lines that import classes, and how they are then called. A class that can't be imported,
    such as of a notebook, is in scope where it was defined.
    """
    lines, named, taken = list[str](), dict[type, str](), set[str]()
    for cls in classes:
        root, dot, inner = cls.__qualname__.partition(".")
        module = _public(cls, root)
        if module is None:
            named[cls] = cls.__qualname__.rpartition("<locals>.")[2]
            continue
        name = root
        while name in taken:
            name += "_"
        taken.add(name)
        line = f"from {module} import {root}"
        lines.append(line if name == root else f"{line} as {name}")
        named[cls] = name + dot + inner
    return list(dict.fromkeys(lines)), named


def _public(cls: type, root: str) -> str | None:
    """The first of a class's module and those around it from which it can be imported."""
    parts, found = cls.__module__.split("."), sys.modules.get(cls.__module__)
    outer = getattr(found, root, None)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls or parts == ["__main__"]:
        return None
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next(x for x in around if getattr(sys.modules.get(x), root, None) is outer)


def _of_model(
    applying: Applying, model: str, over: str | None, classes: str, is_stacked: bool, end: str
) -> list[str]:
    """The rules for a model, and a function that shards it; `end` is the end of their names."""
    kept, used, specs = f"kept{end}", f"used{end}", applying.used[model]
    split = [path for path, spec in specs.items() if spec]
    lines = _by_path(used, split, specs, "mylib.rules.replicated()")
    stacked = f", stacked={classes}" if is_stacked else ""
    spread = f"mylib.rules.where_even(mylib.rules.fsdp({_text(over)}{stacked}))" if over else ""
    rest = f"{used} & {spread}" if split and spread else spread or used
    lines += _by_path(kept, applying.fixed_in(model), applying.kept(model).specs, rest)
    policy = POLICIES[applying.policy][0]
    called = applying.called(model)
    name = called if called.isidentifier() else "model"
    texts = [name, classes, kept, used, "mesh=mesh"]
    texts += [f"dtype=jnp.{jnp.dtype(applying.dtype).name}"] if applying.dtype is not None else []
    texts += [f"policy={policy}"] if policy else []
    texts += [f"saved={_spec_text(applying.saved)}"] if applying.saved else []
    call = f"    return mylib.fully_shard({', '.join(texts)})"
    if len(call) > _WIDTH:
        call = "    return mylib.fully_shard(\n        " + ",\n        ".join(texts) + ",\n    )"
    how = f"{called} = sharded{end}({called})"
    if name != called:
        how = f"sharded{end}({called}) instead of {called}"
    return [*lines, "", "", f"def sharded{end}({name}):", f"    # in the loss: {how}", call, "", ""]


def _by_path(name: str, paths: Sequence[str], specs: Mapping[str, Spec], rest: str) -> list[str]:
    """A rule that places these of the paths of `specs`, and the others by `rest`."""
    if not paths:
        return [f"{name} = {rest}"]
    patterns, is_ordered = _patterns(paths, specs)
    lines = [f"        {_text(k)}: {_spec_text(v)}," for k, v in patterns]
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
        if any(
            spec != fixed and Pattern(pattern).ends(joined(parts_in(path)))
            for pattern, fixed in by_pattern.items()
        )
    }
    ordered = sorted({**by_pattern, **others}.items(), key=lambda x: (-x[0].count("."), x[0]))
    return ordered, bool(others)


def _pattern(path: str) -> str:
    if _ODD.search(path):
        return path
    parts = path.replace("[", ".").replace("]", "").replace("'", "").split(".")
    return ".".join(part for part in parts if part)


# Keys of dicts with dots or brackets.
_ODD = re.compile(r"\['[^']*[.\[\]][^']*'\]")


def _spec_text(spec: Spec) -> str:
    return show_spec(PartitionSpec(*spec)).replace("'", '"')


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
