"""Tests that end in every way in which a test in several processes can end. test_multihost.py runs
them in a session of its own, and looks at what it reports.
"""

import gc
import os
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import all_equal
from hypothesis import given, strategies as st
from jax.experimental import multihost_utils

from mylib.testing import barrier, gather, info, same_program

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=1)


def me() -> int:
    return jax.process_index()


def meet() -> None:
    """A collective of all devices."""
    assert multihost_utils.process_allgather(np.array(me())).tolist() == [0, 1]


def hang() -> None:
    time.sleep(1000)


# --- all do the same -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted():
    counted.times = getattr(counted, "times", 0) + 1
    yield counted.times


def test_passes(counted, tmp_path, multihost_tmp_path):
    # It is disabled while this process imports JAX.
    assert gc.isenabled()
    meet()
    assert counted == 1
    all_equal(str(multihost_tmp_path))
    (multihost_tmp_path / str(me())).touch()
    barrier()
    assert sorted(path.name for path in multihost_tmp_path.iterdir()) == ["0", "1"]
    assert len(set(gather(str(tmp_path)))) == 2


@pytest.mark.parametrize("n", [3, 4])
def test_with_parameters(n, counted, request):
    # The fixture of the first test is still up.
    assert counted == 1 and request.node.name == f"test_with_parameters[{n}]"
    assert info().process_count == 2 and info().device_count == 2


@given(st.integers(), st.floats())
def test_draws_the_same_everywhere(n, x):
    all_equal([n, x])


def test_says_what_it_prints(recwarn):
    print("printed by", me())
    print("complained by", me(), file=sys.stderr)
    os.write(1, b"written past Python\n")
    assert me() == -1


def test_warns():
    warnings.warn("said twice", FutureWarning, stacklevel=1)


def test_skipped_by_all():
    pytest.skip("not today")


@pytest.mark.xfail(reason="known")
def test_fails_in_all_as_expected():
    assert me() == -1


@pytest.mark.xfail(reason="known", strict=False)
def test_passes_against_expectation():
    pass


@pytest.mark.xfail(reason="known", strict=True)
def test_passes_against_strict_expectation():
    pass


@pytest.fixture
def broken_end():
    yield
    raise RuntimeError("the end fails everywhere")


def test_fails_at_the_end(broken_end):
    meet()


def test_subtests(subtests):
    for i in range(3):
        with subtests.test(i=i):
            assert i != 1


def test_is_asserted_with_values():
    left, right = [1, 2, 3], [1, 2, 4]
    assert left == right


# --- one does something else ---------------------------------------------------------------------


def test_one_raises_and_the_other_waits_for_it():
    if me() == 1:
        raise ValueError("process 1 raises")
    meet()


def test_processes_disagree():
    with pytest.raises(AssertionError, match="process 0 has a different program than process 1"):
        same_program(lambda x: x + me(), jnp.ones(3))
    same_program(lambda x: x + 1, jnp.ones(3))


# With one device the computation would be waited for.
@pytest.mark.multihost(devices_per_process=2, env={"FRUIT": "apple"})
def test_one_leaves_something_running():
    assert os.environ["FRUIT"] == "apple"
    if me() == 1:
        jax.jit(lambda x: jnp.sum(x))(_over_all())


def _over_all() -> jax.Array:
    mesh = jax.make_mesh((4,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return jax.make_array_from_callback((4,), sharding, lambda index: np.ones(4)[index])


def test_passes_after_that():
    meet()


def test_one_changes_a_setting():
    if me() == 1:
        jax.config.update("jax_enable_x64", True)


def test_all_change_settings():
    assert not jax.config.jax_enable_x64
    jax.config.update("jax_default_matmul_precision", "float32")
    jax.config.update("jax_default_device", jax.local_devices()[0])
    jax.config.update("jax_disable_jit", True)


def test_prints_a_lot():
    jax.config.update("jax_disable_jit", False)
    print("begin" + "x" * 200_000 + "end")
    assert me() == -1


def test_what_was_printed_before_is_not_kept():
    assert os.fstat(1).st_size + os.fstat(2).st_size < 10_000
    print("printed after that")
    pytest.fail("to be shown")


def test_a_child_returns():
    child = os.fork()
    if child:
        os.waitpid(child, 0)


def test_a_child_fails_and_returns():
    child = os.fork()
    assert child, " ".join(["said", "by", "nobody"])
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.multihost(timeout=60)
@pytest.mark.timeout(1)
def test_the_mark_wins_over_pytest_timeout():
    time.sleep(1.5)


# --- fixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mylib_mesh",
    [{"a": 2}, {"a": -1, "b": (1, jax.sharding.AxisType.Auto)}, {"a": 3}],
    indirect=True,
)
def test_mesh(mylib_mesh):
    assert mylib_mesh.axis_names[0] == "a" and mylib_mesh.shape["a"] == 2
    if "b" in mylib_mesh.shape:
        assert mylib_mesh.axis_types[1] == jax.sharding.AxisType.Auto


def test_mesh_by_default(mylib_mesh):
    assert mylib_mesh.shape == {"data": 2}


def test_second_backend(second_backend):
    assert not set(second_backend) & set(jax.devices())
    x = jax.device_put(np.ones(3), second_backend[1])
    assert x.devices() == {second_backend[1]} and float(x.sum()) == 3


def test_clean_distributed_of_shared_processes(clean_distributed):
    pass


def test_passes_last():
    meet()


# --- one dies, or does not end -------------------------------------------------------------------


def test_one_exits():
    meet()
    if me() == 1:
        # Its child holds its end of the pipe.
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        print("last words", flush=True)
        os._exit(3)
    meet()


def test_all_leave_each_other():
    jax.distributed.shutdown()


def test_one_segfaults():
    if me() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    hang()


def test_the_coordinator_is_killed():
    # And with it what it has started.
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["CHILDREN"], "a") as file:
        file.write(f"{child.pid}\n")
    meet()
    if me() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    hang()


@pytest.mark.multihost(fresh=True)
def test_clean_distributed(clean_distributed):
    assert not jax.distributed.is_initialized()
    jax.distributed.initialize(
        clean_distributed,
        2,
        1 - int(os.environ["PYTHONHASHSEED"]) % 2,
        coordinator_bind_address=clean_distributed,
        cluster_detection_method="deactivate",
    )
    assert jax.process_count() == 2


# Its first meeting takes a while on a busy machine.
@pytest.mark.multihost(timeout=8)
def test_one_sleeps():
    meet()
    if me() == 1:
        hang()
    meet()


# The limit of pytest-timeout.
@pytest.mark.timeout(2)
def test_one_spins_and_the_other_stops_answering():
    if me() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass
