"""Who works with what: clients of Equinox and JAX with our verbs in the place of Equinox's.

    python tests/clients/run.py                           all clients, this Python
    python tests/clients/run.py lineax optax              some of them
    python tests/clients/run.py --jax-checkout DIR jax    JAX's own multi-process tests
    python tests/clients/run.py --write                   writes benchmarks/results/clients.md

The newest releases are installed into `.clients/`, one environment for each Python (`--python`,
which may be given several times). The checks of each client (check_*.py) run twice, in processes of
their own: with Equinox's verbs and with ours. Both have to return the same numbers in the same
places. The table has everything that is in `.clients/`, so clients can be run one by one. The exit
status is 1 if a client differs with ours.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import multiprocess
from outcomes import Row, outcomes, records, row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "benchmarks" / "results" / "clients.md"
BEGIN, END = "<!-- run.py writes from here -->", "<!-- to here -->"
# Names of checks, and what is installed for them.
PACKAGES = {
    "equinox": "equinox",
    "lineax": "lineax",
    "optimistix": "optimistix",
    "diffrax": "diffrax",
    "haliax": "haliax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "flax": "flax",
    "grain": "grain",
    "torch": "torch",
}
# The one version that comes without CUDA, and the Pythons that it is for: see pyproject.toml.
TORCH, TORCH_BEFORE = "torch==2.13.0", (3, 12)


class Environment:
    def __init__(self, python: str):
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        self.version = done.stdout.strip()
        self.folder = ROOT / ".clients" / f"python{self.version}"
        self.python = self.folder / "venv" / "bin" / "python"
        if not self.python.exists():
            subprocess.run([python, "-m", "venv", self.folder / "venv"], check=True)
        packages = [name for client, name in PACKAGES.items() if client != "torch"]
        if self.has_torch:
            packages.append(TORCH)
        # What JAX's own tests import.
        packages += ["absl-py", "portpicker", "pytest"]
        pip = [self.python, "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "-q", "--upgrade", *packages, "-e", ROOT]
        subprocess.run(install, check=True)
        done = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True)
        self.versions = {x["name"]: x["version"] for x in json.loads(done.stdout)}

    @property
    def has_torch(self) -> bool:
        return tuple(map(int, self.version.split("."))) < TORCH_BEFORE

    def run(self, client: str) -> Row:
        both = []
        for verbs in ("equinox", "mylib"):
            file = self.folder / f"{client}.{verbs}.jsonl"
            file.unlink(missing_ok=True)
            self.checks(client, verbs, file)
            both.append(outcomes(file))
        return row(client, self.versions[PACKAGES[client]], *both)

    def checks(self, client: str, verbs: str, file: Path) -> None:
        command = [self.python, HERE / "child.py", client, verbs, file]
        with open(file.with_suffix(".log"), "w") as log:
            while True:
                before = len(list(records(file)))
                done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                # A process that died goes on with the check after, in another one.
                if done.returncode == 0:
                    return
                if len(list(records(file))) == before:
                    raise SystemExit(f"{client} could not be run: see {file.with_suffix('.log')}")

    def run_jax(self, checkout: Path) -> Row:
        version = f"{self.versions['jax']}, tests of {multiprocess.version_of(checkout)}"
        plain = multiprocess.by_launcher(self.python, checkout)
        ours = multiprocess.by_plugin(self.python, checkout)
        for name, outcome in plain.items():
            # The launcher's logs say that a test has failed, and only pytest says how.
            if outcome.error and name in ours and ours[name].error:
                plain[name] = ours[name]
        return row("jax", version, plain, ours)

    def keep(self, found: Row) -> None:
        text = json.dumps(asdict(found) | {"jax": self.versions["jax"]}, indent=1)
        (self.folder / f"{found.client}.json").write_text(text)


def kept(folder: Path) -> tuple[str, list[Row]]:
    """The rows of an environment, and its JAX."""
    rows, jax = [], ""
    for client in (*PACKAGES, "jax"):
        file = folder / f"{client}.json"
        if file.exists():
            values = json.loads(file.read_text())
            jax = values.pop("jax")
            rows.append(Row(**values))
    return jax, rows


def table(folders: Iterable[Path]) -> str:
    lines, abouts = [], {}
    for folder in folders:
        jax, rows = kept(folder)
        if not rows:
            continue
        python = folder.name.removeprefix("python")
        lines += [f"### Python {python}, JAX {jax}", ""]
        lines += ["| client | version | checks | as it is | with mylib | differences |"]
        lines += ["|---|---|---|---|---|---|"]
        for r in rows:
            skipped = f" ({r.skipped} skipped)" if r.skipped else ""
            differences = len(r.differences) or "none"
            cells = (r.client, r.version, f"{r.checks}{skipped}", r.passed, r.ours, differences)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        if "torch" not in {r.client for r in rows}:
            lines += [
                "",
                f"Not run: torch, whose packages for Python {python} bring CUDA with them.",
            ]
        for heading, attribute in (
            ("Differences", "differences"),
            ("What fails as it is", "failures"),
        ):
            texts = [f"- {r.client}, {text}" for r in rows for text in getattr(r, attribute)]
            found = [text.replace("<", "&lt;") for text in texts]
            if found:
                lines += ["", f"{heading}:", "", *found]
        split = [f"- {r.client}: {', '.join(f'`{x}`' for x in r.split)}" for r in rows if r.split]
        if split:
            lines += [
                "",
                "Results that stay split with mylib, and are replicated without:",
                "",
                *split,
            ]
        lines.append("")
        abouts |= {r.client: r.abouts for r in rows if r.abouts}
    lines += ["## What is run", ""]
    for client, about in abouts.items():
        lines += [f"**{client}**", "", *(f"- {text}" for text in about), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", metavar="CLIENT")
    parser.add_argument("--python", action="append", metavar="PATH")
    parser.add_argument("--jax-checkout", type=Path, metavar="DIR")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    unknown = set(options.clients) - {*PACKAGES, "jax"}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    if "jax" in options.clients and options.jax_checkout is None:
        parser.error("JAX's tests are not in its releases: --jax-checkout DIR says where they are")
    clients = options.clients or [*PACKAGES, *(["jax"] if options.jax_checkout else [])]
    environments = [Environment(python) for python in options.python or [sys.executable]]
    differs = False
    for environment in environments:
        for client in clients:
            if client == "torch" and not environment.has_torch:
                continue
            if client == "jax":
                found = environment.run_jax(options.jax_checkout)
            else:
                found = environment.run(client)
            environment.keep(found)
            differs |= bool(found.differences)
            print(f"{environment.version}: {client} {found.passed} {found.ours}", flush=True)
    text = table(sorted((ROOT / ".clients").glob("python*")))
    print(text)
    if options.write:
        page = PAGE.read_text()
        head, tail = page[: page.index(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n{tail}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
