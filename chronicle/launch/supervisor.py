"""Supervise the processes of one launch: copy output, forward signals, watch ranks, and end remaining processes.

    start ── running ──(launcher ends | signal | proposal)── ending ──(nothing left | grace over: TERM, KILL)── ended

A signal is sent to the launcher only, and after its death to the processes it left to us. A DataLoader worker is not
signalled, because its death would break the save of its trainer; one whose trainer has died is ended at once, because it holds
the trainer's connections open (a fork has them all), and the other ranks would wait for the dead one. One thread, no locks.

Nothing here reads what a line says: a loop that must answer signals does only what takes no time. `second` does the rest.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from chronicle.launch.channels import Channels
from chronicle.launch.containment import ControlGroup, EndReport, die_with_parent, end_processes, find_contained
from chronicle.launch.processes import Process, read_process, send_signal, signal_name, walk_children
from chronicle.launch.ranks import RankDeath, RankWatch
from chronicle.launch.second import Second

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TAKEN_AS_TERM = (signal.SIGQUIT, signal.SIGUSR2)  # their default would end a process without a record
WATCH_SECONDS = 1.0
LOOK_SECONDS = 2.0  # for the first LOOK_EARLY_SECONDS, then with each heartbeat
LOOK_AGAIN_SECONDS = 0.5  # while a launcher may be starting its ranks again
LOOK_EARLY_SECONDS = 120.0
LOOK_OFTEN_SECONDS, LOOK_FIRST_SECONDS = 0.2, 20.0  # .3 ms of CPU a look at eight ranks
BEYOND_GRACE_SECONDS = 3.0  # launchers send their own KILL first, because they report which rank did not end
STALLED_GRACE_SECONDS = 30.0  # at most: ranks that stand still save nothing
TERM_SECONDS = 5.0
QUIET_SECONDS = 2.0  # children of a launcher that succeeded may be ending too
LOADER_NAME = "pt_data_worker"  # as torch names the processes of a DataLoader; they look for their parent every 5 s
DO_NOT_REQUEUE = 78  # guard or preflight refused: a restart would be refused again


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended. `exit_code` is returned by `chronicle run`; `launcher_code` is negative for a signal."""

    exit_code: int
    launcher_code: int
    signal: str | None
    stopped_by: str | None  # "signal", "proposal", "peer", "stall", or None
    stop_signal: str | None  # the signal that was forwarded
    duration_seconds: float
    ended: EndReport
    first_death: RankDeath | None
    launcher_ended_at: float
    killed_behind: str = ""  # a process that the launcher left, which somebody else ended by SIGKILL

    @property
    def first_to_end(self) -> RankDeath | None:
        """The rank that ended first; None where a signal ended the launcher before any of its ranks."""
        death = self.first_death
        return None if death is not None and self.launcher_code < 0 and death.time > self.launcher_ended_at else death


@dataclass(kw_only=True)
class Supervisor:
    """Runs one command to its end. `beat` is called with the living process tree every `beat_seconds`.

    `watch` is called once a second; the reason that it returns ends the launch.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    cwd: Path
    token: str
    grace_seconds: float
    selector: selectors.BaseSelector
    channels: Channels
    ranks: RankWatch
    second: Second
    group: ControlGroup | None
    watch: Callable[[], str | None]
    beat: Callable[[Sequence[tuple[int, int]]], None]
    beat_seconds: float
    _launcher: Process | None = None
    _launcher_pid: int | None = None
    _launcher_code: int | None = None
    _launcher_ended_at: float = 0.0
    _killed_behind: str = ""
    _num_deaths: int = 0  # of ranks whose orphans were looked for
    _signals: list[int] = field(default_factory=list)  # received from outside, in order
    _stop_signal: int | None = None
    _stopped_by: str | None = None
    _deadline: float = float("inf")
    _told: set[tuple[int, int]] = field(default_factory=set)
    _started: float = 0.0

    def run(self) -> LaunchOutcome:
        """Start the launcher and return when all its processes have ended. Raises OSError when it cannot be started."""
        with _SignalPipe(self.selector, self._signals):
            self._started = time.monotonic()
            self._start()
            self.second.start()
            self._loop()
            ended = self._end_rest()
            self.channels.drain()
            self.second.finish(self._pump_for, stopped=self._stopped_by == "signal")
        return self._outcome(ended)

    def _start(self) -> None:
        out, err = self.channels.open_pipes()
        prepare = die_with_parent()  # safe: this process has not started a thread yet
        if self.group is not None:
            prepare = self.group.joining(prepare)
        stdin = None if not os.isatty(0) else subprocess.DEVNULL  # its new session has no terminal to read from
        try:
            child = subprocess.Popen(
                list(self.command),
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=dict(self.environ),
                cwd=self.cwd,
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            for fd in {out, err}:
                os.close(fd)
        child.returncode = 0  # reaped by `_reap`, together with adopted orphans
        self._launcher_pid = child.pid
        self._launcher = read_process(child.pid)
        if self.group is not None and self._launcher is not None and not self.group.holds(child.pid):
            self.channels.say("the launcher could not enter its cgroup; subreaper and token still apply")

    def _loop(self) -> None:
        next_watch = next_look = next_beat = self._started
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self.beat(self.ranks.look())
                next_beat = now + self.beat_seconds
            elif now >= next_look and (now - self._started < LOOK_EARLY_SECONDS or self.ranks.unsettled):
                self.ranks.look()
                next_look = now + self._look_seconds(now)
            if now >= next_watch and self._stop_signal is None and (reason := self.watch()) is not None:
                self._stop(signal.SIGTERM, reason)
            if now >= next_watch:
                next_watch = now + WATCH_SECONDS
            soon = next_look if self.ranks.unsettled or self._are_ranks_missing(now) else next_beat
            self._wait(min(next_watch, next_beat, soon, self._deadline) - time.monotonic())
            self._reap()
            self._end_orphaned_loaders()
            self._take_signals()
            if self._launcher_code is not None and not self._go_on_ending():
                return
            if time.monotonic() >= self._deadline:
                return

    def _wait(self, seconds: float) -> None:
        if self._launcher_code is not None:
            seconds = min(seconds, 0.05)
        elif self.channels.waiting_views:
            seconds = min(seconds, 0.1)
        for key, _ in self.selector.select(max(seconds, 0.0)):
            if key.fd in self.selector.get_map():  # an earlier callback of this round may have closed the descriptor
                key.data()
        self.channels.flush_views()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._launcher_pid and self._launcher_code is None:
                self._launcher_code = os.waitstatus_to_exitcode(status)
                self._launcher_ended_at = time.monotonic()
            elif self.second.ended(pid, os.waitstatus_to_exitcode(status)):
                continue
            elif os.waitstatus_to_exitcode(status) == -signal.SIGKILL and self._stop_signal is None:
                self._killed_behind = f"process {pid}, which the launcher had left, was ended by SIGKILL"

    def _end_orphaned_loaders(self) -> None:
        """End the DataLoader workers of ranks that have died: as orphans they are our own children now."""
        if len(self.ranks.deaths) == self._num_deaths:
            return
        self._num_deaths = len(self.ranks.deaths)
        for process in walk_children(os.getpid(), apart=self.second.pid):
            if process.parent == os.getpid() and process.name == LOADER_NAME:
                send_signal(process, signal.SIGTERM)

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            number = signal.SIGTERM if number in TAKEN_AS_TERM else number
            if self._stopped_by == "signal" and number == signal.SIGINT == self._stop_signal:
                self._deadline = time.monotonic()  # Ctrl-C twice ends the grace period
            elif self._stop_signal is None or self._launcher_code is not None:
                self._stop(number, "signal")
            elif number != self._stop_signal:  # SLURM signals every process of a step, so the same one comes several times
                self._forward(number)

    def _look_seconds(self, now: float) -> float:
        """When the ranks are looked for again: soon, until all are known. One that lives shorter is never seen."""
        if self._are_ranks_missing(now):
            return LOOK_OFTEN_SECONDS
        return LOOK_AGAIN_SECONDS if self.ranks.unsettled else LOOK_SECONDS

    def _are_ranks_missing(self, now: float) -> bool:
        return now - self._started < LOOK_FIRST_SECONDS and not self.ranks.complete

    def _stop(self, number: int, reason: str) -> None:
        """Begin to end the launch: forward the signal and set the deadline."""
        if self._stopped_by is None:
            self._stopped_by = reason
            self._stop_signal = number
            grace = min(self.grace_seconds, STALLED_GRACE_SECONDS) if reason == "stall" else self.grace_seconds
            self._deadline = min(self._deadline, time.monotonic() + grace + BEYOND_GRACE_SECONDS)
            self.channels.say(f"{signal_name(number)} forwarded; processes have {grace:g} s to save and end")
        self._forward(number)

    def _forward(self, number: int) -> None:
        if self._launcher is not None and self._launcher_code is None:
            send_signal(self._launcher, number)

    def _go_on_ending(self) -> bool:
        """After the launcher's end, signal the processes it left. False when none are left."""
        alive = [process for process in walk_children(os.getpid(), apart=self.second.pid) if process.alive]
        if not alive:
            alive = self._contained()  # the complete search, when the cheap one finds nothing
        if not alive:
            return False
        now = time.monotonic()
        if self._stop_signal is None:
            ended_well = self._launcher_code == 0
            if ended_well and now - self._launcher_ended_at < QUIET_SECONDS:
                return True
            self._stop_signal = signal.SIGTERM
            seconds = TERM_SECONDS if ended_well else self.grace_seconds + BEYOND_GRACE_SECONDS
            self._deadline = now + seconds
            names = ", ".join(f"{process.name} ({process.pid})" for process in alive[:5])
            self.channels.say(f"the launcher has ended and left {len(alive)} processes, which are being ended: {names}")
        for process in alive:
            if process.parent == os.getpid() and process.key not in self._told:
                self._told.add(process.key)
                send_signal(process, self._stop_signal)
        return True

    def _end_rest(self) -> EndReport:
        report = end_processes(
            self._contained,
            term_seconds=TERM_SECONDS,
            reap=self._pump,
            kill_all=self.group.kill if self.group is not None else lambda: None,
        )
        if self.group is not None:
            self.group.remove()
        self._reap()
        self.ranks.collect()
        return report

    def _contained(self) -> list[Process]:
        return find_contained(self.token, self.group, apart=self.second.pid)

    def _pump_for(self, seconds: float) -> bool:
        """Let the selector work for so long; whether a signal has come meanwhile."""
        num_signals = len(self._signals)
        self._wait(seconds)
        self._reap()
        return len(self._signals) > num_signals

    def _pump(self) -> None:
        """Keep reading while processes are ended: a process that blocks in `write` cannot end."""
        for key, _ in self.selector.select(0):
            if key.fd in self.selector.get_map():
                key.data()
        self.channels.flush_views()
        self._reap()

    def _outcome(self, ended: EndReport) -> LaunchOutcome:
        launcher = self._launcher_code if self._launcher_code is not None else -signal.SIGKILL
        by_signal = -launcher if launcher < 0 else None
        code = 128 + by_signal if by_signal is not None else launcher
        warned = self._stopped_by == "signal" and self._stop_signal == signal.SIGUSR1
        if (self._stopped_by is not None and launcher not in (0, DO_NOT_REQUEUE)) or (warned and launcher == 0):
            # torchrun turns every signal into exit code 1, so the forwarded signal is reported instead. USR1 is a
            # scheduler's warning: a trainer that saved and ended with 0 has not finished its run and must be requeued.
            assert self._stop_signal is not None
            by_signal = self._stop_signal
            code = 128 + by_signal
        if self._stopped_by in ("proposal", "stall"):
            code = 128 + signal.SIGTERM
        return LaunchOutcome(
            exit_code=code,
            launcher_code=launcher,
            signal=None if by_signal is None else signal_name(by_signal),
            stopped_by=self._stopped_by,
            stop_signal=signal_name(self._stop_signal) if self._stopped_by and self._stop_signal else None,
            duration_seconds=time.monotonic() - self._started,
            ended=ended,
            first_death=self.ranks.first_death(),
            launcher_ended_at=self._launcher_ended_at or time.monotonic(),
            killed_behind=self._killed_behind,
        )


@contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that would end this process come when the block is over: an end that is being written is written whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, *TAKEN_AS_TERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SignalPipe:
    """Receives signals as bytes in the selector; restores the previous handlers at the end."""

    def __init__(self, selector: selectors.BaseSelector, received: list[int]) -> None:
        self._selector = selector
        self._received = received
        self._before: dict[int, Any] = {}
        self._old_wakeup = -1
        self._ends = (-1, -1)

    def __enter__(self) -> None:
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in (*FORWARDED, *TAKEN_AS_TERM, signal.SIGCHLD):
            if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGCHLD:
                continue  # an ignored signal stays ignored (`nohup chronicle run …`)
            self._before[number] = signal.signal(number, _ignore)
        self._selector.register(self._ends[0], selectors.EVENT_READ, self._read)

    def __exit__(self, *exc: object) -> None:
        self._selector.unregister(self._ends[0])
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        for end in self._ends:
            os.close(end)

    def _read(self) -> None:
        try:
            numbers = os.read(self._ends[0], 512)
        except BlockingIOError:
            return
        self._received += (number for number in numbers if number != signal.SIGCHLD)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: a handler must exist so that the wakeup byte is written; exec resets it to the default."""

