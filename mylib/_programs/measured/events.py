"""Reads which instruction ran when, from a trace of `jax.profiler`.

On CPUs each operation is an event of a thread, with its program, its run and its device. GPUs have
a plane each. There each kernel is an event of a stream, with its program and its instruction. In a
CUDA graph the graph stands in place of the instruction, and the kernel's name is the instruction's.
Nothing records which call it is of: the program's order tells calls apart.
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from ..._core.compat import names as jax_names
from ..._core.errors import AuditError
from ..._core.text import counted, some

# Of instructions that a program doesn't have, this share of the time is reported as unknown. With
# more, the trace is of another program.
_UNKNOWN = 0.1
_OF_TPU = (
    "measured can't read traces of TPUs: none was there to write it for. Please open an issue with "
    "this one"
)
_ONE_BLOCK = (
    "kernels of libraries, and copies, are without lines inside of a CUDA command buffer: to see "
    "their instructions, set XLA_FLAGS=--xla_gpu_enable_command_buffer= (with nothing behind the "
    "=), and trace again"
)
_KERNEL = {jax_names.PROFILE_HLO_OP, jax_names.PROFILE_HLO_MODULE, jax_names.PROFILE_PROGRAM_ID}
_OPERATION = _KERNEL | {jax_names.PROFILE_RUN_ID, jax_names.PROFILE_DEVICE_ORDINAL}


class ProfiledEvent(NamedTuple):
    """One execution of an instruction, in nanoseconds; `beside` others, if it computes nothing."""

    device: int
    call: int
    name: str
    start: float
    end: float
    program: tuple[str, str] = ("", "")
    beside: bool = False


def events_of(
    path: str | Path, program: str, known: Collection[str], certain: Collection[str]
) -> tuple[list[ProfiledEvent], list[str]]:
    """The events of all whole calls of a program, and notes about them. Its instructions are
    `known`, in their order; on CPUs those that are `certain` run in each call.
    """
    events, is_of_gpus = _read(_file_in(Path(path)), known)
    by_program: dict[tuple[str, str], list[ProfiledEvent]] = {}
    for event in events:
        by_program.setdefault(event.program, []).append(event)
    of_name = [key for key in by_program if key[0].removeprefix("jit_") == program]
    if not of_name:
        found = some(sorted({name for name, _ in by_program})) or "no compiled program at all"
        raise AuditError(
            f"the trace in {path} has no call of {program!r}, but {found}. Call the audited "
            "program inside of jax.profiler.trace, and wait for its result there"
        )
    needed = () if is_of_gpus else certain
    faults = {key: _fault(by_program[key], known, needed) for key in of_name}
    fitting = [key for key, fault in faults.items() if not fault]
    if not fitting:
        raise AuditError(
            f"the {program!r} in the trace in {path} is not the audited program: "
            f"{faults[of_name[0]]}. Audit the compiled program that is traced"
        )
    if len(fitting) > 1:
        raise AuditError(
            f"the trace in {path} has {len(fitting)} programs {program!r} with the instructions of "
            "the audited one. Trace only one of them"
        )
    found = by_program[fitting[0]]
    if is_of_gpus:
        found = _with_calls(found, [x for x in known if x in certain])
    notes = [_ONE_BLOCK] if any(is_command_buffer(x.name) for x in found) else []
    whole = _whole(found, certain)
    cut = len({x.call for x in found} - {x.call for x in whole})
    notes += [f"{counted(cut, 'call')} that the trace has cut off left out"] if cut else []
    return whole, notes


def _file_in(path: Path) -> Path:
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise AuditError(f"there is no trace in {path}: jax.profiler.trace writes *.xplane.pb")
    if len(files) > 1:
        names = some([str(file.relative_to(path)) for file in files])
        raise AuditError(
            f"there are {len(files)} traces in {path}: {names}. Pass the path of one of them. The "
            "clocks of several processes can't be compared"
        )
    return files[0]


def _read(file: Path, known: Collection[str]) -> tuple[list[ProfiledEvent], bool]:
    """All events, and whether they are of GPUs."""
    with warnings.catch_warnings():
        # On Python 3.13, of the extension module's own type.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        try:
            planes = [*ProfileData.from_file(str(file)).planes]
        except RuntimeError as error:
            raise AuditError(f"{file} is not a whole trace: {error}") from error
        devices: list[ProfiledEvent] = []
        for plane in planes:
            if match := re.fullmatch(jax_names.PROFILE_DEVICE_PLANE, plane.name):
                if match["kind"] != "GPU":
                    raise AuditError(f"{_OF_TPU}: {file}")
                devices += _of_gpu(int(match["number"]), plane, known)
        hosts = [plane for plane in planes if plane.name == jax_names.PROFILE_HOST_PLANE]
        if devices:
            return devices, True
        return [x for plane in hosts for x in _of_host(plane)], False


def _of_host(plane: Any) -> Iterator[ProfiledEvent]:
    starts: list[tuple[Any, dict[str, Any]]] = []
    ends: dict[int, float] = {}
    for line in plane.lines:
        if line.name == jax_names.PROFILE_PYTHON_LINE:
            continue
        for x in line.events:
            stats = dict(x.stats)
            if stats.keys() >= _OPERATION:
                starts.append((x, stats))
            elif (
                x.name.startswith(jax_names.PROFILE_END_OF_EVENT)
                and jax_names.PROFILE_CONSUMER in stats
            ):
                ends[stats[jax_names.PROFILE_CONSUMER]] = x.start_ns
    for x, stats in starts:
        program = stats[jax_names.PROFILE_HLO_MODULE], str(stats[jax_names.PROFILE_PROGRAM_ID])
        # An asynchronous operation ends in another thread, and an event may last longer than it.
        number = stats.get(jax_names.PROFILE_PRODUCER)
        end = ends[number] if number in ends else x.end_ns
        device, call = stats[jax_names.PROFILE_DEVICE_ORDINAL], stats[jax_names.PROFILE_RUN_ID]
        yield ProfiledEvent(device, call, stats[jax_names.PROFILE_HLO_OP], x.start_ns, end, program)


def _of_gpu(device: int, plane: Any, known: Collection[str]) -> Iterator[ProfiledEvent]:
    by_kernel = {re.sub(r"\W", "_", name): name for name in known}
    for line in plane.lines:
        if not line.name.startswith(jax_names.PROFILE_STREAM_LINE):
            continue
        run: ProfiledEvent | None = None
        kernels: list[str] = []
        for x in sorted(line.events, key=lambda x: x.start_ns):
            stats = dict(x.stats)
            # Of others, such as copies that no program makes, nothing is known.
            if not stats.keys() >= _KERNEL:
                continue
            name = str(stats[jax_names.PROFILE_HLO_OP])
            name = by_kernel.get(x.name, name) if is_command_buffer(name) else name
            # A copy that a `fusion-start` makes has a name that the program's text hides.
            is_copy = x.name.startswith(jax_names.PROFILE_COPIES) and name not in known
            beside = is_copy and not is_command_buffer(name)
            key = stats[jax_names.PROFILE_HLO_MODULE], str(stats[jax_names.PROFILE_PROGRAM_ID])
            event = ProfiledEvent(device, 0, name, x.start_ns, x.end_ns, key, beside)
            if run and run.name == name and _goes_on(kernels, x.name):
                run = run._replace(end=event.end)
            else:
                if run:
                    yield run
                run, kernels = event, []
            kernels.append(x.name)
        if run:
            yield run


def _goes_on(kernels: Sequence[str], kernel: str) -> bool:
    """Whether a kernel is of the same execution as those before it: libraries run several for an
    instruction, and fill memory before, in as many pieces as they like.
    """
    if kernel not in kernels:
        return True
    is_piece = len({*kernels}) > 1 or kernel.startswith(jax_names.PROFILE_COPIES)
    return kernel == kernels[-1] and is_piece


def _with_calls(events: Iterable[ProfiledEvent], order: Sequence[str]) -> list[ProfiledEvent]:
    """Events with the numbers of their calls. `order` are the instructions that run once in each
    call, in the program's order.
    """
    by_device: dict[int, list[ProfiledEvent]] = {}
    for x in sorted(events, key=lambda x: x.start):
        by_device.setdefault(x.device, []).append(x)
    return [
        x._replace(call=bisect_right(starts, i))
        for of in by_device.values()
        for starts in [_starts_of_calls(of, order)]
        for i, x in enumerate(of)
    ]


def _starts_of_calls(events: Sequence[ProfiledEvent], order: Sequence[str]) -> list[int]:
    """A call begins with the first instruction of the order. What comes before it, and isn't in the
    order, is of that call from the longest pause on.
    """
    names = {x.name for x in events}.intersection(order)
    first = next((x for x in order if x in names), None)
    starts: list[int] = []
    last, ended = -1, True
    for i, x in enumerate(events):
        if x.name == first and ended:
            between = range(last + 1, i + 1) if last >= 0 else [0]
            starts.append(max(between, key=lambda j: events[j].start - events[j - 1].end))
        if x.name in names:
            last, ended = i, x.name != first or len(names) == 1
    return starts


def _fault(
    events: Iterable[ProfiledEvent], known: Collection[str], certain: Collection[str]
) -> str:
    """Why the events aren't those of a program; empty if they are."""
    seconds: dict[str, float] = {}
    for x in events:
        if not x.beside or x.name in known:
            seconds[x.name] = seconds.get(x.name, 0.0) + x.end - x.start
    foreign = sorted(x for x in seconds if x not in known and not is_command_buffer(x))
    if foreign and sum(seconds[x] for x in foreign) > _UNKNOWN * sum(seconds.values()):
        return f"it runs {some(foreign)}, which the audited program doesn't have"
    missing = sorted(x for x in certain if x not in seconds)
    return f"it doesn't run {some(missing)} of the audited program" if missing else ""


def is_command_buffer(name: str) -> bool:
    """Whether it is a CUDA graph: one block of several instructions."""
    return name.startswith(jax_names.PROFILE_COMMAND_BUFFER)


def _whole(events: Sequence[ProfiledEvent], certain: Collection[str]) -> list[ProfiledEvent]:
    """The events of calls in which each device runs all that any call is certain to run."""
    seen: dict[tuple[int, int], set[str]] = {}
    for x in events:
        seen.setdefault((x.call, x.device), set()).add(x.name)
    every = set().union(*seen.values()).intersection(certain)
    devices = {device for _, device in seen}
    calls = {call for call, _ in seen}
    whole = {call for call in calls if all(every <= seen.get((call, d), set()) for d in devices)}
    if not whole:
        raise AuditError(
            f"none of {counted(len(calls), 'traced call')} is whole: wait for the last result, by "
            "jax.block_until_ready, inside of jax.profiler.trace"
        )
    return [x for x in events if x.call in whole]
