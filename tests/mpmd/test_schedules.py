"""Schedules of pipelines: every size is valid, idle for as long and as large as theory says; what
can't be run is refused by name.
"""

import dataclasses
import functools
import graphlib
import itertools
import pickle
import runpy
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mylib import mpmd
from mylib.mpmd import Action, Pass, Schedule

SIZES = list(itertools.product(range(1, 7), range(1, 13)))


@functools.cache
def every():
    return [
        *(builder(*size) for size in SIZES for builder in (mpmd.gpipe, mpmd.one_f_one_b)),
        *(mpmd.zero_bubble(*size) for size in SIZES),
        *(mpmd.interleaved(p, m, v) for p, m in SIZES if m % p == 0 for v in (1, 2, 3)),
    ]


SCHEDULES = st.deferred(lambda: st.sampled_from(every()))
TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


def close(number):
    return pytest.approx(number, rel=1e-9, abs=1e-9)


def graph_of(rows, stages):
    """What has to be done before each action, written anew: graphlib finds its cycles."""
    graph = {action: set() for row in rows for action in row}
    for row in rows:
        for before, after in itertools.pairwise(row):
            graph[after].add(before)
    for kind, stage, microbatch in graph:
        after = graph[kind, stage, microbatch]
        if kind == "F" and stage > 0:
            after.add(("F", stage - 1, microbatch))
        if kind == "B":
            after.add(("F", stage, microbatch))
            if stage < stages - 1:
                after.add(("B", stage + 1, microbatch))
        if kind == "W":
            after.add(("B", stage, microbatch))
    return graph


def theory_of_bubble(schedule, forward, backward, weight):
    p, m, v = schedule.meshes, schedule.microbatches, schedule.stages // schedule.meshes
    if not schedule.splits_backward:
        return (p - 1) / (v * m + p - 1)
    # The paper's (p - 1) * (F + B - W) is that of m >= p and the shortest being W.
    filled = (min(m, p) - 1) * min(forward, backward, weight)
    idle = (p - 1) * (forward + backward) - filled
    return idle / (m * (forward + backward + weight) + idle)


def theory_of_live(schedule):
    p, m, v = schedule.meshes, schedule.microbatches, schedule.stages // schedule.meshes
    if schedule.name == "GPipe":
        return (m,) * p
    if schedule.name == "ZB-H1":
        return (min(m, p),) * p
    if v == 1:
        return tuple(min(m, p - i) for i in range(p))
    return tuple(min(m * v, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in range(p))


def test_every_size_does_everything_once():
    for x in every():
        kinds = "FBW" if x.splits_backward else "FB"
        wanted = itertools.product(kinds, range(x.stages), range(x.microbatches))
        found = [action for row in x.rows for action in row]
        assert sorted(found) == sorted(wanted)
        assert x.splits_backward == (x.name == "ZB-H1")
        for mesh, row in enumerate(x.rows):
            assert {x.mesh_of(action.stage) for action in row} == {mesh}


def test_order_respects_everything():
    for x in every():
        places = {action: place for place, action in enumerate(x.order())}
        graph = graph_of(x.rows, x.stages)
        assert set(places) == set(graph)
        assert all(
            places[before] < places[action] for action, all_ in graph.items() for before in all_
        )


def test_gradients_are_added_in_the_same_order():
    for x in every():
        for kind, stage in itertools.product("BW" if x.splits_backward else "B", range(x.stages)):
            row = x.rows[x.mesh_of(stage)]
            found = [a.microbatch for a in row if a.kind == kind and a.stage == stage]
            assert found == list(range(x.microbatches))


def test_bubbles_of_every_size():
    for x in every():
        times = (1.0, 1.0, 1.0) if x.splits_backward else (1.0, 2.0, 1.0)
        assert x.bubble() == close(theory_of_bubble(x, *times)), x


@given(x=SCHEDULES, forward=TIMES, backward=TIMES, weight=TIMES)
def test_bubbles_of_all_times(x, forward, backward, weight):
    found = x.bubble(forward, backward, weight)
    assert found == close(theory_of_bubble(x, forward, backward, weight))
    p, m = x.meshes, x.microbatches
    if x.splits_backward and m >= p and weight <= min(forward, backward):
        idle = found / (1 - found) * m * (forward + backward + weight)
        assert idle == close((p - 1) * (forward + backward - weight))


def test_live_of_every_size():
    for x in every():
        assert x.live() == theory_of_live(x), x


@given(x=SCHEDULES, forward=TIMES, backward=TIMES, weight=TIMES, send=TIMES)
def test_timelines_are_tight(x, forward, backward, weight, send):
    """Each action starts when its mesh is free and what it needs has arrived, not later."""
    lines = x.timeline(forward, backward, weight, send)
    assert [tuple(action for *_, action in line) for line in lines] == list(x.rows)
    ends = {action: end for line in lines for _, end, action in line}
    durations = {"F": forward, "B": backward, "W": weight}
    graph = graph_of(x.rows, x.stages)
    for mesh, line in enumerate(lines):
        for start, end, action in line:
            arrivals = [
                ends[before] + send * (x.mesh_of(before[1]) != mesh) for before in graph[action]
            ]
            assert start == max(arrivals, default=0)
            assert end == start + durations[action.kind]


def test_known_rows():
    """Of Megatron-LM's figure of the interleaved schedule, and of the paper on ZB-H1."""
    first, second = mpmd.interleaved(2, 4, 2).rows
    told = "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    assert " ".join(map(str, first)) == told
    told = "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    assert " ".join(map(str, second)) == told
    first, second, third = mpmd.zero_bubble(3, 4).rows
    told = "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3"
    assert " ".join(map(str, first)) == told
    told = "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 B1.3 W1.2 W1.3"
    assert " ".join(map(str, second)) == told
    told = "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 W2.2 W2.3"
    assert " ".join(map(str, third)) == told
    # With one chunk, it is 1F1B.
    assert mpmd.interleaved(3, 6, 1).rows == mpmd.one_f_one_b(3, 6).rows


@functools.cache
def small():
    return [x for x in every() if 1 < x.stages <= 4 and x.microbatches <= 4]


@given(data=st.data())
def test_any_order_is_valid_or_names_what_is_stuck(data):
    x = data.draw(st.sampled_from(small()))
    mesh = data.draw(st.integers(0, x.meshes - 1))
    row = list(x.rows[mesh])
    # Few swaps often leave it valid, many hardly ever.
    for _ in range(data.draw(st.integers(1, 3))):
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[i], row[j] = row[j], row[i]
    rows = (*x.rows[:mesh], tuple(row), *x.rows[mesh + 1 :])
    graph, done, moved = graph_of(rows, x.stages), set(), True
    while moved:
        ready = {action for action, before in graph.items() if before <= done} - done
        done |= ready
        moved = bool(ready)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        stuck = {i: next((a for a in row if a not in done), None) for i, row in enumerate(rows)}
        with pytest.raises(ValueError) as caught:
            dataclasses.replace(x, rows=rows)
        lines = str(caught.value).split("\n")[1:]
        told = [f"mesh {i} is stuck at {action} (" for i, action in stuck.items() if action]
        assert told and len(lines) == len(told)
        for expected, line in zip(told, lines, strict=True):
            assert expected in line and "waiting for" in line
    else:
        other = dataclasses.replace(x, rows=rows)
        assert len(other.order()) == len(x.order())


def test_a_deadlock():
    rows = (
        (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)),
        (("F", 1, 0), ("B", 1, 1), ("F", 1, 1), ("B", 1, 0)),
    )
    with pytest.raises(ValueError) as caught:
        Schedule("mine", 2, 2, 2, rows)
    assert str(caught.value).split("\n") == [
        "the schedule 'mine' can't be run:",
        "  deadlock: mesh 0 is stuck at B0.0 (after F0.1), waiting for B1.0 of mesh 1",
        "  deadlock: mesh 1 is stuck at B1.1 (after F1.0), waiting for F1.1, later in its own row",
    ]


def test_everything_wrong_is_told():
    rows = (
        (("F", 0, 0), ("F", 0, 0), ("F", 1, 0), ("F", 9, 0)),
        (("B", 1, 0), ("F", 1, 1), ("B", 1, 1)),
    )
    with pytest.raises(ValueError) as caught:
        Schedule("mine", 2, 2, 2, rows)
    assert str(caught.value).split("\n") == [
        "the schedule 'mine' can't be run:",
        "  row 0 has F0.0, F1.0, F9.0 too many: "
        "it runs stages 0 over 2 microbatches once, counted from 0",
        "  row 0 lacks B0.0, B0.1, F0.1",
        "  row 1 lacks F1.0",
    ]
    with pytest.raises(ValueError, match=r"row 0 lacks B0\.0, .*, B0\.7 and 4 more$"):
        only = tuple(Action(Pass.FORWARD, 0, i) for i in range(12))
        Schedule("mine", 1, 1, 12, (only,))


def test_all_weight_passes_or_none():
    rows = ((("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1), ("W", 0, 1)),)
    with pytest.raises(ValueError, match=r"row 0 lacks W0\.0$"):
        Schedule("mine", 1, 1, 2, rows)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((0, 0, 1), "stages=0 must be at least 1\n  meshes=0 must be"),
        ((1, 1, -1), "microbatches=-1 must be at least 1"),
        ((1, 2, 1), "1 stages leave meshes without work: there are 2 meshes"),
        ((2, 2, 1), "there are 1 rows for 2 meshes"),
    ],
)
def test_sizes(sizes, told):
    with pytest.raises(ValueError, match=told):
        Schedule("mine", *sizes, ((("F", 0, 0), ("B", 0, 0)),))


@pytest.mark.parametrize("builder", [mpmd.gpipe, mpmd.one_f_one_b, mpmd.zero_bubble])
def test_sizes_of_builders(builder):
    with pytest.raises(ValueError, match="microbatches=0 must be at least 1"):
        builder(2, 0)
    with pytest.raises(ValueError, match="stages=0 must be at least 1"):
        builder(0, 2)


def test_sizes_of_interleaved():
    with pytest.raises(
        ValueError, match="microbatches=6 isn't a multiple of meshes=4.*one_f_one_b"
    ):
        mpmd.interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="chunks=0 must be at least 1"):
        mpmd.interleaved(4, 8, 0)
    with pytest.raises(ValueError, match="meshes=0 must be at least 1"):
        mpmd.interleaved(0, 8, 2)
    with pytest.raises(ValueError, match="microbatches=0 must be at least 1"):
        mpmd.interleaved(2, 0, 2)


def test_passes_take_time():
    for times in ({"forward": 0}, {"backward": -1.0}, {"weight": 0}, {"send": -0.1}):
        with pytest.raises(ValueError, match="passes take time"):
            mpmd.gpipe(2, 2).timeline(**times)


def test_written_by_hand():
    rows = [[("F", 0, 0), ["B", 0, 0]]]
    mine = Schedule("mine", 1, 1, 1, rows)
    assert mine.rows == ((Action(Pass.FORWARD, 0, 0), Action(Pass.BACKWARD, 0, 0)),)
    assert all(type(x) is Action and type(x.kind) is Pass for x in mine.rows[0])
    assert dataclasses.replace(mine, name="GPipe") == mpmd.gpipe(1, 1) != mine
    assert len({mine, Schedule("mine", 1, 1, 1, mine.rows)}) == 1
    assert pickle.loads(pickle.dumps(mine)) == mine and mine.bubble() == 0
    assert repr(mine) == "Schedule('mine', stages=1, meshes=1, microbatches=1)"
    # More stages than meshes, in any number.
    order = mpmd.one_f_one_b(3, 2).order()
    rows = [[x for x in order if x.stage % 2 == mesh] for mesh in range(2)]
    assert len(Schedule("three on two", 3, 2, 2, rows).order()) == 12
    with pytest.raises(ValueError, match="'X' is not a valid Pass"):
        Schedule("mine", 1, 1, 1, [[("X", 0, 0)]])


def test_table():
    assert str(mpmd.one_f_one_b(2, 3)).split("\n") == [
        "1F1B: 2 stages on 2 meshes, 3 microbatches",
        "bubble 25.0%, at most 2 activations on a mesh",
        "",
        "step   0  1  2  3  4  5  6  7",
        "mesh 0 F0 F1    B0 F2 B1    B2",
        "mesh 1    F0 B0 F1 B1 F2 B2",
    ]
    assert str(mpmd.interleaved(2, 2, 2)).split("\n")[3:] == [
        "step   0    1    2    3    4    5    6    7    8    9",
        "mesh 0 F0.0 F0.1 F2.0 F2.1      B2.0      B2.1 B0.0 B0.1",
        "mesh 1      F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert str(mpmd.gpipe(1, 1)).startswith("GPipe: 1 stage on 1 mesh, 1 microbatch\n")


def test_wide_tables():
    text = str(mpmd.interleaved(4, 16, 2))
    assert max(map(len, text.split("\n"))) <= 90
    assert all(f" F{stage}.{i}" in text for stage in range(8) for i in range(16))
    long = str(mpmd.one_f_one_b(6, 500))
    assert len(long) < 20_000 and long.endswith(" more steps")
    assert max(map(len, long.split("\n"))) <= 90


def test_the_pictures_in_the_docs_are_current():
    root = Path(__file__).resolve().parents[2]
    drawn = runpy.run_path(str(root / "tools" / "draw_schedules.py"))["pictures"]()
    found = {path.name: path.read_text() for path in (root / "docs" / "schedules").iterdir()}
    assert found == drawn, "run python tools/draw_schedules.py"
