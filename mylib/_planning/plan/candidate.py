"""A strategy that a plan has considered, and what is known of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..._core.text import show_time

# Seconds that differ by less are a tie: of compiled programs less than of prices. Guesses: what is
# called a tie is listed with the plan.
TIES = {"measured": 0.02, "compiled": 0.02, "modelled": 0.05}


@dataclass(frozen=True)
class Candidate:
    """A strategy that was considered.

    **Attributes:**

    - `name`: such as `"FSDP 8 x TP 2, saves dots"`.
    - `seconds`, `interval`: of a call, as those of `mylib.results.Estimate`; None if the step
        can't use this mesh.
    - `memory`: the most bytes that each device holds; None if the step can't use this mesh.
    - `compiled`: whether its figures are those of its compiled program. Otherwise all are modelled.
    - `parts`: the modelled seconds of each part.
    - `measured`: the seconds that a call took, if it was run; then `seconds` are these.
    - `modelled`: its modelled seconds, which all candidates have, unless the step can't use this
        mesh.
    - `why`: why it is rejected; empty if it is not.
    - `unread`: what of its compiled program `mylib.audit` doesn't know, so that its figures are
        modelled; empty if it knows all.

    !!! Example

        ```python
        def step(batch, model):
            loss = lambda model: jnp.mean(jax.vmap(model)(batch) ** 2)
            grads = eqx.filter_grad(loss)(model)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads))

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        plan = mylib.plan(step, np.ones((16, 64), np.float32), model, compile=0)
        for candidate in (plan.chosen, *plan.others[:3]):
            print(candidate.name, candidate.seconds, candidate.reason)
        ```
    """

    name: str
    seconds: float | None
    interval: tuple[float, float] | None
    memory: int | None
    compiled: bool
    parts: Mapping[str, float]
    measured: float | None = None
    modelled: float | None = None
    why: str = ""
    unread: str = ""

    @property
    def source(self) -> str:
        """Where its seconds are from."""
        return "measured" if self.measured else "compiled" if self.compiled else "modelled"

    @property
    def rank(self) -> int:
        """Of its source: what is measured comes first."""
        return [*TIES].index(self.source)

    @property
    def reason(self) -> str:
        """Why it is rejected, or the parts of its modelled time. These add up to it, less what runs
        at the same time as another part.
        """
        if self.why:
            return self.why
        spent = sorted(self.parts.items(), key=lambda part: -part[1])
        text = " + ".join(f"{name} {show_time(seconds)}" for name, seconds in spent)
        total = sum(self.parts.values())
        overlapped = total - (self.modelled or math.inf)
        # Less would be rounding.
        is_some = overlapped > 1e-3 * total
        return f"{text} - {show_time(overlapped)} overlapped" if is_some else text
