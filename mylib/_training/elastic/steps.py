"""Steps that all processes make, or none: each says how it went before any goes on."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass
from typing import Generic, TypeVar

import jax
from jax.sharding import Sharding

from ..._core.compat import forget_effects, names
from ..._core.errors import TeamError, in_words
from ..._moving.processes import AbsentError, Processes, gather_messages, lost, named
from ..jit import Jitted
from .replicas import Replicas
from .rows import BatchRows, Reader
from .state import State, bytes_of, check_copies, check_kept, copied, moved

Aux = TypeVar("Aux")
Result = TypeVar("Result")

# What a process says of a part of a step: that it is done, that it raised, or that a collective
# failed, which may be the fault of another one.
_DONE, _RAISED, _BROKEN = "done", "raised", "broken"


@dataclass
class Steps(Generic[State, Aux]):
    """The steps of a team with these numbers."""

    team: Replicas
    step: Callable[..., tuple[State, Aux]]
    first: InitVar[State]
    read: Reader
    rows: BatchRows
    numbers: range
    every: int

    def __post_init__(self, first: State) -> None:
        team = self.team
        if self.every < 1:
            raise ValueError(f"write every=1 or more, not {self.every}")
        self.rows.check(team.mesh_of, team.at_least, len(team.devices))
        check_copies(first, team.mesh, team.replica)
        self.first_parts = self.rows.parts(team.mesh)
        self.donates = _donates(self.step, self.every, first)
        self.takes_pieces = "pieces" in inspect.signature(self.step).parameters
        # The number of the step to which a loss leads back, and the state before it.
        self.kept = self.numbers.start, first
        # Whether the step has been compiled for the team's mesh.
        self.is_compiled = False

    def run(self) -> Iterator[tuple[int, State, Aux]]:
        n, state = self.kept
        while n < self.numbers.stop:
            since = time.monotonic()
            try:
                state, aux = self._take(n, state)
            except AbsentError as absent:
                n, state = self._go_back(absent.missing, since)
                continue
            yield n, state, aux
            n += 1

    def _go_back(self, gone: Processes, since: float) -> tuple[int, State]:
        n, state = self.kept
        self.team.go_on_without(gone, n, since)
        self.is_compiled = False
        self.kept = n, moved(state, self.team.mesh)
        return self.kept

    def _take(self, n: int, state: State) -> tuple[State, Aux]:
        """Makes a step in all processes. The next state is kept once all have it."""
        mesh, is_kept = self.team.mesh, state is self.kept[1]
        pieces = self.rows.pieces(self.rows.parts(mesh), self.first_parts)
        more = {"pieces": pieces} if self.takes_pieces else {}

        def prepare() -> tuple[State, object]:
            batch = self.rows.read(self.read, n, mesh)
            before = copied(state) if self.donates and is_kept else state
            if isinstance(self.step, Jitted) and not self.is_compiled:
                with jax.set_mesh(mesh):
                    self.step.lower(before, batch, **more).compile()
                self.is_compiled = True
            return before, batch

        # Those that are slow to read, or to compile, would let a collective of the others time out.
        before, batch = self._together("reading", n, prepare)

        def make() -> tuple[State, Aux]:
            with jax.set_mesh(mesh):
                return jax.block_until_ready(self.step(before, batch, **more))

        commits = (n + 1 - self.numbers.start) % self.every == 0 or n + 1 == self.numbers.stop
        result = self._together("step", n, make, commits)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError("return (state, aux) from the step")
        if is_kept:
            check_kept(state)
        if commits:
            check_copies(result[0], mesh, self.team.replica)
            self.kept = n + 1, result[0]
        return result

    def _together(self, what: str, n: int, do: Callable[[], Result], meets: bool = True) -> Result:
        """The result, once all processes have theirs. If nothing is kept then, whether the others
        have is heard of at the next meeting. Its own error is raised as it is; an `AbsentError` is
        about processes that are lost.
        """
        try:
            result = do()
        except Exception as error:
            if _is_broken(error):
                forget_effects()
                self._meet(f"{what} {n}", _BROKEN, in_words(error))
            else:
                with suppress(TeamError, AbsentError):
                    self._meet(f"{what} {n}", _RAISED, in_words(error))
            raise
        if meets:
            self._meet(f"{what} {n}", _DONE)
        return result

    def _meet(self, what: str, outcome: str, about: str = "") -> None:
        """Tells the others the outcome. Raises if one of them has failed, or is lost."""
        if self.team.gate.opens(what, outcome == _DONE):
            return
        processes = self.team.processes
        try:
            told = gather_messages("team", [outcome, what, about], processes)
        except AbsentError as absent:
            if lost().union([jax.process_index()]).intersection(absent.missing):
                raise
            raise TeamError(f"{absent}. Start all processes again", restart=True) from None
        for failure in (_RAISED, _BROKEN):
            failed = [i for i, (said, *_) in zip(processes, told, strict=True) if said == failure]
            if not failed:
                continue
            _, what, about = told[processes.index(failed[0])]
            if failure == _RAISED:
                raise TeamError(f"{named(failed)} raised in {what}: {about}", restart=False)
            raise TeamError(
                f"a collective failed in {what}, and no process is lost, so one may have been "
                f"too slow, or the network cut off. Start all processes again, from the last "
                f"checkpoint. {named(failed)}: {about}",
                restart=True,
            )


def _is_broken(error: Exception) -> bool:
    """Whether it may come from the loss of another process."""
    if isinstance(error, AbsentError):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and names.TEXT_CALLBACK not in str(error)


def _donates(step: object, every: int, state: object) -> bool:
    if not isinstance(step, Jitted):
        return False
    about = step.dispatcher
    mesh, placed = about.mesh, [about.out_shardings]
    if about.inputs is not None:
        mesh, placed = mesh or about.inputs.mesh, [*placed, about.inputs.placement]
    places = jax.tree.leaves(placed, is_leaf=lambda place: isinstance(place, Sharding))
    if mesh is not None or any(isinstance(place, Sharding) for place in places):
        raise ValueError(
            f"write {about.name} without mesh=, and its placements as rules and specs: after a "
            "loss it runs on another mesh, that of jax.set_mesh"
        )
    if about.donate != "none" and every == 1:
        raise ValueError(
            f"write {about.name} without donate={about.donate!r}, or give steps every=10: the "
            "state before a step must outlive it, in case a process is lost "
            f"({bytes_of(state):,} bytes in this process)"
        )
    return about.donate != "none"
