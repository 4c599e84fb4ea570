"""The order in which the layers of a model are called, and that of their backward passes."""

import weakref
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..._core.compat import trace_of, traces_here
from ..._core.errors import PrefetchWarning, warn

# A number, as long as the program that computes it is traced.
Token = weakref.ref[jax.Array]


class Turns:
    """The tokens of the layers that were called last, and of those whose gradients were computed
    last. A token is a number without meaning, which is available when the layer has its input.

    It is part of a model's structure, which JAX's caches keep. So it refers to traces and their
    values only weakly.
    """

    def __init__(self, prefetch: int):
        self._forward, self._backward = (deque[Token](maxlen=prefetch) for _ in range(2))
        # The program of the last call, and how many programs in a row have called one layer alone.
        self._program: Callable[[], object] = lambda: None
        self._alone = 0

    def take(self, backward: bool = False) -> tuple[jax.Array, bool]:
        """The token that the next layer waits for, and whether an earlier layer has returned it."""
        traces = traces_here()
        tokens = self._backward if backward else self._forward
        token = tokens[0]() if len(tokens) == tokens.maxlen else None
        # Values of other programs can't be used in this one.
        if token is not None and any(trace_of(token) is trace for trace in traces):
            self._alone = 0
            return token, True
        if not backward:
            self._note(traces[-1])
        return jnp.zeros((), jnp.int32), False

    def _note(self, program: object) -> None:
        """Warns when the third program in a row calls a single layer."""
        self._alone = 0 if program is self._program() else self._alone + 1
        self._program = weakref.ref(program)
        if self._alone == 3:
            warn(
                "fully_shard: prefetch= has no effect across transformations. Transform the loop "
                "over the layers (by jax.checkpoint, jax.jit), not each layer's call",
                PrefetchWarning,
            )

    def add(self, token: jax.Array, backward: bool = False) -> None:
        # An equation whose operands are not batched belongs to the program around a `vmap`.
        token = jax.lax.optimization_barrier(token)
        if isinstance(token, Tracer):
            # A program keeps the operands of its equations. XLA removes this one.
            jax.lax.optimization_barrier(token)
            (self._backward if backward else self._forward).append(weakref.ref(token))
