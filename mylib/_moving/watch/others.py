"""The exchange between this process and the others of a watch.

It runs in the thread that compares the processes' calls (`processes/comparing.py`): that one may
wait for the coordination service, which stops with the process that keeps it.
"""

import threading
import time

from ..processes import comparison, connected, lost
from .ending import leave_python, say
from .news import Bulletin
from .progress import Progress
from .report import report, standstill
from .verdict import GONE, Account, Told, is_stuck

# In seconds: the longest time between two messages of a process, and between two readings of all of
# them, which only the first two processes do.
_TELL = 10.0
_READ = 5.0
_READERS = 2
# On a busy machine a process may be silent for so long.
_SILENT = 2.0
# A process that makes progress looks for the order to end once in this many messages.
_ORDERS = 3
# If processes seem to be stuck they tell and read more often, but no more messages a second.
_OFTEN = 1.0
_RATE = 200
# Seconds to leave the others; and for them to end before the process that keeps the service.
_LAST = 5.0
_AFTER = 12.0
# The report waits this long for the records of other processes.
_PATIENCE = 2.0
# A process that has used so much of its limit tells all that it knows of itself.
_SOON = 0.8


class Others:
    """The other processes."""

    def __init__(self, progress: Progress, number: int):
        self._progress = progress
        self._limit = progress.limit
        self._me, self._count = progress.me, progress.count
        self._bulletin = Bulletin(connected(), number, self._me)
        self._began = self._heard = time.monotonic()
        self._told = self._read = float("-inf")
        self._number = 0
        # The last news of each, and when they came.
        self._seen: dict[int, tuple[Told, float]] = {}
        # The longest time without progress of any of them.
        self._oldest = 0.0
        self._is_reported = False
        # The standstill whose record has been published.
        self._recorded: object = None
        self._why: str | None = None
        self._has_left = threading.Event()
        self._comparison = comparison()
        self._comparison.also = self._exchange
        self._comparison.wake()

    def leave(self, why: str) -> None:
        self._why = why
        self._comparison.wake()
        self._has_left.wait(_LAST)
        self._comparison.also = None

    def remind(self, now: float) -> None:
        """Lets the other thread send what is due. If it can't, this process reports alone."""
        progress = self._progress
        if self._is_due(now) or self._reads_now(now):
            self._comparison.wake()
        silence = now - self._heard
        if progress.age >= self._limit and silence > max(_LAST, 2.5 * self._pace()):
            progress.conclude(
                f"no progress for {progress.age:.0f} s, and the coordination service, which "
                f"process 0 keeps, has not answered for {silence:.0f} s: it may be stopped or cut "
                "off. The others could not be asked"
            )

    def _pace(self) -> float:
        if self._seems_stuck():
            return max(min(_OFTEN, self._limit / 8), self._count / _RATE)
        return min(_TELL, self._limit / 5)

    def _seems_stuck(self) -> bool:
        return max(self._progress.age, self._oldest) >= self._limit / 2

    def _quiet(self) -> float:
        """A process is silent if it has published nothing for this many seconds."""
        return min(2.5 * min(_TELL, self._limit / 5) + 3, max(_SILENT, self._limit / 2))

    def _is_due(self, now: float) -> bool:
        return now - self._told >= self._pace()

    def _reads_now(self, now: float) -> bool:
        often = self._pace() if self._seems_stuck() else min(_READ, self._limit / 10)
        return self._me < _READERS and now - self._read >= often

    def _exchange(self) -> None:
        """In the other thread."""
        now = time.monotonic()
        if self._has_left.is_set():
            return
        if self._why is not None:
            self._tell_record()
            self._tell(now, "left")
            self._bulletin.leave(self._count)
            self._has_left.set()
            return
        if self._is_due(now):
            self._tell(now)
            if self._seems_stuck() or self._number % _ORDERS == 1:
                self._obey()
        if self._reads_now(now) or self._takes_over(now):
            self._judge(now)
        self._heard = time.monotonic()

    def _tell(self, now: float, state: str = "") -> None:
        progress, self._number, self._told = self._progress, self._number + 1, now
        account = progress.account(full=False)
        if progress.age >= _SOON * self._limit and self._recorded != progress.last:
            self._tell_record()
        standing = {
            "number": self._number,
            "age": progress.age,
            "state": state or account.state,
            "why": self._why or "",
            "recorded": self._recorded == progress.last,
        }
        self._bulletin.tell("news", account.news | standing)

    def _tell_record(self) -> None:
        self._recorded = self._progress.last
        self._bulletin.tell("record", self._progress.account(full=True).record)

    def _obey(self) -> None:
        if (who := self._bulletin.who_ends_all()) is not None:
            say(f"mylib.watch: process {who} has reported who is stuck, and ends this one")
            self._end()

    def _takes_over(self, now: float) -> bool:
        """Whether this process reads everybody's news, as those that usually do are silent."""
        if self._me < _READERS or self._progress.age < self._limit / 2:
            return False
        for i in range(_READERS):
            news = self._bulletin.read_one("news", i)
            if news is not None:
                self._observe(i, news, now)
        return all(not self._speaks(self._account(i, now)) for i in range(_READERS))

    def _observe(self, index: int, news: Told, now: float) -> None:
        before = self._seen.get(index)
        if before is None or before[0]["number"] != news["number"]:
            self._seen[index] = news, now

    def _accounts(self, now: float) -> list[Account]:
        """The accounts of all processes, from their latest news."""
        for i, news in self._bulletin.read("news").items():
            self._observe(i, news, now)
        return [self._account(i, now) for i in range(self._count)]

    def _account(self, index: int, now: float) -> Account:
        if index == self._me:
            return self._progress.account(full=False)
        if index in lost():  # The others go on without it.
            news = {**self._seen.get(index, ({}, 0.0))[0], "why": "being lost"}
            return Account(index, 0.0, state="lost", news=news)
        if index not in self._seen:
            return Account(index, now - self._began, state="absent")
        news, came = self._seen[index]
        state, since = news["state"], now - came
        silent = since if since > self._quiet() and state not in GONE else 0.0
        at_work = state == "paused" or state == "compiling" and not silent
        age = 0.0 if at_work or state in GONE else news["age"] + since
        return Account(index, age, silent, state, news)

    def _speaks(self, account: Account) -> bool:
        return not (account.silent or account.state in GONE or account.state == "absent")

    def _judge(self, now: float) -> None:
        self._read = now
        accounts = self._accounts(now)
        self._oldest = max(account.age for account in accounts)
        if not is_stuck(accounts, self._limit):
            self._is_reported = False
        elif not (self._is_reported or any(map(self._speaks, accounts[: self._me]))):
            others = (account for account in accounts if account.index != self._me)
            slow = [account for account in others if account.age >= self._limit / 2]
            all_told = all(account.news["recorded"] for account in slow if self._speaks(account))
            if all_told or self._oldest >= self._limit + _PATIENCE:
                self._is_reported = True
                self._report(accounts)

    def _report(self, accounts: list[Account]) -> None:
        if self._progress.end and not self._bulletin.end_all():
            return  # another process was faster, and reports
        records = self._bulletin.read("record")
        for account in accounts:
            if account.index == self._me:
                account.record = self._progress.account(full=True).record
            elif account.news.get("recorded") and not account.silent:
                account.record = records.get(account.index, {})
        say(report(accounts, standstill(self._oldest, self._limit)))
        if self._progress.end:
            self._end()

    def _end(self) -> None:
        now = until = time.monotonic()
        self._tell(now, "ended")
        if self._me == 0:
            # JAX ends the others in its own way when the service ends.
            until += _AFTER
        while now < until and any(map(self._speaks, self._accounts(now)[1:])):
            time.sleep(_OFTEN / 2)
            now = time.monotonic()
        leave_python()
