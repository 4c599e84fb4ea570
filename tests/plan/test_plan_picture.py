"""The picture of candidates in notebooks."""

import xml.etree.ElementTree as ET

import planned_steps as steps

import mylib
from mylib._plan.picture import Dot, front


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


def test_the_front():
    sizes = [(1, 9), (2, 5), (3, 6), (4, 4), (5, 4)]
    dots = [Dot(str(x), *x, False, False, "") for x in sizes]
    assert [(x.memory, x.seconds) for x in front(dots)] == [(1, 9), (2, 5), (4, 4)]
