"""Finishes the built site: `python tools/finish_site.py site`.

- A description for each page, its first sentence, and what social networks show of it.
- Pages at the old addresses of those that have moved, and `assets/moved.js` for sections. The
  addresses are in `moved.json`.
- The notebooks and scripts of `examples/`, to download.
- A link to the source of each page, once `pyproject.toml` says where the repository is.
"""

import html
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOVED = Path(__file__).with_name("moved.json")
_DESCRIPTION = re.compile(r'<meta name="description" content="[^"]*"\s*/?>')
_TITLE = re.compile(r"<title>(.*?)</title>")
_ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)

REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved: {old}</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{new}">
<script src="{root}assets/moved.js"></script>
<meta http-equiv="refresh" content="1; url={new}">
<p>This page is now <a href="{new}">{new}</a>.</p>
"""


def description(page: str) -> str:
    """The first sentence of the text; of a page of the API, its title."""
    title = html.unescape(_TITLE.search(page)[1]).removesuffix(" - mylib")  # type: ignore[index]
    article = _ARTICLE.search(page)
    for paragraph in _PARAGRAPH.findall(article[0] if article else ""):
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
        sentence = re.match(r".*?[.:](?=\s|$)", text)
        if sentence and len(sentence[0].split()) > 6 and not sentence[0].startswith("Guide"):
            return f"{title}: {sentence[0]}"[:250]
    return f"{title}, in the documentation of mylib."


def described(page: str) -> str:
    text = html.escape(description(page))
    title = _TITLE.search(page)[1]  # type: ignore[index]
    metas = [
        f'<meta name="description" content="{text}">',
        f'<meta property="og:title" content="{title}">',
        f'<meta property="og:description" content="{text}">',
        '<meta property="og:type" content="website">',
        '<meta name="twitter:card" content="summary">',
    ]
    return _DESCRIPTION.sub(lambda _: "\n".join(metas), page, count=1)


def with_source(page: str, path: Path, address: str) -> str:
    """`path` is that of the page in the site."""
    if not address:
        return page
    name = path.parent.as_posix()
    source = next(
        (p for p in (f"docs/{name}.md", f"docs/{name}/index.md") if (ROOT / p).exists()), ""
    )
    link = f'<p class="source"><a href="{address}/blob/main/{source}">Source of this page</a></p>'
    return page.replace("</article>", f"{link}</article>", 1) if source else page


def redirect(site: Path, old: str, new: str) -> None:
    path = site / old / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    root = "../" * len(Path(old).parts)
    path.write_text(REDIRECT.format(old=old, new=root + new, root=root), encoding="utf-8")


def finish(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"].rstrip("/")
    for path in sorted(site.rglob("index.html")):
        page = described(path.read_text(encoding="utf-8"))
        path.write_text(with_source(page, path.relative_to(site), address), encoding="utf-8")
    moved = json.loads(MOVED.read_text(encoding="utf-8"))
    for old, new in moved.items():
        if "#" not in old:
            redirect(site, old, new)
    script = site / "assets" / "moved.js"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("MOVED = {}", f"MOVED = {json.dumps(moved)}"), encoding="utf-8")
    for pattern in ("*.py", "*.ipynb", "models/*.py"):
        for source in (ROOT / "examples").glob(pattern):
            shutil.copy(source, site / source.relative_to(ROOT))


if __name__ == "__main__":
    finish(Path(sys.argv[1]).resolve())
