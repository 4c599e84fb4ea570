"""`tools/count_words.py`."""

import sys

import _pages

sys.path.append(str(_pages.ROOT / "tools"))

import count_words  # noqa: E402

_PAGE = """---
title: Not counted
---
# Two words

One [link that counts](somewhere/with-a-long/address.md#part), `code x` and an
end. <!-- a comment
of two lines -->

| a | table |
|---|---|

??? example "Folded"

    ```python
    nothing here
    ```

    But this.

```text
nor here
```

--8<-- "README.md:part"

::: mylib.plan
"""


def test_what_is_prose():
    counted = 2 + 1 + 3 + 1 + 3 + 2 + 2
    assert count_words.count(_PAGE) == counted, count_words.prose(_PAGE)


def test_limits():
    assert not count_words.faults({"a.md": count_words.PAGE_LIMIT})
    (page,) = count_words.faults({"docs/a.md": count_words.PAGE_LIMIT + 1})
    assert page.startswith("docs/a.md has 1501 words")
    many = {f"{n}.md": 1_000 for n in range(27)}
    assert count_words.faults(many) == ["all pages have 27000 words of prose, of at most 26000"]
