"""The picture of candidates in notebooks."""

import xml.etree.ElementTree as ET

import planned_steps as steps

import mylib
from mylib._plan.picture import Dot, _names, front


def test_it_is_well_formed_and_has_all_candidates():
    args = steps.abstract(steps.mlp, steps.ROWS)
    step = steps.step_of(steps.squared_loss)
    plan = mylib.plan(step, *args, machine="h100 x 8", policies=("full",), compile=0)
    page = ET.fromstring(plan._repr_html_())
    circles = page.findall(".//circle")
    priced = [x for x in (plan.chosen, *plan.others, *plan.rejected) if x.seconds]
    assert len(circles) == len(priced) > 5
    titles = [x.find("title").text for x in circles]
    assert sum(x.startswith(plan.chosen.name + ":") for x in titles) == 1
    assert sum(x.get("r") == "6" for x in circles) == 1
    assert "fully_shard" in page.find(".//pre").text
    names = [x for x in page.findall(".//text") if x.text in {x.name for x in priced}]
    best = [x.name for x in (plan.chosen, *plan.others)][:5]
    assert sorted(x.text for x in names) == sorted(best)


def test_names_do_not_hide_each_other():
    dots = [Dot(f"FSDP {i}", 1 + i / 100, 1 + i / 100, i == 0, False, "") for i in range(5)]
    labels = list(_names(dots, lambda x: 500 + x, lambda y: 100 + y))
    places = [ET.fromstring(str(x)) for x in labels]
    heights = [float(x.get("y")) for x in places]
    assert all(b - a >= 13 for a, b in zip(heights, heights[1:], strict=False))
    assert {x.get("text-anchor") for x in places} == {"start"}
    far = list(_names(dots[:1], lambda x: 600.0, lambda y: 100.0))
    assert 'text-anchor="end"' in far[0]


def test_the_front():
    sizes = [(1, 9), (2, 5), (3, 6), (4, 4), (5, 4)]
    dots = [Dot(str(x), *x, False, False, "") for x in sizes]
    assert [(x.memory, x.seconds) for x in front(dots)] == [(1, 9), (2, 5), (4, 4)]
