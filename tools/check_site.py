"""Checks the built site: `python tools/check_site.py site`.

It checks what the strict build does not: links and images in the HTML, pages that are missing in
the navigation, files that are loaded from other sites, and words that the search must find.
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

WORDS = ["install", "checkpoint", "orbax", "fsdp", "slurm", "pmap", "filter_shard", "faq"]
WORDS += ["mixed precision", "gradient accumulation", "pipeline"]
# A cell of a table in which Markdown has not taken the backslash of an escaped bar away.
ESCAPED = r"<td>[^\n]*<code>([^<]*\\\|[^<]*)</code>"


class Page(HTMLParser):
    """The names that can be linked to in a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names, self.links, self.loads = set[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


def file_of(path: str, page: Path, site: Path) -> Path:
    found = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    found = page if not path else found.resolve()
    return found / "index.html" if found.is_dir() else found


def faults(site: Path) -> list[str]:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here} loads {url}" for url in page.loads if urlsplit(url).netloc]
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = file_of(unquote(parts.path), path, site)
            if not target.exists():
                found.append(f"{here}: there is no {url}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].names
            ):
                found.append(f"{here}: there is no {url}")
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"doc-module-name\">([^<]*)", text):
            found.append(f"{here} shows a module in place of {name}")
        found += [f"{here} shows a backslash in {code}" for code in re.findall(ESCAPED, text)]
        if "wzxhzdk:" in text:  # what Markdown puts in the place of HTML until the end
            found.append(f"{here} has lost some of its HTML")
    return found + unreachable(pages, site) + unfindable(site)


def unreachable(pages: dict[Path, Page], site: Path) -> list[str]:
    """Every page has the whole navigation, the first page too."""
    home = site / "index.html"
    linked = {file_of(urlsplit(url).path, home, site) for url in pages[home].links}
    # Other files come from docs/ as they are, and are parts of pages.
    left_out = {path for path in pages if path.name == "index.html"} - linked - {home}
    return [f"{path.relative_to(site)} is not in the navigation" for path in sorted(left_out)]


def unfindable(site: Path) -> list[str]:
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    text = " ".join(item["title"] + " " + item["text"] for item in items).lower()
    return [f"the search finds nothing for {word!r}" for word in WORDS if word not in text]


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(found) or 0)
