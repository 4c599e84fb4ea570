"""What README and the docs show, works: every Python block is run, warnings being errors."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import _pages
import pytest
from scripts import printed_by, run_python

_PAGES = [_pages.README, *sorted((_pages.ROOT / "docs").rglob("*.md"))]
_PYTHON = [
    (page, block) for page in _PAGES for block in _pages.blocks(page) if block.language == "python"
]


def _name(page: Path) -> str:
    return page.relative_to(_pages.ROOT).as_posix()


@pytest.fixture(scope="module")
def pages_server(checkout_env, cache_env):
    # BLAS starts threads when NumPy is imported, and a process with threads must not be forked.
    env = checkout_env | cache_env | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", _pages.__file__, "serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=_pages.ROOT, stdin=pipe, stdout=pipe, text=True
    ) as server:
        yield server
        server.stdin.close()
        assert server.wait(60) == 0


_EVERYDAY = ["README.md", "docs/getting-started.md"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(x, id=_name(x), marks=[] if _name(x) in _EVERYDAY else [pytest.mark.slow])
        for x in sorted({page for page, _ in _PYTHON})
    ],
)
def test_page_runs(page, pages_server, tmp_path):
    printed = tmp_path / "printed"
    pages_server.stdin.write(f"{page}\t{printed}\n")
    pages_server.stdin.flush()
    assert pages_server.stdout.readline() == "0\n", printed.read_text()


@pytest.mark.slow
def test_test_files_of_the_pages(pytester, checkout_env, monkeypatch):
    """What the pages show as tests is run by pytest, in a project that has nothing else."""
    files = {block.test_file: block.text for _, block in _PYTHON if block.test_file}
    for name, text in files.items():
        (pytester.path / name).parent.mkdir(exist_ok=True)
        (pytester.path / name).write_text(text)
    for name in ("XLA_FLAGS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", checkout_env["PYTHONPATH"])
    done = pytester.runpytest_subprocess("-W", "error", "-v", timeout=240)
    tests = sum(text.count("def test_") for text in files.values())
    done.assert_outcomes(passed=tests)
    assert tests >= 4


_SCRIPTS = [
    pytest.param(block, id=f"{_name(page)}:{block.line}") for page, block in _PYTHON if block.script
]


@pytest.mark.thorough
@pytest.mark.parametrize("block", _SCRIPTS)
def test_script_in_two_processes(block, tmp_path, checkout_env):
    (tmp_path / block.script).write_text(block.text)
    env = {k: v for k, v in checkout_env.items() if k not in ("XLA_FLAGS", "NPROC")}
    launch = ["-m", "mylib.testing", "launch", "-n", "2", "--devices-per-process", "4"]
    printed = printed_by(*launch, block.script, env=env, cwd=tmp_path)
    assert printed.count("loss ") >= 5, printed


_NOT_RUN = [
    pytest.param(block.not_run, id=f"{_name(page)}:{block.line}")
    for page, block in _PYTHON
    if block.not_run is not None
]

if _NOT_RUN:  # an empty set of parameters would count as a skipped test

    @pytest.mark.parametrize("reason", _NOT_RUN)
    def test_block_that_is_not_run(reason):
        pytest.skip(reason)


def test_code_fits_beside_the_navigation():
    """What programs have printed may be wider: it scrolls."""
    wide = [
        f"{_name(page)}:{block.line + number}"
        for page in _PAGES
        for block in _pages.blocks(page)
        if block.language != "text" and block.command is None
        for number, line in enumerate(block.text.splitlines())
        if len(line) > 78
    ]
    assert not wide


def _tool(name: str):
    path = _pages.ROOT / f"tools/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_picture_of_a_plan_is_that_of_the_notebook():
    """`python tools/draw_plan.py` writes it."""
    tool = _tool("draw_plan")
    assert tool.draw() == tool.PICTURE.read_text(encoding="utf-8")


def test_pictures_of_placements_are_those_of_jax():
    """`python tools/draw_placements.py` writes them."""
    tool = _tool("draw_placements")
    for picture in tool.PICTURES:
        kept = _pages.ROOT / f"docs/assets/placement-{picture.name}.svg"
        assert tool.draw(picture) == kept.read_text(encoding="utf-8")


def test_diagrams_are_those_of_the_tool():
    """`python tools/draw_diagrams.py` writes them."""
    tool = _tool("draw_diagrams")
    for name, draw in tool.PICTURES.items():
        assert draw() == (tool.ASSETS / name).read_text(encoding="utf-8")


def _changed(diff: str, text: str) -> str:
    """`text` after the diff, whose parts are separated by a line of dots."""
    for part in diff.split("\n ...\n"):
        lines = part.strip("\n").splitlines()
        old, new = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +")
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_diff_on_the_first_screen(tmp_path, checkout_env):
    """As many lines as the page claims, and the losses of one device."""
    (diff,) = [b.text for b in _pages.blocks(_pages.README) if b.language == "diff"]
    assert sum(line.startswith("+") for line in diff.splitlines()) == 5
    assert "**five lines changed, same losses.**" in _pages.README.read_text(encoding="utf-8")
    script = _pages.ROOT / "examples" / "first_step.py"
    sharded = tmp_path / "sharded.py"
    shown = "\nprint(len({str(s.index) for s in model.layers[1].weight.addressable_shards}))\n"
    sharded.write_text(_changed(diff, script.read_text()) + shown)
    before, (*after, parts) = (
        printed_by(path, env=checkout_env).splitlines() for path in (script, sharded)
    )
    assert len(before) == 5 and parts == "8"
    losses = [[float(line.removeprefix("loss ")) for line in lines] for lines in (before, after)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_readme_has_its_example_and_both_commands():
    (block,) = [b for b in _pages.blocks(_pages.README) if b.language == "python"]
    assert block.not_run is None and "optax" not in block.text
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10

    demo, test = _pages.command("demo"), _pages.command("test")
    assert demo.endswith("examples/train.py")
    assert test.endswith("-m pytest -n 3 --dist=loadfile")
    # Each does the whole set-up by itself, of what it needs.
    set_up = "python3 -m venv .venv && .venv/bin/python -m pip install -q '.[{}]' "
    assert demo.rsplit("&&", 1)[0] == set_up.format("examples")
    assert test.rsplit("&&", 1)[0] == set_up.format("test")


def test_what_the_extras_bring():
    """pip only warns about one that does not exist."""
    project = tomllib.loads((_pages.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras.keys() >= {"examples", "test", "docs", "dev"}
    assert "mylib[examples,test,docs]" in extras["dev"]
    # With torch CUDA comes along; Node is for who checks types.
    packages = [package for extra in extras.values() for package in extra]
    assert not [package for package in packages if "torch" in package]
    assert [package for package in packages if "node" in package] == extras["dev"][1:2]


@pytest.mark.parametrize(
    "text, language, line, not_run, command",
    [
        ("<!-- test file: test_a.py -->\n```python\nx\n```\n", "python", 3, None, None),
        ("```python\nx\n```\n", "python", 2, None, None),
        ("<!-- not run: needs a TPU -->\n```python\nx\n```\n", "python", 3, "needs a TPU", None),
        (
            "<!-- not run: needs\na TPU -->\n\n```python\nx\n```\n",
            "python",
            5,
            "needs\na TPU",
            None,
        ),
        ("<!-- command: demo -->\n```bash\nx\n```\n", "bash", 3, None, "demo"),
        ("<!-- not run: far -->\nwords\n```python\nx\n```\n", "python", 4, None, None),
        ("- item\n\n    ```python\n    x\n    ```\n", "python", 4, None, None),
        ("````\n```python\nx\n```\n````\n", "", 2, None, None),
    ],
)
def test_blocks(tmp_path, text, language, line, not_run, command):
    page = tmp_path / "page.md"
    page.write_text(text)
    (block,) = _pages.blocks(page)
    expected = (language, line, not_run, command)
    assert (block.language, block.line, block.not_run, block.command) == expected
    assert "x\n" in block.text and not block.text.startswith(" ")
    assert block.test_file == ("test_a.py" if "test file" in text else None)


def test_every_output_is_compared_or_says_what_it_is(tmp_path):
    page = tmp_path / "page.md"
    text = "```python\nprint('a')\n```\n{}```text\nb\n```\n"
    page.write_text(text.format(""))
    with pytest.raises(AssertionError, match="page.md, line 5: mark this as `output`"):
        _pages.run(page)
    page.write_text(text.format("<!-- shown: of a cluster -->\n"))
    _pages.run(page)
    page.write_text(text.format("<!-- output: newest JAX -->\n"))
    _pages.run(page, write=True)
    assert "```text\na\n```" in page.read_text()
    _pages.run(page)


def test_a_note_is_about_the_next_block_only(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- command: one -->\n```bash\n1\n```\n```bash\n2\n```\n"
        "<!-- command: three -->\n```bash\n3\n```\n"
    )
    assert [block.command for block in _pages.blocks(page)] == ["one", None, "three"]


def test_what_a_page_says_is_printed(tmp_path):
    page = tmp_path / "page.md"
    text = "```python\nprint('a')\n```\n<!-- output: of the block above -->\n```text\n{}\n```\n"
    page.write_text(text.format("a"))
    _pages.run(page)
    page.write_text(text.format("b"))
    with pytest.raises(AssertionError, match="page.md, line 6: what is printed is\na"):
        _pages.run(page)


def test_block_that_is_not_run_without_a_reason(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: -->\n```python\nx\n```\n")
    with pytest.raises(ValueError, match="no reason is given"):
        _pages.blocks(page)


def test_blocks_of_a_page_share_a_namespace_and_keep_their_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\nwords\n```python\nassert x == 1\n\nraise KeyError(x)\n```\n"
    )
    done = run_python(_pages.__file__, "run", page)
    assert done.returncode == 1
    assert "KeyError: 1" in done.stderr and "line 8" in done.stderr
