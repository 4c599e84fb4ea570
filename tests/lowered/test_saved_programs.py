"""Compiled programs in files."""

import dataclasses
import inspect
import json
import os
import pickle
import stat
import textwrap
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scripts import printed_by

import mylib
from mylib._core.compat import names
from mylib._programs.lowered import files

FSDP = mylib.rules.fsdp("data", min_size=1)


@pytest.fixture(autouse=True)
def uncached():
    """Without JAX's compilation cache: XLA doesn't save a CPU's program a second time."""
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield
    jax.config.update("jax_compilation_cache_dir", former)
    compilation_cache.reset_cache()


@pytest.fixture
def mesh():
    return mylib.make_mesh(data=8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.mylib"


@pytest.fixture
def compilations():
    """The programs that XLA has compiled since."""
    found = []

    def count(event, duration, **_):
        if event == names.EVENT_COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


@mylib.filter_jit
def double(x):
    return 2 * x


def saved(path, fun=double, *args):
    fun.lower(*(args or (np.ones(8, np.float32),))).compile().save(path)
    return path


def rewritten(path, **changes):
    program, executable = files.read(path)
    files.write(path, dataclasses.replace(program, **changes), executable)


def message(path, *args, fun=double, **options):
    with pytest.raises(mylib.errors.SavedProgramError) as caught:
        mylib.load_compiled(path, fun, *(args or (np.ones(8, np.float32),)), **options)
    return str(caught.value)


class TestTraining:
    @staticmethod
    def made(mesh):
        optimiser = optax.adamw(1e-2)
        make = mylib.filter_jit(eqx.nn.MLP, out_shardings=FSDP, mesh=mesh)
        model = make(16, 16, 32, 2, key=jax.random.key(0))
        state = mylib.filter_jit(optimiser.init, out_shardings=FSDP, mesh=mesh)(
            eqx.filter(model, eqx.is_array)
        )

        @mylib.filter_jit(donate="all-except-first")
        def step(batch, model, state):
            batch = eqx.error_if(batch, jnp.any(batch > 9), "a batch is too large")

            @eqx.filter_value_and_grad
            def loss(model):
                return jnp.mean(jax.vmap(model)(batch) ** 2)

            value, grads = loss(model)
            updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
            return value, eqx.apply_updates(model, updates), state, "static"

        batch = mylib.filter_device_put(np.ones((8, 16), np.float32), P("data"), mesh=mesh)
        return step, batch, model, state

    @pytest.mark.slow
    def test_equal_without_compiling(self, mesh, path, compilations):
        step, batch, model, state = self.made(mesh)
        saved(path, step, batch, model, state)
        expected, *_ = step.lower(batch, model, state).compile()(
            batch, *jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, (model, state))
        )
        compilations.clear()
        loaded = mylib.load_compiled(path, step, batch, model, state)
        weight = model.layers[0].weight
        value, model, state, static = loaded(batch, model, state)
        assert not compilations
        assert value == expected and static == "static"
        assert weight.is_deleted() and model.layers[0].weight.sharding.spec == P("data")
        with pytest.raises(eqx.EquinoxRuntimeError, match="a batch is too large"):
            loaded(batch + 10, model, state)
        # It is a compiled program like others.
        assert loaded.memory.peak > 0 and loaded.audit(mesh=mesh).collectives
        assert loaded.audit(mesh=mesh).expect(mylib.contracts.never("all-to-all")) is None

    @pytest.mark.slow
    def test_abstract_arguments(self, mesh, path):
        step, *arguments = self.made(mesh)
        saved(path, step, *arguments)
        abstract = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                if eqx.is_array(x)
                else x
            ),
            arguments,
        )
        value, *_ = mylib.load_compiled(path, step, *abstract)(*arguments)
        assert np.isfinite(value)


PROGRAM = """
    import sys
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    import mylib

    mesh = mylib.make_mesh(data=jax.device_count())

    @mylib.filter_jit(in_shardings=P("data"), mesh=mesh)
    def step(x):
        return jnp.cumsum(x), x.sum()

    x = np.arange(16.0, dtype=np.float32)
    if sys.argv[1] == "save":
        step.lower(x).compile().save(sys.argv[2])
    else:
        compiled = []
        listen = jax.monitoring.register_event_duration_secs_listener
        listen(lambda event, _, **others: compiled.append(event) if EVENT in event else None)
        many, one = mylib.load_compiled(sys.argv[2], step, x)(x)
        assert not compiled, compiled
        print(float(one), many.sharding.spec)
"""


@pytest.mark.slow
def test_another_process(path, checkout_env):
    program = textwrap.dedent(PROGRAM).replace("EVENT", repr(names.EVENT_COMPILED))
    printed_by("-c", program, "save", path, env=checkout_env)
    assert printed_by("-c", program, "load", path, env=checkout_env).split()[0] == "120.0"


EXPLICIT = jax.make_mesh((8,), ("e",), axis_types=(AxisType.Explicit,))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(AUTO, P("data"))
ONES = np.ones((8, 8), np.float32)
PROGRAMS = {
    "bfloat16": (lambda x: x * 2, lambda: jax.device_put(ONES.astype(jnp.bfloat16), ROWS)),
    "float8": (lambda x: x.astype(jnp.float8_e4m3fn), lambda: jax.device_put(ONES, ROWS)),
    "int4": (lambda x: x.astype(jnp.int4), lambda: jnp.ones(8)),
    "keys": (
        lambda k: (jax.random.split(k), jax.random.normal(k, (4,))),
        lambda: jax.random.key(0),
    ),
    "other keys": (jax.random.split, lambda: jax.random.key(0, impl="unsafe_rbg")),
    "host memory": (
        lambda x: jax.device_put(x, ROWS.with_memory_kind("pinned_host")),
        lambda: jax.device_put(ONES, ROWS),
    ),
    "layout": (
        lambda x: x + 1,
        lambda: jax.device_put(ONES, Format(Layout(major_to_minor=(1, 0)), ROWS)),
    ),
    "explicit": (jnp.sin, lambda: jax.device_put(ONES, NamedSharding(EXPLICIT, P("e")))),
    "shard_map": (
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=AUTO, in_specs=P("data"), out_specs=P()
        ),
        lambda: jax.device_put(ONES, ROWS),
    ),
    "empty": (lambda x: (x, jnp.zeros((0, 3)), None), lambda: jnp.ones((0,))),
    "complex": (lambda x: x * 1j, lambda: jnp.ones(3)),
    "no array": (lambda x: jnp.zeros(3) + x, lambda: 2),
    "captured": (lambda x: x + ONES, lambda: jax.device_put(ONES, ROWS)),
    "linear algebra": (jnp.linalg.qr, lambda: jnp.eye(4)),
    "loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x @ x, x), lambda: jnp.eye(4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(path, name, compilations):
    fun, argument = PROGRAMS[name]
    fun, x = mylib.filter_jit(fun), argument()
    expected = fun(x)
    saved(path, fun, x)
    compilations.clear()
    got = mylib.load_compiled(path, fun, x)(x)
    assert not compilations
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class TestFiles:
    @pytest.mark.parametrize("name", sorted(files._made_for(jax.devices())))
    def test_made_for_something_else(self, path, name):
        saved(path)
        made_for = files.read(path)[0].made_for
        rewritten(path, made_for={**made_for, name: "another"})
        text = message(path)
        assert "(double) was compiled for something else" in text
        assert f"\n  {name}: another, and here {made_for[name]}\n" in text
        assert "Compile it for these devices" in text

    def test_every_difference_is_told(self, path):
        saved(path)
        made_for = files.read(path)[0].made_for
        rewritten(path, made_for={**made_for, "jax": "0.1", "platform": "gpu", "of old": "x"})
        text = message(path, np.ones(4, np.float32))
        assert "jax: 0.1" in text and "platform: gpu" in text and "of old: x, and here none" in text
        assert "argument 0: x float32[8], and here x float32[4]" in text
        assert "result 0: float32[8], and here float32[4]" in text

    def test_many_arguments(self, path):
        fun = mylib.filter_jit(lambda xs: xs)
        saved(path, fun, [jnp.ones(2)] * 30)
        text = message(path, [jnp.ones(3)] * 30, fun=fun)
        assert "xs[9]" in text and "xs[10]" not in text and "and 20 more arguments" in text

    def test_other_code(self, path):
        saved(path)

        def changed(x):
            return 3 * x

        changed.__name__ = "double"
        other = mylib.filter_jit(changed)
        text = message(path, fun=other)
        assert "the code: double has changed, or is given other static arguments" in text
        x = np.ones(8, np.float32)
        assert mylib.load_compiled(path, other, x, check=False)(x)[0] == 2
        assert "argument 0" in message(path, np.ones(4, np.float32), fun=other, check=False)

    def test_other_static_arguments(self, path):
        fun = mylib.filter_jit(lambda x, times: x * times)
        saved(path, fun, jnp.ones(3), 2)
        assert "other static arguments" in message(path, jnp.ones(3), 3, fun=fun)
        assert mylib.load_compiled(path, fun, jnp.ones(3), 2)(jnp.ones(3), 2)[0] == 2

    def test_other_placement(self, path, mesh):
        x = jnp.ones((8, 8))
        rows = mylib.filter_device_put(x, P("data"), mesh=mesh)
        columns = mylib.filter_device_put(x, P(None, "data"), mesh=mesh)
        saved(path, double, rows)
        assert "placed in another way" in message(path, columns)

    def test_another_order_of_devices(self, path):
        def on(devices):
            mesh = jax.make_mesh((2,), ("data",), devices=devices)
            return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))

        here = jax.devices()
        saved(path, double, on(here[:2]))
        assert "order of devices: 0 1, and here 1 0" in message(path, on(here[1::-1]))

    def test_truncated(self, path):
        saved(path)
        content = path.read_bytes()
        for end in {*range(1, 120), *range(120, len(content), 97), len(content) - 1}:
            path.write_bytes(content[:end])
            text = message(path)
            assert "is damaged" in text or "is no program that mylib has saved" in text

    def test_changed_bits(self, path):
        saved(path)
        content = path.read_bytes()
        for at in {*range(0, 200, 7), *range(200, len(content), 131), len(content) - 1}:
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            text = message(path)
            assert "is damaged" in text or "is no program that mylib has saved" in text

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"", "is empty"),
            (b"PK\x03\x04 a zip", "is no program that mylib has saved"),
            (pickle.dumps([1, 2]), "is no program that mylib has saved"),
        ],
    )
    def test_something_else(self, path, content, told):
        path.write_bytes(content)
        assert told in message(path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda content: b"",
            lambda content: content[:-20],
            lambda content: b"\x80\x05" + b"Q" * 20,
            lambda content: content.replace(b"\x94", b"\x95", 1),
            lambda content: content.replace(b"xla_in_layouts", b"xla_in_lay/uts"),
            lambda content: pickle.dumps([1, 2]),
            lambda content: content.replace(b"ELF", b"EL?"),
        ],
    )
    def test_another_executable(self, path, change):
        """With the right hash: something else has written it."""
        saved(path)
        program, content = files.read(path)
        files.write(path, program, change(content))
        assert "holds no executable that can be loaded" in message(path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda fields: {**fields, "form": 2},
            lambda fields: {k: v for k, v in fields.items() if k != "code"},
            lambda fields: [fields],
            lambda fields: "{",
        ],
    )
    def test_another_header(self, path, change):
        saved(path)
        program, executable = files.read(path)
        changed = change(dataclasses.asdict(program))
        header = changed.encode() if isinstance(changed, str) else json.dumps(changed).encode()
        content = len(header).to_bytes(8, "little") + header + executable
        path.write_bytes(files._KIND + sha256(content).digest() + content)
        assert "was saved by another mylib, in another form" in message(path)

    def test_no_file(self, path):
        with pytest.raises(FileNotFoundError, match="step.mylib"):
            mylib.load_compiled(path, double, jnp.ones(8))

    def test_nothing_else_is_made(self, path, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "broken in"),)

        saved(path)
        program, _ = files.read(path)
        files.write(path, program, pickle.dumps(Evil()))
        assert "posix.mkdir is no part of an executable" in message(path)
        assert not (tmp_path / "broken in").exists()

    def test_an_interrupted_save(self, path, monkeypatch):
        saved(path)
        before = path.read_bytes()

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saved(path)
        monkeypatch.undo()
        assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


class TestWhere:
    """`save` writes where `open(path, "wb")` would."""

    def test_through_links(self, path, tmp_path):
        (tmp_path / "other").mkdir()
        target = tmp_path / "other" / "of any name"
        for link, to in (path, "other/of any name"), (tmp_path / "second", path):
            link.symlink_to(to)
            saved(link)
            assert link.is_symlink() and mylib.load_compiled(link, double, np.ones(8, np.float32))
        assert [*target.parent.iterdir()] == [target]

    def test_into_a_pipe(self, path):
        os.mkfifo(path)
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(path.read_bytes)
            saved(path)
            content = got.result(timeout=20)
        assert path.is_fifo() and content.startswith(files._KIND)

    def test_into_what_the_shell_has_opened(self, path):
        reads, writes = os.pipe()
        with open(reads, "rb") as file, open(writes, "wb"):
            files.replace_file(f"/dev/fd/{writes}", b"some")
            assert file.read(4) == b"some"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root makes devices")
    def test_into_a_device(self, path):
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # like /dev/null
            path.write_bytes(b"")
        except PermissionError as error:
            pytest.skip(f"this machine allows no devices here: {error}")
        saved(path)
        assert path.is_char_device() and path.read_bytes() == b""

    @pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
    def test_mode(self, path, umask):
        former = os.umask(umask)
        try:
            saved(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
            path.chmod(0o640)
            saved(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
        finally:
            os.umask(former)

    def test_a_long_name(self, tmp_path):
        path = tmp_path / ("x" * 255)
        saved(path)
        assert [*tmp_path.iterdir()] == [path]


class TestRefused:
    def test_functions_of_python(self, path):
        @mylib.filter_jit
        def calls(x):
            jax.debug.print("{}", x)
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        with pytest.raises(mylib.errors.SavedProgramError) as caught:
            saved(path, calls)
        text = str(caught.value)
        assert "calls can't be saved, as it calls functions of Python" in text
        assert "\n  debug_print at test_saved_programs.py:" in text
        assert "\n  pure_callback at test_saved_programs.py:" in text
        assert "error_if can stay" in text
        assert not path.exists()

    def test_read_from_a_file(self, path):
        saved(path)
        loaded = mylib.load_compiled(path, double, np.ones(8, np.float32))
        with pytest.raises(
            mylib.errors.SavedProgramError, match=r"was read from .*: copy that file"
        ):
            loaded.save(path)

    def test_read_from_the_cache_of_jax(self, path, tmp_path, compilations):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        saved(path)
        jax.clear_caches()
        with pytest.raises(mylib.errors.SavedProgramError, match="from its compilation cache"):
            saved(path)
        assert mylib.load_compiled(path, double, np.ones(8))(np.ones(8))[0] == 2

    def test_other_functions(self, path):
        saved(path)
        with pytest.raises(TypeError, match="not a function of mylib.filter_jit"):
            mylib.load_compiled(path, jax.jit(lambda x: x), jnp.ones(8))

    def test_keys_of_the_users_own(self, path):
        from jax.extend.random import define_prng_impl

        def data(seed):
            return jnp.zeros((2,), jnp.uint32)

        own = define_prng_impl(
            key_shape=(2,),
            seed=data,
            split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
            random_bits=lambda key, width, shape: jnp.zeros(shape, jnp.uint32),
            fold_in=lambda key, x: key,
        )
        with pytest.raises(mylib.errors.SavedProgramError, match="can't be saved"):
            saved(path, mylib.filter_jit(lambda k: k), jax.random.key(0, impl=own))
        assert not path.exists()


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_for_a_machine_that_is_not_here(machine, path):
    def on(mesh):
        return mylib.filter_shard(jax.ShapeDtypeStruct((8, 8), jnp.float32), P("data"), mesh=mesh)

    mesh = machine.mesh(data=-1)
    saved(path, double, on(mesh))
    text = message(path, on(mylib.make_mesh(data=8)))
    assert f"platform: {machine.chip.platform}, and here cpu" in text
    assert f"kind of device: {mesh.devices.flat[0].device_kind}, and here cpu" in text
    with pytest.raises(mylib.machines.NotHereError, match="you don't have"):
        mylib.load_compiled(path, double, on(mesh))


def by_own_partitioning():
    """As cuDNN's attention is, on a mesh."""

    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(
        partition=lambda mesh, x, y: (mesh, lambda x: 2 * x, y.sharding, (x[0].sharding,)),
        sharding_rule="i j -> i j",
    )
    return mylib.filter_jit(lambda x: double(x) + 1)


def test_a_function_with_its_own_partitioning(mesh, path):
    x = mylib.filter_shard(ONES, P("data"), mesh=mesh)
    saved(path, by_own_partitioning(), x)
    # Another process has its objects elsewhere in memory, which is in the lowered text.
    y = mylib.load_compiled(path, by_own_partitioning(), x)(x)
    assert y.sharding == x.sharding
    np.testing.assert_array_equal(y, 3 * ONES)


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8")
class TestKernelsThatMustBeMeasured:
    """What XLA's autotuner would choose on a GPU (`benchmarks/gpu.py` says what becomes of it)."""

    def refused(self, fun, path, *args):
        compiled = mylib.filter_jit(fun).lower(*args).compile()
        with pytest.raises(mylib.errors.SavedProgramError) as error:
            compiled.save(path)
        assert not path.exists()
        return str(error.value)

    def test_products_by_triton(self, machine, path):
        x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        x = mylib.filter_shard(x, P("data"), mesh=machine.mesh(data=-1))

        def product(x):
            return x @ x.T

        line = inspect.getsourcelines(product)[1] + 1
        text = self.refused(product, path, x)
        assert "can't be saved for a NVIDIA H100" in text
        assert f"dot_general at test_saved_programs.py:{line}" in text and "12 to 24 times" in text
        assert ".compile({'xla_gpu_enable_triton_gemm': False})" in text
        options = {"xla_gpu_enable_triton_gemm": False}
        mylib.filter_jit(product).lower(x).compile(options).save(path)
        assert path.exists()

    def test_kernels_of_cudnn(self, machine, path):
        mesh = machine.mesh(data=-1)

        def rows(*shape):
            x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            return mylib.filter_shard(x, P("data"), mesh=mesh)

        def convolve(x, w):
            return jax.lax.conv(x, w, (1, 1), "SAME")

        def attend(q):
            return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

        w = jax.ShapeDtypeStruct((16, 16, 3, 3), jnp.bfloat16)
        w = mylib.filter_shard(w, P(), mesh=mesh)
        for fun, args in (convolve, (rows(64, 16, 32, 32), w)), (attend, (rows(8, 256, 8, 64),)):
            text = self.refused(fun, path, *args)
            line = inspect.getsourcelines(fun)[1] + 1
            assert f" at test_saved_programs.py:{line}" in text
            assert "cuDNN fail when" in text and "implementation='xla'" in text
