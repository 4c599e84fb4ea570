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


def test_arrows_go_down_and_end_at_faces():
    assert rooms.faults_of(rooms.all_imports()) == []


@pytest.mark.parametrize(
    ("room", "source", "told"),
    [
        ("_tree", "from .._placement import resolve", "stands above it"),
        ("_jit", "from .._tree.leaves import split", "_tree.leaves is inside another room"),
        ("_jit", "from mylib._tree.leaves import split", "is inside another room"),
        ("_jit", "import mylib._tree.leaves", "is inside another room"),
        ("data", "def f():\n    from .._transfer.verbs import move", "is inside another room"),
        ("_attic", "from .._tree import split", "_attic has no place"),
    ],
)
def test_what_is_wrong_is_found(room, source, told):
    found = list(rooms.imports_in(source, "x.py", (room, "x"), False))
    (fault,) = rooms.faults_of(found)
    assert told in fault


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
    assert folders <= {room.strip("_") for room in rooms.ORDER} | {"clusters"}


PUBLIC_ROOMS = ["contracts", "data", "loops", "machines", "mpmd", "rules", "testing"]


def test_names():
    assert set(mylib.__all__) <= set(dir(mylib))
    assert mylib.__version__
    for room in (mylib, *(getattr(mylib, name) for name in PUBLIC_ROOMS)):
        names = getattr(room, "__all__", [x for x in vars(room) if not x.startswith("_")])
        classes = [x for name in names if isinstance(x := getattr(room, name), type)]
        assert {x.__module__ for x in classes} <= {room.__name__}
    assert mylib.Row.__module__ == mylib.PlacementError.__module__ == "mylib"
    error = mylib.PlacementError([mylib.Fault("x", (3,), "P('a')", "no", "yes")])
    text = pickle.dumps(error, protocol=0).decode()
    assert "mylib\nPlacementError" in text and "_errors" not in text
    assert pickle.loads(text.encode()).faults == error.faults


@pytest.mark.slow
def test_neither_importing_nor_launching_imports_pytest(checkout_env):
    script = (
        "import sys, mylib, mylib.testing.__main__; mylib.testing.assert_placed; "
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
