"""What a report lists: collectives, and arrays of arguments and results."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    **Attributes:**

    - `kind`: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"` or `"broadcast"`.
    - `axes`: the mesh axes that it goes over, in the order of the mesh. `"data:(2)4"` is a part of
        an axis (4 devices in each of its 2 blocks), `"~data"` a group of devices that isn't a part
        of the mesh. None if the mesh is unknown.
    - `times`: how often it runs in a call of the program; None if that is unknown, as in a
        `while_loop` that depends on data.
    - `bytes`: the size of the result on one device, in one execution; for a reduce-scatter the size
        of the operand.
    - `wire_bytes`: the bytes that a device sends in one execution, assuming a ring.
    - `dtype`: the dtype that is sent. The CPU's compiler, for example, sends bfloat16 as float32.
    - `arrays`: the paths of arguments that are moved unchanged. Computed values have no path; see
        `gradients`, `primitive` and `source`.
    - `gradients`: the paths of arguments whose gradients are summed or moved, if the program then
        updates them, or returns the gradients at the paths of one argument.
    - `primitive`: the JAX primitive that it belongs to, such as `"dot_general"`.
    - `scope`: the scopes around that: of `jax.named_scope`, and the names of Equinox's layers, such
        as `"eqx.nn.MultiheadAttention/eqx.nn.Linear"`.
    - `source`: the line of Python, as `"file.py:31"`.
    - `phase`: `"forward"`, `"backward"` or `"recomputed"` in a gradient, else empty; `"unknown"` if
        the program doesn't tell.
    - `inserted`: whether the partitioner has inserted it. Otherwise the function calls it, such as
        by `jax.lax.psum`. None: unknown.
    - `overlapped`: whether other work is scheduled while it runs.
    - `sometimes`: whether it runs only if a condition takes its branch. `times` is then an upper
        bound.
    - `loops`: the lines of the loops around it, the outermost first.
    - `devices`: the number of devices in each group.
    - `spelling`: how the compiler has written it, if not as an instruction of this kind. It
        contains `"gathered, then split otherwise"` if each device keeps only another part of what
        is gathered: XLA's "involuntary full rematerialization".
    - `branches`: the conditions around it, the outermost first: each as a name, and the number of
        the branch.
    - `instructions`: the names of the instructions that start it, and of those that end it, as
        profilers have them.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        x = mylib.filter_shard(jnp.ones(8), P("data"), mesh=mesh)
        (collective,) = mylib.audit(lambda x: x.sum(), x).collectives
        assert (collective.kind, collective.axes) == ("all-reduce", ("data",))
        ```
    """

    kind: str
    axes: tuple[str, ...] | None
    times: int | None
    bytes: int
    wire_bytes: int
    dtype: str
    arrays: tuple[str, ...]
    gradients: tuple[str, ...]
    primitive: str
    scope: str
    source: str
    phase: str
    inserted: bool | None
    overlapped: bool
    sometimes: bool
    loops: tuple[str, ...]
    devices: int
    spelling: str
    branches: tuple[tuple[str, int], ...] = ()
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramArray:
    """An argument or a result of a program.

    **Attributes:**

    - `path`: its name, such as `model.layers[0].weight`.
    - `dtype`, `shape`, `bytes`: those of the part on one device.
    - `axes`: the mesh axes that it is split over; None if unknown.

    !!! Example

        ```python
        (x,) = mylib.audit(lambda x: x + 1, jnp.ones((8, 8))).parameters
        assert (x.path, x.shape, x.bytes) == ("x", (8, 8), 256)
        ```
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    axes: tuple[str, ...] | None
