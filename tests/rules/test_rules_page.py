"""What the page on rules shows of a transformer is what the rules do with it."""

import contextlib
import itertools
import sys
import types

import _pages
import jax
import jax.tree_util as jtu
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib.rules import fsdp, replicated

_PAGE = _pages.ROOT / "docs" / "rules.md"


@pytest.fixture(scope="module")
def page():
    """The names of the page's blocks before its first output, and what they print."""
    blocks = itertools.takewhile(lambda block: block.language == "python", _pages.blocks(_PAGE))
    module = types.ModuleType("rules_page")
    sys.modules["rules_page"] = module
    printed = _pages.Terminal()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        for name, value in _pages.SITE.items():
            patch.setenv(name, value)
        for block in blocks:
            exec(compile(block.text, str(_PAGE), "exec"), module.__dict__)
    return module, printed.getvalue()


def test_the_explanation_is_the_one_that_is_printed(page):
    shown = next(block for block in _pages.blocks(_PAGE) if block.language == "text")
    assert shown.text == page[1]


def rows_of_the_table():
    for line in _PAGE.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("P("):
            pattern = cells[0].split("`")[0]
            yield pytest.param(pattern, [eval(cell, {"P": P}) for cell in cells[1:]], id=pattern)


@pytest.mark.parametrize(("pattern", "specs"), list(rows_of_the_table()))
def test_the_table(page, pattern, specs):
    module, _ = page
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    parallel = module.tensor_parallel
    strategies = [replicated(), fsdp("data"), parallel, parallel & fsdp("data")]
    for rule, spec in zip(strategies, specs, strict=True):
        resolved = mylib.resolve(module.make(64, 2)(), rule, mesh=mesh)
        found = {
            jtu.keystr(path): target.spec for path, target in jtu.tree_leaves_with_path(resolved)
        }
        names = [
            pattern.replace("*", str(i)).replace(".0", "[0]").replace(".1", "[1]") for i in (0, 1)
        ]
        assert {found[f".{name}"] for name in names} == {spec}


def test_the_table_has_every_kind_of_array():
    assert len(list(rows_of_the_table())) == 6
