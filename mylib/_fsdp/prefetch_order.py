"""The order in which the layers of a model are called, and that of their backward passes."""

import weakref
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._compat import is_eager, trace_of, traces_here
from .._errors import PrefetchWarning, warn


class Turns:
    """The tokens of the layers that were called last, and of those whose gradients were computed
    last. A token is a number without meaning, which is available when the layer has its input.

    It is part of a model's structure, which JAX's caches keep. So it refers to traces and their
    values only weakly.
    """

    def __init__(self, prefetch: int):
        self._forward, self._backward = (deque[Any](maxlen=prefetch) for _ in range(2))
        # The programs that layers were called in last, and whether each called only one.
        self._programs: deque[tuple[Any, bool]] = deque(maxlen=2)
        self._warned = False

    def take(self, backward: bool = False) -> tuple[Any, bool]:
        """The token that the next layer waits for, and whether an earlier layer has returned it."""
        traces = traces_here()
        if not backward:
            self._note(traces[-1])
        tokens = self._backward if backward else self._forward
        token = tokens[0]() if len(tokens) == tokens.maxlen else None
        # Values of other programs can't be used in this one.
        if any(trace_of(token) is x for x in traces):
            return token, True
        return jnp.zeros((), jnp.int32), False

    def add(self, token: Any, backward: bool = False) -> None:
        # An equation whose operands are not batched belongs to the program around a `vmap`.
        token = jax.lax.optimization_barrier(token)
        if isinstance(token, Tracer):
            # A program keeps the operands of its equations. XLA removes this one.
            jax.lax.optimization_barrier(token)
            (self._backward if backward else self._forward).append(weakref.ref(token))

    def _note(self, program: Any) -> None:
        programs = [ref() for ref, _ in self._programs]
        if is_eager(program):
            return
        if programs and programs[-1] is program:
            self._programs[-1] = self._programs[-1][0], False
            return
        alone = [is_alone for _, is_alone in self._programs] == [True, True]
        if alone and not any(x is program for x in programs) and not self._warned:
            self._warned = True
            warn(
                "fully_shard: prefetch= has no effect across transformations. Transform the loop "
                "over the layers (by jax.checkpoint, jax.jit), not each layer's call",
                PrefetchWarning,
            )
        self._programs.append((weakref.ref(program), True))
