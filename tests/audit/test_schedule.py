"""The order in which programs of the GPU's and the TPU's compilers compute and communicate."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

import mylib
from mylib._programs.audit.moments import Begin, End
from mylib._programs.audit.work import Loop, Operation

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.hlo.gz"))


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


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name.removesuffix(".hlo.gz"))
def test_every_collective_begins_and_ends(path):
    report = mylib.audit(gzip.decompress(path.read_bytes()).decode())
    counts = begun(report.work.schedule)
    for number, c in enumerate(report.collectives):
        if c.times is not None and not c.sometimes:
            assert counts[number] == pytest.approx(c.times), c
    hidden = beside(report.work.schedule)
    for number, c in enumerate(report.collectives):
        assert not c.overlapped or number in hidden, c
