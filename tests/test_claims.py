"""Figures on the first screen are those of the rows that they link to."""

import re

import _pages

_LINK = re.compile(r"\[([\d.]+)\]\((?:docs/)?benchmarks\.md#([\w-]+)\)")
_INDEX = _pages.ROOT / "docs/index.md"
_ROWS = {
    name: row.rstrip(" |").split(" | ")[-2]
    for row in (_pages.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").splitlines()
    for name in re.findall(r'<span id="([\w-]+)">', row)
}


def test_figures_of_the_first_screen_are_those_of_their_rows():
    """README's and the site's, which are the same."""
    figures = [_LINK.findall(page.read_text(encoding="utf-8")) for page in (_pages.README, _INDEX)]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 4 and all(_ROWS[name] == figure for figure, name in figures[0])


def test_the_ratio_of_muon_is_that_of_the_kept_table():
    kept = (_pages.ROOT / "benchmarks/results/matrices.md").read_text(encoding="utf-8")
    (row,) = [line for line in kept.splitlines() if "8 H100s, by `estimate`" in line]
    plain, ours = (float(cell.removesuffix(" ms")) for cell in row.strip(" |").split(" | ")[1:])
    assert _ROWS["row-muon"] == f"{ours / plain:.2f}"
