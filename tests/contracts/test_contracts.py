"""Contracts are true of real programs, and broken when a placement is."""

import functools
import re
from collections.abc import Callable

import handwritten
import jax
import known
import pytest
import steps
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib import contracts

ONE, TWO = known.meshes(jax.devices())
STRATEGIES = steps.strategies(ONE, TWO)
CONTRACTS = {
    "data_parallel": contracts.data_parallel("data"),
    "fsdp": contracts.fsdp("data", largest="64 KiB"),
    "tensor_parallel": contracts.tensor_parallel("model", forward=steps.LAYERS),
    "two_d": contracts.two_d("data", "model"),
}


@functools.cache
def report_of(name: str, stacked: bool) -> mylib.results.Report:
    strategy = STRATEGIES[name]
    return mylib.audit(strategy.step(stacked), *strategy.args(stacked))


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.everyday(
    "data_parallel-list", "fsdp-list", "fsdp-scan", "tensor_parallel-scan", "two_d-list",
    rest="thorough",
)  # fmt: skip
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
            "each device computes the gradient of the whole batch",
        ),
        "the model is divided": (
            "data_parallel",
            steps.Strategy(ONE, rows, whole, P("data"), 4096),
            "sharded over data, and each device should have all of it",
        ),
        "a weight is whole": (
            "fsdp",
            steps.Strategy(ONE, {**rows, "down": P()}, whole, P("data"), 4096),
            r"model\['down'\] .*: not sharded over data: 8 devices hold the same",
        ),
        "nothing is gathered": (
            "fsdp",
            steps.Strategy(ONE, rows, rows, P("data"), 64),
            "multiplied without being gathered over data",
        ),
        "a layer is divided the other way": (
            "tensor_parallel",
            steps.Strategy(TWO, turned, turned, P("data"), 4096),
            "expected",
        ),
        "it is whole over model": (
            "two_d",
            steps.Strategy(TWO, over_data, whole, P("data"), 4096),
            "not sharded over model",
        ),
        "it is whole over data": (
            "two_d",
            steps.Strategy(TWO, columns, columns, P("data"), 4096),
            "not sharded over data",
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
        "0 all-gathers over data, and 2 expected",
        "all-reduces over data, and 1 expected",
        "in a call, and at most 1 KiB expected",
        "in a loop: 128 KiB, and none expected above 1 KiB",
        "temporaries: ",
        "model['up'] [3, 64, 256] is not sharded over data: 8 devices hold the same 192 KiB",
    ):
        assert words in told
    first, *others = told.splitlines()
    (_, *more) = raised.value.violations
    assert first == f"step: {len(more) + 1} violations; the first: {raised.value.violations[0]}"
    assert [x.strip() for x in others] == [*raised.value.violations]
    assert raised.value.report is report
    with pytest.raises(mylib.errors.ContractError, match="^step: 1 violation: 4 all-reduces.*$"):
        report.expect(contracts.communicates({("all-reduce", "data"): 7}))


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
    with pytest.raises(ValueError, match="no 'temporary': write one of arguments, results, temp"):
        contracts.memory(temporary="1 MiB")
    with pytest.raises(ValueError, match="step uses arrays of model, x, not of 'params'"):
        report.expect(contracts.sharded("params"))
    with pytest.raises(ValueError, match="no axis 'model'"):
        report.expect(contracts.tensor_parallel("model"))
    with pytest.raises(ValueError, match="no axis 'dat'"):
        report.expect(contracts.data_parallel("dat"))


def test_collectives_that_run_an_unknown_number_of_times():
    def grown(w, x):
        grow = lambda x: x + lax.psum(x, "data")  # noqa: E731
        return lax.while_loop(lambda x: x.sum() < 9, grow, x) @ w

    fun = jax.shard_map(
        grown, mesh=ONE, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    w, x = known.abstract(ONE, P(), (16, 16)), known.abstract(ONE, P("data"), (8, 16))
    report = mylib.audit(jax.jit(fun), w, x)
    for contract in (contracts.data_parallel("data"), contracts.tensor_parallel("data", forward=1)):
        with pytest.raises(mylib.errors.AuditError, match="unknown how often the all-reduce"):
            report.expect(contract)


def test_text_does_not_tell_what_is_divided():
    strategy = STRATEGIES["fsdp"]
    compiled = strategy.step(True).lower(*strategy.args(True)).compile()
    report = mylib.audit(compiled.as_text(), mesh=ONE)
    with pytest.raises(mylib.errors.AuditError, match="is unknown: audit the compiled program"):
        report.expect(contracts.sharded())
    with pytest.raises(mylib.errors.AuditError, match="it is unknown what step returns"):
        report.expect(contracts.fsdp("data"))


# --- steps written by hand: what is wrong in them is known exactly --------------------------------

PSUM, ROW = handwritten.psum, handwritten.scattered
COLUMNS = {"up": P(None, "model"), "down": P("model")}
ALL_COLUMNS = {"up": P(None, "model"), "down": P(None, "model")}


def wrong() -> dict[str, tuple[Callable[[], mylib.results.Report], contracts.Contract, str]]:
    """A step, a contract that does not hold, and how the first sentence begins."""
    audited, whole, rows = handwritten.audited, handwritten.WHOLE, handwritten.ROWS
    summing, sharded = handwritten.summing, handwritten.sharded
    data, parts = contracts.data_parallel("data"), contracts.fsdp("data")
    tensor = contracts.tensor_parallel("model")
    return {
        "summed twice": (
            lambda: audited(ONE, summing(up=PSUM, down=lambda g: PSUM(PSUM(g))), whole),
            data,
            r"model\['down'\]: summed twice: ",
        ),
        "summed in each microbatch": (
            lambda: audited(ONE, handwritten.in_pieces, whole),
            data,
            r"model\['down'\], model\['up'\]: its gradient is summed 4 times in a call, and 1",
        ),
        "only activations summed": (
            lambda: audited(ONE, handwritten.activations_alone, whole),
            data,
            r"model\['down'\], model\['up'\]: its gradient is not sent over data",
        ),
        "5000 gathers of 4 KiB": (
            lambda: audited(ONE, handwritten.gathers, whole, rows=32),
            data,
            "all_gather: moved by all-gather over data .* in a loop: 4 KiB, and no activation",
        ),
        "fsdp, half not sent": (
            lambda: audited(ONE, sharded(up=ROW, down=handwritten.own_part), rows),
            parts,
            r"model\['down'\]: its gradient is not sent over data",
        ),
        "fsdp, the model returned replicated": (
            lambda: audited(ONE, handwritten.returned_whole, rows, out=whole),
            parts,
            r"model\['down'\]: given sharded over data, and returned replicated",
        ),
        "fsdp, the whole batch gathered": (
            lambda: audited(ONE, handwritten.whole_batch, rows),
            parts,
            "x: moved by all-gather over data .*, and no activation expected",
        ),
        "fsdp, the part of another axis": (
            lambda: audited(
                TWO,
                sharded(up=ROW, down=lambda g: handwritten.own_part(PSUM(g), "model")),
                rows,
            ),
            parts,
            r"model\['down'\]: all devices along data keep the same part of it",
        ),
        "tensor, a weight moved by a padded sum": (
            lambda: audited(TWO, handwritten.moved_weight, COLUMNS, out=P("data")),
            tensor,
            r"model\['up'\]: all-reduce over model .*, and weights should stay where they are",
        ),
        "tensor, columns twice": (
            lambda: audited(TWO, handwritten.columns_twice, ALL_COLUMNS, rows=8, out=P("data")),
            tensor,
            "all_gather: moved by all-gather over model .*, and no activation expected",
        ),
        "a gather over both axes": (
            lambda: audited(TWO, handwritten.gathered_over_both, whole, out=P()),
            contracts.never("all-gather", "data"),
            "x: all-gather over data, model .*, and none expected",
        ),
        "a gather over both axes is many bytes": (
            lambda: audited(TWO, handwritten.gathered_over_both, whole, out=P()),
            contracts.at_most(0, "all-gather", "model"),
            "all-gather over model: 8 KiB in a call, and at most 0 B expected",
        ),
        "two gathers over parts": (
            lambda: audited(ONE, handwritten.gathered_in_parts, whole, out=P()),
            contracts.never("all-gather", "data"),
            "x.*: all-gather over data:",
        ),
    }


def right() -> dict[str, tuple[Callable[[], mylib.results.Report], contracts.Contract]]:
    audited, whole, rows = handwritten.audited, handwritten.WHOLE, handwritten.ROWS
    sharded = handwritten.sharded
    data, parts = contracts.data_parallel("data"), contracts.fsdp("data")
    tensor = contracts.tensor_parallel("model", forward=1)
    found = {
        "an adapter alone": (lambda: audited(ONE, handwritten.adapter, whole), data),
        "pieces": (
            lambda: audited(ONE, handwritten.in_pieces, whole),
            contracts.data_parallel("data", pieces=4),
        ),
        "fsdp": (lambda: audited(ONE, sharded(up=ROW, down=ROW), rows), parts),
        "fsdp in 4 pieces": (lambda: audited(ONE, handwritten.sharded_in_pieces, rows), parts),
        "fsdp in at most 4 pieces": (
            lambda: audited(ONE, handwritten.sharded_in_pieces, rows),
            contracts.fsdp("data", pieces=4),
        ),
        "fsdp, evaluation": (
            lambda: audited(ONE, handwritten.evaluation, rows, out=P()),
            parts,
        ),
        "sequence parallelism": (
            lambda: audited(TWO, handwritten.sequence_parallel, COLUMNS, out=P("data")),
            contracts.tensor_parallel("model", forward=2),
        ),
    }
    for n in (8, 64):
        run = functools.partial(audited, TWO, handwritten.megatron, COLUMNS, rows=n, out=P("data"))
        found[f"tensor with {n} rows"] = (run, tensor)
    return found


@pytest.mark.parametrize("case", wrong())
def test_wrong_steps(case):
    run, contract, told = wrong()[case]
    found = contract(run())
    assert found and re.match(told, found[0]), found


@pytest.mark.parametrize("case", right())
def test_right_steps(case):
    run, contract = right()[case]
    assert contract(run()) == []


def test_one_sum_in_each_branch_counts_once():
    def fun(x):
        return lax.cond(x.sum() > 0, handwritten.psum, lambda x: 2 * handwritten.psum(x), x)

    report = mylib.audit(known.mapped(ONE, P("data"), fun), known.abstract(ONE, P("data"), (8, 8)))
    assert len(report.collectives) == 2
    report.expect(contracts.communicates({("all-reduce", "data"): 1}))


def test_results_that_have_other_names_than_the_weights():
    """Whether their gradients are sent is not known, so it is not told that they are."""

    def step(model, x):
        right = handwritten.summing(up=PSUM, down=PSUM)(model, x)
        return {"one": right["up"].sum(0), "two": right["down"].sum(0)}

    out = {"one": P(), "two": P()}
    report = handwritten.audited(ONE, step, handwritten.WHOLE, out=out)
    with pytest.raises(
        mylib.errors.AuditError, match="which weights step trains: none of its results"
    ):
        report.expect(contracts.data_parallel("data"))
