"""The rooms of mylib: arrows go down, and nothing reaches past a room's face."""

import ast
import collections
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import rooms

import mylib


def test_arrows_go_down_and_end_at_rooms():
    assert rooms.faults_of(rooms.all_imports()) == []


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("_core/tree/x", "from ..placement import resolve", "stands above it"),
        ("_core/tree/x", "from .. import placement", "stands above it"),
        ("_training/jit/x", "from ..._core.tree.leaves import split", "is inside another room"),
        ("_training/jit/x", "from mylib._core.tree.leaves import split", "is inside another room"),
        ("_training/jit/x", "import mylib._core.tree.leaves", "is inside another room"),
        ("_moving/data/x", "def f():\n    from ..transfer.verbs import move", "is inside another"),
        ("_training/jit/x", "from ..attic import split", "_training.attic has no place"),
        ("_moving/data/x", "from ..._training.jit import filter_jit", "_moving knows nothing of"),
        ("_programs/audit/x", "from ..._moving import transfer", "_programs knows nothing of _mov"),
        ("_training/jit/x", "from ..._programs import audit", "on_demand.py alone"),
        ("_training/jit/x", "from ... import rules", "rules, which is for users"),
        ("_training/jit/x", "from ...rules import fsdp", "rules, which is for users"),
        ("rules", "from ._core.rules.rule import as_rule", "is inside a room; use _core.rules"),
    ],
)
def test_what_is_wrong_is_found(module, source, told):
    parts = tuple(module.split("/"))
    (fault,) = rooms.faults_of(list(rooms.imports_in(source, "x.py", parts, False)))
    assert told in fault


def test_few_arrows_between_few_folders():
    """What a reader sees first. A new entry, or a new arrow, needs a reason."""
    assert len(rooms.arrows_between_folders(rooms.all_imports())) <= 13
    assert len([x for x in rooms.PACKAGE.iterdir() if x.name != "__pycache__"]) <= 20


def test_no_circle_of_files_in_a_room():
    assert rooms.circles() == set()


def test_functions_are_short():
    files = {
        path.relative_to(rooms.PACKAGE).as_posix(): rooms.long_functions(path.read_text())
        for path in rooms.PACKAGE.rglob("*.py")
    }
    assert {file: found for file, found in files.items() if found} == {}


def test_what_a_long_function_is():
    body = "    x = 1\n" * rooms.LONGEST
    short = f'def f(\n    a,\n    b,\n):\n    """What it does.\n\n    More.\n    """\n{body}'
    assert rooms.long_functions(short) == []
    assert rooms.long_functions(f"{short}    return x\n") == ["f"]


def test_no_name_is_defined_twice():
    """The first definition would be lost: of two tests with one name only the second runs."""
    assert rooms.defined_twice("def f(): ...\nx = 1\n\ndef f(): ...\nx: int = 2") == ["f", "x"]
    folders = (rooms.PACKAGE, rooms.ROOT / "tests", rooms.ROOT / "benchmarks", rooms.ROOT / "tools")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    twice = {path.name: rooms.defined_twice(path.read_text()) for path in files}
    assert {name: found for name, found in twice.items() if found} == {}


def test_the_drawing_is_current():
    page = rooms.PAGE.read_text()
    assert rooms.page_with(rooms.drawing()) == page, "run python tests/rooms.py --write"


def test_each_test_folder_is_a_room():
    folders = {x.name for x in Path(__file__).parent.iterdir() if list(x.glob("test_*.py"))}
    # What real clusters show is of many rooms.
    assert folders <= {room.split(".")[-1].strip("_") for room in rooms.ORDER} | {"clusters"}


def test_public_modules_have_public_names_only():
    for name in rooms.faces():
        face = getattr(mylib, name)
        there = {x for x in vars(face) if not x.startswith("__")}
        assert there == {*rooms.names_in(face)}, name
        assert face.__doc__


def test_names():
    assert set(mylib.__all__) <= set(dir(mylib))
    assert mylib.__version__
    for module in (mylib, *(getattr(mylib, name) for name in rooms.faces())):
        named = (getattr(module, name) for name in rooms.names_in(module))
        classes = [x for x in named if isinstance(x, type)]
        # Three errors are at the top, too.
        own = [x for x in classes if module is mylib or getattr(mylib, x.__name__, None) is not x]
        assert {x.__module__ for x in own} <= {module.__name__}
    assert mylib.results.Row.__module__ == "mylib.results"
    assert mylib.errors.Fault.__module__ == "mylib.errors"
    assert mylib.PlacementError.__module__ == mylib.Plan.__module__ == "mylib"
    error = mylib.PlacementError([mylib.errors.Fault("x", (3,), "P('a')", "no", "yes")])
    text = pickle.dumps(error, protocol=0).decode()
    assert "mylib\nPlacementError" in text and "_errors" not in text
    assert pickle.loads(text.encode()).faults == error.faults


@pytest.mark.slow
def test_neither_importing_nor_launching_imports_pytest(checkout_env):
    script = (
        "import sys, mylib, mylib._testing.launch; mylib.testing.assert_placed; "
        "assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env=checkout_env, check=True, timeout=240)


def test_each_class_has_a_name_of_its_own():
    found = [
        (node.name, path.name)
        for path in rooms.PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = collections.Counter(name.strip("_") for name, _ in found)
    assert [x for x in found if names[x[0].strip("_")] > 1] == []
