"""The order in which programs of the GPU's and the TPU's compilers compute and communicate."""

from collections import Counter

import pytest
from known import TEXTS, text_of

import mylib
from mylib._programs.audit.moments import Begin, End
from mylib._programs.audit.work import Loop, Operation

NAMES = sorted(path.name.removesuffix(".hlo.gz") for path in TEXTS.glob("*.hlo.gz"))


def begun(steps, times=1):
    """How much of each collective begins in a call."""
    counts = Counter()
    for step in steps:
        if isinstance(step, Begin):
            counts[step.collective] += times * step.share
        elif isinstance(step, Loop):
            counts.update(begun(step.steps, times * step.times))
    return counts


def beside(steps):
    """The numbers of the collectives beside which something runs."""
    running, found = set(), set()
    for step in steps:
        match step:
            case Begin():
                running.add(step.collective)
            case End():
                running.discard(step.collective)
            case Operation():
                found |= running
            case Loop():
                found |= beside(step.steps)
    assert not running, "begun, and never ended"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_collective_begins_and_ends(name):
    report = mylib.audit(text_of(name))
    counts = begun(report.work.schedule)
    for number, c in enumerate(report.collectives):
        if c.times is not None and not c.sometimes:
            assert counts[number] == pytest.approx(c.times), c
    hidden = beside(report.work.schedule)
    for number, c in enumerate(report.collectives):
        assert not c.overlapped or number in hidden, c
