"""Starts XLA's compilers for GPUs and TPUs, on machines without them."""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import metadata
from typing import Any

import jax

from ..._core.compat import describe_cudnn, nvidia_gpu_is_here, tpu_is_here
from ..._core.errors import MylibError

Devices = tuple[Any, ...]


class CompilerError(MylibError, ImportError):
    """XLA's compiler for GPUs or TPUs is not installed, or is for another version of JAX. The
    message contains the command that installs the right one.

    !!! Example

        ```python
        try:
            mesh = mylib.machines.gpu("h100").mesh(data=-1)
        except mylib.machines.CompilerError as error:
            print(error)  # which extra to install
        ```
    """


def gpus(target: str, hosts: int, devices_per_host: int) -> Devices:
    """Devices that XLA's GPU compiler can compile for."""
    plugin = _gpu_compiler()
    from jax.experimental import topologies

    variables: dict[str, str] = {}
    if not nvidia_gpu_is_here():
        # The plugin refuses to start without the CUDA libraries, but compiling doesn't need them.
        variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        _describe_cudnn(target)
    options = {"target_config": target, "topology": f"1x{hosts}x{devices_per_host}"}
    with _environment(variables):
        try:
            topology = topologies.get_topology_desc(platform="cuda", **options)
        except NotImplementedError:
            # JAX has already looked for plugins, and this one refused.
            importlib.import_module(plugin).initialize()
            topology = topologies.get_topology_desc(platform="cuda", **options)
    return tuple(topology.devices)


def _describe_cudnn(target: str) -> None:
    """So that programs with cuDNN's attention can be traced, if the target says what JAX asks."""
    versions = (
        re.search(rf"{name}\s*\{{\s*major:\s*(\d+)(?:\s*minor:\s*(\d+))?", target)
        for name in ("dnn_version_info", "cuda_compute_capability")
    )
    numbers = [(int(one[1]), int(one[2] or 0)) for one in versions if one is not None]
    if len(numbers) == 2:
        (major, minor), capability = numbers
        describe_cudnn(10_000 * major + 100 * minor, capability)


def tpus(version: str, shape: tuple[int, ...]) -> Devices:
    """Devices that XLA's TPU compiler can compile for."""
    _tpu_compiler()
    from jax.experimental import topologies

    variables = {} if tpu_is_here() else _WITHOUT_TPU
    name = f"{version}:{'x'.join(map(str, shape))}"
    with _environment(variables):
        try:
            topology = topologies.get_topology_desc(
                topology_name=name, platform="tpu", **_CONFIGURED.get(version, {})
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"libtpu {_version('libtpu')}, XLA's compiler for TPUs, can't compile for "
                f"{name!r}: {error}"
            ) from error
    return tuple(topology.devices)


# On a real v4, the two cores of a chip are one device. The compiler's own default is two.
_CONFIGURED = {"v4": {"chip_config_name": "megacore"}}

# Settings that the compiler would otherwise request from the cloud's servers, and wait for; and the
# lock that keeps two programs from using one TPU turned off.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Temporarily sets environment variables that are not set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _gpu_compiler() -> str:
    """The module of JAX's plugin for GPUs."""
    found = [x for x in ("cuda13", "cuda12") if _is_installed(f"jax_plugins.xla_{x}")]
    cuda = next(iter(found), "cuda12")
    packages = f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt"
    costs = "no GPU and no CUDA libraries (458 MB, for Linux)"
    _check("GPUs", packages, metadata.version("jaxlib"), bool(found), costs)
    return f"jax_plugins.xla_{cuda}"


def _tpu_compiler() -> None:
    if "TPU_LIBRARY_PATH" not in os.environ:
        costs = "no TPU (684 MB, for Linux)"
        _check("TPUs", ("libtpu",), _libtpu_of_jax(), _is_installed("libtpu"), costs)


def _check(
    platform: str, packages: Sequence[str], needed: str, is_installed: bool, costs: str
) -> None:
    """Raises unless the first of the packages is installed, in the version that JAX needs."""
    texts = " ".join(f'"{package}=={needed}"' for package in packages)
    command = f"\n  python -m pip install {texts}"
    if not is_installed:
        raise CompilerError(
            f"XLA's compiler for {platform} is not installed. It needs {costs}:{command}"
        )
    version = _version(packages[0])
    if version is not None and not fnmatch(version, needed):
        raise CompilerError(
            f"{packages[0]} {version}, XLA's compiler for {platform}, is for another version of "
            f"JAX: JAX {jax.__version__} needs {needed}. Install the right one:{command}"
        )


def _libtpu_of_jax() -> str:
    """The version of libtpu that `jax[tpu]` requires, such as `0.0.42.*`."""
    for requirement in metadata.requires("jax") or ():
        match = re.match(r"libtpu *==([\w.*]+)", requirement)
        if match:
            return match[1]
    return "*"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def require(platform: str) -> None:
    """Raises a `CompilerError` if there is no compiler for a platform."""
    if platform == "gpu":
        _gpu_compiler()
    elif platform == "tpu":
        _tpu_compiler()
