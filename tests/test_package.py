"""What is released: the wheel, and what the package index shows of it."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes

import _pages
import pytest
from scripts import printed_by

import mylib

_ADDRESS = "https://example.org/someone/mylib"


def test_files_that_say_the_version():
    said = (_pages.ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mylib.__version__}\n" in said
    site = (_pages.ROOT / "mkdocs.yml").read_text()
    assert f"\ncopyright: mylib {mylib.__version__}\n" in site


def test_links_of_readme():
    """Those that lead to files of the repository."""
    links = re.findall(r"\]\(((?!https?://|#)[^)\s]+)\)", _pages.README.read_text())
    missing = [link for link in links if not (_pages.ROOT / link.partition("#")[0]).exists()]
    assert links and not missing


def _wheel(folder, address):
    """The wheel of what is committed or about to be, as pip makes it."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_pages.ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    names = [name for name in listed if (_pages.ROOT / name).is_file()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((_pages.ROOT / name).read_bytes())
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('address = ""', f'address = "{address}"'))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, str(source)], check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    return wheel, {name for name in names if name.startswith("mylib")}


def test_the_source_distribution_has_what_its_build_needs():
    """A wheel is made of it, and the name of README no longer stands in `pyproject.toml`."""
    project = tomllib.loads((_pages.ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/README.md", "/mylib", "/mylib_pytest.py"} <= set(included)
    assert all((_pages.ROOT / path.lstrip("/")).exists() for path in included)


@pytest.mark.thorough
@pytest.mark.parametrize("address", ["", _ADDRESS], ids=["without an address", "with one"])
def test_wheel(tmp_path, address, checkout_env):
    wheel, sources = _wheel(tmp_path, address)
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (metadata,) = (name for name in held if name.endswith("/METADATA"))
        told = message_from_bytes(archive.read(metadata))
    assert {name for name in held if ".dist-info/" not in name} == sources
    assert "mylib/py.typed" in held and metadata.replace("METADATA", "licenses/LICENSE") in held

    text = told.get_payload()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((\S+?)\)", prose)
    assert all(link.startswith(("https://", "#")) for link in links)
    assert text.count("```") == _pages.README.read_text().count("```")
    assert [*told.get_all("Project-URL", [])] == [
        f"{name}, {_ADDRESS}{path}"
        for name, path in {
            "Repository": "",
            "Issues": "/issues",
            "Changelog": f"/blob/v{mylib.__version__}/CHANGELOG.md",
        }.items()
        if address
    ]
    files = f"{_ADDRESS}/blob/v{mylib.__version__}/"
    assert any(link.startswith(files) for link in links) == bool(address)

    _is_found_by_python_and_pytest(tmp_path, wheel, checkout_env)


def _is_found_by_python_and_pytest(folder, wheel, env):
    """Unpacked anywhere else, without this checkout."""
    there = folder / "there"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(there)
    test = f"def test_it(mylib_mesh):\n    assert mylib.__file__.startswith({str(there)!r})\n"
    (folder / "test_it.py").write_text(f"import mylib\n\n\n{test}")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    printed_by(*command, env=env | {"PYTHONPATH": str(there)}, cwd=folder)
