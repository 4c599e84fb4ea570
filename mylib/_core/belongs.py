"""The leaf that another one belongs to: a moment to its weight, a result to what it replaces.

All rooms use this one answer. A caller with a program passes on its facts: the dimensions that are
split alike, as a part of the form, or the leaves from which a value is computed element by element.
Shapes come next. Paths only decide between leaves that are equal in both. If they can't decide, the
answer is all leaves that fit: it is unknown.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
# A path as the texts of its keys.
Parts = tuple[str, ...]


@dataclass(frozen=True)
class Owner(Generic[Key]):
    """The leaves that another one may belong to, and why these. It is unknown if there are several
    or none.
    """

    all: tuple[Key, ...]
    why: str

    @property
    def only(self) -> Key | None:
        return self.all[0] if len(self.all) == 1 else None


def owner_by_flow(computed_from: Collection[Key]) -> Owner[Key]:
    """The owner of a value that a program computes from these leaves."""
    count = len(computed_from)
    why = "it depends on it alone" if count == 1 else f"it depends on {count} of them"
    return Owner(tuple(computed_from), why)


class Owners(Generic[Key]):
    """Leaves that others may belong to, with their paths and forms, such as their shapes. The form
    of a leaf whose path doesn't fit is not asked for: it may be unknown.
    """

    def __init__(
        self, paths: Mapping[Key, Parts], form_of: Callable[[Key], object] = lambda key: None
    ):
        self._paths, self._form_of = paths, form_of
        self._at: dict[Parts, list[Key]] = {}
        for key, path in paths.items():
            self._at.setdefault(path, []).append(key)

    def of(
        self,
        path: Parts,
        form: object = None,
        near: Collection[Key] = (),
        is_field: Callable[[int], bool] = lambda i: True,
        outside: bool = False,
    ) -> Owner[Key]:
        """The owner of a leaf with this path and form; None as a form fits all. `near` are the
        leaves that it is computed from element by element, if that is known: they tell equals
        apart. `is_field` is for paths that end in list indices alone: such an end counts only
        after a field. If `outside`, it doesn't belong to a leaf with the same path.
        """
        reason = "no path is, or ends, like its own"
        for keys, why in self._by_path(path, is_field, outside):
            fitting = [x for x in keys if form is None or self._form_of(x) == form]
            if fitting:
                close = [x for x in fitting if x in near]
                return Owner(tuple(close or fitting), why)
            reason = "what has its path has another form"
        return Owner((), reason)

    def alike(self, path: Parts, form: object) -> Owner[Key]:
        """Those with this form; of several the ones whose paths have most of its end."""
        fitting = {
            x: _common(self._paths[x], path) for x in self._paths if self._form_of(x) == form
        }
        most = max(fitting.values(), default=0)
        all_ = tuple(x for x, common in fitting.items() if common == most)
        return Owner(all_, f"of this form; {most} keys at the end are the same")

    def _by_path(
        self, path: Parts, is_field: Callable[[int], bool], outside: bool
    ) -> Iterator[tuple[list[Key], str]]:
        """Those whose paths are ends of this one, the longest first; then those whose paths are
        this one but for some keys inside of it, such as `[1].weight` in `[1].mu.weight`.
        """
        ends = [
            i
            for i in range(max(1, len(path)))
            if i == 0 or is_field(i - 1) or not all(part.isdigit() for part in path[i:])
        ]
        for i in ends[1:] if outside else ends:
            if path[i:] in self._at:
                yield self._at[path[i:]], "its path ends so" if i else "it has this path"
        for i in ends:
            for k in range(i - 1, 0, -1):
                if path[:k] + path[i:] in self._at:
                    yield self._at[path[:k] + path[i:]], "its path is so, but for keys inside of it"


def _common(a: Parts, b: Parts) -> int:
    """How many keys at the end are the same."""
    for n, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def places_of(leaves: Mapping[Parts, object], tree: Mapping[Parts, object]) -> Iterator[Parts]:
    """Where a tree has nodes with exactly these leaves: both are forms by path."""
    first = next(iter(leaves))
    for path, form in tree.items():
        node = path[: len(path) - len(first)]
        if node + first == path and form == leaves[first]:
            inside = {p[len(node) :]: x for p, x in tree.items() if p[: len(node)] == node}
            if inside == leaves:
                yield node
