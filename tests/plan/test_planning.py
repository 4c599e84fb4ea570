"""`plan`: what it finds, says, and refuses."""

import re
import sys
import threading
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import planned_steps as steps
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from planned_steps import MLP, STEP, modelled

import mylib
from mylib._planning.plan.calls import Calls, roles_in

KEY = jax.random.key(0)
BATCH = np.ones((16, 64), np.float32)


def assert_code_says_the_same(plan, model):
    names = {"mylib": mylib, "P": P, "jnp": jnp, "Linear": eqx.nn.Linear, "model": model}
    exec(plan.code(), names)
    for name in ("kept", "used"):
        ours = mylib.resolve(model, getattr(plan, name), mesh=plan.mesh)
        theirs = mylib.resolve(model, names[name], mesh=names["mesh"])
        assert jax.tree.all(jax.tree.map(lambda a, b: a.spec == b.spec, ours, theirs))


@pytest.fixture(scope="module")
def made():
    return modelled(STEP, *MLP, axes={"data": 4, "model": 2})


class TestPlan:
    def test_what_it_has(self, made):
        assert made.mesh.shape == made.axes == {"data": 4, "model": 2}
        assert made.layers == (eqx.nn.Linear,) and made.policy == "full" and made.dtype is None
        assert set(made.arguments) == {"batch", "model", "state"}
        assert made.audit is None and made.memory > 0 and made.seconds[0] <= made.seconds[1]
        found = {x.name for x in (made.chosen, *made.others)}
        assert found == {"DP 4 x TP 2", "FSDP 4 x TP 2"}
        assert "code=" not in repr(made) and "fully_shard" in repr(made)
        assert "nothing was compiled" in repr(made)

    def test_is_text(self, made):
        text = made.as_text()
        again = mylib.Plan.of(text)
        assert again == made and again.as_text() == text and hash(again) == hash(made)
        assert modelled(STEP, *MLP, axes={"data": 4, "model": 2}) == made

    def test_other_texts(self, made):
        with pytest.raises(ValueError, match="this isn't the text of a plan, or that of another"):
            mylib.Plan.of("{}")
        text = made.as_text().replace("equinox.nn._linear:Linear", "not.there:Linear")
        with pytest.raises(ValueError, match=r"can't be imported: .*layers=\[Linear\]"):
            mylib.Plan.of(text)
        assert mylib.Plan.of(text, layers=made.layers) == made

    def test_moments_are_where_their_weights_are(self, made):
        model = made.applying.arguments["model"]
        state = made.applying.arguments["state"]
        for path, spec in model.items():
            assert state[f"[0].mu{path}"] == state[f"[0].nu{path}"] == spec
            assert made.applying.results[f"[0]{path}"] == spec
        assert made.applying.donated == ("model", "state")

    def test_rules_explain(self, made):
        explanation = mylib.explain(MLP[1], made.kept, made.mesh)
        assert not explanation.faults
        assert "planned for model.layers[0].weight" in explanation.whole()

    def test_explained(self):
        rule = mylib.rules.by_path({"layers.1.weight": P(None, "data")})
        plan = modelled(STEP, *MLP, machine="h100 x 8", axes={"data": 8}, kept=rule)
        plan = mylib.Plan.of(plan.as_text())
        why = {x.leaf.name: x.why for x in mylib.explain(MLP[1], plan).rows}
        assert why[".layers[1].weight"] == "fixed by kept="
        (state,) = {x.why for x in mylib.explain(MLP[0], plan, argument="batch").rows}
        assert state == "rows of the batch"

    def test_arguments_that_the_step_lacks(self, made):
        told = r"the step has no argument 'models'. It has batch, model, state"
        with pytest.raises(mylib.errors.PlanError, match=told):
            mylib.explain(MLP[1], made, argument="models")
        with pytest.raises(mylib.errors.PlanError, match=told):
            made.make(lambda: None, arguments=("models",))
        with pytest.raises(TypeError, match="make must return a tuple of model, state"):
            made.make(lambda: steps.mlp(KEY))
        with pytest.raises(TypeError, match=r"write a tuple of names, \('model',\)"):
            made.make(lambda: steps.mlp(KEY), arguments="model")

    def test_explained_tensor_parallelism(self, made):
        rows = mylib.explain(MLP[2], made, argument="state").rows
        (why,) = {x.why for x in rows if x.leaf.name.endswith("mu.layers[0].weight")}
        # Which layers are split by rows and which by columns is a tie.
        assert why.startswith("over model by dimension ")
        assert "together with layers[*].weight" in why

    def test_reasons(self, made):
        plan = modelled(STEP, *MLP)
        assert plan.why_not(plan.chosen.name).endswith("was chosen: " + plan.chosen.reason)
        assert "times as long" in plan.why_not(plan.others[-1].name)

    def test_code_without_rows(self):
        plan = modelled(STEP, *MLP, axes={"model": 8})
        names = {"mylib": mylib, "P": P, "Linear": eqx.nn.Linear, "model": MLP[1]}
        exec(plan.code(), names)
        assert names["rows"] == mylib.rules.replicated()

    def test_code_says_the_same(self, made):
        assert "# in the loss:" in made.code()
        assert_code_says_the_same(made, MLP[1])


class TestText:
    def test_parts_and_what_overlaps_add_up(self, made):
        for x in (made.chosen, *made.others):
            numbers = re.findall(r"(- )?[a-z ]*?(\S+) ms", x.reason)
            total = sum(float(n) * (-1 if minus else 1) for minus, n in numbers)
            assert total == pytest.approx(1e3 * x.modelled, rel=0.02)

    def test_a_table_has_what_is_known(self, made):
        header = "strategy modelled memory its parts, or why not"
        assert header in [" ".join(line.split()) for line in repr(made).splitlines()]
        assert "FSDP x DP (HSDP): sharded within groups of devices" in repr(made)
        (other, *_) = made.others
        late, early = (
            replace(other, name=name, compiled=True, seconds=seconds)
            for name, seconds in (("late", 2.0), ("early", 1.0))
        )
        text = repr(replace(made, others=(late, early, other)))
        text = text[text.index("\nnext\n") :]
        assert text.index("early") < text.index("late") < text.index(other.name)

    def test_it_folds(self, made, monkeypatch):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", "80")
        wide = [line for line in repr(made).splitlines() if len(line) > 80]
        assert not [line for line in wide if line not in made.code()]

    def test_it_says_at_once_that_it_begins(self, capsys):
        first = []

        def step(*args):
            first.append(capsys.readouterr().err)
            return STEP(*args)

        modelled(step, *MLP, progress=True)
        assert first[0].strip() == "planning for cpu x 8: tracing the step"


class TestModelled:
    """What a plan says without a compiler, and beside what was compiled."""

    def test_the_mesh_needs_no_compiler(self, monkeypatch):
        def missing(*_):
            raise mylib.machines.CompilerError("there is none")

        monkeypatch.setattr(mylib._programs.machines.machine, "gpus", missing)
        plan = modelled(STEP, *MLP, machine="h100 x 16")
        assert dict(plan.mesh.shape) == plan.axes
        assert not mylib.explain(MLP[1], plan.kept, plan.mesh).faults
        with pytest.raises(mylib.machines.CompilerError):
            plan.jit(STEP)

    def test_modelled_seconds_are_beside_the_others(self, made):
        compiled = replace(made.chosen, compiled=True, seconds=2 * made.chosen.modelled)
        plan = replace(made, chosen=compiled)
        (ours, theirs) = (repr(x).split("\n")[4].split() for x in (plan, made))
        (header, *_) = (line for line in repr(plan).splitlines() if "strategy" in line)
        assert header.split()[:3] == ["strategy", "modelled", "compiled"]
        time, twice = (f"{x * made.chosen.modelled * 1e3:.3g}" for x in (1, 2))
        assert ours.count(time) == 1 and theirs.count(time) == 1
        assert ours[ours.index(time) + 2] == twice
        told = f"the chosen one {made.chosen.modelled * 1e3:.3g} ms by the same model"
        assert told in plan.why_not(made.others[0].name)

    def test_whole_weights_are_not_called_wasteful(self):
        model = eqx.filter_eval_shape(eqx.nn.Linear, 1024, 1024, key=KEY)
        args = jax.ShapeDtypeStruct((65536, 1024), jnp.float32), model, None
        plan = modelled(lambda x, model, state: jax.vmap(model)(x), *args, axes={"data": 8})
        assert plan.chosen.name == "DP 8"
        explained = str(mylib.explain(model, plan))
        assert "large and replicated: .weight" in explained and "wast" not in explained


class Tied(eqx.Module):
    both: eqx.nn.Shared

    def __init__(self, key):
        pair = (eqx.nn.Linear(64, 64, key=key),) * 2
        self.both = eqx.nn.Shared(pair, lambda x: x[1].weight, lambda x: x[0].weight)

    def __call__(self, x, key=None):
        first, second = self.both()
        return second(first(x))


class Ends(eqx.Module):
    inner: dict[str, dict[str, eqx.nn.Linear]]
    up: eqx.nn.Linear

    def __init__(self, mlp, up):
        self.inner, self.up = {"up": {"a.b": mlp.layers[1], "up": mlp.layers[0]}}, up

    def __call__(self, x):
        return self.up(self.inner["up"]["a.b"](jnp.tile(x, 4))[:64])


def kept_of(plan, path=".layers[0].weight", name="model"):
    return plan.applying.arguments[name][path]


class TestFixed:
    """What `kept=` and `used=` say of a part; the plan decides the rest."""

    def test_kept(self):
        rule = mylib.rules.by_path({"layers.0.weight": P(None, "data")})
        plan = modelled(STEP, *MLP, axes={"data": 8}, kept=rule)
        free = modelled(STEP, *MLP, axes={"data": 8})
        assert kept_of(plan) == (None, "data") != kept_of(free)
        assert kept_of(plan, "[0].mu.layers[0].weight", "state") == (None, "data")
        assert plan.applying.results["[0].layers[0].weight"] == (None, "data")
        assert kept_of(plan, ".layers[1].weight") == kept_of(free, ".layers[1].weight")
        assert mylib.Plan.of(plan.as_text()) == plan != free
        assert_code_says_the_same(plan, MLP[1])

    @pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
    def test_code_of_paths_that_end_alike(self, axes):
        """A pattern matches the ends of paths, and so weights of other Modules."""
        make = lambda key: Ends(steps.mlp(key), eqx.nn.Linear(64, 64, key=key))  # noqa: E731
        rule = lambda leaf: P("data") if leaf.name == ".up.bias" else mylib.rules.PASS  # noqa: E731
        args = steps.abstract(make, steps.ROWS)
        plan = modelled(STEP, *args, axes=axes, kept=rule)
        kept = mylib.resolve(args[1], plan.kept, mesh=plan.mesh)
        assert kept.up.bias.spec == P("data") != kept.inner["up"]["up"].bias.spec
        assert_code_says_the_same(plan, args[1])

    def test_other_arguments_need_no_weight_in_parts(self):
        """None of these weights is worth splitting."""
        args = steps.abstract(lambda key: steps.mlp(key, 16, 16), np.ones((8, 16), np.float32))
        plan = modelled(STEP, *args, kept={"batch": P()}, axes={"replica": 2, "data": 4})
        assert plan.chosen.name == "FSDP 4 x DP 2"

    def test_nothing_is_left_to_split(self):
        with pytest.raises(mylib.errors.PlanError, match="kept= or used= leaves no dimensions"):
            modelled(STEP, *MLP, used=P(), axes={"data": 4, "model": 2})

    def test_memory_and_bytes(self):
        """With all weights kept whole there is nothing to gather, and more to hold."""
        rule = mylib.rules.by_path({"layers.0.weight": P()})
        fixed = modelled(STEP, *MLP, axes={"data": 8}, kept=rule)
        free = modelled(STEP, *MLP, axes={"data": 8})
        name = "FSDP 8"
        ours, theirs = (
            next(x for x in (plan.chosen, *plan.others) if x.name == name) for plan in (fixed, free)
        )
        # The weight and its two moments.
        assert ours.memory - theirs.memory >= 2 * 64 * 256 * 4 * 7 // 8
        assert ours.parts["gathers of weights"] < theirs.parts["gathers of weights"]
        whole = modelled(STEP, *MLP, axes={"data": 8}, kept=mylib.rules.replicated())
        assert "shards no weight" in whole.why_not(name)
        parts = modelled(STEP, *MLP, axes={"data": 8}, kept=mylib.rules.fsdp("data"))
        assert parts.chosen.name == name and "kept= shards weights over" in parts.why_not("DP 8")

    def test_used(self):
        rule = mylib.rules.by_path({"layers.0.weight": mylib.rules.where_present(P("model"))})
        plan = modelled(STEP, *MLP, used=rule, axes={"data": 4, "model": 2})
        assert plan.applying.used["[1]"][".layers[0].weight"] == ("model",)
        rule = mylib.rules.by_path({"layers.0.weight": P()})
        plan = modelled(STEP, *MLP, used=rule, axes={"data": 4, "model": 2})
        used = plan.applying.used["[1]"]
        assert used[".layers[0].weight"] == () and any(used.values())

    @pytest.mark.parametrize("spec", [("model", "data"), ("data", "model"), (("data", "model"),)])
    def test_kept_over_both_axes(self, spec):
        rule = mylib.rules.by_path({"layers.0.weight": P(*spec)})
        plan = modelled(STEP, *MLP, kept=rule, axes={"data": 4, "model": 2})
        assert kept_of(plan) == kept_of(plan, "[0].mu.layers[0].weight", "state") == spec
        model_at = [i for i, x in enumerate(spec) if "model" in x]
        used = plan.applying.used["[1]"][".layers[0].weight"]
        assert [i for i, x in enumerate(used) if x] == model_at

    def test_kept_over_replicas(self):
        rule = mylib.rules.by_path({"layers.0.weight": P("replica", "data")})
        plan = modelled(STEP, *MLP, kept=rule, axes={"replica": 2, "data": 4})
        assert plan.chosen.name == "FSDP 4 x DP 2" and plan.axes == {"replica": 2, "data": 4}
        assert (
            kept_of(plan) == ("replica", "data")
            and not plan.applying.used["[1]"][".layers[0].weight"]
        )

    def test_by_argument(self):
        moments = mylib.rules.by_path({"*.mu.layers.0.weight": P("data")})
        plan = modelled(STEP, *MLP, axes={"data": 8}, kept={"state": moments, "batch": P()})
        assert kept_of(plan, "[0].mu.layers[0].weight", "state") == ("data",)
        assert kept_of(plan, "", "batch") == ()

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"kept": mylib.rules.by_path({"layers.0.weigth": P()})}, "kept= can't be served"),
            ({"kept": mylib.rules.by_path({"layers.0.weight": P("fsdp")})}, "fsdp"),
            (
                {"used": mylib.rules.by_path({"layers.0.weight": P("data")})},
                r"used= fixes model.layers\[0\].weight at .*only over 'model'.*Write kept=",
            ),
            (
                {
                    "used": mylib.rules.by_path({"layers.0.weight": P("replica")}),
                    "axes": {"replica": 2, "data": 4},
                },
                r"used= fixes model.layers\[0\].weight at .*only over 'model'.*Write kept=",
            ),
            (
                {"axes": {"fsdp": 8}},
                "the axes of plans are 'data'.*by hand, with mylib",
            ),
            ({"axes": {"data": 4, "model": 4}}, "data=4, model=4. It has 8 devices"),
            ({"axes": {"model": 16}, "machine": "h100 x 16"}, "'model' .*within a host of GPUs"),
            (
                {"kept": {"model": P()}, "used": P("model"), "axes": {"model": 8}},
                r"used= fixes model.layers\[0\].bias|used= fixes model",
            ),
            ({"kept": {"weights": P()}}, "kept= names 'weights'; the step's arguments are batch"),
            ({"used": {"state": P()}}, "used= fixes state.*not a weight of a model"),
            ({"kept": jax.devices()[0]}, "kept= takes specs"),
        ],
    )
    def test_what_no_plan_can_serve(self, given, told):
        with pytest.raises(mylib.errors.PlanError, match=told):
            modelled(STEP, *MLP, **given)


@pytest.mark.slow
def test_what_is_fixed_runs():
    rule = mylib.rules.by_path({"layers.0.weight": P(None, "data")})
    args = BATCH, *steps.with_state(steps.mlp(KEY))
    plan = modelled(STEP, *args, axes={"data": 8}, kept=rule)
    model, _, loss = plan.jit(STEP)(*args)
    assert model.layers[0].weight.sharding.spec == P(None, "data")
    assert abs(loss - eqx.filter_jit(STEP)(BATCH, *steps.with_state(steps.mlp(KEY)))[2]) < 1e-6


def test_ctrl_c_returns_what_is_known(capsys):
    traces = []

    def step(*args):
        traces.append(args)
        if len(traces) > 1:  # the first candidate is compiled
            raise KeyboardInterrupt
        return STEP(*args)

    options = {"layers": eqx.nn.Linear, "policies": ("full",), "progress": True}
    plan = mylib.plan(step, *MLP, **options)
    assert not plan.chosen.compiled and "nothing was compiled" in repr(plan)
    assert "compiling 1 of " in capsys.readouterr().err


class TestRefuses:
    def test_too_little_memory(self):
        with pytest.raises(mylib.errors.PlanError, match=r"no plan fits on cpu x 8. .* missing"):
            modelled(STEP, *MLP, memory=10_000)

    def test_too_few_rows(self):
        args = steps.abstract(steps.mlp, jax.ShapeDtypeStruct((4, 64), jnp.float32))
        with pytest.raises(
            mylib.errors.PlanError, match="4 rows of .* can't be divided over 8 devices"
        ):
            modelled(STEP, *args, axes={"data": 8})
        assert modelled(STEP, *args).axes["model"] >= 2

    def test_sizes_that_nothing_divides(self):
        make = lambda key: steps.mlp(key, 65, 33)  # noqa: E731
        args = steps.abstract(make, jax.ShapeDtypeStruct((16, 65), jnp.float32))
        plan = modelled(STEP, *args)
        assert "no group of dimensions can be divided by 2" in plan.why_not("FSDP 4 x TP 2")

    def test_a_step_that_calls_no_model(self):
        step = steps.step_of(lambda model, x: jnp.mean(x @ model.layers[0].weight.T))
        with pytest.raises(
            mylib.errors.PlanError, match=r"model = mylib.fully_shard\(model, layers"
        ):
            modelled(step, *MLP)

    def test_no_model(self):
        with pytest.raises(mylib.errors.PlanError, match="no argument of the step has a Module"):
            modelled(lambda x, w: x @ w, steps.ROWS, np.ones((64, 2)))

    def test_a_step_that_needs_a_mesh(self):
        step = steps.step_of(
            lambda model, x: jnp.mean(jax.vmap(model)(mylib.filter_shard(x, P("data"))))
        )
        with pytest.raises(mylib.errors.PlanError, match="the array at .*needs a mesh"):
            modelled(step, *MLP)

    def test_no_batch(self):
        with pytest.raises(mylib.errors.PlanError, match="none of the arguments model is a batch"):
            modelled(lambda model: model(jnp.ones(64)), MLP[1])

    def test_another_batch_than_the_first(self):
        told = "4 rows of state can't be divided over 8 devices"
        with pytest.raises(mylib.errors.PlanError, match=told):
            modelled(lambda state, x, m: jax.vmap(m)(x), np.ones(4), *MLP[:2], axes={"data": 8})
        key = jax.random.PRNGKey(0)
        plan = modelled(lambda key, x, m: jax.vmap(m)(x), key, *MLP[:2], axes={"data": 8})
        assert plan.arguments["x"].specs == {"": ("data",)} and plan.arguments["key"].specs == {
            "": ()
        }

    def test_grouped_convolutions(self):
        """XLA's gradient of their weights is wrong, or XLA ends the process."""
        make = lambda key: eqx.nn.Conv2d(8, 8, 3, padding=1, groups=2, key=key)  # noqa: E731
        args = steps.abstract(make, jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32))
        told = "gradient of a convolution's weights is wrong"
        with pytest.raises(mylib.errors.PlanError, match=told):
            modelled(STEP, *args, axes={"data": 4, "model": 2})
        assert "model" not in modelled(STEP, *args).axes

        def halves(batch, model, state):
            split = batch.reshape(2, 8, *batch.shape[1:])
            return jax.lax.scan(
                lambda c, x: (STEP(x, model, state), None), (model, state, 0.0), split
            )

        with pytest.raises(mylib.errors.PlanError, match="its rows are not split over all devices"):
            modelled(halves, *args, axes={"data": 8})

    def test_why_grouped_convolutions_are_refused(self):
        """Plain JAX does this. Once it doesn't, `plan` need not refuse them any more."""

        def loss(weights, x):
            y = jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", feature_group_count=2)
            return jnp.sum(y**2)

        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        x, weights = jax.random.normal(KEY, (16, 8, 8, 8)), jax.random.normal(KEY, (8, 4, 3, 3))
        args = jax.device_put(
            (weights, x), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
        )
        gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))(*args)
        np.testing.assert_allclose(gradient, 2 * jax.grad(loss)(weights, x), rtol=1e-3, atol=1e-2)

    def test_convolutions_of_whole_batches(self):
        """Positions may be split, as XLA decides."""
        make = lambda key: eqx.nn.Conv2d(8, 8, 3, padding=1, key=key)  # noqa: E731
        args = steps.abstract(make, jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32))
        on = {"axes": {"data": 4, "model": 2}}
        assert modelled(STEP, *args, **on).chosen
        with pytest.raises(mylib.errors.PlanError, match="gradient of a convolution's weights"):
            modelled(STEP, *args, **on, kept={"batch": P()})

    def test_why_convolutions_of_whole_batches_are_refused(self):
        """Plain JAX does this. Once it doesn't, `plan` need not refuse them any more."""
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        at = NamedSharding(mesh, P(None, None, "model"))

        def loss(weights, x):
            x = jax.lax.with_sharding_constraint(x, at)
            y = jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME")
            return jnp.sum(jax.lax.with_sharding_constraint(y, at) ** 2)

        x, weights = jax.random.normal(KEY, (16, 8, 8, 8)), jax.random.normal(KEY, (8, 8, 3, 3))
        alone = jax.grad(lambda w: jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME") ** 2))
        gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))(weights, x)
        np.testing.assert_allclose(gradient, 4 * alone(weights), rtol=1e-3, atol=1e-1)

    def test_layers_of_tied_weights(self):
        make = lambda key: eqx.nn.Sequential([Tied(key)])  # noqa: E731
        state, (x, model, _) = None, steps.abstract(make, steps.ROWS)
        with pytest.raises(mylib.errors.PlanError, match=r"layers= of model: [^$]*eqx.nn.Shared"):
            modelled(STEP, x, model, state, layers=eqx.nn.Linear)

    def test_an_ensemble(self):
        models = eqx.filter_eval_shape(eqx.filter_vmap(steps.mlp), jax.random.split(KEY, 3))

        def step(batch, models):
            return eqx.filter_vmap(
                lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None)
            )(models, batch)

        with pytest.raises(
            mylib.errors.PlanError, match="a member of an ensemble under equinox.filter_vmap"
        ):
            modelled(step, steps.ROWS, models)

    def test_options(self):
        with pytest.raises(ValueError, match="policies"):
            modelled(STEP, *MLP, policies=("some",))
        for axes in ((8,), {}, {"data": "8"}, {"data": 0}):
            with pytest.raises(TypeError, match=r"axes=.* is no dict of sizes"):
                modelled(STEP, *MLP, axes=axes)
        with pytest.raises(TypeError, match="machine=8: write a Machine or its name"):
            modelled(STEP, *MLP, machine=8)
        with pytest.raises(TypeError, match="compile=-1: write a number of at least 0"):
            modelled(STEP, *MLP, compile=-1)
        for wrong in (0,), (2.0,), ("2",), (True,), 4, "12":
            with pytest.raises(TypeError, match="micro_batches=.*: write numbers of at least 1"):
                modelled(lambda n: STEP, *MLP, micro_batches=wrong)
        with pytest.raises(
            ValueError, match="measure=2 runs compiled candidates, and with compile=0"
        ):
            modelled(STEP, *MLP, measure=2)
        with pytest.raises(TypeError, match="can't be called with these arguments: too many"):
            modelled(lambda: None, *MLP)
        with pytest.raises(TypeError, match="memory='80 GiB' is no number of bytes"):
            modelled(STEP, *MLP, memory="80 GiB")
        with pytest.raises(TypeError, match="neither a class"):
            modelled(STEP, *MLP, layers="Block")
        with pytest.raises(mylib.errors.PlanError, match="no argument of the step has a Conv2d"):
            modelled(STEP, *MLP, layers=(eqx.nn.Linear, eqx.nn.Conv2d))
        with pytest.raises(
            mylib.errors.PlanError, match="no mesh of cpu x 8 is considered with data=3"
        ):
            modelled(STEP, *MLP, axes={"data": 3})

    def test_other_arguments(self, made):
        other = steps.with_state(steps.mlp(KEY, depth=3))
        with pytest.raises(
            mylib.errors.PlanError, match=r"model.layers\[3\].weight isn't in the plan"
        ):
            made.jit(STEP).lower(BATCH, *other)
        with pytest.raises(TypeError, match="batch, model, state"):
            made.jit(STEP)(BATCH)


class TestCalls:
    """Classes stay what they are, and a call of the model is found whatever it went through."""

    def test_what_is_common_in_equinox(self):
        model, state = steps.with_state(steps.mlp(KEY))
        weights, static = eqx.partition(model, eqx.is_inexact_array)
        mask = jax.tree.map(eqx.is_inexact_array, model)
        seen = []

        def step(batch, weights, state):
            def loss(weights):
                found = eqx.combine(weights, static)
                seen.append(type(found) is eqx.nn.MLP)
                found = eqx.combine(*eqx.partition(found, mask))
                return steps.squared_loss(found, batch)

            return eqx.filter_grad(loss)(weights)

        plan = modelled(step, BATCH, weights, state, axes={"data": 8})
        assert plan.applying.order == ("[1]",) and all(seen)

    def test_the_class_is_as_before(self):
        before = vars(eqx.nn.MLP)["__call__"]
        modelled(STEP, *MLP, axes={"data": 8})
        with pytest.raises(mylib.errors.PlanError):
            modelled(lambda batch, model: batch, *MLP[:2])
        assert vars(eqx.nn.MLP)["__call__"] is before

    def test_teacher_and_student(self):
        def step(batch, student, teacher):
            aim = jax.lax.stop_gradient(jax.vmap(teacher)(batch))
            return eqx.filter_grad(lambda s: jnp.mean((jax.vmap(s)(batch) - aim) ** 2))(student)

        plan = modelled(step, steps.ROWS, MLP[1], MLP[1], axes={"data": 8})
        assert plan.applying.order == ("[2]", "[1]")

    def test_other_threads_are_not_concerned(self):
        model = steps.mlp(KEY)
        roles = roles_in((model,))
        calls = Calls(roles, lambda role, model: lambda x: "planned")
        found = []
        with calls.tracing():
            thread = threading.Thread(target=lambda: found.append(model(BATCH[0])))
            thread.start()
            thread.join()
            assert model(BATCH[0]) == "planned"
        assert found[0].shape == (64,) and model(BATCH[0]).shape == (64,)

    def test_functions_compiled_by_themselves(self):
        """A trace of another call isn't taken for a planned one."""
        forward = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
        model, state = steps.with_state(steps.mlp(KEY))
        forward(model, BATCH)
        plan = modelled(
            steps.step_of(lambda m, x: jnp.mean(forward(m, x) ** 2)), BATCH, model, state
        )
        assert plan.applying.order == ("[1]",)


def test_a_cache_has_rows_and_heads():
    plan = modelled(steps.decode, *steps.DECODED, axes={"data": 4, "model": 2})
    assert plan.applying.arguments["cache"] == {"": ("data", None, "model")}
    assert plan.applying.results["[1]"] == ("data", None, "model")
    assert plan.applying.donated == ("cache",)


def test_biases_of_convolutions():
    """Their dimensions of size 1 are those of their moments and results: all are donated."""
    make = lambda key: eqx.nn.Conv2d(3, 8, 3, padding=1, key=key)  # noqa: E731
    args = steps.abstract(make, jax.ShapeDtypeStruct((16, 3, 8, 8), jnp.float32))
    plan = modelled(STEP, *args, axes={"data": 8})
    assert plan.applying.donated == ("model", "state")


def test_two_models():
    """A generator and a discriminator of one class, each with a rule of its own."""
    models = eqx.filter_eval_shape(
        lambda: (steps.mlp(KEY, 64, 512), eqx.nn.MLP(64, "scalar", 256, 2, key=KEY))
    )

    def step(batch, models):
        def fool(g, d):
            return jnp.mean(jax.nn.softplus(-jax.vmap(d)(jax.vmap(g)(batch))))

        g, d = models
        return eqx.filter_grad(fool)(g, d), eqx.filter_grad(lambda d: -fool(g, d))(d)

    plan = modelled(step, steps.ROWS, models, axes={"data": 4, "model": 2})
    assert set(plan.applying.order) == {"[1][0]", "[1][1]"}
    split = {path for used in plan.applying.used.values() for path, spec in used.items() if spec}
    assert ".layers[0].weight" in split
    for i in range(2):
        assert f"sharded_models_{i}(models[{i}]) instead of models[{i}]" in plan.code()


def test_models_with_layers_of_their_own():
    """Each has only layers of its own class; the optimiser's state comes first."""
    class_of = {name: type(name, (eqx.nn.Linear,), {}) for name in ("Given", "Judged")}
    make = lambda name: eqx.nn.Sequential([class_of[name](64, 64, key=KEY)] * 2)  # noqa: E731
    g, d = eqx.filter_eval_shape(lambda: (make("Given"), make("Judged")))

    def step(state, g, d, batch):
        loss = lambda g, d: jnp.mean(jax.vmap(d)(jax.vmap(g)(batch)) ** 2)  # noqa: E731
        return eqx.apply_updates(state, {"mu": eqx.filter_grad(loss)(g, d)})

    plan = modelled(step, {"mu": g}, g, d, steps.ROWS, axes={"data": 8})
    assert set(plan.layers) == set(class_of.values()) and plan.applying.order == ("[1]", "[2]")
    names = {"mylib": mylib, "P": P, "g": g, "d": d, **class_of}
    exec(plan.code(), names)
    assert "fully_shard(g, Given," in plan.code() and "fully_shard(d, Judged," in plan.code()


def test_what_a_loop_over_time_takes_is_not_stacked():
    """Positions are as long as time, which a loop iterates over."""

    class Timed(steps.Recurrent):
        places: jax.Array

        def __init__(self, key):
            super().__init__(key)
            self.places = jnp.zeros((16, 64))

        def __call__(self, x):
            return super().__call__(x + self.places)

    args = steps.abstract(Timed, jax.ShapeDtypeStruct((16, 16, 64), jnp.float32))
    plan = modelled(STEP, *args, axes={"data": 8}, layers=eqx.nn.GRUCell)
    assert not plan.stacked and "stacked=" not in plan.code()


class WithNorm(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    down: eqx.nn.Linear

    def __init__(self):
        self.up = eqx.nn.Linear(64, 256, key=KEY)
        self.norm = eqx.nn.BatchNorm(256, "batch", mode="batch")
        self.down = eqx.nn.Linear(256, 64, key=KEY)

    def __call__(self, x, state):
        x, state = self.norm(self.up(x), state)
        return self.down(jax.nn.relu(x)), state


def test_a_state_of_batch_norm():
    model, state = eqx.filter_eval_shape(eqx.nn.make_with_state(WithNorm))

    def step(model, state, batch):
        def loss(model, state):
            run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            y, state = run(batch, state)
            return jnp.mean(y**2), state

        grads, state = eqx.filter_grad(loss, has_aux=True)(model, state)
        return eqx.apply_updates(model, grads), state

    plan = modelled(step, model, state, steps.ROWS, axes={"data": 4, "model": 2})
    # The statistics of the hidden layer are split as that is.
    assert ("model",) in plan.applying.arguments["state"].values()
    assert plan.applying.arguments["batch"] == {"": ("data",)}
    assert plan.applying.donated == ("model", "state") and plan.layers == ()


@pytest.mark.parametrize(("machine", "count"), [("h100 x 16", 16), ("v5e 4x4", 16)])
def test_machines_that_are_not_here(machine, count):
    plan = modelled(STEP, *MLP, machine=machine, dtype=jnp.bfloat16)
    assert plan.machine.count == count and plan.others and plan.dtype == "bfloat16"
    assert mylib.Plan.of(plan.as_text()).chosen == plan.chosen
    hosts = "FSDP 8 x DP 2" in {x.name for x in (plan.chosen, *plan.others)}
    assert hosts == (plan.machine.chip.platform == "gpu")


@pytest.mark.parametrize("which", ["one", "all"])
def test_what_the_audit_cannot_read_is_modelled(monkeypatch, which):
    """A candidate with an opcode that isn't known stays, with its modelled figures."""
    module, read = sys.modules["mylib._programs.audit.audit"], []

    def reader(*args, **kwargs):
        read.append(args)
        if which == "all" or len(read) == 1:
            raise mylib.errors.AuditError("the opcode 'frobnicate' is not known")
        return report_of(*args, **kwargs)

    report_of = module.report_of
    for name in [x for x in sys.modules if x.startswith("mylib._")]:
        if getattr(sys.modules[name], "report_of", None) is report_of:
            monkeypatch.setattr(sys.modules[name], "report_of", reader)
    plan = mylib.plan(STEP, *MLP, policies=("full",), compile=2)
    unread = [x for x in (plan.chosen, *plan.others) if x.unread]
    assert len(unread) == {"one": 1, "all": 2}[which]
    assert plan.chosen.compiled == (plan.chosen not in unread) == (which == "one")
    assert (plan.audit is None) == (which == "all")
    for x in unread:
        assert x.source == "modelled" and x.seconds == x.modelled and not x.why
        assert f"{x.name} was compiled, and its figures are modelled: the opcode" in repr(plan)
    assert mylib.Plan.of(plan.as_text()) == plan and plan._repr_html_()
