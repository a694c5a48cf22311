"""One launch, from the request through admission and supervision to its `launch.end` entry.

    refuse? -> launches/<nnnn>/ -> launch.start -> supervisor -> launch.end -> heartbeat removed

`supervisor` knows processes and no journal; this module joins the two.
"""

from __future__ import annotations

import functools
import os
import secrets
import selectors
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from chronicle.checkpoints import SaveWatch, checkpoints_left
from chronicle.errors import JournalError
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import (
    CheckpointSeen,
    EndCause,
    EntryKind,
    LaunchAttempt,
    LaunchEnd,
    LaunchSettings,
    LaunchStart,
    LaunchStep,
    events_of,
)
from chronicle.journal.place import look, refuse_copy
from chronicle.journal.reader import anchor_heads, damage_overridden
from chronicle.journal.writer import store_bytes
from chronicle.launch.admission import (
    LaunchRefused,
    close_lost_launches,
    ensure_node_in_use,
    ensure_startable,
    hold_admission,
    take_number,
)
from chronicle.launch.channels import Channels, rank_prefix_of
from chronicle.launch.code import CODE_VARIABLE, files_of, read_code
from chronicle.launch.containment import (
    TOKEN_ONLY,
    TOKEN_VARIABLE,
    ControlGroup,
    become_subreaper,
    describe_containment,
    make_group,
)
from chronicle.launch.ending import Ending, Seen, Steps, count_oom_kills, full_disks, judge_attempt, judge_end
from chronicle.launch.heartbeat import (
    FRESH_SECONDS,
    INTERVAL_SECONDS,
    Heartbeat,
    lease_path,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from chronicle.launch.launchers import REQUESTED_VARIABLE, build_environment, count_requested_ranks
from chronicle.launch.live_metrics import (
    DeviceSampler,
    LiveDetector,
    PrintedMetrics,
    last_point,
    last_steps,
    read_start_step,
)
from chronicle.launch.nodes import Node, Peers, share_number
from chronicle.launch.output import read_last_lines
from chronicle.launch.pods import take_lease
from chronicle.launch.provenance import describe_launch, host_name, read_packages, read_settings_files
from chronicle.launch.pulse import PULSES_VARIABLE, make_pulses_dir, read_attempts_begun, remove_pulses_dir
from chronicle.launch.ranks import OUTPUT_VARIABLE, FirstFailure, RankDeath, RankWatch
from chronicle.launch.record import (
    TAIL_LINES,
    LaunchRecord,
    LaunchSeals,
    code_of,
    describe_end,
    first_failures,
    format_end,
    refusal_of,
    reported_failure,
    title_of_end,
)
from chronicle.launch.slurm import ask_job, job_of
from chronicle.launch.stall import StallWatch
from chronicle.launch.supervisor import DO_NOT_REQUEUE, LaunchOutcome, Supervisor, signals_wait
from chronicle.metrics.log import read_attempts
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import FILE_SOURCE, plain_settings, planned_steps
from rollback.disk.durable import mount_points


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What to start, and how to end it."""

    command: tuple[str, ...]
    paths: RunPaths
    checkpoints_dir: Path | None
    cwd: Path
    environ: Mapping[str, str]
    grace_seconds: float
    stop_on_proposal: bool = False
    stop_on_stall: bool = False
    rhythm: Mapping[str, Any] = field(default_factory=dict)  # what an earlier launch learned (`LaunchEnd.rhythm`)
    force: str | None = None  # reason to start although a launch seems alive elsewhere, or the journal is damaged
    overrode: tuple[str, ...] = ()  # that damage
    recorded: Mapping[str, Any] = field(default_factory=dict)  # further fields of `launch.start`
    node: Node | None = None  # set when this is one of several nodes of a launch

    @property
    def is_first(self) -> bool:
        """Whether this is the only node, or the one that speaks for all."""
        return self.node is None or self.node.number == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """Number and exit code of a launch, and the data of its `launch.end`."""

    launch: int
    exit_code: int
    data: Mapping[str, Any]


T = TypeVar("T")
JUDGED_LINES = 200  # last lines in which an exception is looked for

# --- One admitted launch

class Launch:
    """One admitted launch: supervisor, channels, ranks, devices and live detector, and the journal entries about them."""

    def __init__(
        self,
        request: LaunchRequest,
        number: int,
        token: str,
        writer: JournalWriter,
        live_watch: Callable[..., LiveDetector] | None,
    ) -> None:
        self._request, self._number, self._token = request, number, token
        self._directory = request.paths.launch_dir(number)
        self._metrics = request.paths.metrics_path(number)
        self._selector = selectors.PollSelector()
        self._said: set[str] = set()
        self._group: ControlGroup | None = None
        self._lease: int | None = None
        self._oom_kills = count_oom_kills()
        self._attempts: list[tuple[int, float]] = []  # each further start of the ranks by their launcher, and when
        self._start_step: int | None = None
        self._saves: SaveWatch | None = None
        self._proposal: object | None = None  # the event of the detector that stops the launch
        self._processes: tuple[tuple[int, int], ...] = ()  # of the newest heartbeat
        self._state_told = ""  # of the stall watch, in the newest heartbeat
        node, self._peers = request.node, None
        if node is not None:
            self._peers = Peers(self._directory, node.number, request.grace_seconds)
        self._record = LaunchRecord(writer, number, complain=self._complain)
        self._seals = LaunchSeals(request.paths, number, self._record)
        self._pulses = make_pulses_dir()
        self._ranks = RankWatch(
            self._selector,
            on_attempt=self._note_attempt,
            named=self._named,
            begun=functools.partial(read_attempts_begun, self._pulses),
        )
        self._printed = PrintedMetrics(
            self._metrics, say=self._say_for_detector, complain=self._complain, on_step_back=self._ranks.hear
        )
        self._channels = Channels(
            self._directory,
            self._selector,
            complain=self._complain,
            rank_prefix=rank_prefix_of(request.command),
            on_rank=self._ranks.add,
            on_rotate=self._seals.seal_part,
            on_printed=self._printed.take if request.is_first else lambda source, data: None,
            log_name="supervisor.log" if node is None or node.number == 0 else f"supervisor-node{node.number}.log",
        )
        host = host_name()
        self._devices = DeviceSampler(self._directory, self._selector, host=host, step=self._last_step)
        keeps_code = request.environ.get(CODE_VARIABLE, "").lower() not in ("off", "0", "no")
        self._code = read_code(request.cwd, with_patch=keeps_code)
        self._packages = read_packages(request.command, request.environ)
        self._start = describe_launch(request.command, request.cwd, request.environ, self._code, self._packages)
        self._stall = StallWatch(
            pulses=self._pulses,
            rank_pids=lambda: self._ranks.pids,
            signs=self._signs,
            step=self._last_step,
            say=self._channels.say,
            write=self._record.write,
            directory=self._directory,
            host=host,
            launch=number,
            known=request.rhythm,
            others_work=self._others_work,
            devices=lambda: self._devices.busy,
        )
        self._watch: LiveDetector | None = None
        if live_watch is not None and request.is_first:  # one detector a launch; a run without it is better than no run
            self._watch = self._contained(
                "the live detector",
                lambda: live_watch(
                    request.paths, number, writer, checkpoints_dir=request.checkpoints_dir, say=self._say_for_detector
                ),
            )

    def enter(self) -> None:
        """Write `launch.start`. From then on no other launch of this run is admitted."""
        request = self._request
        subreaper = become_subreaper()
        self._group = make_group(self._token, request.environ)
        if request.force:
            self._start |= {"force": request.force, "overrode": list(request.overrode)}
        self._lease = take_lease(lease_path(request.paths.heartbeats_dir, self._start["host"]))
        self._start |= {
            **request.recorded,
            "token": self._token,
            "containment": describe_containment(subreaper, self._group),
            "grace_seconds": request.grace_seconds,
            "lease": self._lease is not None,
        }
        if self._group is not None:
            self._start["cgroup"] = str(self._group.path)
        self._contained("code", self._store_patch)
        self._contained("packages", self._store_packages)
        purpose = f" ({self._start['purpose']}: {self._start['part']})" if "purpose" in self._start else ""
        command = " ".join(self._start["argv"])
        command = command if len(command) <= 120 else command[:119] + "…"
        self._record.write(LaunchStart.from_json(self._start), title=f"launch {self._number}{purpose}: {command}")
        if request.is_first:
            self._contained("settings", self._record_files)

    def _record_files(self) -> None:
        """The settings files that the command names, before a person edits them."""
        for name, values in read_settings_files(self._request.command, self._request.cwd):
            event = LaunchSettings(values=plain_settings(values), source=f"{FILE_SOURCE}{name}")
            self._record.write(event, title=f"settings of {name}: {', '.join(map(str, values))}"[:200])

    def _store_patch(self) -> None:
        """Keep the uncommitted changes as an object of the run; where they cannot be kept, the entry says why."""
        code = self._code
        if code.patch is not None:
            stored = store_bytes(self._request.paths, code.patch, "uncommitted.patch")
            self._start["code_patch"] = {**stored, "files": len(files_of(code.patch)), "hidden": code.hidden}
        elif code.why:
            self._start["code_patch"] = {"why": code.why}

    def _store_packages(self) -> None:
        """Keep the list of packages as the object that `env_digest` names: the same list is kept once."""
        if self._packages is not None:
            store_bytes(self._request.paths, self._packages, "packages")

    def run(self) -> LaunchResult:
        """Supervise the launch to its end. Raises `LaunchRefused` when the command cannot be started."""
        request, number = self._request, self._number
        sys.stdout.flush()
        holds = self._start["containment"]
        weak = f"; {holds}" if holds.startswith(TOKEN_ONLY) else ""
        self._channels.say(f"launch {number} of run `{request.paths.run}`: logs in {self._directory}{weak}")
        if request.is_first:  # note which checkpoints lie there before the launch
            self._contained("checkpoints", self._watch_saves)
        supervisor = self._make_supervisor()
        try:
            outcome = supervisor.run()
        except OSError as error:
            end = LaunchEnd(
                host=self._start["host"],
                exit_code=LaunchRefused.exit_code,
                cause=EndCause.REFUSED,
                because=f"`{request.command[0]}` cannot be started: {error.strerror or error}",
            )
            self._record.write(end, title=f"launch {number} could not start: {error}")
            raise LaunchRefused(f"cannot start `{request.command[0]}`: {error.strerror or error}") from error
        finally:
            if self._group is not None:
                self._group.remove()
            remove_pulses_dir(self._pulses)
            remove_heartbeat(request.paths.heartbeats_dir, self._heartbeat(()))
        with signals_wait():
            return self._finish(outcome)

    def _make_supervisor(self) -> Supervisor:
        request = self._request
        ours = {
            "CHRONICLE_RUN": request.paths.run,
            "CHRONICLE_RUN_DIR": request.paths.run_dir.resolve(),
            "CHRONICLE_LAUNCH": self._number,
            "CHRONICLE_LAUNCH_DIR": self._directory.resolve(),
            OUTPUT_VARIABLE: self._channels.listen(f"chronicle-{self._token}"),
            TOKEN_VARIABLE: self._token,
            PULSES_VARIABLE: self._pulses,
            REQUESTED_VARIABLE: count_requested_ranks(request.command),
        }
        if request.checkpoints_dir is not None:
            ours["CHRONICLE_CHECKPOINTS"] = request.checkpoints_dir.resolve()
        environ = build_environment(request.environ, ours, request.grace_seconds)
        if os.isatty(0) and "PYTHONBREAKPOINT" not in environ:
            environ["PYTHONBREAKPOINT"] = "0"  # its prompt would read the end of a file and end the trainer
            self._channels.say("the trainer has no terminal: `breakpoint()` is skipped; debug without `chronicle run`")
        return Supervisor(
            command=request.command,
            environ=environ,
            cwd=request.cwd,
            token=self._token,
            grace_seconds=request.grace_seconds,
            selector=self._selector,
            channels=self._channels,
            ranks=self._ranks,
            group=self._group,
            watch=self._look,
            work=self._printed.read_some,
            beat=self._beat,
            beat_seconds=INTERVAL_SECONDS,
        )

    def _finish(self, outcome: LaunchOutcome) -> LaunchResult:
        self._printed.finish(in_a_hurry=outcome.stopped_by is not None)
        self._note_start_step()
        if self._watch is not None:
            self._note_proposal(self._watch.finish)
        launcher_tail = self._channels.log.last_lines(TAIL_LINES)
        ending = self._judge(outcome, launcher_tail)
        refused = ending.cause is EndCause.REFUSED
        if refused:
            outcome = replace(outcome, exit_code=DO_NOT_REQUEUE)  # torchrun returns 1 when a rank returns 78
        channels = self._channels
        data = describe_end(
            outcome,
            host=self._start["host"],
            last_step=self._last_step(),
            tails=self._rank_tails(outcome),
            launcher_tail=launcher_tail,
            lost_bytes=channels.lost_bytes,
            late=channels.latency.late,
            ending=ending,
            explained=refused or outcome.stopped_by == "proposal",
        )
        if rhythm := self._stall.rhythm():
            data["rhythm"] = rhythm
        if self._attempts:
            data["attempts"] = self._intervals()
        if self._printed.writing:
            data["metrics_from"] = "printed lines"
        if channels.latency.tested:
            data["latency_tested_ranks"] = len(channels.latency.tested)
        event = self._proposal
        if event is not None and outcome.stopped_by == "proposal":
            data["proposal"] = str(getattr(event, "title", None) or getattr(event, "kind", "") or event)[:400]
        for line in format_end(self._number, data):
            channels.say(line)
        channels.close()  # the logs are sealed now; later messages go to the terminal only
        data["sealed"] = self._seals.seal_all(self._is_ours)
        title = title_of_end(self._number, data)
        self._record.write(LaunchEnd.from_json(data), title=title, step=data["last_step"])
        if self._peers is not None:
            peers = self._peers
            self._contained("the other nodes", lambda: peers.tell(data))
        self._contained("checkpoints", self._record_checkpoints)
        if self._record.waiting:
            self._complain(f"{self._record.waiting} journal entries could not be written and are lost")
        self._close()
        return LaunchResult(launch=self._number, exit_code=outcome.exit_code, data=data)

    def _judge(self, outcome: LaunchOutcome, launcher_tail: Sequence[str]) -> Ending:
        """Look at everything that may tell why the launch ended."""
        request, death = self._request, outcome.first_to_end
        failed = outcome.exit_code != 0
        refusal = refusal_of(read_journal(request.paths), self._number, launcher_tail) if failed else ""
        printed = self._channels.log.last_lines(JUDGED_LINES)
        rank, code = (death.rank, code_of(death, launcher_tail)) if death is not None else reported_failure(printed)
        if failed and not refusal and DO_NOT_REQUEUE in (outcome.exit_code, code):
            refusal = f"the trainer ended with {DO_NOT_REQUEUE}: guard or preflight refused"
        job = job_of(request.environ)
        lead = request.environ.get("CHRONICLE_SIGNAL_LEAD", "")
        lines = self._rank_tails(outcome, JUDGED_LINES).get(death.rank) if death is not None else None
        killed = outcome.killed_behind
        if death is not None and death.code == -signal.SIGKILL:
            killed = killed or f"rank {death.rank} was ended by SIGKILL"
        return judge_end(
            Seen(
                exit_code=outcome.exit_code,
                launcher_code=outcome.launcher_code,
                stopped_by=outcome.stopped_by,
                stop_signal=outcome.stop_signal,
                refused=refusal,
                rank=rank,
                rank_code=code,
                oom_kills=self._oom_kills_since(),
                full=full_disks(self._written_to()),
                lines=tuple(lines or printed),
                scheduler=ask_job(job, now=time.time()) if job is not None and (failed or outcome.stopped_by) else None,
                in_job=job,
                lead_seconds=float(lead) if lead.isdigit() else 0.0,
                peer="" if self._peers is None else self._peers.said,
                stall=self._stall.words,
                steps=Steps() if failed or not request.is_first else self._steps_known(),
                killed=killed,
            )
        )

    def _oom_kills_since(self) -> int | None:
        """Processes that the kernel ended for lack of memory since the launch, or its present attempt, began."""
        now = count_oom_kills()
        return None if now is None or self._oom_kills is None else now - self._oom_kills

    def _steps_known(self) -> Steps:
        """What the log, the guard and the settings say of the steps of this launch and of the run."""
        entries, number = read_journal(self._request.paths).entries, self._number
        own = {entry.kind for entry in entries if entry.launch == number}
        earlier = [end.last_step for entry, end in events_of(entries, LaunchEnd) if (entry.launch or 0) < number]
        reached = [step for step in earlier if step is not None]
        handed = self._start.get("handed") or {}
        logged = last_steps(self._metrics)
        begun = self._start_step if handed.get("step") is None else handed["step"]
        if begun is None and reached:
            begun = reached[-1]
        guarded = EntryKind.GUARD_ATTACHED in own
        stepped = EntryKind.GUARD_VERDICT in own
        return Steps(
            planned=planned_steps(entries, number),
            begun=begun,
            last=logged[-1] if logged else None,
            stride=max(1, logged[-1] - (logged[0] if len(logged) > 1 else begun or 0)) if logged else 1,
            none_taken=guarded and not stepped and not logged,
            none_logged=bool(reached) and not stepped and not logged,
        )

    def _named(self) -> list[FirstFailure]:
        """The ranks that the launcher has named as first to fail. What it prints before it starts ranks is read by then."""
        self._channels.read_waiting()
        return [one for one, _ in first_failures(self._channels.log.tail)]

    def _lines_of_attempt(self, death: RankDeath | None) -> list[str]:
        """What the launcher and its ranks printed in the attempt that ended with `death`: between two words of the launcher."""
        log = self._channels.log
        before = log.received - len(log.tail)
        words = [(one.pid, before + end) for one, end in first_failures(log.tail)]
        place = next((place for place, (pid, _) in enumerate(words) if death is not None and pid == death.pid), len(words))
        start = words[place - 1][1] if place else 0
        return log.last_lines(JUDGED_LINES, start=start, end=words[place][1] if place < len(words) else None)

    def _note_attempt(self, attempt: int, death: RankDeath | None, seconds_ago: float) -> None:
        """The launcher started its ranks again: say why the attempt before ended, and where its log stood."""
        self._channels.read_waiting()  # what it printed last
        own = [] if death is None else self._channels.last_lines_of(death.rank, death.pid, JUDGED_LINES)
        lines = own or self._lines_of_attempt(death)
        ending = judge_attempt(
            Seen(
                exit_code=1,
                rank=None if death is None else death.rank,
                rank_code=None if death is None else death.code,
                oom_kills=self._oom_kills_since(),
                full=full_disks(self._written_to()),
                lines=tuple(lines),
            )
        )
        self._oom_kills = count_oom_kills()
        began = time.time() - seconds_ago
        self._attempts.append((attempt, began))
        self._printed.begin_attempt(attempt)
        host = self._start["host"]
        event = LaunchAttempt(
            host=host, attempt=attempt, began=round(began, 3), cause=ending.cause.value, because=ending.because
        )
        self._record.write(event, title=f"attempt {attempt} of launch {self._number} begins: {ending.because}")
        self._channels.say(f"the launcher starts its ranks again (attempt {attempt}): {ending.because}")

    def _intervals(self) -> list[dict[str, int]]:
        """The logged steps of each attempt: by the marks of their writer; by their times where it makes none."""
        try:
            points = list(read_attempts(self._metrics))
        except OSError:
            return []
        steps: dict[int, list[int]] = {}
        moments = [when for _, when in self._attempts]
        marked = any(attempt for attempt, _ in points)
        for attempt, point in points:
            if marked or point.time is not None:
                number = attempt if marked else bisect_right(moments, point.time or 0.0)
                steps.setdefault(number, []).append(point.step)
        return [{"attempt": number, "first_step": own[0], "last_step": max(own)} for number, own in steps.items()]

    def _written_to(self) -> list[Path]:
        """Where the launch writes: its run directory, the checkpoints, disks below its directory, what its command names."""
        here = self._request.cwd.resolve()
        below = [Path(point) for point in mount_points() if Path(point).is_relative_to(here)]
        named = [Path(word) for word in self._request.command[1:] if os.path.isabs(word)]
        known = [self._request.paths.run_dir, here, *below, *named]
        try:
            return [*known, *map(Path, self._roots())]
        except (JournalError, OSError):
            return known  # a journal that cannot be read ends no launch

    def _watch_saves(self) -> None:
        self._saves = SaveWatch(self._roots, self._entries, self._record.writer.place.run_id)

    def _record_new_saves(self) -> None:
        """Record the checkpoints without an identity that have appeared: no guard says who saved them."""
        if self._saves is not None:
            self._write_seen(self._saves.look())

    def _record_checkpoints(self) -> None:
        """Record the checkpoints without an identity that the launch has left and that are not recorded yet."""
        if self._saves is not None:
            run_id = self._record.writer.place.run_id
            self._write_seen(checkpoints_left(self._roots(), self._saves.before, self._entries(), run_id))

    def _entries(self) -> tuple[Entry, ...]:
        return tuple(read_journal(self._request.paths).entries)

    def _write_seen(self, saves: Iterable[tuple[int, CheckpointSeen]]) -> None:
        for step, seen in saves:
            self._record.write(seen, title=f"checkpoint {Path(seen.path).name} of launch {self._number}", step=step)

    def _roots(self) -> tuple[str, ...]:
        """The directories of checkpoints: those that are known, and the usual one, which may not be there yet."""
        known = self._record.writer.place.anchors(self._request.paths.run_dir).roots
        return known if known else (str(self._request.cwd / "checkpoints"),)

    def _contained(self, what: str, work: Callable[[], T]) -> T | None:
        """Do something that a launch can do without: an error is said and ends nothing."""
        try:
            return work()
        except JournalError:
            return None  # reported with the entries of the launch
        except Exception as error:  # noqa: BLE001 the launch matters more than this record
            self._complain(f"cannot look at {what}: {type(error).__name__}: {error}")
            return None

    def _rank_tails(self, outcome: LaunchOutcome, count: int = TAIL_LINES) -> dict[int, list[str]]:
        """Return the last lines by rank, from logs written here or from a `rank-<r>.log` that the trainer wrote."""
        tails = {rank: log.last_lines(count) for rank, log in self._channels.rank_logs.items()}
        death = outcome.first_death
        if death is not None and death.rank not in tails:
            tails[death.rank] = read_last_lines(self._request.paths.rank_log(self._number, death.rank), count)
        return tails

    def _is_ours(self, path: Path) -> bool:
        node = self._request.node
        if node is None:
            return True
        mine = {self._channels.log.path.stem, f"host-{self._start['host']}"}
        if node.number == 0:
            mine |= {"metrics", "samples"}
        mine |= {f"rank-{rank}" for rank in (*self._channels.rank_logs, *self._ranks.pids)}
        return path.name.split(".")[0] in mine

    def _close(self) -> None:
        deadline = time.monotonic() + 2.0
        while self._channels.waiting_views and time.monotonic() < deadline:
            time.sleep(0.02)  # give a slow terminal time for the last lines
            self._channels.flush_views()
        self._ranks.close()
        self._devices.close()
        self._record.writer.close()
        self._selector.close()
        if self._lease is not None:
            os.close(self._lease)

    def _say_for_detector(self, line: str) -> None:
        self._channels.say(line.removeprefix("chronicle: "))

    def _look(self) -> str | None:
        """Once a second: record the start step; why the launch is to be stopped, if it is."""
        self._printed.write_due()
        self._devices.look(time.monotonic())
        self._note_start_step()
        self._channels.latency.check(self._channels.say)
        if self._watch is not None and self._note_proposal(self._watch.poll):
            return "proposal"
        stands = self._contained("signs of progress", self._stall.tick)
        if self._stall.state != self._state_told:
            self._beat(self._processes)  # `status` hears of every change from the heartbeat
        if stands and self._request.stop_on_stall:
            return "stall"
        return "peer" if self._peers is not None and self._peers.have_failed() else None

    def _note_proposal(self, ask: Callable[[], Iterable[object]]) -> bool:
        """Ask the live detector; whether it has just proposed what stops this launch."""
        events = self._contained("the detector's events", lambda: list(ask())) or []
        proposing = [event for event in events if _tier_of(event) == "propose"]
        if not proposing or not self._request.stop_on_proposal or self._proposal is not None:
            return False
        self._proposal = proposing[0]
        return True

    def _signs(self) -> tuple[int, int, int]:
        """Signs of progress: printed points, bytes of the metrics, bytes of output."""
        try:
            size = 0 if self._printed.writing else os.stat(self._metrics).st_size  # what we write ourselves is late and no sign
        except OSError:
            size = 0
        return self._printed.seen, size, self._channels.log.received

    def _others_work(self) -> str:
        """Of several nodes: one whose ranks work, or are not known to stand still, by its heartbeat; "" where none does."""
        now, own = time.time(), self._start["host"]
        for beat in read_heartbeats(self._request.paths.heartbeats_dir) if self._peers is not None else ():
            if beat.launch != self._number or beat.host == own or beat.age(now) >= FRESH_SECONDS:
                continue
            state = (beat.progress or {}).get("state")
            if state not in ("stands here", "stands"):
                return f"node {beat.host}: {state or 'not known'}"
        return ""

    def _note_start_step(self) -> None:
        """Record the start step from the per-step log, for trainers without a guard."""
        if self._start_step is not None or not self._request.is_first:
            return
        self._start_step = read_start_step(self._metrics)
        if self._start_step is None:
            return
        verdicts = read_journal(self._request.paths).of_kind(EntryKind.GUARD_VERDICT)
        if not any(entry.launch == self._number for entry in verdicts):  # the guard's is exact, and not contradicted
            self._record.write(LaunchStep(start_step=self._start_step, inferred=True), step=self._start_step)

    def _beat(self, processes: Sequence[tuple[int, int]]) -> None:
        self._processes, self._state_told = tuple(processes), self._stall.state
        error = write_heartbeat(self._request.paths.heartbeats_dir, self._heartbeat(processes))
        if error is not None:
            self._complain(f"cannot write the heartbeat: {error.strerror or error}")
        if self._record.waiting:
            self._record.flush()
        self._contained("checkpoints", self._record_new_saves)
        self._devices.sample()

    def _last_step(self) -> int | None:
        point = last_point(self._metrics)
        return None if point is None else point.step

    def _heartbeat(self, processes: Sequence[tuple[int, int]]) -> Heartbeat:
        start = self._start
        me = {name: start[name] for name in ("host", "pid", "boot_id", "uid")}
        return Heartbeat(
            **me,
            launch=self._number,
            start_ticks=start["start_ticks"] or 0,
            time=time.time(),
            processes=tuple(processes),
            progress=self._stall.progress(time.time()),
        )

    def _complain(self, text: str) -> None:
        """Write a message to stderr, once. Not to the log, which may be what failed."""
        if text in self._said:
            return
        self._said.add(text)
        try:
            os.write(2, f"chronicle: {text}\n".encode("utf-8", "replace"))
        except OSError:
            pass  # stderr is closed


def _tier_of(event: object) -> str:
    """The tier as a word, whether it is an enum member or text."""
    tier = getattr(event, "tier", "")
    return str(getattr(tier, "value", tier)).lower()


# --- Admission, then the launch


def launch(request: LaunchRequest, *, live_watch: Callable[..., LiveDetector] | None = None) -> LaunchResult:
    """Run one launch to its end. Raises `LaunchRefused` when nothing was started, `Refusal` for a copied run."""
    paths = request.paths
    if shutil.which(request.command[0], path=request.environ.get("PATH")) is None:
        raise LaunchRefused(f"`{request.command[0]}` is not an executable on the PATH", "activate its environment first")
    _refuse_copied(paths)  # before the lock, which writes its holder into the directory
    with hold_admission(paths):
        _refuse_copied(paths)
        one = _admit(request, live_watch)
        one.enter()
    return one.run()


def _refuse_copied(paths: RunPaths) -> None:
    place, standing = look(paths)
    if place is not None:
        refuse_copy(place, standing, paths)


def _take_part(paths: RunPaths, number: int, node: Node) -> None:
    """Raise `LaunchRefused` for a node that comes back alone: the ranks of the others wait for those that are gone."""
    try:
        (paths.launch_dir(number) / f".node{node.number}").open("x").close()
    except FileExistsError:
        raise LaunchRefused(
            f"node {node.number} has already taken part in launch {number} of job `{node.key}`",
            "start all nodes of the job again, as a JobSet does: its next start has another job",
        ) from None


def _known_rhythm(journal: Journal) -> Mapping[str, Any]:
    """What the newest launch that came to a rhythm learned; {} where none did."""
    ends = [LaunchEnd.view(entry.data) for entry in journal.of_kind(EntryKind.LAUNCH_END)]
    return next((end.rhythm for end in reversed(ends) if end.rhythm), {})


def _admit(request: LaunchRequest, live_watch: Callable[..., LiveDetector] | None) -> Launch:
    paths = request.paths
    journal = read_journal(paths)
    ensure_node_in_use(journal, force=request.force)
    if request.node is None:
        ensure_startable(paths, journal, now=time.time(), force=request.force)
        number = take_number(paths)
    else:  # other nodes of this launch may be running already
        number = share_number(paths, request.node.key, lambda: take_number(paths))
        ensure_startable(paths, journal, now=time.time(), force=request.force, own=number)
        _take_part(paths, number, request.node)
    request = replace(
        request,
        recorded={**request.recorded, "journal_heads": anchor_heads(journal)},
        overrode=damage_overridden(paths, journal) if request.force else (),
        rhythm=_known_rhythm(journal),
    )
    writer = JournalWriter(paths, checkpoints=request.checkpoints_dir)
    try:
        request = replace(request, recorded={**request.recorded, "run_id": writer.place.run_id})
        close_lost_launches(paths, journal, writer)
    except JournalError:
        pass  # reported with the first entry of this launch
    return Launch(request, number, secrets.token_hex(16), writer, live_watch)
