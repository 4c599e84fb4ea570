"""Small training steps that run on 8 devices, and their profiles."""

import gzip
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Block, Transformer

import mylib
from mylib.rules import fsdp

KEPT = fsdp("data", min_size=256)


def profile(folder: Path, call: Any, *arguments: Any, calls: int = 2) -> None:
    """Traces some calls of a compiled program."""
    jax.block_until_ready(call(*arguments))
    with jax.profiler.trace(folder):
        jax.block_until_ready([call(*arguments) for _ in range(calls)])


def trained(model: Any, layer: type, loss: Any, mesh: Mesh, batch: Any) -> tuple[Any, ...]:
    """A compiled step of SGD under FSDP, and its arguments."""

    @mylib.filter_jit(in_shardings=(KEPT, P("data")), out_shardings=(KEPT, P()), mesh=mesh)
    def step(model: Any, batch: Any) -> Any:
        def whole(model: Any) -> Any:
            return loss(mylib.fully_shard(model, layer, KEPT, mesh=mesh), batch)

        value, gradients = eqx.filter_value_and_grad(whole)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    model = mylib.filter_shard(model, KEPT, mesh=mesh)
    batch = mylib.filter_shard(batch, P("data"), mesh=mesh)
    return step.lower(model, batch).compile(), model, batch


def mlp(mesh: Mesh) -> tuple[Any, ...]:
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))

    def loss(model: Any, x: Any) -> Any:
        y = jax.vmap(model)(x)
        with jax.named_scope("squares"):
            return jnp.mean((y - x) ** 2)

    return trained(model, eqx.nn.Linear, loss, mesh, np.ones((32, 32), np.float32))


def gpt(mesh: Mesh) -> tuple[Any, ...]:
    model = Transformer(32, 64, 2, 16, 2, scanned=True, key=jax.random.key(0))

    def loss(model: Any, tokens: Any) -> Any:
        scores = jax.nn.log_softmax(jax.vmap(model)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    return trained(model, Block, loss, mesh, np.zeros((16, 9), np.int32))


class Expert(eqx.Module):
    """One expert on each device: rows go there and come back."""

    up: Any
    down: Any

    def __call__(self, x: Any) -> Any:
        def here(up: Any, down: Any, x: Any) -> Any:
            sent = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
            made = jnp.tanh(sent @ up[0]) @ down[0]
            return jax.lax.all_to_all(made, "data", 0, 0, tiled=True)

        specs = (P("data"), P("data"), P("data"))
        return x + jax.shard_map(here, in_specs=specs, out_specs=P("data"))(self.up, self.down, x)


def experts(mesh: Mesh) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0))
    model = Expert(jax.random.normal(keys[0], (8, 16, 32)), jax.random.normal(keys[1], (8, 32, 16)))
    model = mylib.filter_shard(model, P("data"), mesh=mesh)
    x = mylib.filter_shard(np.ones((64, 16), np.float32), P("data"), mesh=mesh)

    @mylib.filter_jit(out_shardings=(P("data"), P()), mesh=mesh)
    def step(model: Any, x: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradients), loss

    with jax.set_mesh(mesh):
        return step.lower(model, x).compile(), model, x


def sleeping(mesh: Mesh, late: int, axes: Any, sleep: float) -> tuple[Any, ...]:
    """Device number `late` sleeps before a sum over some axes."""

    def pause(i: Any, x: Any) -> Any:
        if int(i) == late:
            time.sleep(sleep)
        return x

    numbers = jax.device_put(mesh.device_ids, NamedSharding(mesh, P(*mesh.axis_names)))

    def each(number: Any, x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(pause, like, number.reshape(()), x)
        return jax.lax.psum(x, axes)

    @jax.jit
    def step(numbers: Any, x: Any) -> Any:
        specs: dict[str, Any] = dict(in_specs=(P(*mesh.axis_names), P()), out_specs=P())
        return jax.shard_map(each, mesh=mesh, check_vma=False, **specs)(numbers, x)

    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))
    return step.lower(numbers, x).compile(), numbers, x


H100 = Path(__file__).parent / "h100"


def of_h100(name: str, folder: Path) -> tuple[Any, Path]:
    """The report of a step of this module on one H100 with jax 0.11.2, and the trace of two calls:
    `mlp` or `gpt`, or one of them with `_without_command_buffers`. Both are without what nothing
    here reads: the configuration of kernels, and the planes of the host.
    """
    file = folder / "host.xplane.pb"
    file.write_bytes(gzip.decompress((H100 / f"{name}.xplane.pb.gz").read_bytes()))
    text = gzip.decompress((H100 / f"{name}.hlo.gz").read_bytes()).decode()
    return mylib.audit(text), file


def written(folder: Path, **planes: dict[str, list[tuple[Any, ...]]]) -> Path:
    """A trace with these planes, such as `GPU_0`: by line the events, each its name, its start and
    its length in nanoseconds, and its statistics.
    """
    text = ""
    for plane, lines in planes.items():
        events = [event for line in lines.values() for event in line]
        names = {name: i for i, name in enumerate(dict.fromkeys(x[0] for x in events), 1)}
        stats = {x: i for i, x in enumerate(dict.fromkeys(k for x in events for k in x[3]), 1)}
        text += f'planes {{ name: "/device:{plane.replace("_", ":")}"\n'
        for line, of in lines.items():
            text += f'lines {{ name: "{line}"\n'
            for name, start, length, of_event in of:
                given = " ".join(
                    f'stats {{ metadata_id: {stats[k]} str_value: "{v}" }}'
                    for k, v in of_event.items()
                )
                text += f"events {{ metadata_id: {names[name]} offset_ps: {start * 1000} "
                text += f"duration_ps: {length * 1000} {given} }}\n"
            text += "}\n"
        for kind, found in ("event", names), ("stat", stats):
            for name, i in found.items():
                text += f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        text += "}\n"
    file = folder / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file
