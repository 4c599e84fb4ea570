"""Finishes the built site: `python tools/finish_site.py site`.

- Of a function with overloads the last is shown, and the others are folded.
- Links to the glossary, where a page has one of its words for the first time.
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
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOVED = Path(__file__).with_name("moved.json")
_DESCRIPTION = re.compile(r'<meta name="description" content="[^"]*"\s*/?>')
_TITLE = re.compile(r"<title>(.*?)</title>")
_ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)
_OUTSIDE = ("a", "code", "pre", "table", "h1", "h2", "h3", "h4", "svg", "summary")
_SIGNATURE = re.compile(r'<div class="[^"]*doc-signature.*?</pre></div>', re.DOTALL)
_OVERLOADS = re.compile(
    rf'<div class="doc-overloads">\s*((?:{_SIGNATURE.pattern}\s*)+)</div>', re.DOTALL
)
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
    """The first sentence of the text; of a page that has none, its heading or title."""
    title = html.unescape(_TITLE.search(page)[1]).removesuffix(" - mylib")  # type: ignore[index]
    article = _ARTICLE.search(page)
    for paragraph in _PARAGRAPH.findall(article[0] if article else ""):
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
        sentence = re.match(r".*?(?:\.(?=\s|$)|:$)", text)
        if sentence and len(sentence[0].split()) > 6 and not sentence[0].startswith("Guide"):
            return textwrap.shorten(f"{title}: {sentence[0][:-1]}.", 250, placeholder=" …")
    heading = re.search(r"<h1[^>]*>(.*?)(?:<a class=\"headerlink|</h1>)", page, re.DOTALL)
    said = html.unescape(re.sub(r"<[^>]+>", "", heading[1])).strip() if heading else title
    return f"{said if ':' in said else title}, in the documentation of mylib."


def described(page: str, address: str) -> str:
    """`address` is that of the repository: a picture is named by its whole address."""
    text = html.escape(description(page))
    title = _TITLE.search(page)[1]  # type: ignore[index]
    metas = [
        f'<meta name="description" content="{text}">',
        f'<meta property="og:title" content="{title}">',
        f'<meta property="og:description" content="{text}">',
        '<meta property="og:type" content="website">',
        f'<meta name="twitter:card" content="{"summary_large_image" if address else "summary"}">',
    ]
    if address:
        card = f"{address}/raw/main/docs/assets/card.png"
        metas += [
            f'<meta property="og:image" content="{card}">',
            '<meta property="og:image:width" content="1200">',
            '<meta property="og:image:height" content="630">',
            '<meta property="og:image:alt" content="Five changed lines; arrays on four devices">',
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


def folded(page: str) -> str:
    def fold(match: re.Match[str]) -> str:
        *others, last = _SIGNATURE.findall(match[1])
        if not others:
            return last
        summary = "<summary>Other forms</summary>"
        return f"{last}<details>{summary}{''.join(others)}</details>"

    return _OVERLOADS.sub(fold, page)


def glossary(page: str) -> dict[str, str]:
    """The anchors of the words, from the source of the page. Everyday words are left out."""
    terms = {}
    for name, words in re.findall(r'^\| <a id="(.*?)"></a>(.*?) \|', page, re.MULTILINE):
        if name not in ("kept", "leaf", "process"):
            terms |= {word: name for word in re.split(r", | \(|\)", words) if word}
    return terms


def with_glossary(page: str, terms: dict[str, str], address: str) -> str:
    """The first use of each word in a paragraph or list leads to the glossary."""
    left = dict(terms)
    words = "|".join(re.escape(word) for word in sorted(terms, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({words})(?![\w-])")
    start, end = page.find("<article"), page.find("</article>")
    if start < 0:
        return page
    open_tags: list[str] = []
    parts = re.split(r"(<[^>]+>)", page[start:end])
    for i, part in enumerate(parts):
        tag = re.match(r"<(/?)(\w+)", part)
        if tag and tag[2] in (*_OUTSIDE, "p", "li"):
            if not tag[1]:
                open_tags.append(tag[2])
            elif tag[2] in open_tags:
                del open_tags[len(open_tags) - 1 - open_tags[::-1].index(tag[2]) :]
        elif not tag and open_tags and not set(open_tags) & set(_OUTSIDE):

            def link(match: re.Match[str]) -> str:
                name = left.pop(match[1], None)
                return f'<a href="{address}#{name}">{match[1]}</a>' if name else match[1]

            parts[i] = pattern.sub(link, part)
    return page[:start] + "".join(parts) + page[end:]


def redirect(site: Path, old: str, new: str) -> None:
    path = site / old / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    root = "../" * len(Path(old).parts)
    path.write_text(REDIRECT.format(old=old, new=root + new, root=root), encoding="utf-8")


def finish(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"].rstrip("/")
    terms = glossary((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    for path in sorted(site.rglob("index.html")):
        here = path.relative_to(site)
        page = folded(described(path.read_text(encoding="utf-8"), address))
        page = with_source(page, here, address)
        if here.parts[0] not in ("api", "examples", "glossary", "changelog"):
            page = with_glossary(page, terms, "../" * (len(here.parts) - 1) + "glossary/")
        path.write_text(page, encoding="utf-8")
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
