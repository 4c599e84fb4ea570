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

from ..._core.contexts import plan_in_force
from ..._core.meshes import make_mesh
from ..._core.placement import no_mesh
from ..._core.show import columns, for_stdout, wrapped
from ..._core.text import listed, show_bytes, show_time
from ..._programs.audit import Report
from ..._programs.machines import Chip, CompilerError, Machine
from ..._training.jit import filter_jit
from ..verify import Verified, verify
from .apply import Applying, Planned, PlannedFunction
from .candidate import TIES, Candidate
from .code import code_of
from .matrices import laid_out
from .picture import page_of
from .strategy import mesh_of
from .trace import PlanError, PlannedStep

# Of the next and of the rejected candidates, so that a plan fits a screen.
_SHOWN = 6
_COLUMNS = "strategy", "modelled", "compiled", "measured", "memory", "its parts, or why not"
_LEGEND = (
    "DP: each device has all weights, and some rows. FSDP: weights are sharded. FSDP x DP (HSDP): "
    "sharded within groups of devices, with a copy in each. TP: devices divide each product"
)


class _ByArgument(dict[str, Planned]):
    """The placements of a step's arguments, by their names."""

    def __missing__(self, name: str) -> NoReturn:
        raise PlanError(f"the step has no argument {name!r}. It has {', '.join(self)}")


@dataclass(frozen=True, repr=False, eq=False)
class Plan:
    """The result of `mylib.plan`. `print` shows what was chosen, what comes next, what was
    rejected and why, and the code to write.

    Plans are equal if their texts and the classes of their layers are: `as_text` and `Plan.of` save
    them.

    **Attributes:**

    - `machine`: the `mylib.machines.Machine` that it is for.
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
    - `chosen`, `others`, `rejected`: `mylib.results.Candidate`s: the one that was
        chosen, and the others, the best first.
    - `notes`: ties, and what was assumed.
    - `limit`: the most bytes that a step may take on each device: 95 % of its memory, or of
        `memory=`; None if no limit is known.
    - `stacked`: the paths of models with stacked layers.
    - `applying`: what `jit` needs, as data: paths and specs.
    - `audit`: the `mylib.results.Report` of the compiled program; None if nothing was compiled,
        or if the plan was read from text.

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
    limit: float | None
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
        self, fun: Callable[..., object], *, donate: tuple[str, ...] | None = None
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
        takes the same arguments, as that of `mylib.filter_jit`.

        **Raises:**

        Calls raise `mylib.errors.PlanError` for arguments that the plan wasn't made for.
        """
        return PlannedFunction(fun, self.applying, self._mesh, donate)

    def verify(self, *args: object, high: int | None = None, seed: int = 0) -> Verified:
        """Runs the step under the plan and on one device, and compares all results: it is
        `mylib.testing.verify` of `jit(step)`. If the machine is unavailable, it uses as many of
        the available devices; simulated ones will do.

        **Arguments:**

        - `args`: the step's arguments; by default random ones of the shapes that were planned,
            which need as much memory as the step.
        - `high`, `seed`: as for `mylib.testing.verify`.

        **Returns:**

        A `mylib.testing.Verified`: what was compared.

        **Raises:**

        `mylib.testing.VerifyError` if a result differs by more than rounding explains.
        `mylib.errors.PlanError` if the plan was read from text, which doesn't have the step.
        """
        __tracebackhide__ = True
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
        """Creates arguments of the step where they are planned, each device its own part.

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
        places = [self.arguments[name] for name in arguments]

        def make_all(*args: object) -> tuple[object, ...]:
            with plan_in_force((self.applying.of_matrices, self._mesh)):
                made = make(*args)
            made = made if len(places) > 1 else (made,)
            if not isinstance(made, tuple | list) or len(made) != len(places):
                raise TypeError(f"make must return a tuple of {', '.join(arguments)}")
            return tuple(made)

        # Arguments, such as a key, may be on another mesh.
        made = filter_jit(
            make_all,
            in_shardings=PartitionSpec(),
            out_shardings=tuple(place.at(1) for place in places),
            mesh=self._mesh,
        )(*args)
        return made if len(places) > 1 else made[0]

    def why_not(self, name: str) -> str:
        """Why a strategy was not chosen.

        **Arguments:**

        - `name`: its name, such as `"FSDP 8 x TP 8"` or `"FSDP 64, saves dots"`.

        **Returns:**

        The reason, as text.

        **Raises:**

        `mylib.errors.PlanError` if no candidate has this name, with those that are called
        alike.
        """
        candidates = {one.name: one for one in (self.chosen, *self.others, *self.rejected)}
        one = candidates.get(name) or self._only(name, candidates)
        if one is self.chosen:
            return f"{one.name} was chosen: {one.reason}"
        if one.why or one.seconds is None:
            return f"{one.name} was rejected: {one.why}"
        return f"{one.name} takes {self._times(one)}: {one.reason}"

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
            f"{name!r} was not considered: no mesh of {self.machine} has this shape (TP stays "
            "within a host of GPUs), or axes= or policies= ask for another. There are "
            f"{listed(alike or [*candidates], 4)}"
        )

    def _times(self, one: Candidate) -> str:
        assert one.seconds is not None and self.chosen.seconds is not None
        if one.source != self.chosen.source and self.chosen.modelled is not None:
            chosen = f"the chosen one {show_time(self.chosen.modelled)} by the same model"
            return f"{show_time(one.seconds)} ({one.source}), and {chosen}"
        ratio = one.seconds / self.chosen.seconds
        tie = ", a tie" if ratio <= 1 + TIES[one.source] else ""
        return f"{ratio:.2f} times as long{tie} ({one.source})"

    def code(self) -> str:
        """The lines that do by hand what `jit` does. They run where they are pasted, and their
        comments show what to call in the loss. Classes of layers that can't be imported, such as a
        notebook's, must be in scope.
        """
        return code_of(self.applying, self.axes, self.is_sharded, self.stacked)

    def as_text(self) -> str:
        """The plan as text, which `mylib.Plan.of` reads."""
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

        A `mylib.Plan`, equal to the one that was saved if its machine is the same.
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
        candidates = self.chosen, *self.others, *self.rejected
        return page_of(repr(self), candidates, self.chosen, self.limit)

    def __repr__(self) -> str:
        lines = [f"{self.machine}: {self.chosen.name}", *self._table("chosen", [self.chosen])]
        lines += ["", "code", *(f"  {line}".rstrip() for line in self.code().splitlines())]
        others = sorted(self.others, key=lambda one: (one.rank, one.seconds or math.inf))
        lines += self._table("next", others) + self._table("rejected", self.rejected)
        return for_stdout([*lines, "", *wrapped([*self.notes, _LEGEND])])

    def _table(self, heading: str, candidates: Sequence[Candidate]) -> list[str]:
        if not candidates:
            return []
        rows = [
            (x.name, show_time(x.modelled),
             *(show_time(x.seconds) * (x.source == source) for source in _COLUMNS[2:4]),
             "" if x.memory is None else show_bytes(x.memory), x.reason)
            for x in candidates[:_SHOWN]
        ]  # fmt: skip
        filled = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
        table = [[cells[i] for i in filled] for cells in (_COLUMNS, *rows)]
        left = len(candidates) - _SHOWN
        more = [f"  and {left} more"] if left > 0 else []
        return ["", heading, *columns(table, indent="  "), *more]


def _as_data(machine: Machine) -> Mapping[str, object]:
    of_chip = {x.name: getattr(machine.chip, x.name) for x in fields(Chip)}
    chip = {name: dict(x) if isinstance(x, Mapping) else x for name, x in of_chip.items()}
    return {x.name: getattr(machine, x.name) for x in fields(Machine)} | {"chip": chip}


def _frozen(node: Any) -> Any:
    """With tuples for lists."""
    if isinstance(node, dict):
        return {key: _frozen(value) for key, value in node.items()}
    return tuple(map(_frozen, node)) if isinstance(node, list) else node


def _imported(name: str) -> type:
    module, _, attributes = name.partition(":")
    try:
        return operator.attrgetter(attributes)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(
            f"{name} can't be imported: pass the classes of the layers, "
            f"Plan.of(text, layers=[{attributes.rpartition('.')[2]}])"
        ) from error
