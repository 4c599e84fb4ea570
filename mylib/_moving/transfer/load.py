"""`filter_load`: arrays made from parts. A process reads the parts that its devices need."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..._core.compat import array_like
from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Placement,
    Target,
    current_world,
    fill_free,
    has_partial_sums,
    is_here,
    leaf_at,
    regions_of,
    resolve_leaves,
    sharding_of,
)
from ..._core.status import StatusLine
from ..._core.text import counted, show_bytes
from ..._core.tree import Kind, Leaf, is_of_keys, split
from .. import several
from ..several import one_call, raised_in_all
from .already_placed import wants_layout
from .host import aligned, over_key_data
from .relocation import NOT_HERE

T = TypeVar("T")
Read = Callable[[Leaf, tuple[slice, ...]], object]

# At most this many parts are read at once, and fewer if they are large.
_READERS = 8


def filter_load(
    tree: T, placement: PyTree[Placement], /, read: Read, mesh: AnyMesh | None = None
) -> T:
    """Makes the arrays of a PyTree from parts: each device's part is read from a file, or from
    anywhere else, and never the whole of an array that is sharded.

    **Arguments:**

    - `tree`: the shapes, such as those of `equinox.filter_eval_shape`. Arrays count as their
        shapes, and their values are not used.
    - `placement`, `mesh`: as in `mylib.filter_shard`.
    - `read`: a function that is called with a `mylib.Leaf` and an index, a tuple of one slice
        for each dimension (with a start and a stop), and returns that part of the leaf as a NumPy
        array, of the leaf's dtype. It is called in several threads at once, once for each part
        that this process needs: a part that several of its devices need is read once, and parts
        without elements are not. Of typed PRNG keys it returns the key data, with their additional
        dimension.

    At most two of the largest parts are in host memory at a time, and up to eight smaller ones. On
    a terminal, a line shows how much has been read.

    **Returns:**

    A tree of the same structure with committed arrays. Leaves with the placement None are returned
    unchanged.

    **Raises:**

    `mylib.PlacementError` before anything is read, naming every leaf that can't be placed as
    requested, or that isn't the same in all processes; or if `read` returns another shape or
    dtype. What `read` raises, with a note that names the leaf. `TypeError` inside of transformed
    functions.

    !!! Example

        ```python
        file = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        tree = {"weight": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
        mesh = mylib.make_mesh(data=8)
        loaded = mylib.filter_load(
            tree, P("data"), lambda leaf, index: file[index], mesh=mesh
        )
        assert loaded["weight"].sharding.spec == P("data")
        ```
    """
    world = current_world()
    if world.staged:
        raise TypeError(
            "filter_load reads from files, so it can't be part of a compiled function. Call it "
            "outside, and pass the arrays as arguments"
        )
    if not callable(read):
        raise TypeError(f"filter_load(tree, placement, read): read is a function, not {read!r}")
    with one_call(mesh, world) as call:
        leaves = split(tree)
        shapes = leaves.with_shapes(leaves.arrays)
        with raised_in_all(call.processes):
            # Treated as NumPy arrays, so targets on absent machines are refused.
            from_host = replace(shapes, kinds=[Kind.HOST] * len(shapes.kinds))
            targets = resolve_leaves(from_host, placement, mesh, world, _refuse)
        mesh = world.devices if mesh is None else mesh
        plans = {
            i: _Assembly.of(leaf_at(shapes, i, mesh), sharding_of(target))
            for i, target in enumerate(targets)
            if target is not None
        }
        if jax.process_count() > 1:
            several.agree(shapes, targets, list(plans), [], None)
        with _told_to_others(targets):
            _fill(list(plans.values()), read)
        loaded = list(leaves.arrays)
        for i, plan in plans.items():
            loaded[i] = plan.array()
    return leaves.join(loaded)


def _refuse(target: Target) -> Iterator[Fault]:
    if not is_here(sharding_of(target)):
        yield because(NOT_HERE, "place the shapes by filter_shard, and compile with those")
    if wants_layout(target):
        yield because("parts are read in JAX's own layout", "load first, then filter_device_put")
    if has_partial_sums(sharding_of(target)):
        yield because("partial sums can't be read", "leave out unreduced= and reduced=")


def _told_to_others(targets: Sequence[Target | None]) -> AbstractContextManager[object]:
    """If this process can't read its share, the next call of the others fails."""
    if jax.process_count() == 1:
        return nullcontext()
    groups = {several.processes_at(sharding_of(target)) for target in targets if target is not None}
    everybody = tuple(sorted({index for group in groups for index in group}))
    return several.CommonCall(lambda: everybody if jax.process_index() in everybody else ())


@dataclass
class _Assembly:
    """An array to be made, and the shards of it that are here so far. For keys of the
    implementation `keys`, that of their numbers.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    keys: object = None
    shards: list[jax.Array] = field(default_factory=list)

    @classmethod
    def of(cls, leaf: Leaf, target: Sharding) -> "_Assembly":
        sharding = fill_free(target, None, leaf.ndim)
        if not is_of_keys(leaf):
            return cls(leaf, leaf.shape, leaf.dtype, sharding)
        impl: list[Any] = []

        def numbers(keys: jax.Array) -> jax.Array:
            impl.append(jax.random.key_impl(keys))
            return jax.random.key_data(keys)

        data = jax.eval_shape(numbers, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return cls(leaf, data.shape, data.dtype, over_key_data(sharding, leaf.ndim), *impl)

    def __post_init__(self) -> None:
        # What may be read: 64 bits become 32 as in `jnp.asarray`. Known before threads read, as JAX
        # may have 64 bits in this one alone.
        wide = map(np.dtype, ("float64", "int64", "uint64", "complex128"))
        narrowed = (d for d in wide if jax.dtypes.canonicalize_dtype(d) == self.dtype)
        self.dtypes = {self.dtype, *narrowed}

    def parts(self) -> Iterator["_Part"]:
        local = self.sharding.addressable_devices
        for bounds, devices in sorted(regions_of(self.shape, self.sharding).items()):
            holders = [device for device in devices if device in local]
            if holders:
                yield _Part(self, tuple(slice(*ends) for ends in bounds), holders)

    def array(self) -> jax.Array:
        whole = array_like(self, self.sharding, self.shards)
        return whole if self.keys is None else jax.random.wrap_key_data(whole, impl=self.keys)


@dataclass
class _Part:
    """A part of an array, and the devices of this process that need it."""

    plan: _Assembly
    index: tuple[slice, ...]
    devices: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.index)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * self.plan.dtype.itemsize

    def read(self, read: Read) -> np.ndarray:
        """The part in host memory, as an array of its own."""
        if not self.nbytes:
            return aligned(self.shape, self.plan.dtype)
        leaf = self.plan.leaf
        try:
            # Keys have one dimension less than the numbers that are read.
            part = read(leaf, self.index[: leaf.ndim])
            if isinstance(part, jax.Array) and is_of_keys(part):
                part = jax.random.key_data(part)
            numbers = np.asarray(part)
        except Exception as error:
            error.add_note(f"(raised by {_called(read)} for {self._name})")
            raise
        if numbers.shape != self.shape or numbers.dtype not in self.plan.dtypes:
            raise PlacementError([self._unfit(numbers, read)])
        is_own = numbers.flags.owndata and not isinstance(numbers, np.memmap)
        if is_own and numbers.dtype == self.plan.dtype:
            return numbers
        # What lies in a mapped file is read here, while other threads read other parts.
        copy = aligned(self.shape, self.plan.dtype)
        copy[...] = numbers
        return copy

    def put(self, numbers: np.ndarray) -> None:
        memory = self.plan.sharding.memory_kind
        where = [SingleDeviceSharding(device, memory_kind=memory) for device in self.devices]
        # The memory of a copy may become that of one array in host memory.
        alias = [None if i == 0 and not numbers.flags.owndata else False for i in range(len(where))]
        shards = jax.device_put([numbers] * len(where), where, may_alias=alias)
        self.plan.shards += jax.block_until_ready(shards)

    @property
    def _name(self) -> str:
        bounds = ", ".join(f"{s.start}:{s.stop}" for s in self.index[: self.plan.leaf.ndim])
        return f"{self.plan.leaf.name or 'the array'}[{bounds}]" if bounds else self.plan.leaf.name

    def _unfit(self, numbers: np.ndarray, read: Read) -> Fault:
        leaf = self.plan.leaf
        request = f"{_called(read)} for {self._name}"
        reason = (
            f"it returned {numbers.dtype}{list(numbers.shape)}, and the part is "
            f"{self.plan.dtype}{list(self.shape)}"
        )
        fix = "return file[index], and convert it to the dtype of the leaf: .astype(leaf.dtype)"
        return Fault(leaf.name or "the array", leaf.shape, request, reason, fix)


def _called(read: Read) -> str:
    return getattr(read, "__qualname__", None) or repr(read)


def _fill(plans: Sequence[_Assembly], read: Read) -> None:
    """Reads all parts, with at most two of the largest in memory, or the same number of bytes
    in smaller parts."""
    waiting = deque(part for plan in plans for part in plan.parts())
    total, loaded, start = sum(part.nbytes for part in waiting), 0, time.monotonic()
    of, is_on = f"loading {counted(len(plans), 'array')}", False if jax.process_index() else None
    most, held = 2 * max((part.nbytes for part in waiting), default=0), 0
    reading: dict[Future[np.ndarray], _Part] = {}
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="mylib-load")
    with StatusLine(of, is_on) as line, pool:
        while waiting or reading:
            while waiting and len(reading) < _READERS and held + waiting[0].nbytes <= most:
                part = waiting.popleft()
                held += part.nbytes
                reading[pool.submit(part.read, read)] = part
            done = wait(reading, return_when=FIRST_COMPLETED).done
            while done:
                future = done.pop()
                part = reading.pop(future)
                part.put(future.result())
                del future  # It holds the part.
                held -= part.nbytes
                loaded += part.nbytes
                rate = show_bytes(loaded / max(time.monotonic() - start, 1e-9))
                line.write(f"{of}: {show_bytes(loaded)} of {show_bytes(total)}, {rate}/s")
