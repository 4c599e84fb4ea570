"""Put beside JAX's own multi-process tests as their `conftest.py`: pytest runs them unchanged."""

import absl.flags
import jax
import portpicker
import pytest
from jax._src import distributed, test_multiprocess  # noqa: F401  (the second defines flags)

# What the tests' own launcher gives them.
this = distributed.global_state.process_id
jax.config.config_with_absl()
absl.flags.FLAGS(["pytest", "--num_processes=4", f"--multiprocess_test_worker_id={this}"])


def transfer_through_sockets(address):
    """What socket_transfer_test.py does where it is started as a program."""
    jax.config.update("jax_cross_host_transfer_socket_address", address)
    jax.config.update("jax_force_dcn_cross_host_transfers", bool(address))


# The devices are made with it, once for all files. Before a test that is not of that file it is
# taken back: one of array_test.py expects JAX to refuse such transfers.
ADDRESS = f"127.0.0.1:{portpicker.pick_unused_port()}"
transfer_through_sockets(ADDRESS)


@pytest.fixture(autouse=True)
def transfers(request):
    jax.devices()
    is_for_these = request.path.name == "socket_transfer_test.py"
    transfer_through_sockets(ADDRESS if is_for_these else "")


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.multihost(processes=4, devices_per_process=2))
