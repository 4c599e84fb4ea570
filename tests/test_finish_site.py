"""`tools/finish_site.py`, and the lists of `tools/check_site.py`. The built site is checked by
`.ci/run`.
"""

import json
import struct
import sys

import _pages
import pytest

sys.path.append(str(_pages.ROOT / "tools"))

import check_site  # noqa: E402
import draw_card  # noqa: E402
import finish_site  # noqa: E402

_HTML = """<html><head><title>Rules - mylib</title>
<meta name="description" content="the same everywhere"></head><body><article>
<h1>Rules</h1><p>After this page you can <em>place</em> a whole model. And more.</p>
</article><script src="../assets/moved.js"></script></body></html>
"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "index.html").write_text(_HTML)
    (tmp_path / "assets").mkdir()
    script = _pages.ROOT / "docs" / "assets" / "moved.js"
    (tmp_path / "assets" / "moved.js").write_text(script.read_text())
    (tmp_path / "examples" / "models").mkdir(parents=True)
    finish_site.finish(tmp_path)
    return tmp_path


def test_a_description_is_the_first_sentence(site):
    page = (site / "rules" / "index.html").read_text()
    said = 'content="Rules: After this page you can place a whole model."'
    assert f'name="description" {said}' in page and f'property="og:description" {said}' in page
    assert "the same everywhere" not in page and "Source of this page" not in page


def test_redirects(site):
    page = (site / "transforming" / "index.html").read_text()
    assert "url=../filter-jit/" in page and 'src="../assets/moved.js"' in page
    script = (site / "assets" / "moved.js").read_text()
    moved = json.loads(finish_site.MOVED.read_text())
    assert f"const MOVED = {json.dumps(moved)};" in script
    assert set(moved) <= set(check_site.OLD)


def test_the_first_use_of_a_word_leads_to_the_glossary():
    terms = finish_site.glossary((_pages.ROOT / "docs" / "glossary.md").read_text())
    assert terms["sharded"] == "sharded" and terms["all-gather"] == "gather" and "used" not in terms
    text = "<article><h2>sharded</h2><p>sharded <code>mesh</code> unsharded, sharded</p></article>"
    link = '<a href="../glossary/#sharded">sharded</a>'
    assert finish_site.with_glossary(text, terms, "../glossary/") == text.replace(
        "<p>sharded", f"<p>{link}"
    )


def test_overloads_are_folded():
    first, last = (
        f'<div class="language-python doc-signature highlight"><pre>{x}</pre></div>' for x in "ab"
    )
    page = f'<h2>f</h2><div class="doc-overloads">\n{first}{last}  </div><p>text</p>'
    folded = f"{last}<details><summary>Other forms</summary>{first}</details>"
    assert finish_site.folded(page) == f"<h2>f</h2>{folded}<p>text</p>"


def test_downloads(site):
    for name in ("gpt.py", "shard_a_model.ipynb", "models/llama.py"):
        source = _pages.ROOT / "examples" / name
        assert (site / "examples" / name).read_bytes() == source.read_bytes()


def test_the_source_of_a_page():
    path = finish_site.Path("rules/index.html")
    page = finish_site.with_source(_HTML, path, "https://example.org/someone/mylib")
    assert 'href="https://example.org/someone/mylib/blob/main/docs/rules.md"' in page


def test_the_card_of_a_page():
    address = "https://example.org/someone/mylib"
    page = finish_site.described(_HTML, address)
    assert f'property="og:image" content="{address}/raw/main/docs/assets/card.png"' in page
    assert 'name="twitter:card" content="summary_large_image"' in page
    assert "og:image" not in finish_site.described(_HTML, "")
    card = draw_card.CARD.read_bytes()
    assert card[:4] == b"\x89PNG" and struct.unpack(">II", card[16:24]) == draw_card.SIZE


def test_the_card_has_the_lines_of_the_first_screen():
    text = draw_card.page(_pages.README.read_text(encoding="utf-8"))
    assert "five lines changed, same losses" in text and text.count("\n+ ") == 4


def test_an_old_address_that_leads_nowhere_is_a_fault(site, monkeypatch):
    pages = {path: check_site.Page(path) for path in site.rglob("*.html")}
    monkeypatch.setattr(check_site, "OLD", ["rules/", "rules/#gone", "gone/"])
    monkeypatch.setattr(check_site, "MOVED", {})
    assert check_site.lost(pages, site) == [
        "the old address 'rules/#gone' leads nowhere",
        "the old address 'gone/' leads nowhere",
    ]


def test_many_words_are_searched():
    assert len(check_site.FINDS) >= 150
