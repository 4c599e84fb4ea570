"""Puts notebooks on pages of the site, with the outputs that are kept in them; and scripts.

A Markdown extension: a line `{{ notebook: examples/shard_a_model.ipynb }}` becomes the cells of
that notebook, and `{{ script: examples/gpt.py }}` the code of that script. The path is that from
the root of the repository, where the site is built.
"""

import json
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

_LINE = re.compile(r"^\{\{ (notebook|script): (\S+) \}\}$")
# Before anything else that Markdown does: what comes out is Markdown.
_PRIORITY = 100


class Notebooks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Cells(md), "notebooks", _PRIORITY)


class _Cells(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [new for line in lines for new in self._expanded(line)]

    def _expanded(self, line: str) -> list[str]:
        found = _LINE.match(line)
        if not found:
            return [line]
        source = Path(found[2]).read_text(encoding="utf-8")
        # The page of examples/gpt.py is examples/gpt/; tools/finish_site.py brings the file.
        up = "../" * len(Path(found[2]).parts)
        name = Path(found[2]).name
        download = f'<p><a href="{up}{found[2]}" download>Download {name}</a></p>\n'
        if found[1] == "script":
            return [download, *_fenced("python", source).splitlines()]
        notebook = json.loads(source)
        text = "\n\n".join(part for cell in notebook["cells"] for part in self._parts(cell))
        title, _, text = text.partition("\n")
        return [title, "", download, *text.splitlines()]

    def _parts(self, cell: dict[str, Any]) -> list[str]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            return [source]
        return [_fenced("python", source), *map(self._output, cell["outputs"])]

    def _output(self, output: dict[str, Any]) -> str:
        data = output.get("data", {})
        for kind in ("text/html", "image/svg+xml"):
            if kind in data:
                return _html("".join(data[kind]))
        if "image/png" in data:
            return _html(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"])}">')
        return _fenced("text", "".join(output.get("text") or data["text/plain"]))


def _html(html: str) -> str:
    # Not by Markdown's own stash: a later preprocessor takes the marks off its placeholders.
    # Without empty lines, after which Markdown would begin again.
    lines = [line for line in html.splitlines() if line.strip()]
    return "\n".join(['<div class="output">', *lines, "</div>"])


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def makeExtension(**options: Any) -> Notebooks:
    return Notebooks(**options)
