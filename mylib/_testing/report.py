"""Merges the reports of several processes into one report of a test.

Only this module decides what "some failed, some were skipped, one died" means:

| the processes say                | the test                                              |
|----------------------------------|-------------------------------------------------------|
| all passed                       | has passed                                            |
| one or more failed               | has failed: the first to fail first, equal texts once |
| one died                         | has failed: how it died, what it printed last         |
| some have not finished           | has failed: where they are                            |
| all skipped, xfailed or xpassed  | the same                                              |
| some skipped, others not         | has failed: the processes disagree                    |
| some xfailed, others passed      | has xfailed                                           |
| all passed, but not in step      | has passed, with an error in its tear-down            |
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from .._core.text import counted
from .._moving.processes import named
from .pool import Outcome, Result, named_status

# Phases of plugins come between them.
_PLACES = {"setup": 0, "teardown": 2}
_OUTCOMES = {"passed", "failed", "skipped"}
# Frames of ours or of pytest, and libraries' messages at exit.
_NOISE = (
    "/_pytest/",
    "/pluggy/",
    "/pytest/__main__.py",
    "/mylib/_testing/worker.py",
    "/mylib/_testing/process.py",
    "<frozen runpy>",
    "Extension modules:",
    "    @     0x",
    "*** Check failure stack",
)
# Show at most this many lines of a stack.
_STACK = 30
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LAST_WORDS = 4000


class Text:
    """The text of a failure: a line for the summary, and sections."""

    def __init__(self, summary: str, sections: Sequence["Section"]) -> None:
        # pytest and its JUnit file read the line from here.
        self.reprcrash = SimpleNamespace(message=summary)
        self._sections = sections

    def toterminal(self, writer: Any) -> None:
        writer.line(self.reprcrash.message, bold=True, red=True)
        for heading, body in self._sections:
            writer.line()
            writer.line(f"--- {heading} ---", bold=True)
            if hasattr(body, "toterminal"):
                body.toterminal(writer)
            elif body:
                writer.line(str(body))

    def __str__(self) -> str:
        sections = [f"--- {heading} ---\n{body}".rstrip() for heading, body in self._sections]
        return "\n\n".join([self.reprcrash.message, *sections])


# A heading, and a text or pytest's representation of an exception.
Section = tuple[str, Any]


@dataclass
class Merger:
    """Merges the reports of one test."""

    item: pytest.Item
    result: Result
    timeout: float | None
    grace: float
    start: float

    def reports(self) -> list[pytest.TestReport]:
        merged = [self.merge(group) for group in self.by_phase()]
        _count_subtests(merged)
        lost = [o for o in self.result.outcomes if not o.finished or o.trouble]
        if lost and not any(report.failed for report in merged):
            merged = [r for r in merged if r.when == "setup" and r.passed]
            merged.append(self._lost(lost))
        if not any(report.when == "teardown" for report in merged):
            merged.append(report_of(self.item, "teardown", "passed", start=self.start))
        if self.result.out_of_step and merged[-1].passed:
            merged[-1].outcome = "failed"
            merged[-1].longrepr = (
                "the test has left its processes out of step, and they have been killed: "
                f"{self.result.out_of_step}. All must do the same work, and wait for everything "
                "that they start"
            )
        return merged

    def by_phase(self) -> list[dict[int, pytest.TestReport]]:
        """The processes' reports by phase, and by subtest in it."""
        config = self.item.config
        phases: dict[tuple[str, str, int], dict[int, pytest.TestReport]] = {}
        for outcome in self.result.outcomes:
            times: Counter[Any] = Counter()
            for data in outcome.reports:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                name = (report.when, repr(getattr(report, "context", None)))
                times[name] += 1
                phases.setdefault((*name, times[name]), {})[outcome.index] = report
        return [phases[key] for key in sorted(phases, key=lambda key: _PLACES.get(key[0], 1))]

    def merge(self, reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
        """One report of a phase: that of the first process, with what all of them say."""
        failed = {i: r for i, r in reports.items() if r.failed}
        skipped = {i: r for i, r in reports.items() if r.skipped}
        expected = [r.wasxfail for r in reports.values() if hasattr(r, "wasxfail")]
        others = [r for r in reports.values() if r.outcome not in _OUTCOMES]
        outcome, text = "passed", None
        if failed:
            outcome, text = "failed", self._failure(failed)
        elif skipped and len(skipped) < len(reports) and not expected:
            outcome, text = "failed", self._disagreement(skipped, reports)
        elif skipped:
            outcome = "skipped"
            skip = next(iter(skipped.values()))
            # JSON has no tuples, but pytest needs one for the location of a skip.
            text = tuple(skip.longrepr) if isinstance(skip.longrepr, list) else skip.longrepr
        elif others:
            # An outcome of a plugin, which handles it itself.
            outcome, text = others[0].outcome, others[0].longrepr
        merged: Any = next(iter(reports.values()))
        merged.nodeid, merged.outcome, merged.longrepr = self.item.nodeid, outcome, text
        vars(merged).pop("wasxfail", None)
        if expected and not failed:
            merged.wasxfail = expected[0]
        merged.duration = max(r.duration for r in reports.values())
        merged.sections = [
            (f"{name} [process {i}]", printed)
            for i, r in reports.items()
            for name, written in r.sections
            if (printed := _without_gloo(written))
        ]
        pairs = [tuple(pair) for r in reports.values() for pair in r.user_properties]
        merged.user_properties = list(dict.fromkeys(pairs))
        return merged

    def _lost(self, lost: Sequence[Outcome]) -> pytest.TestReport:
        text, duration = self._failure({}), max(0.0, time.time() - self.start)
        report = report_of(self.item, "call", "failed", text, start=self.start, duration=duration)
        report.sections = [
            (f"Captured {name} call [process {o.index}]", printed)
            for o in lost
            if o.status is None
            for name, written in (("stdout", o.output), ("stderr", o.errors))
            if (printed := _without_gloo(written))
        ]
        return report

    def _disagreement(
        self, skipped: Mapping[int, pytest.TestReport], reports: Mapping[int, pytest.TestReport]
    ) -> Text:
        others = [i for i in reports if i not in skipped]
        reasons = [f"process {i}: {_skip_reason(r)}" for i, r in skipped.items()]
        return Text(f"the processes disagree: {'; '.join(reasons)}; but {named(others)} ran", [])

    def _failure(self, failed: Mapping[int, pytest.TestReport]) -> Text:
        """All failures, the first one first."""
        failures = list(self._failures(failed))
        sections = [section for _, section in failures]
        fine = [
            o.index
            for o in self.result.outcomes
            if o.finished and not o.trouble and o.index not in failed
        ]
        if fine:
            sections.append((f"{named(fine)} did not fail", ""))
        return Text("; ".join([head for head, _ in failures if head][:3]), sections)

    def _failures(self, failed: Mapping[int, pytest.TestReport]) -> Iterator[tuple[str, Section]]:
        texts = {i: _ADDRESS.sub("0x", r.longreprtext) for i, r in failed.items()}
        shown: set[str] = set()
        for order, outcome in enumerate(self.result.by_time):
            name = self._one_of(outcome.index)
            if outcome.index in failed:
                text = texts[outcome.index]
                if text not in shown:
                    shown.add(text)
                    who = self._all_of(sorted(i for i in texts if texts[i] == text))
                    report = failed[outcome.index]
                    yield f"{who}: {_headline(report)}", (f"{who} failed", report.longrepr)
            elif outcome.status is not None:
                head = f"{name} died: {named_status(outcome.status)}"
                after = ", after another had failed" if order else ""
                output = _without_noise(outcome.output + outcome.errors)
                yield head, (head + after, output[-_LAST_WORDS:].strip())
            elif outcome.trouble:
                text = outcome.trouble.strip()
                yield f"{name}: {text.splitlines()[-1]}", (name, text)
            elif not outcome.finished:
                late = f"{self.grace:g} s after the first failure"
                if timed_out := self.result.timed_out:
                    late = f"after {self.timeout:g} s"
                head = f"{name} had not finished {late}"
                where = stack_of(outcome.stack or "") or "(it does not respond to signals either)"
                yield head if timed_out else "", (f"{head}; it was here", where)

    def _one_of(self, index: int) -> str:
        return f"process {index} of {len(self.result.outcomes)}"

    def _all_of(self, indices: Sequence[int]) -> str:
        if len(indices) == 1:
            return self._one_of(indices[0])
        are_all = len(indices) == len(self.result.outcomes)
        return "all processes" if are_all else named(indices)


def report_of(
    item: pytest.Item,
    when: Any,
    outcome: Any,
    text: Any = None,
    *,
    start: float,
    duration: float = 0.0,
) -> pytest.TestReport:
    keywords: Any = dict.fromkeys(item.keywords, 1)
    times: Any = {"duration": duration, "start": start, "stop": start + duration}
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, text, when, **times)


def _count_subtests(reports: Sequence[pytest.TestReport]) -> None:
    """Makes a test with failed subtests fail. Each process's pytest would do so only when showing
    the test, which it doesn't.
    """
    failed = sum(hasattr(r, "context") and r.failed for r in reports)
    for report in reports:
        if failed and report.when == "call" and report.passed and not hasattr(report, "context"):
            report.outcome = "failed"
            report.longrepr = f"contains {counted(failed, 'failed subtest')}"


def _headline(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else report.longreprtext
    lines = message.strip().splitlines()
    return lines[0] if lines else "failed"


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr
    return str(text[2]) if isinstance(text, tuple | list) else str(text)


def stack_of(text: str) -> str:
    """The main thread's stack, which faulthandler prints last."""
    return "\n".join(_without_noise(text.strip().split("\n\n")[-1]).splitlines()[:_STACK])


def _without_noise(text: str) -> str:
    lines = _without_gloo(text).splitlines()
    return "\n".join(line for line in lines if not any(noise in line for noise in _NOISE))


def _without_gloo(text: str) -> str:
    """Removes the line that gloo prints for each group of processes."""
    lines = text.splitlines()
    return "\n".join(x for x in lines if "peer ranks" not in x or "Rank" not in x).strip()
