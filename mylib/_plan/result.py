"""The result of `plan`: what was chosen, what else was tried, and how to use it."""

import importlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._audit import Report
from .._jit import filter_jit
from .._meshes import make_mesh
from .._placement import no_mesh, plan_in_force
from .._show import columns, for_stdout, wrapped
from .._text import listed, show_bytes, show_spec
from .._verify import Verified, verify
from ..machines import Chip, CompilerError, Machine
from .apply import Applying, Planned, PlannedFunction
from .code import code_of
from .matrices import laid_out
from .picture import Dot, page_of
from .strategy import mesh_of
from .trace import PlanError, PlannedStep

# Of the next and of the rejected candidates, so that a plan fits a screen.
_SHOWN = 6
_COLUMNS = "strategy", "a call", "figures", "modelled", "memory", "lost", "its parts, or why not"
# Seconds that differ by less are a tie: of compiled programs less than of prices. Guesses: what is
# called a tie is listed with the plan.
TIES = {"modelled": 0.05, "compiled": 0.02, "measured": 0.02}


@dataclass(frozen=True)
class Candidate:
    """A strategy that was considered.

    **Attributes:**

    - `name`: such as `"FSDP 8 x TP 2, saves dots"`.
    - `seconds`, `interval`: of a call, as those of [`mylib.Estimate`][]; None if the step can't
        use this mesh, or if they are unknown.
    - `memory`: the most bytes that each device holds; None if unknown.
    - `compiled`: whether the target's compiler has compiled it. Otherwise all figures are modelled.
    - `parts`: the modelled seconds of each part.
    - `measured`: the seconds that a call took, if it was run; then `seconds` are these.
    - `modelled`: its modelled seconds, which all candidates have, unless the step can't use this
        mesh.
    - `why`: why it is rejected; empty if it is not.
    - `unread`: what of its compiled program [`mylib.audit`][] doesn't know, so that its figures are
        unknown; empty if it knows all.

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
    def reason(self) -> str:
        """Why it is rejected, or the parts of its modelled time. These add up to it, less what runs
        at the same time as another part.
        """
        if self.why or self.unread:
            return self.why or f"compiled, but its figures are unknown: {self.unread}"
        spent = sorted(self.parts.items(), key=lambda part: -part[1])
        text = " + ".join(f"{name} {_ms(seconds)}" for name, seconds in spent)
        total = sum(self.parts.values())
        overlapped = total - (self.modelled or math.inf)
        # Less would be rounding.
        is_some = overlapped > 1e-3 * total
        return f"{text} - {_ms(overlapped)} overlapped" if is_some else text


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


class _ByArgument(dict[str, Planned]):
    """The placements of a step's arguments, by their names."""

    def __missing__(self, name: str) -> NoReturn:
        raise PlanError(f"the step has no argument {name!r}. It has {', '.join(self)}")


@dataclass(frozen=True, repr=False, eq=False)
class Plan:
    """The result of [`mylib.plan`][]. `print` shows what was chosen, what comes next, what was
    rejected and why, and the code to write.

    Plans are equal if their texts and the classes of their layers are: `as_text` and `Plan.of` save
    them.

    **Attributes:**

    - `machine`: the [`mylib.machines.Machine`][] that it is for.
    - `axes`: the mesh axes and their sizes.
    - `mesh`: the mesh. If neither its machine nor the machine's compiler is available, it is a
        `jax.sharding.AbstractMesh`, which is enough for rules and `explain`.
    - `is_sharded`: whether weights are sharded over `"data"`.
    - `policy`: what layers save: `"full"` (only their input: all is computed again), `"dots"` or
        `"all"`, or `"offload"` (products, in the host's memory).
    - `micro_batches`: into how many the step cuts its batch.
    - `layers`: the classes of the layers.
    - `dtype`: the name of the dtype that layers compute in; None: that of the weights.
    - `arguments`, `results`: a rule for each argument by its name, and one for the results: where
        every array is, between steps.
    - `kept`, `used`: rules for the model, the first that the step calls, as `fully_shard` takes
        them.
    - `memory`: the most bytes that each device holds.
    - `seconds`: the seconds of a call, at least and at most.
    - `chosen`, `others`, `rejected`: [`mylib.Candidate`][]s: the one that was
        chosen, and the others, the best first.
    - `notes`: ties, and what was assumed.
    - `stacked`: the paths of models with stacked layers.
    - `applying`: what `jit` needs, as data: paths and specs.
    - `audit`: the [`mylib.Report`][] of the compiled program; None if nothing was compiled, or if
        the plan was read from text.

    !!! Example

        ```python
        def step(batch, model):
            loss = lambda model: jnp.mean(jax.vmap(model)(batch) ** 2)
            grads = eqx.filter_grad(loss)(model)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads))

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        plan = mylib.plan(step, np.ones((16, 64), np.float32), model, compile=0)
        print(plan, plan.why_not(plan.others[0].name))
        assert mylib.Plan.of(plan.as_text()) == plan
        ```
    """

    machine: Machine
    axes: Mapping[str, int]
    is_sharded: bool
    chosen: Candidate
    others: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    notes: tuple[str, ...]
    stacked: tuple[str, ...]
    applying: Applying = field(repr=False)
    audit: Report | None = None
    # None if the plan was read from text.
    _planned: PlannedStep | None = field(default=None, repr=False)

    @property
    def policy(self) -> str:
        return self.applying.policy

    @property
    def micro_batches(self) -> int:
        return self.applying.micro_batches

    @property
    def layers(self) -> tuple[type, ...]:
        return self.applying.layers

    @property
    def memory(self) -> int | None:
        return self.chosen.memory

    @property
    def seconds(self) -> tuple[float, float] | None:
        return self.chosen.interval

    @property
    def dtype(self) -> str | None:
        dtype = self.applying.dtype
        return None if dtype is None else jnp.dtype(dtype).name

    @cached_property
    def mesh(self) -> Mesh | AbstractMesh:
        try:
            return self._mesh
        # Without its compiler nothing can be compiled for it, but rules can be resolved.
        except CompilerError:
            types = (AxisType.Auto,) * len(self.axes)
            return AbstractMesh(tuple(self.axes.values()), tuple(self.axes), types)

    @cached_property
    def _mesh(self) -> Mesh:
        return mesh_of(self.machine, self.axes)

    @property
    def arguments(self) -> dict[str, Planned]:
        return _ByArgument(
            (name, Planned(specs, name, self.applying.reasons[name]))
            for name, specs in self.applying.arguments.items()
        )

    @property
    def results(self) -> Planned:
        return Planned(self.applying.results, "the result")

    @property
    def kept(self) -> Planned:
        return self.applying.kept(self.applying.order[0])

    @property
    def used(self) -> Planned:
        return self.applying.used_in(self.applying.order[0])

    def jit(
        self, fun: Callable[..., Any], *, donate: tuple[str, ...] | None = None
    ) -> PlannedFunction:
        """The step under the plan.

        **Arguments:**

        - `fun`: the step that was planned, unedited.
        - `donate`: the names of the arguments that are donated; by default those that the results
            replace: each is the only argument with the tree, the shapes and the dtypes of a result.
            If there are several, as of a model and an anchor, none of them is donated, and the plan
            reports it.

        **Returns:**

        A function with the step's arguments, which it moves to where they are planned. `lower`
        takes the same arguments, as that of [`mylib.filter_jit`][].

        **Raises:**

        Calls raise [`mylib.PlanError`][] for arguments that the plan wasn't made for.
        """
        return PlannedFunction(fun, self.applying, self._mesh, donate)

    def verify(self, *args: Any, high: int | None = None, seed: int = 0) -> Verified:
        """Runs the step under the plan and on one device, and compares all results: it is
        [`mylib.testing.verify`][] of `jit(step)`. If the machine is unavailable, it uses as many of
        the available devices; simulated ones will do.

        **Arguments:**

        - `args`: the step's arguments; by default random ones of the shapes that were planned,
            which need as much memory as the step.
        - `high`, `seed`: as for [`mylib.testing.verify`][].

        **Returns:**

        A [`mylib.testing.Verified`][]: what was compared.

        **Raises:**

        [`mylib.testing.VerifyError`][] if a result differs by more than rounding explains.
        [`mylib.PlanError`][] if the plan was read from text, which doesn't have the step.
        """
        planned = self._planned
        if planned is None:
            raise PlanError(
                "this plan was read from text, and doesn't have the step: write "
                "mylib.testing.verify(plan.jit(step), ...) with the step's arguments"
            )
        if self.machine.is_here:
            mesh = self._mesh
        else:
            axes: dict[str, Any] = dict(self.axes)
            mesh = make_mesh(devices=jax.devices()[: self.machine.count], **axes)
        fun = PlannedFunction(planned.fun, self.applying, mesh)
        args = args or laid_out(planned.args, self.applying.of_matrices.spec_at, mesh)
        return verify(fun, *args, high=high, seed=seed)

    @no_mesh()
    def make(
        self, make: Callable[..., Any], *args: Any, arguments: Sequence[str] = ("model", "state")
    ) -> Any:
        """Creates arguments of the step where they are planned, so that no device ever holds more
        than its part.

        **Arguments:**

        - `make`: a function that returns a tuple of these arguments, or one argument if
            `arguments` has one name.
        - `args`: its arguments, such as a key.
        - `arguments`: the names of the step's arguments that it returns.

        **Returns:**

        What `make` returns.
        """
        if isinstance(arguments, str):
            raise TypeError(f"arguments={arguments!r}: write a tuple of names, ({arguments!r},)")
        placements = self.arguments
        places = tuple(placements[name] for name in arguments)
        if len(places) == 1:
            return self._jit(make, places[0].at(0))(*args)

        def make_all(*args: Any) -> Any:
            created = make(*args)
            if not isinstance(created, tuple | list) or len(created) != len(places):
                raise TypeError(f"make must return a tuple of {', '.join(arguments)}")
            return tuple(created)

        return self._jit(make_all, tuple(place.at(1) for place in places))(*args)

    def _jit(self, make: Callable[..., Any], places: Any) -> Callable[..., Any]:
        def placed(*args: Any) -> Any:
            with plan_in_force((self.applying.of_matrices, self._mesh)):
                return make(*args)

        # Arguments, such as a key, may be on another mesh.
        return filter_jit(
            placed, in_shardings=PartitionSpec(), out_shardings=places, mesh=self._mesh
        )

    def why_not(self, name: str) -> str:
        """Why a strategy was not chosen.

        **Arguments:**

        - `name`: its name, such as `"FSDP 8 x TP 8"` or `"FSDP 64, saves dots"`.

        **Returns:**

        The reason, as text.

        **Raises:**

        [`mylib.PlanError`][] if no candidate has this name, with those that are called alike.
        """
        candidates = {x.name: x for x in (self.chosen, *self.others, *self.rejected)}
        x = candidates.get(name) or self._only(name, candidates)
        if x is self.chosen:
            return f"{x.name} was chosen: {x.reason}"
        if x.unread:
            return f"{x.name} was {x.reason}"
        if x.why or x.seconds is None:
            return f"{x.name} was rejected: {x.why}"
        return f"{x.name} takes {self._times(x)}: {x.reason}"

    def _only(self, name: str, candidates: Mapping[str, Candidate]) -> Candidate:
        """The candidate on this mesh, if there is one only."""
        on_mesh = [x for x in candidates if x.partition(",")[0] == name]
        if len(on_mesh) == 1:
            return candidates[on_mesh[0]]
        if on_mesh:
            raise PlanError(f"{name!r} may be {' or '.join(map(repr, on_mesh))}")
        mesh = name.partition(",")[0]
        alike = [x for x in candidates if x.startswith(mesh)] or get_close_matches(name, candidates)
        raise PlanError(
            f"{name!r} was not considered: no mesh of {self.machine} has this shape, or axes= or "
            f"policies= ask for another. There are {listed(alike or [*candidates], 4)}"
        )

    def _times(self, x: Candidate) -> str:
        assert x.seconds is not None
        if self.chosen.seconds is None:
            return f"{_ms(x.seconds)} ({x.source}); that of the chosen one is unknown"
        ratio = x.seconds / self.chosen.seconds
        if x.source != self.chosen.source and self.chosen.modelled is not None:
            chosen = f"the chosen one {_ms(self.chosen.modelled)} by the same model"
            return f"{_ms(x.seconds)} ({x.source}), and {chosen}"
        tie = ", a tie" if ratio <= 1 + TIES[x.source] else ""
        return f"{ratio:.2f} times as long{tie} ({x.source})"

    def diff(self, other: "Plan") -> str:
        """How another plan differs from this one.

        **Arguments:**

        - `other`: the other plan.

        **Returns:**

        A line for each difference; empty text if there is none.
        """
        ours, theirs = _compared(self), _compared(other)
        return "\n".join(
            f"{name}: {ours.get(name, 'absent')} -> {theirs.get(name, 'absent')}"
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name, "absent") != theirs.get(name, "absent")
        )

    def code(self) -> str:
        """The lines that do by hand what `jit` does. They run where they are pasted, and their
        comments show what to call in the loss. Classes of layers that can't be imported, such as a
        notebook's, must be in scope.
        """
        return code_of(self.applying, self.axes, self.is_sharded, self.stacked)

    def as_text(self) -> str:
        """The plan as text, which [`Plan.of`][mylib.Plan.of] reads."""
        contents = {**vars(self.applying), **vars(self)}
        for name in ("applying", "audit", "mesh", "_mesh", "_planned"):
            contents.pop(name, None)
        contents |= {
            "machine": _as_data(self.machine),
            "dtype": self.dtype,
            "layers": [f"{cls.__module__}:{cls.__qualname__}" for cls in self.layers],
            "memory": self.memory,
        }
        return json.dumps(contents, indent=1, default=asdict)

    @classmethod
    def of(
        cls, text: str, layers: Sequence[type] | None = None, machine: Machine | None = None
    ) -> "Plan":
        """The plan with this text.

        **Arguments:**

        - `text`: what `as_text` has returned.
        - `layers`: the classes of the layers, for those that can't be imported by name.
        - `machine`: the machine that it is used on, if that isn't the one that it was made for: on
            a cluster `mylib.machines.here()`.

        **Returns:**

        A [`mylib.Plan`][], equal to the one that was saved if its machine is the same.
        """
        contents = _frozen(json.loads(text))
        needed = {x.name for x in (*fields(Applying), *fields(cls))}
        needed -= {"applying", "audit", "_planned"}
        is_plan = isinstance(contents, dict) and needed <= {*contents}
        if not is_plan or not {x.name for x in fields(Chip)} <= {*contents["machine"]["chip"]}:
            raise ValueError(
                "this isn't the text of a plan, or that of another version: plan the step again"
            )
        dtype, about = contents["dtype"], contents["machine"]
        applying = {x.name: contents[x.name] for x in fields(Applying)}
        applying |= {
            "layers": tuple(map(_imported, contents["layers"]) if layers is None else layers),
            "dtype": None if dtype is None else jnp.dtype(dtype),
        }
        attributes = {x.name: contents[x.name] for x in fields(cls) if x.name in contents}
        attributes |= {
            "machine": machine or Machine(**about | {"chip": Chip(**about["chip"])}),
            "chosen": Candidate(**contents["chosen"]),
            "others": tuple(Candidate(**x) for x in contents["others"]),
            "rejected": tuple(Candidate(**x) for x in contents["rejected"]),
        }
        return cls(**attributes, applying=Applying(**applying))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return False
        return self.as_text() == other.as_text() and self.layers == other.layers

    def __hash__(self) -> int:
        return hash(self.as_text())

    def _repr_html_(self) -> str:
        dots = [
            Dot(x.name, x.memory, x.seconds, x is self.chosen, bool(x.why), x.reason)
            for x in (self.chosen, *self.others, *self.rejected)
            if x.memory and x.seconds
        ]
        title = f"{self.machine}: {self.chosen.name}"
        return page_of(title, repr(self), dots, self.machine.memory)

    def __repr__(self) -> str:
        lines = [f"{self.machine}: {self.chosen.name}", *self._table("chosen", [self.chosen])]
        lines += ["", "code", *(f"  {line}".rstrip() for line in self.code().splitlines())]
        lines += self._table("next", self.others) + self._table("rejected", self.rejected)
        return for_stdout([*lines, "", *wrapped(self.notes)] if self.notes else lines)

    def _table(self, heading: str, candidates: Sequence[Candidate]) -> list[str]:
        if not candidates:
            return []
        rows = [
            (x.name, _ms(x.seconds), x.source if x.seconds else "",
             "" if x.source == "modelled" else _ms(x.modelled),
             "" if x.memory is None else show_bytes(x.memory), self._lost(x), x.reason)
            for x in candidates[:_SHOWN]
        ]  # fmt: skip
        filled = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
        table = [[cells[i] for i in filled] for cells in (_COLUMNS, *rows)]
        left = len(candidates) - _SHOWN
        more = [f"  and {left} more"] if left > 0 else []
        return ["", heading, *columns(table, indent="  "), *more]

    def _lost(self, x: Candidate) -> str:
        """Why a candidate was not chosen, in a word."""
        if x.name == self.chosen.name:
            return ""
        if x.why:
            return "impossible" if x.memory is None else "too large"
        if x.unread or x.seconds is None or self.chosen.seconds is None:
            return "unknown"
        if x.source != self.chosen.source:
            return f"not {self.chosen.source}"
        return "tie" if x.seconds <= self.chosen.seconds * (1 + TIES[x.source]) else "slower"


def _as_data(machine: Machine) -> dict[str, Any]:
    of_chip = {x.name: getattr(machine.chip, x.name) for x in fields(Chip)}
    chip = {name: dict(x) if isinstance(x, Mapping) else x for name, x in of_chip.items()}
    return {x.name: getattr(machine, x.name) for x in fields(Machine)} | {"chip": chip}


# What plans may differ in, besides where arrays are.
_COMPARED = (
    "axes", "policy", "micro_batches", "saved", "dtype", "send_dtype", "layers", "memory"
)  # fmt: skip


def _compared(plan: Plan) -> dict[str, Any]:
    """What plans may differ in, by what it is called."""
    applying, contents = plan.applying, json.loads(plan.as_text())
    used = {f"used {applying.called(path)}": specs for path, specs in applying.used.items()}
    return {
        "machine": repr(plan.machine).splitlines()[0],
        **{name: contents[name] for name in _COMPARED},
        **{
            name + path: show_spec(PartitionSpec(*spec))
            for name, specs in {**applying.arguments, **used}.items()
            for path, spec in specs.items()
        },
    }


def _frozen(x: Any) -> Any:
    """With tuples for lists."""
    if isinstance(x, dict):
        return {key: _frozen(value) for key, value in x.items()}
    return tuple(map(_frozen, x)) if isinstance(x, list) else x


def _imported(name: str) -> type:
    module, _, attributes = name.partition(":")
    try:
        return operator.attrgetter(attributes)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(
            f"{name} can't be imported: pass the classes of the layers, "
            f"Plan.of(text, layers=[{attributes.rpartition('.')[2]}])"
        ) from error
