"""The manifests in `examples/clusters`, held against Kubernetes' published schema. JobSet is not
part of it: only the Job inside is checked.
"""

from pathlib import Path

import pytest
import yaml
from needs import skip_unless_required

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clusters"


@pytest.fixture(scope="module")
def validator(request: pytest.FixtureRequest):
    try:
        import kubernetes_validate
    except ImportError:
        reason = "the schema is not installed: python -m pip install kubernetes-validate"
        skip_unless_required(request.config, "--require-clusters", reason)
    return kubernetes_validate


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema(validator, path):
    for doc in yaml.safe_load_all(path.read_text()):
        if doc["kind"] == "JobSet":
            (replicated,) = doc["spec"]["replicatedJobs"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": doc["metadata"]}
            doc = {**job, **replicated["template"]}
        validator.validate(doc, validator.latest_version(), strict=True)
        doc["spec" if "spec" in doc else "metadata"]["parallelims"] = 2
        with pytest.raises(validator.ValidationError, match="parallelims"):
            validator.validate(doc, validator.latest_version(), strict=True)
