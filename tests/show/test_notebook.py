"""What notebooks show: well-formed, escaped, with nothing from elsewhere."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import notebook_pages as pages
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from notebook_pages import abstract, transformer

import mylib

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module", params=pages.SHOWN)
def page(request):
    return pages.html_of(request.param)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], Counter(), Counter()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen[tag] += 1
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_well_formed(page):
    ElementTree.fromstring(page)
    tags = _Tags()
    tags.feed(page)
    assert not tags.open
    assert set(tags.seen) <= set(
        "div style p pre table thead tbody tr th td wbr svg rect text title".split()
    )
    assert not [name for name in tags.attributes if name.startswith("on") or name == "href"]


def test_the_example_in_the_docs_is_current():
    told = f"run python {pages.__file__}"
    assert pages.IN_THE_DOCS.read_text() == pages.html_of("transformer") + "\n", told


def test_nothing_from_elsewhere(page):
    assert not [word for word in ("http", "url(", "src=", "@import", "<script") if word in page]


def texts(page, name, class_=None):
    found = ElementTree.fromstring(page).iter(name)
    return ["".join(x.itertext()) for x in found if class_ in (None, x.get("class"))]


def test_what_a_model_shows():
    shown = mylib.show(transformer(MESH, 32, 2))
    page = shown._repr_html_()
    # A picture for each distinct sharding, with a cell for each device.
    specs = {row.spec for row in shown.rows}
    captions = texts(page, "div", "caption")
    assert len(captions) == len(specs) and all(any(s in c for c in captions) for s in specs)
    assert page.count("<rect") == 8 * len(specs)
    # Over a cell: the device, and what it holds.
    (over,) = [t for t in texts(page, "title") if t.startswith("cpu 5") and ".up.weight: " in t]
    assert ".layers[*].up.weight: 2 x 2 KiB" in over
    # The table has what the text has.
    cells = [text for text in texts(page, "td") if text]
    assert [word for word in cells if word not in str(shown)] == []


def test_copies_have_the_same_colour():
    page = ElementTree.fromstring(mylib.show([abstract((8, 8), MESH, P("model"))])._repr_html_())
    fills = [rect.get("fill") for rect in page.iter("rect")]
    assert fills == fills[:2] * 4 and fills[0] != fills[1]


def test_many_panels_are_shortened():
    over = pages.mesh(a=16, b=2, c=2)
    shown = mylib.show(abstract((16, 2, 2), over, P("a", "b", "c")))._repr_html_()
    # Of the array, and of the mesh.
    assert shown.count("and 8 more grids") == 2 and shown.count("<svg") == 8


def test_a_mesh_without_axes():
    one = jax.sharding.Mesh(np.array(jax.devices()[0]), ())
    shown = mylib.show(abstract((2,), one, P()))
    assert "mesh (): cpu 0" in str(shown) and shown._repr_html_().count("<rect") == 1


def test_what_goes_to_the_host():
    before = {"a": abstract((8,), MESH, P("data")), "b": np.ones(8, np.float32)}
    after = {"a": np.ones(8, np.float32), "b": abstract((8,), MESH, P("data"))}
    page = mylib.show(before, after)._repr_html_()
    assert "host memory" in texts(page, "td")


def test_what_a_report_shows():
    audited = pages.report()
    page = audited._repr_html_()
    cells = texts(page, "td")
    assert all(c.kind in cells for c in audited.collectives) and "arguments" in cells


NASTY = "</td><script>alert('&\"')</script>\x00\x1b\ud800"


class Nasty:
    def __call__(self, leaf):
        return P()

    def why(self, leaf):
        return NASTY


@pytest.mark.parametrize(
    "make",
    [
        lambda: mylib.show({NASTY: jnp.ones(3), "b": {NASTY: 1}}),
        lambda: mylib.show({}, {NASTY: jnp.ones(3)}),
        lambda: mylib.explain(jnp.ones(8), Nasty(), MESH),
        lambda: mylib.explain({NASTY: jnp.ones(7)}, P("data"), MESH),
        lambda: mylib.show(abstract((8,), AbstractMesh((8,), (NASTY,)), P(NASTY))),
        lambda: mylib.show({"a": type(NASTY[:8], (), {})()}),
        lambda: mylib.audit(jax.jit(lambda tree: tree[NASTY[:26]] + 1), {NASTY[:26]: jnp.ones(8)}),
    ],
)
def test_what_comes_from_the_user_is_escaped(make):
    page = make()._repr_html_()
    ElementTree.fromstring(page)
    assert "<script" not in page and "\x00" not in page and "\x1b" not in page
