"""Contracts are true of real programs, and broken when a placement is."""

import jax
import known
import pytest
import steps
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib import contracts

ONE = known.mesh_of(jax.devices(), (8,), ("data",))
TWO = known.mesh_of(jax.devices(), (4, 2), ("data", "model"))
STRATEGIES = steps.strategies(ONE, TWO)
CONTRACTS = {
    "data_parallel": contracts.data_parallel("data"),
    "fsdp": contracts.fsdp("data", largest="64 KiB"),
    "tensor_parallel": contracts.tensor_parallel("model", forward=steps.LAYERS),
    "two_d": contracts.two_d("data", "model"),
}
REPORTS: dict[tuple[str, bool], mylib.Report] = {}


def report_of(name: str, stacked: bool) -> mylib.Report:
    if (name, stacked) not in REPORTS:
        strategy = STRATEGIES[name]
        report = mylib.audit(strategy.step(stacked), *strategy.args(stacked))
        REPORTS[name, stacked] = report
    return REPORTS[name, stacked]


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_true_of_the_real_step(name, stacked):
    report_of(name, stacked).expect(CONTRACTS[name])


def _broken() -> dict[str, tuple[str, steps.Strategy, str]]:
    """A contract, a step whose placements are wrong, and what is told of it."""
    whole, rows = {"up": P(), "down": P()}, {"up": P("data"), "down": P("data")}
    columns = {"up": P(None, "model"), "down": P("model")}
    turned = {"up": P("model"), "down": P("model")}
    over_data = {"up": P("data"), "down": P(None, "data")}
    return {
        "the batch is whole": (
            "data_parallel",
            steps.Strategy(ONE, whole, whole, P(), 4096),
            "not all of them are summed",
        ),
        "the model is divided": (
            "data_parallel",
            steps.Strategy(ONE, rows, whole, P("data"), 4096),
            "only all-reduce expected over data",
        ),
        "a weight is whole": (
            "fsdp",
            steps.Strategy(ONE, {**rows, "down": P()}, whole, P("data"), 4096),
            r"model\['down'\] .* is not sharded over data: 8 devices hold the same",
        ),
        "nothing is gathered": (
            "fsdp",
            steps.Strategy(ONE, rows, rows, P("data"), 64),
            "and only all-gather and reduce-scatter",
        ),
        "a layer is divided the other way": (
            "tensor_parallel",
            steps.Strategy(TWO, turned, turned, P("data"), 4096),
            "expected",
        ),
        "it is whole over model": (
            "two_d",
            steps.Strategy(TWO, over_data, whole, P("data"), 4096),
            "is not sharded over model",
        ),
        "it is whole over data": (
            "two_d",
            steps.Strategy(TWO, columns, columns, P("data"), 4096),
            "is not sharded over data",
        ),
    }


@pytest.mark.parametrize("case", _broken())
def test_broken_on_purpose(case):
    name, strategy, told = _broken()[case]
    report = mylib.audit(strategy.step(True), *strategy.args(True))
    with pytest.raises(AssertionError, match=told):
        report.expect(CONTRACTS[name])


def test_all_faults_together_and_the_table():
    report = report_of("data_parallel", True)
    with pytest.raises(AssertionError) as raised:
        report.expect(
            contracts.communicates({("all-reduce", "data"): 1, ("all-gather", "data"): 2}),
            contracts.at_most("1 KiB", "all-reduce", "data"),
            contracts.never("all-reduce", "data", above="1 KiB", in_loops=True),
            contracts.memory(temporaries=1),
            contracts.sharded(),
        )
    told = str(raised.value)
    for words in (
        "step is not as expected:",
        "0 all-gathers over data, and 2 expected",
        "all-reduces over data, and 1 expected",
        "in a call, and at most 1 KiB expected",
        "in a loop: 128 KiB, and none expected above 1 KiB",
        "temporaries: ",
        "model['up'] [3, 64, 256] is not sharded over data: 8 devices hold the same 192 KiB",
        "each device sends",
    ):
        assert words in told


def test_contracts_that_hold():
    report = report_of("fsdp", True)
    report.expect(
        contracts.never("all-gather", "data", above="64 KiB", in_loops=True),
        contracts.never("all-to-all"),
        contracts.memory(temporaries="64 MiB"),
        contracts.sharded(within=0.1),
        contracts.at_most("2 MiB"),
    )


def test_names_that_do_not_exist():
    report = report_of("fsdp", True)
    with pytest.raises(ValueError, match="no axis 'dat'"):
        report.expect(contracts.never("all-gather", "dat"))
    with pytest.raises(ValueError, match="no collective 'gather'"):
        report.expect(contracts.communicates({("gather", "data"): 1}))
    with pytest.raises(ValueError, match="'64 MegaBytes' is not a size"):
        contracts.at_most("64 MegaBytes")
    with pytest.raises(ValueError, match="no array of an argument 'params'"):
        report.expect(contracts.sharded("params"))
    with pytest.raises(ValueError, match="no axis 'model'"):
        report.expect(contracts.tensor_parallel("model"))
    with pytest.raises(ValueError, match="no axis 'dat'"):
        report.expect(contracts.data_parallel("dat"))


@pytest.mark.parametrize("size, unknown", [(2048, True), (8, False)])
def test_collectives_that_run_an_unknown_number_of_times(size, unknown):
    def grown(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + lax.psum(x, "data"), x)

    mapped = known.mapped(ONE, P("data"), grown)
    report = mylib.audit(jax.jit(mapped), known.abstract(ONE, P("data"), (8, size)))
    some = [contracts.data_parallel("data"), contracts.tensor_parallel("data", forward=0)]
    for contract in some:
        if unknown:
            with pytest.raises(mylib.AuditError, match="unknown how often the all-reduce"):
                report.expect(contract)
        else:
            contract(report)


def test_text_does_not_tell_what_is_divided():
    strategy = STRATEGIES["fsdp"]
    compiled = strategy.step(True).lower(*strategy.args(True)).compile()
    report = mylib.audit(compiled.as_text(), mesh=ONE)
    with pytest.raises(mylib.AuditError, match="is unknown: audit the compiled program"):
        report.expect(contracts.sharded())
