"""The code blocks of the pages of documentation, and how to run them.

    python tests/_pages.py command NAME    prints README's command of that name
    python tests/_pages.py run PAGE        runs the Python blocks of a page in one namespace
    python tests/_pages.py write PAGE      does so, and writes what they print into the page
    python tests/_pages.py serve           runs each page that standard input names

Needs nothing but Python: `.ci/run` asks it for the commands before anything is installed.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import io
import os
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
# What pages show of compiled programs is that of this version, and of newer ones.
NEWEST_JAX = (0, 12)

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)[^\n`]*\n"
    r"(?P<text>.*?)"
    r"^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
# At the end of what stands in front of a block.
_NOTE = re.compile(
    r"<!--\s*(?P<kind>not run|command|test file|script|output|shown):"
    r"\s*(?P<text>(?:(?!-->).)*?)\s*-->\s*\Z",
    re.DOTALL,
)


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of its first line of code
    not_run: str | None  # the reason that `<!-- not run: reason -->` gives in front of it
    command: str | None  # the name that `<!-- command: name -->` gives in front of it
    test_file: str | None  # the same of `<!-- test file: name -->`: pytest runs it
    script: str | None  # the same of `<!-- script: name -->`: started in two processes
    # After `<!-- output: ... -->`: what the Python block above prints. `newest JAX` if that depends
    # on the version.
    output: str | None = None
    shown: str | None = None  # after `<!-- shown: why -->`: text that no block of the page prints


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        note = _NOTE.search(text, 0, match.start())
        kind, said = (note["kind"], note["text"]) if note else (None, None)
        if kind == "not run" and not said:
            raise ValueError(f"{page}: a block is not run, and no reason is given")
        found.append(
            Block(
                language=match["language"],
                text=textwrap.dedent(match["text"]),
                line=text.count("\n", 0, match.start("text")) + 1,
                not_run=said if kind == "not run" else None,
                command=said if kind == "command" else None,
                test_file=said if kind == "test file" else None,
                script=said if kind == "script" else None,
                output=said if kind == "output" else None,
                shown=said if kind == "shown" else None,
            )
        )
    return found


def command(name: str) -> str:
    found = [block for block in blocks(README) if block.command == name]
    if len(found) != 1 or found[0].language != "bash":
        raise ValueError(f"README.md must have one ```bash block after <!-- command: {name} -->")
    return found[0].text.strip()


# A terminal as wide as the site.
SITE = {"COLUMNS": "130", "NO_COLOR": "1"}


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def run(page: Path, write: bool = False) -> None:
    # A module of its own, as dataclasses look the names in their annotations up in `sys.modules`.
    module = types.ModuleType("page")
    os.environ.update(SITE)
    sys.modules["page"] = module
    printed = ""
    outputs: list[tuple[Block, str]] = []
    for block in blocks(page):
        if write and block.output is not None:
            outputs.append((block, printed))
        elif block.language == "text":
            _compare(page, block, printed)
        if block.language == "python" and not (block.not_run or block.test_file or block.script):
            # Moved down to where it stands in the page, so that tracebacks show its lines.
            source = "\n" * (block.line - 1) + block.text
            with contextlib.redirect_stdout(Terminal()) as out:
                exec(compile(source, str(page), "exec"), module.__dict__)
            printed = out.getvalue()
            print(printed, end="")
    if jax := sys.modules.get("jax"):
        # A process that ends while its simulated devices wait for each other may crash, or hang.
        jax.block_until_ready(jax.live_arrays())
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block, said in reversed(outputs):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [said]
    if outputs:
        page.write_text("".join(lines), encoding="utf-8")


def _compare(page: Path, block: Block, printed: str) -> None:
    """Every text block after a `print` is its output, or says what it is."""
    where = f"{page}, line {block.line}"
    if block.output is None and block.shown is None and printed:
        raise AssertionError(f"{where}: mark this as `output`, or say what is `shown`")
    if block.output == "newest JAX" and _jax_version() < NEWEST_JAX:
        return
    if block.output is not None and block.text != printed:
        raise AssertionError(f"{where}: what is printed is\n{printed}")


def _jax_version() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))


def serve() -> None:
    """Each page runs in a fork of this process, which has imported what most pages import: that
    takes longer than most pages. A line of input has a page, and a file for what it prints; a line
    of output is the exit status.
    """
    for name in ("equinox", "mylib", "mylib.data", "mylib.mpmd", "optax"):
        importlib.import_module(name)
    # No fork searches what they share for garbage, which would copy it, too.
    gc.freeze()
    for line in sys.stdin:
        page, printed = line.split("\t")
        child = os.fork()
        if child == 0:
            out = os.open(printed.strip(), os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(out, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(Path(page))
            return  # the fork ends as any script does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["command", name]:
            print(command(name))
        case ["run", page]:
            run(Path(page))
        case ["write", page]:
            run(Path(page), write=True)
        case ["serve"]:
            serve()
        case _:
            sys.exit(__doc__)
