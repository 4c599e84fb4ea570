"""What `mylib.audit` takes, and where it says that collectives come from."""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import known
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from models import Block, Transformer
from terminals import terminal

import mylib

ONE, TWO = known.meshes(jax.devices())


def line_of(fun, text: str) -> str:
    """Where a piece of a function stands, as reports tell it."""
    lines, first = inspect.getsourcelines(fun)
    return f"test_audit.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def model_and_batch():
    model = eqx.nn.MLP(16, 16, 256, 1, key=jax.random.key(0))
    model = mylib.filter_shard(model, mylib.rules.fsdp("data"), mesh=ONE)
    return model, jax.device_put(np.ones((4096, 16), np.float32), NamedSharding(ONE, P("data")))


def step(model, x):
    gradient = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
    return eqx.apply_updates(model, gradient)


def _placed_shape(x):
    if not eqx.is_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


class TestInputs:
    def test_what_it_takes(self):
        model, x = model_and_batch()
        ours = mylib.filter_jit(step)
        theirs = eqx.filter_jit(step)
        arrays, static = eqx.partition(model, eqx.is_array)
        raw = jax.jit(
            lambda arrays, x: eqx.filter(step(eqx.combine(arrays, static), x), eqx.is_array)
        )
        compiled = ours.lower(model, x).compile()
        reports = [
            mylib.audit(ours, model, x),
            compiled.audit(),
            mylib.audit(compiled),
            mylib.audit(theirs, model, x),
            mylib.audit(theirs.lower(model, x).compile()),
            mylib.audit(step, model, x),
            mylib.audit(raw, arrays, x),
            mylib.audit(raw.lower(arrays, x).compile()),
            mylib.audit(eqx.filter_jit(step), model, x=x),
        ]
        for report in reports:
            sums = {(c.kind, c.axes): report.bytes(c.kind) for c in report.collectives}
            assert sums == {(c.kind, c.axes): reports[0].bytes(c.kind) for c in report.collectives}
            assert report.memory.arguments == reports[0].memory.arguments
        named = [reports[i] for i in (0, 1, 2, 3, 5, 8)]
        for report in named:
            paths = [p.path for p in report.parameters]
            assert paths[0] == "model.layers[0].weight" and paths[-1] == "x"
            assert ("model.layers[0].weight",) in {c.arrays for c in report.among("all-gather")}
        assert reports[6].parameters[0].path == "arrays.layers[0].weight"

    def test_donated_arguments_keep_their_names(self):
        model, x = model_and_batch()

        def update(x, model):
            return step(model, x)

        report = mylib.audit(mylib.filter_jit(update, donate="all-except-first"), x, model)
        assert [p.path for p in report.parameters][:2] == ["x", "model.layers[0].weight"]

    @pytest.mark.filterwarnings("ignore:Some donated buffers")
    @pytest.mark.parametrize("donate", ["none", "all", "all-except-first"])
    def test_shapes_for_a_function_of_equinox(self, donate):
        args = model_and_batch()
        jitted = eqx.filter_jit(step, donate=donate)
        shapes = jax.tree.map(_placed_shape, args)
        report, real = (mylib.audit(jitted, *each) for each in (shapes, args))
        assert str(report) == str(real) and report.share == pytest.approx(1 / 8)
        assert {p.path for p in report.parameters} >= {"model.layers[1].bias", "x"}
        assert {c.arrays for c in report.among("all-gather")} >= {("model.layers[0].weight",)}
        assert (real.memory.aliased > 0) == (donate == "all")

    def test_what_it_does_not_take(self):
        with pytest.raises(TypeError, match="a int is no function"):
            mylib.audit(3)
        lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
        with pytest.raises(TypeError, match="compile it first"):
            mylib.audit(lowered)
        with pytest.raises(TypeError, match="takes no arguments"):
            mylib.audit(lowered.compile(), 1)
        assert mylib.audit(lowered.compile()).collectives == ()

    def test_parameters(self):
        model, x = model_and_batch()
        report = mylib.audit(step, model, x)
        weight, batch = report.parameters[0], report.parameters[-1]
        assert (weight.shape, weight.axes, weight.bytes) == ((32, 16), ("data",), 2048)
        assert (batch.shape, batch.axes) == ((512, 16), ("data",))

    def test_unused_arguments_and_keys(self):
        report = mylib.audit(
            jax.jit(lambda a, key, b: jax.random.normal(key, (3,)) + b),
            jax.ShapeDtypeStruct((8, 3), "float32", sharding=NamedSharding(ONE, P("data"))),
            jax.random.key(0),
            jax.ShapeDtypeStruct((3,), "float32", sharding=NamedSharding(ONE, P())),
        )
        assert [(p.path, p.axes) for p in report.parameters] == [("key", ()), ("b", ())]


class TestOrigins:
    @pytest.mark.parametrize("jit", [jax.jit, mylib.filter_jit, eqx.filter_jit])
    def test_the_line_of_an_operation_not_of_the_call(self, jit):
        def fun(x):
            y = jnp.sin(x)
            return jnp.exp(y.sum(0))

        x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(ONE, P("data")))
        (only,) = mylib.audit(jit(fun), x).collectives
        assert only.source == line_of(fun, "y.sum")

    def test_written_by_the_user(self):
        def fun(x):
            x = lax.psum(x, "data")
            return lax.ppermute(x, "data", [(0, 1)])

        x = known.abstract(ONE, P("data"), (8, 4))
        report = mylib.audit(jax.jit(known.mapped(ONE, P("data"), fun)), x)
        summed, moved = report.among("all-reduce") + report.among("collective-permute")
        assert (summed.inserted, summed.primitive, summed.arrays) == (False, "psum", ("x",))
        assert summed.source == line_of(fun, "lax.psum")
        assert (moved.inserted, moved.primitive, moved.arrays) == (False, "ppermute", ())
        assert moved.source == line_of(fun, "lax.ppermute")

    def test_the_inserted_gather_of_a_public_thread(self):
        """A batch that is divided meets a weight that is divided over the same axis."""

        def loss(model, x):
            h = jnp.tanh(x @ model["first"])
            return jnp.mean((h @ model["second"]) ** 2)

        w = known.abstract(ONE, P("data"), (64, 64))
        x = known.abstract(ONE, P("data"), (4096, 64))
        report = mylib.audit(jax.jit(loss), {"first": w, "second": w}, x)
        first, second = report.among("all-gather", "data")
        assert (first.arrays, second.arrays) == (("model['first']",), ("model['second']",))
        assert first.inserted and second.inserted
        assert first.source == line_of(loss, 'model["first"]')
        assert second.source == line_of(loss, 'model["second"]')
        # Kept whole, there is none.
        whole = known.abstract(ONE, P(), (64, 64))
        cured = mylib.audit(jax.jit(loss), {"first": whole, "second": whole}, x)
        assert cured.count("all-gather") == 0

    def test_the_scopes_around_it(self):
        """Equinox's layers are in scopes, whatever transformations and loops are around them."""

        class Block(eqx.Module):
            linear: eqx.nn.Linear

            def __call__(self, x):
                with jax.named_scope("block"):
                    return jnp.tanh(jax.vmap(self.linear)(x))

        def loss(blocks, x):
            x, _ = lax.scan(jax.checkpoint(lambda x, block: (block(x), None)), x, blocks)
            return lax.cond(x.sum() > 0, lambda: jnp.mean(x**2), lambda: jnp.mean(x))

        placed = {"weight": P(None, None, "data"), "bias": P()}
        blocks = eqx.filter_vmap(lambda key: Block(eqx.nn.Linear(64, 64, key=key)))
        blocks = eqx.filter_eval_shape(blocks, jax.random.split(jax.random.key(0), 3))
        blocks = jax.tree_util.tree_map_with_path(
            lambda path, x: known.abstract(ONE, placed[path[-1].name], x.shape), blocks
        )
        x = known.abstract(ONE, P(None, "data"), (32, 64))
        report = mylib.audit(mylib.filter_jit(eqx.filter_grad(loss)), blocks, x)
        of_products = [c for c in report.collectives if c.primitive == "dot_general"]
        assert {c.phase for c in of_products} == {"forward", "recomputed", "backward"}
        assert {c.scope for c in of_products} == {"block/eqx.nn.Linear"}
        assert "dot_general in block/eqx.nn.Linear" in str(report)
        assert {c.scope for c in report.collectives} <= {"", "block", "block/eqx.nn.Linear"}

    def test_rematerialised_gathers(self):
        def loss(ws, x):
            @jax.checkpoint
            def layer(h, w):
                return jnp.tanh(h @ w), None

            return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)

        ws = known.abstract(ONE, P(None, "data"), (3, 64, 64))
        x = known.abstract(ONE, P("data"), (4096, 64))
        report = mylib.audit(jax.jit(jax.grad(loss)), ws, x)
        gathers = [c for c in report.among("all-gather", "data") if c.arrays]
        assert {c.arrays for c in gathers} == {("ws",)}
        assert sum(c.times or 0 for c in gathers) == 6  # forward, and again backward
        assert {c.phase for c in gathers} == {"forward", "recomputed"}
        assert all(c.loops == (line_of(loss, "lax.scan"),) for c in gathers)

    def test_the_opaque_kernel_of_a_public_thread(self):
        """Split over "data" alone: the gradient of a call that nothing can look into is summed over
        "model" as well, which costs and does nothing.
        """

        def copy(x):
            return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        @jax.custom_vjp
        def plain(x):
            return copy(x)

        plain.defvjp(lambda x: (copy(x), None), lambda _, g: (g,))
        opaque = mylib.opaque(copy, fwd=lambda x: (copy(x), None), bwd=lambda _, g: (g,))
        x = known.abstract(TWO, P("data"), (8, 4))

        def gradient(kernel, **options):
            mapped = mylib.filter_shard_map(
                kernel, mesh=TWO, in_specs=P("data"), out_specs=P("data"), **options
            )
            return mylib.audit(jax.jit(jax.grad(lambda x: jnp.sum(mapped(x) ** 2))), x)

        report = gradient(plain, check_vma=False)
        (only,) = report.collectives
        assert (only.kind, only.axes, only.phase) == ("all-reduce", ("model",), "backward")
        assert only.source.startswith("test_audit.py:") and not only.inserted
        assert gradient(opaque).collectives == ()


def pairs(model, x):
    for w in model["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("first", ["nothing", "runs"])
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, mylib.filter_jit, lambda fun: fun])
def test_a_program_out_of_the_compilation_cache_tells_its_own_lines(jit, first, monkeypatch):
    """Two functions that compute the same, from lines and with names of their own."""
    offset = {"runs": 2.5, "nothing": 1.5}[first]  # else the second case would have the first's

    def total(tree):
        return jnp.mean(tree["a"] * offset)

    def of_others(others):
        return jnp.mean(others["b"] * offset)

    monkeypatch.setattr(of_others, "__name__", "total")
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(ONE, P("data")))
    assert jax.config.values["jax_compilation_cache_dir"]
    mylib.audit(jit(total), {"a": x})
    fun = jit(of_others)
    if first == "runs":
        fun({"b": x})
    (collective,) = mylib.audit(fun, {"b": x}).collectives
    assert collective.source == line_of(of_others, "jnp.mean")
    if jit is mylib.filter_jit:
        (collective,) = fun.lower({"b": x}).compile().audit().collectives
        assert collective.source == line_of(of_others, "jnp.mean")


class TestGradients:
    """Whose gradient a collective sums, in programs that update what they were given."""

    MODEL = {"layers": [known.abstract(ONE, P(), (64, 64))] * 2}
    X = known.abstract(ONE, P("data"), (512, 64))
    PATHS = ("model['layers'][0]", "model['layers'][1]")

    def gradients(self, step, *args):
        report = mylib.audit(step, *args)
        found = {path for c in report.among("all-reduce", "data") for path in c.gradients}
        return tuple(sorted(found)), report

    def test_of_an_optimiser(self):
        """Its state is updated, too, and is not what a user looks for."""
        optimiser = optax.adamw(1e-3)
        arrays = jax.tree.map(lambda x: jnp.zeros(x.shape), self.MODEL)
        state = jax.eval_shape(optimiser.init, arrays)
        whole = NamedSharding(ONE, P())
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state
        )

        def step(state, model, x):
            updates, state = optimiser.update(jax.grad(pairs)(model, x), state, model)
            return optax.apply_updates(model, updates), state

        found, report = self.gradients(step, state, self.MODEL, self.X)
        assert found == self.PATHS
        assert all(c.arrays == () and c.phase == "backward" for c in report.collectives)
        assert "gradient of model['layers'][0..1]" in str(report)

    def test_in_a_loop(self):
        def step(stack, x):
            def loss(stack):
                return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2)

            return stack - 0.1 * jax.grad(loss)(stack)

        stack = known.abstract(ONE, P(), (3, 64, 64))
        found, report = self.gradients(step, stack, self.X)
        assert found == ("stack",) and report.count("all-reduce", "data") == 3

    def test_written_by_the_user(self):
        def step(w, x):
            gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * lax.pmean(gradient, "data")

        mapped = jax.shard_map(
            step, mesh=ONE, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        w = known.abstract(ONE, P(), (64, 64))
        found, report = self.gradients(jax.jit(mapped), w, self.X)
        assert found == ("w",) and not report.collectives[0].inserted

    def test_activations_are_none(self):
        """They are added to an argument of their size, too."""
        columns, rows = (known.abstract(TWO, spec, (64, 64)) for spec in _MEGATRON)
        x = known.abstract(TWO, P("data"), (512, 64))
        block = lambda up, down, x: x + jnp.tanh(x @ up) @ down  # noqa: E731
        (only,) = mylib.audit(jax.jit(block), columns, rows, x).collectives
        assert only.axes == ("model",) and only.gradients == ()

    def test_gradients_of_activations_are_none(self):
        """They become the rows of an embedding's gradient, after a sum of tensor parallelism."""
        table = known.abstract(TWO, P(), (32, 64))
        up, down = (known.abstract(TWO, spec, (64, 64)) for spec in _MEGATRON)
        tokens = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=NamedSharding(TWO, P("data")))

        def step(table, up, down, tokens):
            def loss(table, up):
                return jnp.mean((jnp.tanh(jnp.tanh(table[tokens]) @ up) @ down) ** 2)

            gradients = jax.grad(loss, (0, 1))(table, up)
            return [w - 0.1 * g for w, g in zip((table, up), gradients, strict=True)]

        sums = mylib.audit(jax.jit(step), table, up, down, tokens).among("all-reduce")
        found = {(c.axes, path) for c in sums if c.phase == "backward" for path in c.gradients}
        assert found == {(("data",), "table"), (("data",), "up")}
        assert any(c.phase == "backward" and c.axes == ("model",) for c in sums)

    @pytest.mark.parametrize("gradient", [jax.grad, jax.value_and_grad])
    def test_that_are_returned(self, gradient):
        """A result at the path of an argument, or of the shape of the only one, is its gradient."""
        found, report = self.gradients(gradient(pairs), self.MODEL, self.X)
        assert found == self.PATHS and "gradient of model['layers'][0..1]" in str(report)
        one = known.abstract(ONE, P(), (64, 64))
        assert self.gradients(gradient(lambda w, x: jnp.mean((x @ w) ** 2)), one, self.X)[0] == (
            "w",
        )

    def test_of_one_of_two_alike_has_no_path(self):
        def loss(student, teacher, x):
            return jnp.mean((pairs(student, x) - pairs(teacher, x)) ** 2)

        found, report = self.gradients(jax.grad(loss), self.MODEL, self.MODEL, self.X)
        assert found == () and report.count("all-reduce", "data") >= 1


_MEGATRON = P(None, "model"), P("model")


class TestInvoluntaryRematerialization:
    """XLA warns on the standard error; what it does is in the program."""

    MESH = known.mesh_of(jax.devices(), (2, 2, 2), ("a", "b", "c"))

    def moved(self, before, after):
        there = jax.NamedSharding(self.MESH, after)

        def fun(x):
            return jax.lax.with_sharding_constraint(jnp.sin(x), there)

        report = mylib.audit(jax.jit(fun), known.abstract(self.MESH, before, (16, 16)))
        told = [c for c in report.collectives if "gathered, then split otherwise" in c.spelling]
        return told, report, fun

    def test_the_array_and_the_line_are_told(self):
        (only,), report, fun = self.moved(P("a", "b"), P(("c", "b", "a")))
        assert only.kind == "all-gather" and only.arrays == ("x",) and only.inserted
        assert only.source == line_of(fun, "with_sharding_constraint")
        assert "x (gathered, then split otherwise)" in str(report)

    @pytest.mark.parametrize(
        ("before", "after"), [(P("a"), P()), (P("a", "b"), P("b", "a")), (P("a"), P("a", "b"))]
    )
    def test_other_moves_are_not(self, before, after):
        told, _, _ = self.moved(before, after)
        assert told == []


class TestMemory:
    def test_numbers(self):
        model, x = model_and_batch()
        compiled = mylib.filter_jit(step).lower(model, x).compile()
        memory = compiled.audit().memory
        analysis = compiled.compiled.memory_analysis()
        assert memory.arguments == analysis.argument_size_in_bytes
        assert memory.temporaries == analysis.temp_size_in_bytes
        assert memory.arguments == sum(p.bytes for p in compiled.audit().parameters)
        # The CPU's own peak lacks the temporaries.
        assert memory.peak == memory.total

    def test_what_is_alive_at_the_peak(self):
        x, w = (known.abstract(ONE, P("data"), shape) for shape in [(4096, 512), (512, 512)])

        def loss(w, x):
            return jnp.sum(jnp.sort(x @ w) * jnp.cos(x))

        memory = mylib.audit(jax.jit(loss), w, x).memory
        assert memory.alive[0].bytes >= 512 * 512 * 4
        assert line_of(loss, "x @ w") in [x.source for x in memory.alive]
        found = sum(x.bytes for x in memory.alive)
        assert abs(memory.arguments + found - memory.peak) <= memory.peak / 10

    def test_results_in_donated_memory_are_held_once(self):
        def step(x, state):
            return jax.tree.map(lambda s: 0.9 * s + jnp.sum(x), state)

        x, *state = (known.abstract(ONE, P("data"), (4096, 512)) for _ in range(4))
        each = 512 * 512 * 4
        for donate, results in (("all-except-first", 0), ("none", 3)):
            memory = mylib.audit(mylib.filter_jit(step, donate=donate), x, state).memory
            assert 0 <= memory.peak - (4 + results) * each < each / 2
            found = sum(x.bytes for x in memory.alive)
            assert results * each <= found < results * each + each / 2

    def test_a_list_that_does_not_account_for_the_peak_is_unknown(self):
        x = known.abstract(ONE, P("data"), (4096, 512))
        report = mylib.audit(jax.jit(jnp.sort), x)
        assert report.memory.alive is not None
        unknown = dataclasses.replace(report.memory, alive=None)
        assert "what is held then is unknown" in str(dataclasses.replace(report, memory=unknown))

    def test_captured_constants(self):
        table = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
        x = known.abstract(ONE, P("data"), (64, 512))
        report = mylib.audit(jax.jit(lambda x: x @ table), x)
        assert report.memory.constants >= table.nbytes
        assert mylib.audit(jax.jit(jnp.sin), x).memory.constants == 0
        assert "constants 128 KiB" in str(report)


def test_a_machine_without_a_data_sheet_is_described():
    here = mylib.machines.here()
    report = mylib.audit(jax.jit(jnp.dot), *[np.ones((64, 64), np.float32)] * 2)
    told = "cpu: the rate of float32 on its data sheet is unknown. .*machine.chip, memory_"
    with pytest.raises(ValueError, match=told):
        report.estimate(here)
    chip = dataclasses.replace(here.chip, memory_bandwidth=50e9, flops={"float32": 1e12})
    assert report.estimate(dataclasses.replace(here, chip=chip)).seconds > 0


class TestPrinting:
    def test_table(self):
        def loss(model, x):
            for w in model:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        model = [known.abstract(ONE, P("data"), (64, 64))] * 3
        report = mylib.audit(jax.jit(loss), model, known.abstract(ONE, P("data"), (4096, 64)))
        text = str(report)
        assert text.splitlines()[0] == "loss on data=8"
        (gathers,) = [line for line in text.splitlines() if "all-gather" in line]
        # Equal layers are one line.
        assert gathers.split()[:3] == ["3", "all-gather", "data"]
        assert "model[0..2]" in gathers and line_of(loss, "x @ w") in gathers
        assert repr(report) == text

    def test_a_transformer_on_one_screen(self, monkeypatch):
        """Of a narrow terminal: nothing but what is alike is folded."""
        optim = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        model = eqx.filter_eval_shape(
            lambda key: Transformer(128, 512, 8, 256, depth=3, key=key), jax.random.key(0)
        )
        state = eqx.filter_eval_shape(lambda m: optim.init(eqx.filter(m, eqx.is_array)), model)
        kept = mylib.rules.fsdp("data")

        @mylib.filter_jit(in_shardings=(kept, kept, P("data")), out_shardings=kept, mesh=ONE)
        def step(model, state, tokens):
            def loss(model):
                model = mylib.fully_shard(model, Block, kept, mesh=ONE, dtype=jnp.bfloat16)
                scores = jax.nn.log_softmax(jax.vmap(model)(tokens))
                return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))

            arrays = eqx.filter(model, eqx.is_array)
            updates, new = optim.update(eqx.filter_grad(loss)(model), state, arrays)
            return eqx.apply_updates(model, updates), new

        report = mylib.audit(step, model, state, jax.ShapeDtypeStruct((64, 8), jnp.int32))
        assert "model.layers[0..2].attention.{query, key, value, output}_proj.weight" in str(report)
        with terminal(monkeypatch, 100):
            screen = repr(report).splitlines()
        assert len(screen) <= 40 and max(map(len, screen)) <= 100
        with terminal(monkeypatch, 80):
            lines = repr(report).splitlines()
        assert lines[2].split() == ["times", "bytes", "sent", "what", "line"]
        assert max(map(len, lines)) <= 80
        text = " ".join(" ".join(screen).split())
        assert "names without their first word are of model" in text
        assert "of f32 over data, inserted, forward, recomputed:" in text
        rows = screen[: next(i for i, line in enumerate(screen) if "in a call" in line)]
        times = [int(line[:6]) for line in rows if line[:6].strip().isdigit()]
        assert sum(times) == report.count()

    def test_nothing(self):
        report = mylib.audit(jnp.sin, known.abstract(ONE, P("data"), (8, 4)))
        assert "nothing is communicated" in str(report) and report.count() == 0


def test_a_function_that_nobody_has_compiled():
    """With shapes for arrays, a Module that has some, and arguments that are none."""
    linear = known.abstract(ONE, P("data"), (16, 8))

    def total(model, /, *xs, how, **named):
        x = model["w"] * xs[0] * named["scale"]
        return jnp.sum(x) if how == "sum" else x

    report = mylib.audit(total, {"w": linear, "name": "w"}, linear, how="sum", scale=2.0)
    (one,) = report.collectives
    assert one.kind == "all-reduce" and one.axes == ("data",)
    assert mylib.audit(total, {"w": linear}, linear, how="none", scale=2.0).collectives == ()
