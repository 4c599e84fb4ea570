"""What notebooks show, of small and large models, of arrays, and of reports.

python tests/show/notebook_pages.py    writes the example of docs/show.md
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import by_path, fsdp, replicated

TESTS = Path(__file__).parent.parent
IN_THE_DOCS = TESTS / "show/notebook.html"

if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

import models  # noqa: E402


def mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


PAIR, CUBE, POD = mesh(data=4, model=2), mesh(stage=2, data=2, model=2), mesh(data=64, model=16)


def abstract(shape, over, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(over, spec))


def transformer(over=PAIR, width=256, depth=12):
    """Split over both axes: by tensor parallelism, and what is left by FSDP."""
    make = lambda: models.Transformer(  # noqa: E731
        width, 4 * width, 8, 1024, depth, key=jax.random.key(0)
    )
    tensor = {"up.weight": P("model"), "down.weight": P(None, "model")}
    rule = by_path(tensor) & fsdp("data") | replicated()
    return mylib.filter_shard(eqx.filter_eval_shape(make), rule, mesh=over)


def small_model():
    return of_ones(lambda: eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0)))


def of_ones(make):
    """A model whose arrays are ones: random numbers would have to be compiled."""
    shapes = eqx.filter_eval_shape(make)
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    ones = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), arrays)
    return eqx.combine(ones, rest)


def moved():
    model = small_model()
    return mylib.show(
        model, mylib.filter_shard(eqx.filter_eval_shape(lambda: model), P("data"), mesh=PAIR)
    )


def report():
    def loss(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    over = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layers = [abstract((512, 512), over, P("data"))] * 3
    return mylib.audit(jax.jit(loss), layers, abstract((4096, 512), over, P("data")))


SHOWN: dict[str, Callable[[], object]] = {
    "small model": lambda: mylib.show(small_model()),
    "transformer": lambda: mylib.show(transformer()),
    "array": lambda: mylib.show(abstract((256, 64), PAIR, P("data", "model"))),
    "copies": lambda: mylib.show(abstract((256, 64), PAIR, P("model"))),
    "scalar": lambda: mylib.show(jnp.ones(())),
    "cube": lambda: mylib.show(abstract((4, 128, 128, 3), CUBE, P("stage", "data", "model"))),
    "cube of a model": lambda: mylib.show(
        [abstract((8, 64), CUBE, spec) for spec in (P("stage", "data"), P("model"), P())]
    ),
    "pod": lambda: mylib.show(transformer(POD, 4096)),
    "line": lambda: mylib.show(abstract((64, 8), mesh(data=64), P("data"))),
    "host": lambda: mylib.show({"a": np.ones(3), "b": "text"}),
    "nothing": lambda: mylib.show({}),
    "moves": moved,
    "explanation": lambda: mylib.explain(transformer(), fsdp("data"), PAIR),
    "faults": lambda: mylib.explain({"a": np.ones(7)}, P("data"), PAIR),
    "report": report,
    "silent report": lambda: mylib.audit(jax.jit(lambda x: x + 1), jnp.ones(8)),
}


@cache
def html_of(name: str) -> str:
    shown: object = SHOWN[name]()
    return shown._repr_html_()


if __name__ == "__main__":
    IN_THE_DOCS.write_text(html_of("transformer") + "\n")
