"""What notebooks show, in Chromium: it fits telephones and screens, and can be read."""

import json

import chromium
import notebook_pages as pages
import pytest
from needs import skip_unless_required

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(request):
    path = chromium.find()
    if path is None:
        reason = "Chromium is missing: apt-get install chromium"
        skip_unless_required(request.config, "--require-browser", reason)
    return path


@pytest.fixture(scope="module")
def measured(browser):
    """Of each page, by name, theme and width. One Chromium for all of them."""
    frames = [
        chromium.frame(f"{name}, {theme}, {width}", pages.html_of(name), theme, width)
        for name in pages.SHOWN
        for theme in chromium.THEMES
        for width in chromium.WIDTHS
    ]
    found = json.loads(chromium.measure(browser, frames))
    assert len(found) == len(frames)
    return found


def faults(measured, name):
    return {page: found[name] for page, found in measured.items() if found[name]}


def test_pages_are_there(measured):
    assert all(found["texts"] for found in measured.values())


def test_nothing_scrolls_sideways(measured):
    assert faults(measured, "scrolls") == {}
    assert faults(measured, "wide") == {}


def test_words_are_not_broken(measured):
    assert faults(measured, "broken") == {}


def test_texts_fit_into_their_cells(measured):
    assert faults(measured, "cramped") == {}


def test_texts_can_be_read(measured):
    assert faults(measured, "tiny") == {}
    assert faults(measured, "faint") == {}


def test_faults_are_found(browser):
    """Of a page that is too wide and too faint."""
    html = '<div class="mylib-show"><p style="width: 600px; color: #ccc">words</p></div>'
    cell = '<td style="max-width: 3em; overflow-wrap: anywhere">unbreakable short</td>'
    cell = f'<div class="mylib-show"><table><tr>{cell}</tr></table></div>'
    frames = [
        chromium.frame("wide", html, "light", 390),
        chromium.frame("fits", html, "light", 800),
        chromium.frame("cell", cell, "light", 800),
    ]
    found = json.loads(chromium.measure(browser, frames))
    assert found["wide"]["scrolls"] > 0 and found["wide"]["wide"] == ["P words"]
    assert found["fits"]["scrolls"] == 0 and found["fits"]["faint"] == ["P words"]
    assert found["cell"]["broken"] == ["unbreakable"]
