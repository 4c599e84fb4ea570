"""The processes that train together, in replicas of the model."""

from collections.abc import Callable, Iterator

from jax.sharding import PartitionSpec

from .replicas import Replicas
from .rows import BatchRows, Reader
from .state import State
from .steps import Aux, Steps


class Team(Replicas):
    """All processes, in replicas of a model, and those that are left of them.

    A replica is on the devices of one process or of several whole ones; or a process has several
    replicas. When a process is lost, so are its replicas, and the others go on in
    `mylib.elastic.Team.steps`.

    **Arguments:**

    - `replica`: the name of the axis of replicas: there are as many as there are devices for.
    - `at_least`: the smallest number of replicas that goes on.
    - `axes`: the names and sizes of the axes of a replica.

    **Attributes:**

    - `mesh`: a mesh with the axes `(replica, *axes)`; another one after a loss.
    - `lost`: a list of `mylib.elastic.Loss`.

    !!! Example

        ```python
        team = mylib.elastic.Team(data=4, at_least=1)
        assert dict(team.mesh.shape) == {"replica": 2, "data": 4}
        ```
    """

    def steps(
        self,
        step: Callable[..., tuple[State, Aux]],
        state: State,
        read: Reader,
        *,
        rows: int,
        start: int = 0,
        stop: int,
        every: int = 1,
        batch: PartitionSpec | None = None,
    ) -> Iterator[tuple[int, State, Aux]]:
        """Trains, and goes on when processes are lost: then the arrays of `state` that are on the
        others are enough, no byte is moved, and the step is made again with the same rows.

        All processes call it. It waits for each step, and ends with an error in all of them if one
        raises.

        **Arguments:**

        - `step`: takes the state and a batch, and returns the next state and anything else. It is a
            function, or one of `mylib.filter_jit` without a mesh, and runs under `jax.set_mesh`
            of the team's. If it has a parameter `pieces`, it gets how many times larger a process's
            part of the batch is than at the beginning, for `mylib.accumulate`.
        - `state`: a PyTree. Its arrays over several processes are replicated over the axis of
            replicas.
        - `read`: takes the number of the step, and the numbers of the rows that this process needs,
            in order; returns a PyTree of NumPy arrays with these rows.
        - `rows`: the number of rows of the whole batch. It stays the same.
        - `start`, `stop`: the numbers of the first step, and of that after the last.
        - `every`: after a loss it goes back to the last state whose number is a multiple of this
            many from `start`. The steps between may donate the state.
        - `batch`: where batches go; by default over the replicas, and the axis `data` if there is
            one. Its first entry is for rows.

        **Returns:**

        An iterator of `(n, state, aux)` after step `n`. After a loss it may go back to an `n` that
        you have seen.

        **Raises:**

        `mylib.errors.TeamError` if they can't go on; `ValueError` before the first step if
        `rows` don't divide, an array of the state isn't in each replica, or its memory is donated.

        !!! Example

            ```python
            team = mylib.elastic.Team(data=4)
            w = mylib.filter_shard(jnp.zeros(4), P("data"), mesh=team.mesh)
            data = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

            @mylib.filter_jit(out_shardings=(P("data"), P()))
            def step(w, x):
                loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
                return w - 0.1 * slope, loss

            def read(n, rows):
                return data[rows]

            for n, w, loss in team.steps(step, w, read, rows=64, stop=3):
                print(n, loss)
            ```
        """
        over = (self.replica, "data") if "data" in self.axes else self.replica
        batch_rows = BatchRows(rows, PartitionSpec(over) if batch is None else batch)
        return Steps(self, step, state, read, batch_rows, range(start, stop), every).run()
