"""The user's line in messages, also of files whose names begin like a package's."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from traceback import walk_stack
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mylib
from mylib._core.errors import StaticNumberWarning, warn
from mylib._core.jaxprs import line_of
from mylib._core.lines import innermost, is_of_user, line_of_caller
from mylib._moving.watch.stacks import Thread

# Next to the package, and with its name in front.
FILE = str(Path(mylib.__file__).parent.parent / "mylib_train.py")


# A frame in one of JAX's files.
_through_jax = eval(compile("lambda: ask()", jax.__file__, "eval"), {"ask": line_of_caller})


def run(code: str, **names: Any) -> Any:
    """What `result` is after this code of the user's file."""
    exec(compile(dedent(code), FILE, "exec"), names)
    return names["result"]


def test_a_file_named_like_the_package():
    assert is_of_user(FILE) and is_of_user(FILE.replace("mylib_", "jax_"))
    assert run("result = ask()", ask=line_of_caller) == "mylib_train.py:1"
    assert run("\nresult = ask()", ask=_through_jax) == "mylib_train.py:2"


def test_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("result = 1\nwarn('look', kind)", warn=warn, kind=StaticNumberWarning)
    assert (caught[0].filename, caught[0].lineno) == (FILE, 2)


def test_stacks():
    def stack():
        here = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        return Thread("", [frame for frame, _ in walk_stack(here)])

    thread = run("\n\nresult = stack()", stack=stack)
    assert thread.where() == "mylib_train.py:3 in <module>"
    assert "mylib_train.py:3 in <module>" in thread.lines()


def test_programs():
    f = run("def result(x):\n    return (x * 2).sum()")
    equations = jax.make_jaxpr(f)(jnp.ones(3)).jaxpr.eqns
    assert all(line_of(eqn) == f"{FILE}:2 (result)" for eqn in equations)


def test_audits():
    mesh = mylib.make_mesh(data=8)
    loss = run("def result(x):\n    return (x * 2).sum()")
    x = mylib.filter_shard(jnp.ones(8), jax.P("data"), mesh=mesh)
    (only,) = mylib.audit(loss, x).collectives
    assert only.source == "mylib_train.py:2"


def test_cells_of_notebooks():
    """Their files have names that tell readers nothing."""
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.push({"ask": line_of_caller, "mylib": mylib, "jnp": jnp, "jax": jax})
        shell.run_cell("pass")
        done = shell.run_cell("a = 1\nb = 2\nresult = ask()", store_history=True)
        cell = done.execution_count or 0
        assert shell.user_ns["result"] == f"cell {cell}, line 3"
        shell.run_cell(
            "x = mylib.filter_shard(jnp.ones(8), jax.P('data'), mesh=mylib.make_mesh(data=8))"
        )
        shell.run_cell(
            "a = 3\nreport = mylib.audit(lambda x: (x * 2).sum(), x)", store_history=True
        )
        (only,) = shell.user_ns["report"].collectives
        assert only.source == f"cell {cell + 1}, line 2"
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("{package}/_jit/jit.py", "/lib/site-packages/trainer/loop.py", "/me/train.py"), 2),
        (("{package}/_jit/jit.py", "/lib/site-packages/trainer/loop.py", "<frozen runpy>"), 1),
        (("<frozen runpy>", "{package}/_jit/jit.py"), 0),
        ((), None),
    ],
)
def test_the_innermost(files: Sequence[str], expected: int | None):
    """User code that is installed counts where no other does."""
    files = [file.format(package=Path(mylib.__file__).parent) for file in files]
    assert innermost(files, str) == (None if expected is None else files[expected])
