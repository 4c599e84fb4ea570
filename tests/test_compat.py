"""That JAX still has the private names that we use; and what they tell of the context of a call."""

import ast
import contextlib
import functools
import importlib
import inspect
import warnings
from pathlib import Path

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import mylib
import mylib.testing
from mylib._core.compat import (
    UNCOMMITTED,
    GradientPass,
    UnknownParameter,
    axes_of_cast_or_sum,
    batched,
    break_connection,
    classes_in,
    closed_or_open,
    compilation_cache,
    coordination_client,
    data_of,
    data_of_shards,
    deserialized,
    devices_of_lowered,
    donation_warning_silenced,
    frames_of,
    function_of_equinox,
    host_callbacks,
    in_host_memory,
    index_of_process,
    is_filter_jit,
    is_of_jax,
    label_of,
    nodes_of,
    opened,
    pass_of,
    readable_error,
    rule_of_custom_jvp,
    rules_of_custom_vjp,
    scan_sizes,
    serialized,
    set_label,
    sharding_under,
    start_transfer_server,
    text_with_constants,
    trace_kind,
    trace_of,
    traces_here,
    unreduced_kind,
    weakly_typed,
    which_have_data,
    while_body,
    without_dead_code,
)
from mylib._core.jaxprs import all_jaxprs, jaxprs_in
from mylib._core.placement import current_world
from mylib._training.jit.error_checks import calling, check_p, checks_replaced
from mylib._training.jit.running import _is_ours, tracing

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
AXES = ("data", "model")
MESH = jax.make_mesh((4, 2), AXES, axis_types=(AUTO, AUTO))
TYPED = jax.make_mesh((4, 2), AXES, axis_types=(EXPLICIT, EXPLICIT))
X = jnp.arange(8.0)


def traced(fun):
    """Its program, as `filter_jit` sees it."""
    with checks_replaced(), calling("returned"):
        return jax.jit(fun).trace(X).jaxpr


CHECKED = traced(lambda x: eqx.error_if(x, x < 0, "negative"))

PACKAGE = Path(mylib.__file__).parent

# What each private name is used for. When JAX moves one, its test fails and says this.
USES = {
    "equinox._errors._error": (
        "what `equinox.error_if` and `branched_error_if` call with x, pred, index, msgs=, "
        "on_error= and stack=. mylib/_training/jit/error_checks.py puts its own in this place"
    ),
    "equinox._jit.last_error_info": (
        "the message of the last error that `equinox.error_if` raised, and the stack inside of the "
        "program, with `__equinox_jit_id__` between the frames"
    ),
    "equinox._jit._JitWrapper": (
        "what `equinox.filter_jit` returns: `mylib.audit` finds the names of its arguments. See "
        "TestInputs in tests/audit/test_audit.py for what they are called in the program"
    ),
    "equinox._jit._on_error_msg": "what `equinox.filter_jit` makes of these two",
    "equinox.internal._primitive._vprim_impl_registry": (
        "what each primitive made by `equinox.internal.create_vprim` does, by the primitive"
    ),
    "jax._src.api.jit": "`jax.jit`, whatever others have put in its place",
    "jax._src.config.compilation_cache_include_metadata_in_key": (
        "called with True, a context manager in which the compilation cache tells programs apart "
        "that differ in lines and names alone"
    ),
    "jax._src.core.trace_ctx.trace": (
        "the innermost transformation that is going on. Find out how JAX itself now asks "
        "(`trace_state_clean` in the same file, for one)"
    ),
    "jax._src.core.ShardingTypeError": (
        "what JAX raises if the result of an operation on Explicit axes could have several "
        "shardings: tests/jit/test_notes.py"
    ),
    "jax._src.array.ArrayImpl": (
        "the type of arrays, made of an `aval`, a sharding and shards: the only way to give an "
        "array of shards a weak type"
    ),
    "jax._src.core.EvalTrace": "the trace that computes at once: no transformation goes on",
    "jax._src.distributed.global_state.client": (
        "the service through which processes find each other: a store of keys and values, and "
        "barriers. tests/processes use it in several processes"
    ),
    "jax._src.distributed.global_state.num_processes": (
        "the number of processes, which `jax.process_count()` starts the devices for"
    ),
    "jax._src.distributed.global_state.process_id": (
        "this process's index, which `jax.process_index()` starts the devices for"
    ),
    "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability": (
        "called with a string such as '9.0' while cuDNN's attention is traced; replaced for GPUs "
        "that are not here"
    ),
    "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version": (
        "called without arguments while cuDNN's attention is traced; returns such as 91000"
    ),
    "jax._src.hardware_utils.has_visible_nvidia_gpu": (
        "whether there is an NVIDIA GPU; looks at files only, and starts nothing"
    ),
    "jax._src.hardware_utils.num_available_tpu_chips_and_device_id": (
        "how many TPU chips there are, and of which kind; looks at files only"
    ),
    "jax._src.interpreters.ad.JVPTrace": "`jax.jvp`; eager if `.parent_trace` is",
    "jax._src.interpreters.ad.JVPTracer": "a value under `jax.jvp`; `.primal` is the value itself",
    "jax._src.interpreters.ad.LinearizeTrace": "`jax.grad`; eager if `.parent_trace` is",
    "jax._src.interpreters.ad.LinearizeTracer": (
        "a value under `jax.grad`; `.primal` is the value itself"
    ),
    "jax._src.interpreters.batching.BatchTrace": "`jax.vmap`; eager if `.parent_trace` is",
    "jax._src.interpreters.batching.BatchTracer": (
        "a value under `jax.vmap`; `.val` has all of them stacked along `.batch_dim`"
    ),
    "jax._src.interpreters.batching.batch_jaxpr": (
        "a jaxpr under `jax.vmap`, and which of its results are batched, exactly"
    ),
    "jax._src.interpreters.mlir.warnings": (
        "the module `warnings` in the file of JAX that warns about donated buffers. Find out which "
        "file does so now, and give that one our stand-in"
    ),
    "jax._src.mesh.get_concrete_mesh": "the mesh of `jax.set_mesh`, with its devices",
    "jax._src.mesh.thread_resources.env.physical_mesh": "the mesh of the deprecated `with mesh:`",
    "jax._src.sharding_impls.UNSPECIFIED": (
        "among `in_shardings` and `out_shardings` of a call of `jax.jit`: the compiler decides"
    ),
    "jax._src.sharding_impls.parse_flatten_op_sharding": (
        "the specs of a sharding of the compiler's on a mesh; a ValueError if it splits a part of "
        "an axis"
    ),
    "jax._src.source_info_util.Transform": (
        "an entry of an equation's stack of names that a transformation has made, `jvp` or "
        "`transpose` by its `.name`; what is computed again in a checkpoint has an entry "
        "`rematted_computation`"
    ),
    "jax._src.interpreters.partial_eval.dce_jaxpr": (
        "a jaxpr without the equations whose results nothing uses"
    ),
    "jax._src.traceback_util.register_exclusion": (
        "leaves the frames of a file out of what `jax.debug.breakpoint` shows. "
        "`test_a_breakpoint_shows_the_users_frame` says whether it does"
    ),
    "jax._src.xla_bridge._backends": "the backends that JAX has started, by name",
    "jax._src.xla_bridge._init_backend": "starts one of those that have been added",
    "jax._src.xla_bridge.backends_are_initialized": "whether JAX has started its backends",
    "jax._src.xla_bridge.register_backend_factory": "adds a backend",
    "jax.experimental.serialize_executable._JaxPjrtUnpickler": (
        "reads the pickle of `serialize`, with a stream, a client and devices; its "
        "`persistent_load` gets ('exec', bytes), ('device', id) and ('client',)"
    ),
    "jax.experimental.serialize_executable.serialize": (
        "an executable as the pickle of (unloaded executable, infos of arguments, no_kwargs)"
    ),
    "jax._src.config._check_vma": (
        "called with False it is a context in which `pallas_call` asks for no `manual_axis_type`. "
        "test_inside_shard_map in tests/kernels/test_split_kernels.py needs it"
    ),
    "jax._src.dispatch.runtime_tokens.clear": (
        "forgets the effects of programs; tests/elastic/test_going_on.py, "
        "test_a_process_that_is_late_in_a_collective ends with another status without"
    ),
    "jax._src.dispatch.prim_requires_devices_during_lowering.add": (
        "the primitives whose rules for lowering get `abstract_mesh` and `device_assignment` in "
        "`ctx.module_context.axis_context`, where programs have shardings"
    ),
    "jaxlib._hlo.HloPrintOptions": (
        "what `hlo_modules()[0].to_string` of an executable prints: with `print_large_constants`, "
        "also the numbers that `as_text` leaves out"
    ),
    "jaxlib.xla_client.make_cpu_client": "makes a backend of CPU devices",
}


def advice(name):
    return (
        f"JAX {jax.__version__} or Equinox {eqx.__version__} has moved or changed {name}, which "
        f"_core/compat/__init__.py uses: {USES[name]}. Find what took its place, use it there so "
        f"that all supported versions pass this test, and change it here."
    )


NOWHERE = object()


def find(name):
    """The object of a dotted name, or `NOWHERE`."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, NOWHERE)
        return found
    return NOWHERE


def private_names(path):
    """The dotted names that a file uses of what others keep private, `core.trace_ctx.trace`."""
    tree = ast.parse(path.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_private(node.module):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_private(alias.name):
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.Assign) and called(node.value) == "_Private":
            modules[ast.unparse(node.targets[0])] = node.value.args[0].value
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if called(node) == "_replacing":
            chains.add(f"{node.args[0].id}.{node.args[1].value}")
    names = {
        chain.replace(local, module, 1)
        for chain in chains
        for local, module in modules.items()
        if chain.startswith(local + ".")
    }
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def called(node):
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def is_private(module):
    return module is not None and (module.startswith("jaxlib") or "._" in module)


class TestPrivateNames:
    """Names that JAX may move at any time: each is there, and is what we take it for."""

    @pytest.mark.parametrize("name", USES)
    def test_is_there(self, name):
        assert find(name) is not NOWHERE, advice(name)

    @pytest.mark.parametrize(
        "name", ["jax._src.core.nothing", "jax._src.nothing.at_all", "jaxlib.x"]
    )
    def test_would_be_missed(self, name):
        assert find(name) is NOWHERE

    @pytest.mark.slow
    def test_no_other_is_used(self):
        used = set()
        for path in PACKAGE.rglob("*.py"):
            names = private_names(path)
            assert not names or path == PACKAGE / "_core/compat/__init__.py", (path, names)
            used |= names
        assert used == set(USES)

    @pytest.mark.parametrize(
        ("donate", "first", "rest"),
        [("none", False, False), ("all", True, True), ("all-except-first", False, True)],
    )
    def test_what_filter_jit_donates(self, donate, first, rest):
        filtered = eqx.filter_jit(jnp.add, donate=donate)
        assert is_filter_jit(filtered) and not is_filter_jit(jax.jit(jnp.sin))
        told = filtered.donate_first, filtered.donate_rest
        assert told == (first, rest), advice("equinox._jit._JitWrapper")

    def test_the_error_of_a_check(self):
        def f(x):
            __equinox_jit_id__ = b"here"  # noqa: F841
            return eqx.error_if(x, x < 0, "below zero")

        with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as caught:
            jax.block_until_ready(jax.jit(f)(-X - 1))
        name = "equinox._jit.last_error_info"
        message, pieces = find(name)
        assert message == "below zero" and b"here" in pieces, advice(name)
        text = str(readable_error(str(caught.value), b"here"))
        assert "Below is the stack inside of JIT" in text, advice("equinox._jit._on_error_msg")
        assert "below zero" in text and "pytest" not in text
        assert readable_error("ValueError: another", b"here") is None

    def test_the_warning_about_donated_buffers(self):
        name = "jax._src.interpreters.mlir.warnings"
        lossy = jax.jit(lambda x: x.sum(), donate_argnums=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with donation_warning_silenced(_is_ours), calling("returned"):
                lossy(jnp.ones(3))
                with tracing([]):
                    lossy(jnp.ones(4))
            lossy(jnp.ones(5))
        texts = [str(w.message) for w in caught]
        assert ["float32[4]" in text for text in texts] == [True, False], advice(name)
        assert ["float32[5]" in text for text in texts] == [False, True], advice(name)
        assert {Path(w.filename).name for w in caught} == {"mlir.py"}, advice(name)
        assert find(name) is warnings

    def test_functions_that_made_an_equation(self):
        def maker():
            def update(x):
                return jnp.sin(x)

            return update

        (eqn,) = jax.make_jaxpr(maker())(1.0).eqns
        frames = [x for x in frames_of(eqn) if x.function_name.endswith("maker.<locals>.update")]
        line = maker().__code__.co_firstlineno + 1
        found = [(x.file_name, x.line_num) for x in frames]
        assert found == [(__file__, line)], advice("frames of jaxlib's Traceback")

    def test_parts_of_a_gradient(self):
        """By their stack of names, those of a program that is called by that of the call."""
        name = "jax._src.source_info_util.Transform"

        def passes(f):
            found = {}

            def look(jaxpr, around):
                for eqn in opened(jaxpr).eqns:
                    own = pass_of(eqn, around)
                    found.setdefault(eqn.primitive.name, set()).add(own)
                    for inner in jaxprs_in(eqn):
                        look(inner, own)

            look(jax.jit(lambda x: jnp.tan(jax.grad(f)(x))).trace(1.0).jaxpr, GradientPass.NONE)
            return found

        for f in (lambda x: jnp.sin(x) ** 3, jax.jit(lambda x: jnp.sin(x) ** 3)):
            assert passes(f)["sin"] == passes(f)["cos"] == {GradientPass.FORWARD}, advice(name)
            assert passes(f)["mul"] >= {GradientPass.TRANSPOSED}, advice(name)
            assert passes(f)["tan"] == {GradientPass.NONE}, advice(name)
        again = passes(lambda x: jax.checkpoint(jnp.sin)(x) ** 3)
        assert again["cos"] == {GradientPass.FORWARD} and GradientPass.TRANSPOSED in again["mul"], (
            advice(name)
        )

    def test_a_check_is_ours(self):
        name = "equinox._errors._error"
        found = {eqn.primitive for part in all_jaxprs(CHECKED) for eqn in opened(part).eqns}
        assert check_p in found, advice(name)

    def test_primitives_of_equinox(self):
        name = "equinox.internal._primitive._vprim_impl_registry"
        own = eqxi.create_vprim("own", lambda x: [x + 1], lambda x: [x], None, None)
        program = jax.jit(lambda x: own.bind(x)[0] * 2).trace(X).jaxpr
        made, other = opened(program).eqns
        function = function_of_equinox(made)
        assert function is not None and function(X)[0].tolist() == (X + 1).tolist(), advice(name)
        assert function_of_equinox(other) is None, advice(name)

    def test_dead_code(self):
        name = "jax._src.interpreters.partial_eval.dce_jaxpr"
        unused = traced(lambda x: (eqx.error_if(x, x < 0, "below zero"), x + 1)[1])
        for program, count in [(CHECKED, 1), (unused, 0)]:
            parts = all_jaxprs(without_dead_code(program))
            checks = [e for part in parts for e in opened(part).eqns if e.primitive is check_p]
            assert len(checks) == count, advice(name)

    def test_loops(self):
        def loops(x, y):
            c, _ = jax.lax.scan(lambda c, z: (c + z + y.sum(), c), X, x)
            return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.sin(c), c)

        program = opened(jax.jit(loops).trace(jnp.ones((3, 8)), X).jaxpr)
        eqns = {eqn.primitive.name: eqn for eqn in program.eqns}
        assert scan_sizes(eqns["scan"]) == (1, 1), (
            "scan's parameters: see scan_sizes in mylib/_core/compat/__init__.py"
        )
        body = opened(while_body(eqns["while"]))
        assert [eqn.primitive.name for eqn in body.eqns] == ["sin"], (
            "while's parameters: see while_body in mylib/_core/compat/__init__.py"
        )
        with pytest.raises(UnknownParameter, match="JAX's sin has no parameter 'body_jaxpr'"):
            while_body(body.eqns[0])

    def test_rules_of_custom_derivatives(self):
        one = jax.custom_jvp(lambda x: x * 2)
        one.defjvp(lambda primals, tangents: (one(*primals), tangents[0] * 3))
        other = jax.custom_vjp(lambda x, n: x * n)
        other.defvjp(lambda x, n: (x * n, (x, n)), lambda saved, ct: (ct * saved[1] * 5, None))
        told = "the parameters of custom derivatives: see rules_of_custom_vjp"
        (eqn,) = opened(jax.make_jaxpr(one)(2.0)).eqns
        assert [float(x) for x in rule_of_custom_jvp(eqn)(2.0, 1.0)] == [4, 3], told
        (eqn,) = opened(jax.make_jaxpr(other)(2.0, 7)).eqns
        forward, backward = rules_of_custom_vjp(eqn)
        assert [float(x) for x in forward([True, False], 2.0, 7)] == [14, 2, 7], told
        cotangents = backward(2.0, 7, jnp.ones(()))
        assert float(cotangents[0]) == 35 and cotangents[1] is None, told

    def test_a_program_under_vmap(self):
        name = "jax._src.interpreters.batching.batch_jaxpr"
        program = jax.make_jaxpr(lambda x, y: (x + 1, jax.jit(jnp.sin)(y), x.sum() * y))(X, 2.0)

        def look(x):
            assert traces_here()[0] is trace_of(x), advice(name)
            axis = traces_here()[0].axis_data
            under, are_batched = batched(program, axis, [True, False])
            assert list(are_batched) == [True, False, True], advice(name)
            assert under.in_avals[0].shape == (3, *X.shape), advice(name)
            return x

        jax.vmap(look)(jnp.stack([X] * 3))
        assert trace_of(X) is None

    def test_executables(self):
        """tests/lowered/test_saved_programs.py shows what may be in one (`names.PICKLED_NAMES`)."""

        def calls(x):
            jax.debug.print("{}", x)
            return x

        devices = jax.devices()[2:4]
        x = jax.device_put(X, NamedSharding(jax.make_mesh((2,), "d", devices=devices), P("d")))
        lowered = jax.jit(lambda x: x * 2).lower(x)
        assert devices_of_lowered(lowered) == tuple(devices)
        compiled = lowered.compile()
        assert host_callbacks(compiled) == 0
        assert host_callbacks(jax.jit(calls).lower(X).compile()) == 1
        again = deserialized(serialized(compiled), lowered, devices)
        assert again.as_text() == compiled.as_text()

    def test_texts_with_constants(self):
        numbers = np.arange(100.0, dtype=np.float32) ** 2
        compiled = jax.jit(lambda x: x + numbers).lower(numbers).compile()
        assert "9604, 9801}" not in compiled.as_text()
        assert "9604, 9801}" in text_with_constants(compiled), advice("jaxlib._hlo.HloPrintOptions")

    def test_open_and_closed_jaxprs(self):
        inner = jaxprs_in(jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns[0])[0]
        like = closed_or_open(jax.make_jaxpr(jnp.cos)(1.0), inner)
        told = "the jaxpr of a checkpoint: see closed_or_open in mylib/_core/compat/__init__.py"
        assert type(like) is type(inner) and opened(like).eqns[0].primitive.name == "cos", told

    def test_casts_and_sums(self):
        program = jax.shard_map(
            lambda x: jax.lax.psum(jax.lax.pcast(x, AXES, to="varying"), "data"),
            mesh=MESH,
            in_specs=P(),
            out_specs=P("model"),
        )
        (part,) = jaxprs_in(opened(jax.jit(program).trace(X).jaxpr).eqns[0])
        axes = {eqn.primitive.name: axes_of_cast_or_sum(eqn) for eqn in opened(part).eqns}
        told = "the names and parameters of pvary and psum: see axes_of_cast_or_sum"
        assert set(axes["pvary"]) == set(AXES) and axes["psum_invariant"] == ("data",), told

    def test_what_shards_hold(self):
        """An attribute of arrays. Where it is gone, `x.addressable_shards` has the same."""
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        backwards = Mesh(mesh.devices[::-1], ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        for here, spec in [(mesh, P("a", "b")), (backwards, P("b")), (mesh, P())]:
            x = jax.device_put(np.arange(16.0).reshape(4, 4), NamedSharding(here, spec))
            for y in (x, jax.jit(lambda x: x + 1)(x)):
                held = [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards]
                assert [data.unsafe_buffer_pointer() for data in data_of_shards(y)] == held

    def test_labels(self):
        """Arrays take attributes, and each result of a program is an object of its own."""
        x, key = jnp.arange(3), jax.random.key(0)
        for one in (x, key, weakly_typed(jax.device_put(x, NamedSharding(MESH, P())))):
            set_label(one, "one")
            assert label_of(one) == "one", advice("jax._src.array.ArrayImpl")
        first, second = jax.jit(lambda x: (x, x))(x)
        assert label_of(first) == label_of(second) == "" and first is not second

    def test_weak_types(self):
        name = "jax._src.array.ArrayImpl"
        x = jax.device_put(np.arange(8.0), NamedSharding(MESH, P("data")))
        y = weakly_typed(x)
        assert y.weak_type and not x.weak_type, advice(name)
        assert (y.dtype, y.sharding, y.committed) == (x.dtype, x.sharding, True)
        np.testing.assert_array_equal(y, x)
        assert jax.jit(lambda y: y * jnp.ones(8, jnp.bfloat16))(y).dtype == jnp.bfloat16

    def test_a_second_backend_that_comes_late(self):
        jax.devices()
        mylib.testing.second_backend("late", devices=2)
        late = jax.devices("late")
        assert len(late) == 2, advice("jax._src.xla_bridge._init_backend")
        assert set(late).isdisjoint([*jax.devices(), *jax.devices("other")])
        y = mylib.filter_shard(X, late[1])
        assert y.devices() == {late[1]}, advice("jax._src.xla_bridge._backends")

    def test_one_process_has_nobody_to_talk_to(self):
        name = "jax._src.distributed.global_state.client"
        assert coordination_client() is None, advice(name)
        name = "jax._src.distributed.global_state.process_id"
        assert index_of_process() == 0, advice(name)

    def test_a_broken_connection(self):
        name = "jax.experimental.transfer.TransferConnection._poison_connection"
        client = jax.local_devices()[0].client
        giver, taker = (start_transfer_server(client, "127.0.0.1") for _ in range(2))
        assert giver is not None and taker is not None, advice("jax.experimental.transfer")
        assert giver.address().startswith("127.0.0.1:")  # no other host can reach it
        connection = taker.connect(giver.address())
        wanted = jax.ShapeDtypeStruct(
            (8,), X.dtype, sharding=SingleDeviceSharding(jax.devices()[1])
        )
        giver.await_pull(1, [X])
        np.testing.assert_array_equal(connection.pull(1, [wanted])[0], X)
        (never,) = connection.pull(2, [wanted])
        break_connection(connection)
        with pytest.raises(jax.errors.JaxRuntimeError):
            assert jax.block_until_ready(never) is None, advice(name)


@contextlib.contextmanager
def deprecated_mesh(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def worlds(transform, x=X):
    """The worlds in which a transformed function finds itself."""
    seen = []

    def f(x, *rest):
        seen.append(current_world())
        return x

    transform(f, x)
    assert seen
    return seen


def scalar(f):
    return lambda x, *rest: f(x, *rest).sum()


EAGER = {
    "nothing": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(scalar(f))(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(scalar(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x)[1](x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "hessian": lambda f, x: jax.hessian(scalar(f))(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f))(x[None]),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(x),
    "grad of vmap": lambda f, x: jax.grad(scalar(jax.vmap(f)))(x),
    "grad of grad": lambda f, x: jax.grad(jax.grad(f))(x[0]),
    "vmap over a named axis": lambda f, x: jax.vmap(f, axis_name="batch")(x),
    "filter_grad": lambda f, x: eqx.filter_grad(scalar(f))(x),
    "filter_vmap": lambda f, x: eqx.filter_vmap(f)(x),
    "custom_vjp": lambda f, x: custom_vjp(f)(x),
    "custom_vjp forward": lambda f, x: jax.grad(scalar(custom_vjp(lambda x: x, forward=f)))(x),
    "custom_vjp backward": lambda f, x: jax.grad(scalar(custom_vjp(lambda x: x, backward=f)))(x),
    "custom_jvp": lambda f, x: custom_jvp(f)(x),
}


def custom_vjp(f, *, forward=lambda x: x, backward=lambda x: x):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (forward(x), None), lambda _, ct: (backward(ct),))
    return g


def custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return g


STAGED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "nested jit": lambda f, x: jax.jit(jax.jit(f))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(scalar(f)))(x),
    "grad of jit": lambda f, x: jax.grad(scalar(jax.jit(f)))(x),
    "jit of vmap": lambda f, x: jax.jit(jax.vmap(f))(x),
    "vmap of jit": lambda f, x: jax.vmap(jax.jit(f))(x),
    "jit of vmap of grad": lambda f, x: jax.jit(jax.vmap(jax.grad(f)))(x),
    "jit of custom_vjp": lambda f, x: jax.jit(custom_vjp(f))(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, a: (f(c), a), x, x),
    "grad of scan": lambda f, x: jax.grad(lambda x: jax.lax.map(f, x).sum())(x),
    "vmap of scan": lambda f, x: jax.vmap(lambda y: jax.lax.map(f, y))(x[None]),
    "while_loop": lambda f, x: jax.lax.while_loop(lambda x: False, f, x),
    "while_loop's condition": lambda f, x: jax.lax.while_loop(
        lambda x: f(x).sum() < 0, lambda x: x, x
    ),
    "fori_loop": lambda f, x: jax.lax.fori_loop(0, 2, lambda i, x: f(x), x),
    "cond": lambda f, x: jax.lax.cond(True, f, lambda x: x, x),
    "switch": lambda f, x: jax.lax.switch(0, [f, f], x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "grad of checkpoint": lambda f, x: jax.grad(scalar(jax.checkpoint(f)))(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "filter_jit": lambda f, x: eqx.filter_jit(f)(x),
    "filter_eval_shape": lambda f, x: eqx.filter_eval_shape(f, x),
    "filter_checkpoint": lambda f, x: eqx.filter_checkpoint(f)(x),
    "linear_transpose": lambda f, x: jax.linear_transpose(f, x)(x),
    "shard_map": lambda f, x: shard_map(f)(x),
    "jit of shard_map": lambda f, x: jax.jit(shard_map(f))(x),
    "grad in jit of shard_map": lambda f, x: jax.jit(shard_map(jax.grad(scalar(f))))(x),
}


def shard_map(f, mesh=MESH, **kwargs):
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), **kwargs)


class TestStaged:
    @pytest.mark.parametrize("name", EAGER)
    def test_no(self, name):
        assert not any(world.staged for world in worlds(EAGER[name]))

    @pytest.mark.parametrize("name", STAGED)
    def test_yes(self, name):
        assert all(world.staged for world in worlds(STAGED[name]))

    @pytest.mark.parametrize("mesh", [MESH, TYPED], ids=["auto", "explicit"])
    def test_a_mesh_changes_nothing(self, mesh):
        with jax.set_mesh(mesh):
            assert not any(world.staged for world in worlds(EAGER["grad"]))
            assert not any(world.staged for world in worlds(EAGER["vmap"]))
            assert all(world.staged for world in worlds(STAGED["jit"]))

    def test_clean_is_where_a_mesh_can_be_set(self):
        def look(x):
            clean = current_world().clean
            try:
                with jax.set_mesh(MESH):
                    pass
            except ValueError:
                assert not clean
            else:
                assert clean
            return x.sum()

        look(X)
        for transform in (jax.jit, jax.grad, lambda f: jax.vmap(lambda x: f(x * jnp.ones(2)))):
            transform(look)(X)

    def test_without_jit_nothing_is_staged(self):
        with jax.disable_jit():
            assert not any(world.staged for world in worlds(STAGED["jit"]))

    def test_afterwards_all_is_as_before(self):
        before = current_world()
        for transform in (*EAGER.values(), *STAGED.values()):
            worlds(transform)
        assert current_world() == before

    def test_an_exception_leaves_no_trace(self):
        def f(x):
            raise RuntimeError("stop")

        for transform in (jax.jit, jax.vmap, jax.checkpoint):
            with pytest.raises(RuntimeError, match="stop"):
                transform(f)(X)
            assert not current_world().staged


def types(world):
    return dict(zip(world.mesh.axis_names, world.mesh.axis_types, strict=True))


def test_arrays_are_placed_at_once_where_jax_evaluates_at_compile_time():
    placed = []

    def f(x):
        with jax.ensure_compile_time_eval():
            placed.append(mylib.filter_shard(np.ones((8, 4)), P("data"), mesh=MESH))
        return x

    jax.jit(f)(X)
    (y,) = placed
    assert not isinstance(y, jax.core.Tracer)
    assert y.sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 2)


class TestMesh:
    def test_none(self):
        for transform in (EAGER["nothing"], EAGER["grad"], STAGED["jit"], STAGED["scan"]):
            for world in worlds(transform):
                assert world.mesh.empty and world.devices is None

    @pytest.mark.parametrize("name", ["nothing", "grad", "vmap", "jit", "scan", "checkpoint"])
    @pytest.mark.parametrize("mesh", [MESH, TYPED], ids=["auto", "explicit"])
    def test_set(self, mesh, name):
        with jax.set_mesh(mesh):
            for world in worlds((EAGER | STAGED)[name]):
                assert world.mesh == mesh.abstract_mesh
                assert world.devices == mesh
                assert world.manual_axes == frozenset()

    @pytest.mark.parametrize("name", ["nothing", "vmap", "jit", "scan"])
    def test_deprecated(self, name):
        with deprecated_mesh(MESH):
            for world in worlds((EAGER | STAGED)[name]):
                assert world.mesh.empty
                assert world.devices == MESH

    def test_the_mesh_that_is_set_goes_before_the_deprecated_one(self):
        with deprecated_mesh(MESH), jax.set_mesh(TYPED):
            assert current_world().devices == TYPED

    def test_abstract(self):
        abstract = AbstractMesh((4, 2), AXES, axis_types=(AUTO, AUTO))
        with jax.sharding.use_abstract_mesh(abstract):
            world = current_world()
        assert world.mesh == abstract
        assert world.devices is None and not world.staged

    def test_all_axes_of_a_shard_map_are_manual(self):
        for world in worlds(STAGED["jit of shard_map"]):
            assert types(world) == {"data": MANUAL, "model": MANUAL}
            assert world.manual_axes == {"data", "model"}

    @pytest.mark.parametrize(("mesh", "rest"), [(MESH, AUTO), (TYPED, EXPLICIT)])
    def test_some_axes_of_a_shard_map_are_manual(self, mesh, rest):
        def partly(f, x):
            return jax.jit(shard_map(f, mesh, axis_names={"data"}))(x)

        with jax.set_mesh(mesh):
            for world in worlds(partly, jax.device_put(X, NamedSharding(mesh, P("data")))):
                assert types(world) == {"data": MANUAL, "model": rest}
                assert world.manual_axes == {"data"}
                assert world.devices == mesh

    def test_a_shard_map_in_a_shard_map(self):
        def twice(f, x):
            inner = jax.shard_map(
                f, in_specs=P("model"), out_specs=P("model"), axis_names={"model"}
            )
            return jax.jit(shard_map(inner, axis_names={"data"}))(x)

        for world in worlds(twice):
            assert world.manual_axes == {"data", "model"}

    def test_jit_in_shard_map(self):
        for world in worlds(lambda f, x: shard_map(jax.jit(f))(x)):
            assert world.staged
            assert world.manual_axes == {"data", "model"}

    def test_a_loop_in_shard_map(self):
        for world in worlds(lambda f, x: shard_map(lambda x: jax.lax.map(f, x))(x)):
            assert world.manual_axes == {"data", "model"}

    def test_axes_made_auto(self):
        def auto(f, x):
            return jax.jit(jax.sharding.auto_axes(f, axes="data", out_sharding=P()))(x)

        with jax.set_mesh(TYPED):
            for world in worlds(auto):
                assert types(world) == {"data": AUTO, "model": EXPLICIT}

    def test_axes_made_explicit(self):
        def explicit(f, x):
            return jax.jit(jax.sharding.explicit_axes(f, axes="data", in_sharding=P()))(x)

        with jax.set_mesh(MESH):
            for world in worlds(explicit):
                assert types(world) == {"data": EXPLICIT, "model": AUTO}


class TestSizeAt:
    """On how many devices a program runs, if that is known when it is written down."""

    def sizes(self, x, f=jax.jit):
        seen = []

        def look(x):
            seen.append(current_world().size_at(x))
            return x

        f(look)(x)
        return seen

    def test_of_a_program_in_a_mesh(self):
        with jax.set_mesh(MESH):
            assert self.sizes(X) == [8]
        with deprecated_mesh(MESH):
            assert self.sizes(X) == [8]

    def test_of_a_program_whose_arguments_know_their_mesh(self):
        assert self.sizes(jax.device_put(X, NamedSharding(TYPED, P("data")))) == [8]

    def test_of_a_program_of_one_device_that_does_not_say_so(self):
        assert self.sizes(X) == [None]
        assert self.sizes(jax.device_put(X, jax.devices()[3])) == [None]

    def test_of_a_shard_map(self):
        half = jax.make_mesh((2,), ("data",), axis_types=(AUTO,), devices=jax.devices()[:2])
        assert self.sizes(X, lambda f: jax.jit(shard_map(f, half))) == [2]

    def test_of_host_arrays_inside_of_a_program(self):
        assert self.sizes(X, lambda f: jax.jit(lambda x: f(np.ones(3)))) == [None]


def under(transform, *args):
    """What lies under the value that a transformed function is given."""
    seen = []

    def f(x, *rest):
        seen.append(sharding_under(x))
        return x.sum()

    transform(f)(*args)
    (sharding,) = seen
    return sharding


def placed(spec, shape=(8, 4), mesh=MESH, **kwargs):
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec, **kwargs))


class TestShardingUnder:
    """Where the array behind a value lies, as far as the dimensions go that one sees."""

    @pytest.mark.parametrize("x", [placed(P("data")), placed(P(), mesh=TYPED)])
    def test_of_an_array(self, x):
        assert sharding_under(x) == x.sharding

    def test_of_an_array_that_jax_may_move(self):
        assert sharding_under(X) is UNCOMMITTED

    @pytest.mark.parametrize("x", [np.ones(3), np.float32(1), 3, None, "text"], ids=repr)
    def test_of_what_has_no_place(self, x):
        assert sharding_under(x) is None

    @pytest.mark.parametrize("mesh", [MESH, TYPED], ids=["auto", "explicit"])
    def test_of_derivatives(self, mesh):
        x = placed(P("data"), mesh=mesh)
        with jax.set_mesh(mesh):
            assert under(jax.grad, x) == x.sharding
            assert under(lambda f: lambda x: jax.jvp(f, (x,), (x,)), x) == x.sharding
            assert under(lambda f: lambda x: jax.linearize(f, x), x) == x.sharding
            assert under(lambda f: jax.grad(jax.grad(f)), placed(P(), (), mesh)).spec == P()

    @pytest.mark.parametrize(
        ("spec", "axis", "expected"),
        [
            (P("data", "model"), 0, P("model")),
            (P("data", "model"), 1, P("data")),
            (P("data", "model"), -1, P("data")),
            (P("data"), 0, P(None)),
            (P("data"), 1, P("data")),
            (P(), 0, P(None)),
        ],
    )
    def test_of_vmap(self, spec, axis, expected):
        x = placed(spec)
        found = under(functools.partial(jax.vmap, in_axes=axis), x)
        assert found == NamedSharding(MESH, expected)

    def test_of_vmap_over_something_else(self):
        x = placed(P("data"))
        assert under(lambda f: jax.vmap(f, in_axes=(None, 0)), x, X) == x.sharding

    def test_of_nested_transformations(self):
        x = placed(P("data", None, "model"), (8, 3, 4))
        assert under(lambda f: jax.vmap(jax.vmap(f)), x).spec == P("model")
        assert under(lambda f: jax.vmap(jax.vmap(f, in_axes=1), in_axes=1), x).spec == P("data")
        assert under(lambda f: jax.vmap(jax.grad(f)), x).spec == P(None, "model")
        mapped = under(lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), x)
        assert mapped.spec == P(None, "model")

    def test_of_one_device(self):
        x = jax.device_put(jnp.zeros((2, 3)), jax.devices()[3])
        assert under(jax.vmap, x) == SingleDeviceSharding(jax.devices()[3])
        assert under(jax.grad, x) == SingleDeviceSharding(jax.devices()[3])

    def test_keeps_the_memory_kind(self):
        x = placed(P("data", "model"), memory_kind="pinned_host")
        assert sharding_under(x).memory_kind == "pinned_host"
        assert under(jax.vmap, x) == NamedSharding(MESH, P("model"), memory_kind="pinned_host")

    def test_of_keys(self):
        keys = jax.random.split(jax.random.key(0), (8, 4))
        keys = jax.device_put(keys, NamedSharding(MESH, P("data", "model")))
        seen = []

        def f(keys):
            seen.append(sharding_under(keys))
            return 0

        jax.vmap(f)(keys)
        assert seen[0].spec == P("model")

    def test_is_not_known_while_staging(self):
        x = placed(P("data"))
        assert under(jax.jit, x) is None
        assert under(lambda f: jax.jit(jax.grad(f)), x) is None
        assert under(lambda f: jax.jit(jax.vmap(f)), x) is None


def test_meshes_over_the_same_devices_in_another_order_are_told_apart():
    backwards = Mesh(MESH.devices[::-1], AXES, axis_types=(AUTO, AUTO))
    with jax.set_mesh(backwards):
        assert current_world().devices == backwards != MESH


def test_jax_forgets_the_memory_kind_of_results_on_mixed_axes():
    """When JAX itself returns "pinned_host", this fails: then remove `in_host_memory` and
    its call in `Running`.
    """
    mixed = jax.make_mesh((4, 2), AXES, axis_types=(EXPLICIT, AUTO))
    x = jax.device_put(np.zeros((8, 8)), NamedSharding(mixed, P("data")))
    y = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))(x)
    assert y.sharding.memory_kind == "device"
    assert {s.data.sharding.memory_kind for s in y.addressable_shards} == {"pinned_host"}
    told = in_host_memory(y)
    assert told.sharding == y.sharding.with_memory_kind("pinned_host")
    assert told.addressable_shards[0].data.unsafe_buffer_pointer() == (
        y.addressable_shards[0].data.unsafe_buffer_pointer()
    )
    for other in (told, np.zeros(3)):
        assert in_host_memory(other) is other


def test_jax_forgets_the_memory_kind_of_keys():
    """When JAX itself returns "pinned_host", this fails: then `in_host_memory` may say so."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("data")))
    keys = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))(keys)
    assert keys.sharding.memory_kind == "device"
    assert in_host_memory(keys).sharding.memory_kind == "pinned_host"


def test_the_peak_of_the_cpus_compiler_lacks_the_temporaries():
    """When it contains them, this fails: then `machines._memory` can use it on the CPU, too."""
    x = jax.ShapeDtypeStruct((256, 256), np.float32)
    program = jax.jit(lambda x: jax.numpy.sort(x @ x) @ x).lower(x).compile()
    memory = program.memory_analysis()
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes >= x.size * 4
    assert 0 <= memory.peak_memory_in_bytes - others < x.size


def test_how_calls_run():
    seen = []

    def look(x):
        seen.append(trace_kind())
        return x

    look(1.0), jax.grad(look)(1.0), jax.vmap(look)(jnp.ones(2)), jax.jit(look)(1.0)
    jax.vmap(jax.jit(look))(jnp.ones(2))
    told = "see trace_kind in mylib/_core/compat/__init__.py"
    assert seen == ["eager", "transformed", "transformed", "staged", "staged"], told


class Data(eqx.Module):
    x: jax.Array
    n: object = eqx.field(static=True)


def test_data_of_nodes():
    told = "what PyTreeDef.__getstate__ returns: see nodes_of in mylib/_core/compat/__init__.py"

    def all_data(tree):
        return data_of(nodes_of(jax.tree.structure(tree)))

    def data(tree):
        return [x for x in all_data(tree) if x in (print, "a", "b", 7)]

    tree = [Data(jnp.ones(2), 7), {"a": 1, "b": (3, None)}, Data(jnp.ones(2), 7.0)]
    assert list(map(repr, data(tree))) == ["7", "'a'", "'b'", "7.0"], told
    # Data that is neither a tuple nor a list stays whole.
    assert data([jax.tree_util.Partial(print), Data(1.0, 7)]) == [print, 7], told
    assert all_data([1, (2, None)]) == [], told
    nodes = nodes_of(jax.tree.structure(tree))
    assert which_have_data(nodes) == [i for i, x in enumerate(nodes) if data_of([x])], told
    assert classes_in(nodes) == {Data}, told
    assert classes_in(nodes_of(jax.tree.structure([1, {"a": (None, 2)}]))) == set(), told


def test_operations_of_an_inlined_jit_lose_their_lines_in_old_versions():
    """And a jit that newer versions inline stays a call until it is lowered. Where a program keeps
    its lines and loses its call, `with_checks_as_values` may inline it instead of calling
    `interpret`.
    """

    def sine(x):
        return jnp.sin(x)

    line = inspect.getsourcelines(sine)[1] + 1
    inlined = jax.jit(sine, inline=True)
    text = jax.jit(lambda x: inlined(x)).lower(1.0).as_text(debug_info=True)
    loses = jax.__version_info__ < (0, 12)
    assert (f'test_compat.py":{line}:' not in text) == loses


@pytest.mark.parametrize(("folder", "enabled"), [("a", True), ("a", False), (None, True)])
def test_where_the_compilation_cache_is(folder, enabled):
    told = (
        "JAX's options of its compilation cache: see compilation_cache in _core/compat/__init__.py"
    )
    options = {"jax_compilation_cache_dir": folder, "jax_enable_compilation_cache": enabled}
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        assert compilation_cache() == (folder if enabled else None), told
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_unreduced_kind():
    assert unreduced_kind(P("a")) is None
    assert unreduced_kind(P("a", unreduced={"b"})) == "sum"
    for kind in getattr(jax.sharding, "UnreducedKind", ()):  # JAX 0.10 has only sums
        assert unreduced_kind(P(unreduced={"b"}, unreduced_kind=kind)) == kind.name


def test_functions_of_jax():
    """`verify` gives what they compute the line that calls them."""
    program = jax.make_jaxpr(jax.jit(lambda x: jnp.where(x > 0, x, 0)))(jnp.ones(3))
    found = [is_of_jax(part) for part in all_jaxprs(program)]
    assert True in found and not found[0], found
