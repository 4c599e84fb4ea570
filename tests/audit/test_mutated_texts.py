"""Stored programs in which a word is changed: what is told is equal, unknown, or an error."""

import mutated_texts
import pytest


def test_there_are_texts_of_each_compiler():
    assert len(mutated_texts.NAMES) >= 10
    assert {name.split("-")[0] for name in mutated_texts.NAMES} == {"cpu", "gpu", "tpu", "tpu7x"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mutated_texts.NAMES)
def test_nothing_is_silently_wrong(name: str):
    tally = mutated_texts.tally_of(name)
    assert not tally.bad
    # 3,018 in all texts; of the smallest, 58.
    assert sum(tally.counts.values()) > 50
    # Far from all are errors: what nothing asks for may change.
    assert tally.counts["equal"] > tally.counts["valid"]
