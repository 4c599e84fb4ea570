"""Reads stored programs in which one word is changed: an attribute, an opcode, a key of metadata or
of a backend's settings, renamed, dropped, or at another place. What is told must be equal, or
unknown, or an `AuditError`. It is silently wrong if another value is told.

By hand: `python tests/audit/mutated_texts.py` for all, `--text NAME` for one. It prints what is
silently wrong, and what crashes.
"""

import argparse
import collections
import contextlib
import gzip
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mylib
from mylib._programs.audit.peak import peak_of

TEXTS = Path(__file__).parent / "texts"
NAMES = (
    "cpu-0.12.0.1-fsdp_scan", "gpu-0.12.0.1-cond", "gpu-0.10.2-pbroadcast", "gpu-0.12.0.1-ragged",
    "gpu-0.12.0.1-attention", "gpu-0.12.0.1-mlp_dp_scan", "tpu-0.10.2-iota_rs_b",
    "tpu-0.12.0.1-scan53", "tpu-0.12.0.1-mlp_tp_scan", "tpu-0.12.0.1-mlp_dp_list",
    "tpu7x-0.12.0.1-product",
)  # fmt: skip
_ATTRIBUTE = re.compile(r", ([a-z_]\w*)=")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][a-z0-9\-]*)(?=\()")
_FORM = re.compile(r"(-start|-update|-done|)$")
_INNER = re.compile(r'(?<=[{ ])([a-z_]\w*)=(?=["\d{])|"([a-z_]\w*)":')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# Names that XLA and JAX give to what they have written, which an analysis looks for.
_WORDS = (
    "transpose(", "jvp(", "rematted_computation", "while/body", "/dot_general",
    "windowed_dot_general_body", "async_collective_fusion", "is_spmd_generated", "kind=kLoop",
)  # fmt: skip
_LINE = re.compile(r"^\s+(?:ROOT )?%\S+ = .*$", re.MULTILINE)
_PER_KEY = 2  # single places at which a word is changed alone, besides all of them together


class Mutation(NamedTuple):
    how: str
    word: str
    text: str


def mutations(text: str) -> Iterator[Mutation]:
    yield from _header(text)
    for kind, pattern in (
        ("opcode", _OPCODE), ("attribute", _ATTRIBUTE), ("key", _INNER), ("target", _TARGET),
    ):  # fmt: skip
        places: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for line in _LINE.finditer(text):
            for match in pattern.finditer(text, line.start(), line.end()):
                group = 1 if match[1] is not None else 2
                places[match[group]].append(match.span(group))
        for word, spans in places.items():
            chosen = spans if len(spans) <= _PER_KEY else spans[:: -(-len(spans) // _PER_KEY)]
            for each in [spans, *([span] for span in chosen if len(spans) > 1)]:
                where = "everywhere" if each is spans else f"at {each[0][0]}"
                new = _FORM.sub(r"-x\1", word, count=1) if kind == "opcode" else f"{word}_x"
                yield Mutation(f"{kind} renamed {where}", word, _renamed(text, each, new))
                if kind == "attribute":
                    yield Mutation(f"{kind} dropped {where}", word, _dropped(text, each))
                    yield Mutation(f"{kind} moved {where}", word, _moved(text, each))


def _header(text: str) -> Iterator[Mutation]:
    header = text[: text.index("\n")]
    for match in re.finditer(r", (\w+)=", header):
        word = match[1]
        end = _end(text, match.end())
        yield Mutation("header renamed", word, text.replace(f", {word}=", f", {word}_x=", 1))
        yield Mutation("header dropped", word, text[: match.start()] + text[end:])
    for word in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
        if f"\n{word}\n" in text:
            yield Mutation("table renamed", word, text.replace(f"\n{word}\n", f"\n{word}X\n", 1))
    for word in _WORDS:
        yield Mutation("name renamed", word, text.replace(word, f"{word[:2]}x{word[2:]}"))
    for layout in dict.fromkeys(re.findall(r"(?:S|T)\([\d,]+\)", text)):
        yield Mutation("layout dropped", layout, text.replace(layout, ""))
        yield Mutation("layout renamed", layout, text.replace(layout, f"L{layout}"))


def _end(text: str, start: int) -> int:
    """The end of the value of an attribute."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif depth == 0 and (c == "\n" or (c == "," and text[i + 1] == " ")):
            if not text.startswith(", device_ids=(", i):
                return i
    return len(text)


def _renamed(text: str, spans: list[tuple[int, int]], word: str) -> str:
    for start, end in reversed(spans):
        text = text[:start] + word + text[end:]
    return text


def _dropped(text: str, spans: list[tuple[int, int]]) -> str:
    for start, end in reversed(spans):
        text = text[: start - 2] + text[_end(text, end + 1) :]
    return text


def _moved(text: str, spans: list[tuple[int, int]]) -> str:
    """With the attribute as the last of its line."""
    for start, end in reversed(spans):
        stop, line = _end(text, end + 1), text.index("\n", end)
        value = text[start - 2 : stop]
        text = text[: start - 2] + text[stop:line] + value + text[line:]
    return text


def told(text: str) -> dict[str, Any]:
    """All that a report and the contracts read."""
    report = mylib.audit(text)
    graph = report.flow.graph
    module, memory = report.flow.module, None
    with contextlib.suppress(mylib.errors.AuditError):
        memory = peak_of(module).bytes
    fields: dict[str, Any] = {
        "name": report.name,
        "axes": report.axes,
        "parameters": report.parameters,
        "flops": report.work.flops,
        "traffic": report.work.traffic,
        "unknown": report.work.unknown,
        "schedule": report.work.schedule,
        "peak": memory,
        "donated": module.donated,
        "count": len(report.collectives),
        "results": [tuple(graph.sources_in(mark.any)) for mark in graph.results],
        "arrays": [tuple(graph.sources_in(mark.arrays)) for mark in graph.results],
        "products": [tuple(graph.sources_in(mark.product)) for mark in graph.results],
        "into": sorted((k, v.any, v.near, v.arrays) for k, v in graph.into.items()),
        "behind": sorted((k, v.product) for k, v in graph.into.items()),
        "unnamed": sorted(graph.unnamed.values()),
        "uses": sorted((k, sorted(v)) for k, v in graph.uses.items()),
        "differentiates": graph.differentiates,
        "sums": [report.flow.is_sum(bit) for bit in graph.into],
    }
    for i, c in enumerate(report.collectives):
        for name in c.__dataclass_fields__:
            fields[f"{i}.{name}"] = getattr(c, name)
    return fields


def judge(right: dict[str, Any], mutation: Mutation) -> tuple[str, str]:
    """`"equal"`, `"unknown"`, `"error"`, `"valid"`, `"crash"` or `"wrong"`, and what differs."""
    try:
        found = told(mutation.text)
    except mylib.errors.AuditError:
        return "error", ""
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"[:100]
    differ = [key for key in right.keys() | found.keys() if right.get(key) != found.get(key)]
    if not differ:
        return "equal", ""
    if found["unknown"] > right["unknown"]:
        differ = [k for k in differ if k not in ("flops", "traffic", "schedule", "unknown")]
    # Products that may be of the model or of an optimiser: contracts decide by the data.
    unnamed = found["unnamed"] != right["unnamed"]
    differ = [k for k in differ if not (unnamed and k in ("unnamed", "products", "behind"))]
    # Contracts refuse such a program.
    differ = [k for k in differ if not (k == "uses" and found["differentiates"] is None)]
    wrong = {k for k in differ if k not in found or not _is_unknown(k, right.get(k), found[k])}
    names = {k.split(".")[-1] for k in wrong}
    if not names:
        return "unknown", ""
    for how, word, fields, _ in VALID:
        if re.match(how, mutation.how) and re.fullmatch(word, mutation.word) and names <= fields:
            return "valid", ", ".join(sorted(names))
    return "wrong", ", ".join(sorted(names))


_SIZES = {"peak", "schedule", "traffic"}
# Mutations that make another valid program: what is told of it is true. How a word is changed,
# which word, what is told otherwise, and why it may be.
VALID: tuple[tuple[str, str, set[str], str], ...] = (
    ("layout dropped", r"[ST]\(\d[\d,]*\)", _SIZES, "an array in other memory, or without tiles"),
    ("layout dropped", r"T\(1,0\)", {"axes"}, "the same list of devices in another order"),
    ("name renamed", "/dot_general", {"primitive", "uses"}, "another primitive"),
    ("name renamed", "while/body", {"scope"}, "a scope of a user's"),
    ("name renamed", "rematted_computation", {"phase", "uses", "scope"}, "a scope of a user's"),
    (
        "(attribute|key) .* at ", "metadata|op_name", {"primitive"},
        "an instruction without a name, as compilers write: its neighbour's is told",
    ),
)  # fmt: skip

# Empty if they are unknown, as is documented.
_MAY_BE_EMPTY = {"arrays", "gradients", "primitive", "scope", "source", "axes"}


def _is_unknown(key: str, right: Any, found: Any) -> bool:
    """Whether what is told is what is right, or unknown, in each part."""
    match key.split(".")[-1]:
        case "parameters":
            numbered = enumerate(zip(right, found, strict=True))
            return all(
                replace(b, path=a.path) == a and b.path in (a.path, f"argument {i}")
                for i, (a, b) in numbered
            )
        case "uses":
            return [bit for bit, _ in right] == [bit for bit, _ in found] and all(
                {(u.loops, u.size) for u in a} == {(u.loops, u.size) for u in b}
                and {u.phase for u in b} <= {u.phase for u in a} | {"unknown"}
                for (_, a), (_, b) in zip(right, found, strict=True)
            )
        case "loops":
            return all(b in ("", a) for a, b in zip(right, found, strict=True))
        case "arrays" if all(re.fullmatch(r"argument \d+", x) for x in {*found} - {*right}):
            return True
        case name if name in _MAY_BE_EMPTY and not found:
            return True
    return found is None or found == "unknown"


@dataclass
class Tally:
    """The verdicts on the mutations of a text; and those that are silently wrong, or crash."""

    counts: collections.Counter[str]
    bad: dict[tuple[str, str, str, str], int]


def tally_of(name: str) -> Tally:
    text = gzip.decompress((TEXTS / f"{name}.hlo.gz").read_bytes()).decode()
    right, tally = told(text), Tally(collections.Counter(), collections.Counter())
    for mutation in mutations(text):
        if mutation.text != text:
            verdict, what = judge(right, mutation)
            tally.counts[verdict] += 1
            if verdict in ("wrong", "crash"):
                how = re.sub(r" at \d+", " at one place", mutation.how)
                tally.bad[verdict, how, mutation.word, what] += 1
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", choices=NAMES)
    args = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    for name in [args.text] if args.text else NAMES:
        tally = tally_of(name)
        print(name, dict(tally.counts), flush=True)
        for (verdict, how, word, what), count in tally.bad.items():
            print(f"  {verdict}: {how}: {word} [{what}], {count} times")
        total.update(tally.counts)
    print(sum(total.values()), dict(total))
    return min(1, total["wrong"] + total["crash"])


if __name__ == "__main__":
    sys.exit(main())
