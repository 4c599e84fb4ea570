"""The files for clusters in `examples/clusters`: what JAX finds its processes by. No cluster is
needed; `tests/clusters/test_kubernetes.py` holds them against Kubernetes' schema.
"""

import math
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "clusters"


def kinds(name: str) -> dict[str, dict]:
    return {doc["kind"]: doc for doc in yaml.safe_load_all((FOLDER / name).read_text())}


def job_of(jobset: dict) -> dict:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]


def pod_of(job: dict) -> dict:
    return job["spec"]["template"]["spec"]


@pytest.fixture
def job() -> dict:
    return kinds("kubernetes_job.yaml")["Job"]


@pytest.fixture
def jobset() -> dict:
    return kinds("kubernetes_jobset_tpu.yaml")["JobSet"]


def test_all_processes_run_at_once_and_have_numbers(job, jobset):
    for spec in job["spec"], job_of(jobset)["spec"]:
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] > 1
        assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_first_pod_has_a_name_for_the_others(job):
    service = kinds("kubernetes_job.yaml")["Service"]
    assert pod_of(job)["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"  # as text: null would be something else
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_jax_may_read_the_job_and_its_pods(job):
    docs = kinds("kubernetes_job.yaml")
    account = docs["ServiceAccount"]["metadata"]["name"]
    binding = docs["RoleBinding"]
    assert pod_of(job)["serviceAccountName"] == account
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == docs["Role"]["metadata"]["name"]
    allowed = {
        (resource, verb)
        for rule in docs["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("pods", "list"), ("jobs", "get"), ("services", "list")} <= allowed


def test_the_hosts_of_a_tpu_are_those_of_its_topology(jobset):
    spec, pod = job_of(jobset)["spec"], pod_of(job_of(jobset))
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert spec["completions"] * chips == math.prod(map(int, topology.split("x")))
    # A process that fails ends its job, and all start again together.
    assert spec["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_slurm_starts_one_process_for_each_gpu():
    path = FOLDER / "slurm_gpus.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    lines = [line.split(" ", 1)[1] for line in path.read_text().splitlines() if "#SBATCH" in line]
    options = dict(line.removeprefix("--").split("=") for line in lines if "=" in line)
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert int(options["nodes"]) > 1 and "--requeue" in lines
