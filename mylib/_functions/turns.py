"""The order in which the layers of a model are called."""

import weakref
from collections import deque
from typing import Any

from jax.core import Tracer

from .._compat import hold, is_eager, trace_of, traces_here
from .._errors import PrefetchWarning, warn


class Turns:
    """The tokens of the layers that were called last.

    It is part of a model's structure, which JAX's caches keep. So it refers to traces and their
    values only weakly.
    """

    def __init__(self, prefetch: int):
        self._tokens: deque[Any] = deque(maxlen=prefetch)
        # The programs that layers were called in last, and whether each called only one.
        self._programs: deque[tuple[Any, bool]] = deque(maxlen=2)
        self._warned = False

    def take(self) -> Any:
        """The token that the next layer waits for; None for the first layers."""
        traces = traces_here()
        self._note(traces[-1])
        if len(self._tokens) < (self._tokens.maxlen or 0):
            return None
        token = self._tokens[0]()
        # Values of other programs can't be used in this one.
        return token if any(trace_of(token) is x for x in traces) else None

    def add(self, token: Any) -> None:
        if isinstance(token, Tracer):
            hold(token)
            self._tokens.append(weakref.ref(token))

    def _note(self, program: Any) -> None:
        known = [ref() for ref, _ in self._programs]
        if is_eager(program):
            return
        if known and known[-1] is program:
            self._programs[-1] = self._programs[-1][0], False
            return
        is_new = not any(x is program for x in known)
        if is_new and [alone for _, alone in self._programs] == [True, True] and not self._warned:
            self._warned = True
            warn(
                "fully_shard: prefetch= has no effect across transformations. Transform the loop "
                "over the layers (jax.checkpoint, jax.jit), not each layer's call",
                PrefetchWarning,
            )
        self._programs.append((weakref.ref(program), True))
