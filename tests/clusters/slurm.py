"""A real SLURM cluster of two nodes on this machine, for as long as a `with` block lasts."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

# What the tests run on both nodes.
PROGRAMS = str(Path(__file__).parent / "programs.py")
SRUN = ("srun", "-N2", "-n2")

_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
# JAX looks for its coordinator at the name of the first node. These names are addresses of this
# machine, 127.0.0.1 and 127.0.0.2, so that no file of the system has to be changed for them.
NODES = ("0x7f000001", "0x7f000002")
FOUR_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "4",
    "NPROC": "32",
    "XLA_FLAGS": "",
}
# Debian keeps servers where only root looks for them.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONFIG = """
ClusterName=mylib
FirstJobId={first_job}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
# No groups of the kernel: this may be a container.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
# The nodes say that they have more CPUs than the machine.
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=5
MinJobAge=300
JobRequeue=1
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]


class Slurm:
    """A cluster that runs. Use [`start`][]."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            **FOUR_DEVICES,
            "PATH": _PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(
        self, *command: str, timeout: float = 200, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One of SLURM's commands, with its output and its errors together."""
        with self.begin(*command, env=env) as running:
            try:
                said, _ = running.communicate(timeout=timeout)
            finally:
                running.kill()
        return subprocess.CompletedProcess(command, running.returncode, said)

    def begin(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def wait_until(self, done: Callable[[], bool], out: Path | None = None) -> None:
        deadline = time.monotonic() + 150
        while not done():
            if time.monotonic() > deadline:
                said = out.read_text() if out is not None and out.exists() else ""
                raise TimeoutError(f"{said}\n{self.run('squeue').stdout}\n{self.logs()}")
            time.sleep(0.1)

    def wait_for_nodes(self) -> None:
        count = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        self.wait_until(lambda: self.run(*count).stdout.strip() == str(len(NODES)))

    def is_running(self, program: str) -> bool:
        """Whether a process of this cluster, and not of one beside it, runs a program."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                runs_it = program.encode() in (process / "cmdline").read_bytes()
                ours = self.env["SLURM_CONF"].encode()
                if runs_it and ours in (process / "environ").read_bytes():
                    return True
        return False

    def start_node(self, node: str) -> None:
        spool = self.folder / f"spool-{node}"
        spool.mkdir(exist_ok=True)
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])

    def kill_node(self, node: str) -> None:
        """As if the machine had lost its power: nobody says goodbye, its steps are gone too."""
        daemon = self.daemons.pop(f"slurmd-{node}")
        for pid in (*_children(daemon.pid), daemon.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _start_all(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        folder = str(self.folder)
        self._start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        self.wait_until((self.folder / "munge.socket").exists)
        (self.folder / "state").mkdir()
        self._start("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def _stop_all(self) -> None:
        for name in sorted(self.daemons, key=lambda name: name != "slurmctld"):
            daemon = self.daemons[name]
            pids = (*_children(daemon.pid), daemon.pid)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemon.wait()


@contextmanager
def start() -> Iterator[Slurm]:
    """Starts the cluster, and takes it down whatever happens."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mylib-slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
            for node, port in zip(NODES, ports, strict=True)
        )
        # JAX makes the port of its coordinator from the job's number, modulo 4096: clusters side by
        # side, one for each worker of pytest-xdist, must not count the same jobs.
        first_job = 1 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        config = _CONFIG.format(
            folder=folder, controller=controller, first_job=first_job, nodes=nodes
        )
        (folder / "slurm.conf").write_text(config.lstrip())
        cluster = Slurm(folder)
        stack.callback(cluster._stop_all)
        cluster._start_all()
        yield cluster


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _children(pid: int) -> list[int]:
    """All that a process has started, and what those have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [*_children(child), child]
    return found
