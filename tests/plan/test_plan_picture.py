"""The picture of candidates in notebooks."""

import xml.etree.ElementTree as ET

import pytest
from planned_steps import MLP, STEP, modelled

from mylib._planning.plan.candidate import Candidate
from mylib._planning.plan.picture import _BYTES, _SECONDS, Axis, Dot, _names

GIB = 2**30


def test_it_is_well_formed_and_has_all_candidates():
    plan = modelled(STEP, *MLP, machine="h100 x 8", memory=2**20)
    page = ET.fromstring(plan._repr_html_())
    circles = page.findall(".//circle")
    priced = [x for x in (plan.chosen, *plan.others, *plan.rejected) if x.seconds]
    assert len(circles) == len(priced) > 5
    titles = [x.find("title").text for x in circles]
    assert sum(x.startswith(plan.chosen.name + ":") for x in titles) == 1
    assert sum(x.get("r") == "6" for x in circles) == 1
    assert "fully_shard" in page.find(".//pre").text
    texts = [x.text for x in page.findall(".//text")]
    best = [x.name for x in (plan.chosen, *plan.others)][:5]
    assert sorted(x for x in texts if x in {x.name for x in priced}) == sorted(best)
    assert {"a step may take 972.8 KiB", "memory of each device", "time of a call"} <= {*texts}
    assert plan.limit == 0.95 * 2**20


@pytest.mark.parametrize(
    ("values", "units", "texts"),
    [
        ((5 * GIB, 190 * GIB), _BYTES, [f"{n} GiB" for n in (5, 10, 20, 50, 100, 200)]),
        ((0.5 * GIB, 3 * GIB), _BYTES, ["500 MiB", "1 GiB", "2 GiB"]),
        ((0.42, 0.73), _SECONDS, [f"{n} ms" for n in (400, 500, 600, 700, 800)]),
        ((1, 1), _SECONDS, ["900 ms", "910 ms"]),
    ],
)
def test_ticks_are_round(values, units, texts):
    found = [text for _, text in Axis(values, 0, 100).ticks(units)]
    assert found[: len(texts)] == texts


def test_names_are_at_their_dots_and_do_not_hide_each_other():
    dots = [
        Dot(1 + i / 10, 1 + i / 40, Candidate(f"FSDP {i}", 1, None, 1, False, {}), i == 0)
        for i in range(5)
    ]
    x = Axis([dot.memory for dot in dots], 0, 600)
    y = Axis([dot.seconds for dot in dots], 300, 0)
    places = [ET.fromstring(str(label)) for label in _names(dots, x, y)]
    for dot, label in zip(dots, places, strict=True):
        assert abs(float(label.get("x")) - x.at(dot.memory)) <= 9.1
        assert abs(float(label.get("y")) - y.at(dot.seconds)) <= 20
    assert len({(label.get("x"), label.get("y")) for label in places}) == 5
