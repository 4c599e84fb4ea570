"""Compiled programs in files: what each was compiled for, and its executable.

A file is a line that names its kind, the hash of what follows, the length of a header, the header
as JSON, and the executable as JAX serialises it. JAX's form is a pickle, so all else is read and
compared first, and only the classes of JAX that belong to an executable are made of it.
"""

import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax

from ..._core.errors import SavedProgramError
from ..._core.text import more

_KIND = b"a program compiled by mylib\n"
_HASH = 32  # bytes of a SHA-256
_LENGTH = 8  # bytes of the header's length
# Where the object of a `custom_partitioning` is in memory.
_ADDRESS = re.compile(r'(@CustomSPMDPartitioning\([^\n]*? backend_config = ")\d+')
# The compilers for GPUs and TPUs, by the packages that contain them.
_PLUGINS = {
    "gpu": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "tpu": ("libtpu",),
    "cpu": (),
}
# The number of simulated devices is compared as such.
_OF_DEVICES = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class SavedProgram:
    """A compiled program without its executable. Files with other fields are refused.

    **Attributes:**

    - `name`: of the function.
    - `code`: the hash of its lowered text.
    - `arguments`, `results`: the arrays that it takes and returns, in words.
    - `made_for`: everything else that it depends on, in words.
    """

    name: str
    code: str
    arguments: Sequence[str]
    results: Sequence[str]
    made_for: dict[str, str]


def program_for(
    name: str, text: str, arguments: Iterable[str], results: Iterable[str], devices: Sequence[Any]
) -> SavedProgram:
    """The dependencies of a program with this lowered text, compiled here for these devices."""
    code = sha256(_ADDRESS.sub(r"\1", text).encode()).hexdigest()
    return SavedProgram(name, code, [*arguments], [*results], _made_for(devices))


def versions(kind: str) -> dict[str, str]:
    """The versions and flags of what compiles for a platform."""
    flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if kind == "tpu" else ("XLA_FLAGS",)
    return {
        "mylib": _version("mylib"),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        **{name: _version(name) for name in _PLUGINS.get(kind, ())},
        "platform": kind,
        **{name: _flags(name) for name in flags},
    }


def _made_for(devices: Sequence[Any]) -> dict[str, str]:
    kind = devices[0].platform
    texts = {
        **versions(kind),
        "kind of device": devices[0].device_kind,
        "number of devices": str(len(devices)),
        "order of devices": " ".join(str(x.id) for x in devices),
        "processes of devices": " ".join(str(x.process_index) for x in devices),
    }
    if kind == "cpu":
        texts["processor"] = _processor()
    if kind == "tpu":
        texts["coordinates of devices"] = " ".join(str(x.coords).replace(" ", "") for x in devices)
    return texts


def _processor() -> str:
    """This host's processor and, on Linux, a hash of what it can do: XLA uses all of it."""
    name = platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        features = re.search(r"^(?:flags|Features)\s*: (.*)$", cpus.read_text(), re.MULTILINE)
        names = " ".join(sorted(features[1].split())) if features else ""
        name += f" with features {sha256(names.encode()).hexdigest()[:8]}"
    return name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _flags(variable: str) -> str:
    flags = os.environ.get(variable, "").split()
    return " ".join(sorted(x for x in flags if not x.startswith(_OF_DEVICES))) or "none"


def write(path: str | os.PathLike[str], program: SavedProgram, executable: bytes) -> None:
    header = json.dumps(asdict(program)).encode()
    content = b"".join((len(header).to_bytes(_LENGTH, "little"), header, executable))
    replace_file(path, _KIND + sha256(content).digest() + content)


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file where `open(path, "wb")` would: through links, and into devices and pipes. A
    regular file is replaced in one step, so that several processes may write the same, and keeps
    its mode.
    """
    named, target = Path(path), Path(os.path.realpath(path))
    if named.exists() and not named.is_file():
        named.write_bytes(content)
        return
    # Not `tempfile`: other users may not read its files.
    unfinished = target.with_name(f".mylib-{secrets.token_hex(8)}")
    try:
        unfinished.write_bytes(content)
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[SavedProgram, bytes]:
    """The program in a file, and its executable."""
    content = Path(path).read_bytes()
    if not content.startswith(_KIND):
        what = "is empty" if not content else "is no program that mylib has saved"
        raise SavedProgramError(f"{path} {what}")
    start = len(_KIND) + _HASH
    if content[len(_KIND) : start] != sha256(content[start:]).digest():
        raise SavedProgramError(
            f"{path} is damaged: a part of it is missing, or has changed since it was saved. "
            "Copy it again"
        )
    begin = start + _LENGTH
    end = begin + int.from_bytes(content[start:begin], "little")
    return _program_of(path, content[begin:end]), content[end:]


def _program_of(path: str | os.PathLike[str], header: bytes) -> SavedProgram:
    try:
        return SavedProgram(**json.loads(header))
    except (TypeError, ValueError) as error:
        raise SavedProgramError(
            f"{path} was saved by another mylib, in another form than that of this one "
            f"({_version('mylib')}). Compile it again"
        ) from error


def compare(path: Any, saved: SavedProgram, current: SavedProgram, check: bool) -> None:
    """Raises an error that lists all differences between a saved program and the one that would be
    compiled here. Without `check` the code may differ, in nothing that can be seen from outside.
    """
    problems = [
        f"{name}: {old}, and here {new}"
        for name in {**saved.made_for, **current.made_for}
        if (old := saved.made_for.get(name, "none")) != (new := current.made_for.get(name, "none"))
    ]
    problems += _differences("argument", saved.arguments, current.arguments)
    problems += _differences("result", saved.results, current.results)
    if not problems and check and saved.code != current.code:
        problems.append(
            f"the code: {current.name} has changed, or is given other static arguments or arrays "
            "that are placed in another way"
        )
    if problems:
        lines = "\n".join(f"  {x}" for x in problems)
        raise SavedProgramError(
            f"{path} can't be used, as its program ({saved.name}) was compiled for something "
            f"else:\n{lines}\nCompile it for these devices, and save that"
        )


# List at most this many problems.
_MOST = 10


def _differences(what: str, saved: Sequence[str], current: Sequence[str]) -> list[str]:
    pairs = zip_longest(saved, current, fillvalue="nothing")
    problems = [f"{what} {i}: {a}, and here {b}" for i, (a, b) in enumerate(pairs) if a != b]
    return [*problems[:_MOST], *more(len(problems) - _MOST, what)]
