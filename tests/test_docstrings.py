"""Every public name is in the API pages, its docstring says all that there is to say, and the
examples in it run as they stand.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import textwrap

import _pages
import jax
import pytest
import rooms
from jax.experimental.compilation_cache import compilation_cache

import mylib
import mylib.testing

_MODULES = [
    mylib,
    mylib.contracts,
    mylib.data,
    mylib.elastic,
    mylib.errors,
    mylib.loops,
    mylib.machines,
    mylib.mpmd,
    mylib.results,
    mylib.rules,
    mylib.testing,
]
_API = _pages.ROOT / "docs" / "api"


def _public(module):
    """The public names of a module, with their full paths."""
    for name in rooms.names_in(module):
        value = getattr(module, name)
        # Three errors are at the top, too: they are shown there.
        elsewhere = module is not mylib and getattr(mylib, name, None) is value
        if not inspect.ismodule(value) and not elsewhere:
            yield f"{module.__name__}.{name}", value


_NAMES = {path: value for module in _MODULES for path, value in _public(module)}
_PUBLIC = {
    path: value
    for path, value in _NAMES.items()
    if inspect.isfunction(value) or inspect.isclass(value)
}


def _examples(value) -> list[str]:
    text = inspect.getdoc(value) or ""
    return [textwrap.dedent(b) for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]


@pytest.fixture
def nothing_compiled_before():
    """XLA does not write the code of a program for CPUs again that JAX has read from its cache."""
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", former)
    compilation_cache.reset_cache()


# The example of `second_backend` wants a process in which nobody has called it yet.
@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in _PUBLIC if p != "mylib.testing.second_backend"])
def test_examples(path, request):
    if path == "mylib.load_compiled":
        request.getfixturevalue("nothing_compiled_before")
    # Which `help(mylib)` shows.
    names: dict[str, object] = {}
    exec(textwrap.dedent(mylib.__doc__.partition("for granted:\n")[2]), names)
    for example in _examples(_PUBLIC[path]):
        exec(compile(example, path, "exec"), names)


def _section(doc, title):
    """The text of **Title:** up to the next one."""
    found = re.search(
        rf"^\*\*{title}:\*\*\n(.*?)(?=^\*\*\w+:\*\*\n|\Z)", doc, re.DOTALL | re.MULTILINE
    )
    return found[1] if found else ""


def _missing_in_function(function, doc):
    signature = inspect.signature(function)
    arguments = _section(doc, "Arguments")
    for name, parameter in signature.parameters.items():
        # What takes any other keyword is there to refuse it.
        refused = (parameter.kind, name) == (parameter.VAR_KEYWORD, "others")
        if not refused and f"`{name}`" not in arguments:
            yield f"the argument {name}"
    if signature.return_annotation not in (None, "None") and not _section(doc, "Returns"):
        yield "what it returns"
    if _raises(function) and not _section(doc, "Raises"):
        yield "what it raises"


def _raises(function):
    """Whether there is a `raise` in the function itself, not in one inside of it."""
    open_ = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body)
    while open_:
        node = open_.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.FunctionDef):
            open_ += ast.iter_child_nodes(node)
    return False


def _missing_in_class(cls, doc):
    described = _section(doc, "Attributes") + _section(doc, "Arguments")
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for field in fields:
        if not field.name.startswith("_") and f"`{field.name}`" not in described:
            yield f"the attribute {field.name}"
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        inner = inspect.getdoc(member) or ""
        if name.startswith("_"):
            continue
        if isinstance(member, property | functools.cached_property):
            if not inner and f"`{name}`" not in described:
                yield f"the attribute {name}"
        elif inspect.isfunction(function):
            arguments = [*inspect.signature(function).parameters][1:]
            yield from ([] if inner else [f"a docstring of {name}"])
            yield from (f"the argument {x} of {name}" for x in arguments if f"`{x}`" not in inner)


def test_docstrings_are_complete():
    faults = collections.defaultdict(list)
    for path, value in _PUBLIC.items():
        doc = inspect.getdoc(value) or ""
        missing = _missing_in_class if inspect.isclass(value) else _missing_in_function
        faults[path] += [*([] if doc else ["a docstring"]), *missing(value, doc)]
        if not _examples(value):
            faults[path].append("an example")
        if any(len(line) > 78 for text in _examples(value) for line in text.splitlines()):
            faults[path].append("lines of at most 78 columns")
    assert not {path: missing for path, missing in faults.items() if missing}
    assert len(faults) > 60


def test_names_are_links_on_the_site_alone():
    """`help()` prints docstrings as they are."""
    assert not [path for path, value in _NAMES.items() if "`][" in (inspect.getdoc(value) or "")]
    pytest.importorskip("griffe")
    from tools.public_names import linked

    names = "`mylib.show`, `mylib.Plan.of`, `mylib.rules`, `mylib.show(x)`"
    example = "  ```python\n  # `mylib.show`\n  ```"
    links = "[`mylib.show`][], [`mylib.Plan.of`][], `mylib.rules`, `mylib.show(x)`"
    assert linked(f"{names}\n{example}\n{names}") == f"{links}\n{example}\n{links}"


def test_api_pages():
    """Every public name is on one of them, and once; so is a link to it on the first page."""
    pages = [page for page in sorted(_API.glob("*.md")) if page.name != "index.md"]
    shown = {page.name: re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE) for page in pages}
    assert sorted(name for names in shown.values() for name in names) == sorted(_NAMES)
    links = {(page, name) for page, names in shown.items() for name in names}
    index = (_API / "index.md").read_text()
    assert set(re.findall(r"\]\((\S+?)#(\S+?)\)", index)) == links


@pytest.mark.slow
def test_second_backend(checkout_env):
    (example,) = _examples(mylib.testing.second_backend)
    program = f"import jax, mylib.testing\n{example}\nassert len(jax.devices('other')) == 4"
    # It would exclude the second backend.
    env = {name: value for name, value in checkout_env.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=env, check=True, timeout=240)
