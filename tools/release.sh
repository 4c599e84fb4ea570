#!/usr/bin/env bash
# Builds what is released as VERSION into dist/, and tries the wheel where nothing else of the project is:
# tools/release.sh VERSION
set -euo pipefail
version=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for said in "__version__ = \"$version\":mylib/__init__.py" "version: $version:CITATION.cff" "copyright: mylib $version:mkdocs.yml" "## $version :CHANGELOG.md"; do
    if ! grep -qF -- "${said%:*}" "${said##*:}"; then
        echo "${said##*:} does not say '${said%:*}'" >&2
        exit 1
    fi
done

if grep -q "not on the package index" README.md; then
    echo "README.md says that mylib is not on the package index: its Installation is now 'pip install mylib'" >&2
    exit 1
fi

rm -rf dist
python3 -m venv "$work/build"
"$work/build/bin/python" -m pip install -q build twine
"$work/build/bin/python" -m build --outdir dist
"$work/build/bin/python" -m twine check --strict dist/*

python3 -m venv "$work/clean"
"$work/clean/bin/python" -m pip install -q "dist/mylib-$version-py3-none-any.whl" pytest optax
python3 - README.md >"$work/readme.py" <<'END'
import pathlib
import re
import sys

print(*re.findall(r"```python\n(.*?)```", pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"), re.S), sep="\n")
END
cd "$work"
cat >test_wheel.py <<'END'
import jax
import mylib
import numpy as np
from jax.sharding import PartitionSpec as P


def test_wheel(mylib_mesh):
    x = mylib.filter_shard(np.ones(8), P("data"), mesh=mylib_mesh)
    assert len(x.sharding.device_set) == jax.device_count() == 8
END
export XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 JAX_PLATFORMS=cpu
"$work/clean/bin/python" -m pytest -q test_wheel.py
"$work/clean/bin/python" readme.py
echo "dist/ is ready"
