"""Words of prose by page: `python tools/count_words.py`. Fails where there are too many.

Code, output, tables, front matter, comments, HTML and addresses of links are not counted. What a
page includes from another file counts where it is written.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE_LIMIT = 1_500
TOTAL_LIMIT = 26_000
_LEFT_OUT = [
    (re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE), ""),
    (re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE), ""),
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"<(svg|style|script)\b.*?</\1>", re.DOTALL), ""),
    (re.compile(r"^ *\|.*$", re.MULTILINE), ""),  # tables
    (re.compile(r"^ *(:::|--8<--).*$", re.MULTILINE), ""),
    (re.compile(r"<[a-z/][^>\n]*>"), ""),
    (re.compile(r"\]\([^)\s]*\)"), "]"),  # the text of a link is prose, its address isn't
]
_WORD = re.compile(r"`[^`]+`|\w[\w'’.,/-]*")


def prose(text: str) -> str:
    for pattern, kept in _LEFT_OUT:
        text = pattern.sub(kept, text)
    return text


def count(text: str) -> int:
    """`a span of code` is one word."""
    return len(_WORD.findall(prose(text)))


def pages() -> list[Path]:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return [*(page for page in top if page.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def faults(words: dict[str, int]) -> list[str]:
    found = [
        f"{page} has {n} words of prose, of at most {PAGE_LIMIT}"
        for page, n in words.items()
        if n > PAGE_LIMIT
    ]
    total = sum(words.values())
    if total > TOTAL_LIMIT:
        found.append(f"all pages have {total} words of prose, of at most {TOTAL_LIMIT}")
    return found


def main() -> None:
    words = {
        page.relative_to(ROOT).as_posix(): count(page.read_text(encoding="utf-8"))
        for page in pages()
    }
    for page, n in sorted(words.items(), key=lambda item: -item[1]):
        print(f"{n:7}  {page}")
    print(f"{sum(words.values()):7}  of {TOTAL_LIMIT}")
    sys.exit("\n".join(faults(words)) or 0)


if __name__ == "__main__":
    main()
