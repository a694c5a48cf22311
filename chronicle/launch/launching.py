"""One launch, from the request through admission and supervision to its `launch.end` entry.

    refuse? -> launches/<nnnn>/ -> launch.start -> supervisor -> launch.end -> heartbeat removed

`supervisor` knows processes and no journal; this module joins the two.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import sys
import time
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
    LaunchEnd,
    LaunchSettings,
    LaunchStart,
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
from chronicle.launch.ending import Ending, Seen, Steps, count_oom_kills, full_disks, judge_end
from chronicle.launch.heartbeat import (
    INTERVAL_SECONDS,
    Heartbeat,
    lease_path,
    remove_heartbeat,
    take_lease,
    write_heartbeat,
)
from chronicle.launch.launchers import REQUESTED_VARIABLE, build_environment, count_requested_ranks
from chronicle.launch.live_metrics import last_point, last_steps, read_start_step
from chronicle.launch.nodes import Node, Peers, share_number
from chronicle.launch.output import read_last_lines
from chronicle.launch.provenance import describe_launch, host_name, read_packages, read_settings_files
from chronicle.launch.pulse import PULSES_VARIABLE, make_pulses_dir, remove_pulses_dir
from chronicle.launch.ranks import OUTPUT_VARIABLE, RankWatch
from chronicle.launch.record import (
    TAIL_LINES,
    LaunchRecord,
    LaunchSeals,
    code_of,
    contained,
    describe_end,
    format_end,
    refusal_of,
    reported_failure,
    title_of_end,
)
from chronicle.launch.second import Second
from chronicle.launch.slurm import ask_job, job_of
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
    hooks: Mapping[str, str] = field(default_factory=dict)  # of the user, one per tier of an event
    options: tuple[str, ...] = ()  # what a proposed command needs to find the same run and checkpoints
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
    ) -> None:
        self._request, self._number, self._token = request, number, token
        self._directory = request.paths.launch_dir(number)
        self._metrics = request.paths.metrics_path(number)
        self._selector = selectors.PollSelector()
        self._said: set[str] = set()
        self._group: ControlGroup | None = None
        self._lease: int | None = None
        self._oom_kills = count_oom_kills()
        self._saves: SaveWatch | None = None
        self._processes: tuple[tuple[int, int], ...] = ()  # of the newest heartbeat
        self._state_told: object = None  # of the stall watch, in the newest heartbeat
        node, self._peers = request.node, None
        if node is not None:
            self._peers = Peers(self._directory, node.number, request.grace_seconds)
        self._record = LaunchRecord(writer, number, complain=self._complain)
        self._seals = LaunchSeals(request.paths, number, self._record)
        self._pulses = make_pulses_dir()
        self._ranks = RankWatch(self._selector, apart=lambda: self._second.pid)
        self._channels = Channels(
            self._directory,
            self._selector,
            complain=self._complain,
            rank_prefix=rank_prefix_of(request.command),
            on_rank=self._ranks.add,
            log_name="supervisor.log" if node is None or node.number == 0 else f"supervisor-node{node.number}.log",
        )
        self._second = Second(self._facts(), self._selector, say=self._channels.say)
        keeps_code = request.environ.get(CODE_VARIABLE, "").lower() not in ("off", "0", "no")
        self._code = read_code(request.cwd, with_patch=keeps_code)
        self._packages = read_packages(request.command, request.environ)
        self._start = describe_launch(request.command, request.cwd, request.environ, self._code, self._packages)

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

    def _facts(self) -> dict[str, Any]:
        """What the follower has to know."""
        request = self._request
        return {
            "run_dir": str(request.paths.run_dir.absolute()),
            "launch": self._number,
            "log": self._channels.log.path.name,
            "checkpoints": None if request.checkpoints_dir is None else str(request.checkpoints_dir),
            "pulses": None if self._pulses is None else str(self._pulses),
            "host": host_name(),
            "is_first": request.is_first,
            "has_peers": request.node is not None,
            "rhythm": dict(request.rhythm),
            "oom_kills": self._oom_kills,
            "hooks": dict(request.hooks),
            "options": list(request.options),
            "stop_on_proposal": request.stop_on_proposal,
            "stop_on_stall": request.stop_on_stall,
        }

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
            second=self._second,
            group=self._group,
            watch=self._look,
            beat=self._beat,
            beat_seconds=INTERVAL_SECONDS,
        )

    def _finish(self, outcome: LaunchOutcome) -> LaunchResult:
        point = last_point(self._metrics)
        launcher_tail = self._channels.log.last_lines(TAIL_LINES)
        ending = self._judge(outcome, launcher_tail)
        refused = ending.cause is EndCause.REFUSED
        if refused:
            outcome = replace(outcome, exit_code=DO_NOT_REQUEUE)  # torchrun returns 1 when a rank returns 78
        channels = self._channels
        data = describe_end(
            outcome,
            host=self._start["host"],
            last_step=None if point is None else point.step,
            tails=self._rank_tails(outcome),
            launcher_tail=launcher_tail,
            lost_bytes=channels.lost_bytes,
            ending=ending,
            explained=refused or outcome.stopped_by == "proposal",
        )
        heard = self._second.heard
        if heard.get("rhythm"):
            data["rhythm"] = heard["rhythm"]
        if intervals := self._intervals():
            data["attempts"] = intervals
        if heard.get("printed"):
            data["metrics_from"] = "printed lines"
        if outcome.stopped_by == "proposal":
            data["proposal"] = heard["words"]
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
                stall=self._second.heard.get("words", ""),
                steps=Steps() if failed or not request.is_first else self._steps_known(),
                killed=killed,
            )
        )

    def _oom_kills_since(self) -> int | None:
        """Processes that the kernel ended for lack of memory since the launch, or its present attempt, began."""
        now, before = count_oom_kills(), self._second.heard.get("oom_kills", self._oom_kills)
        return None if now is None or before is None else now - before

    def _steps_known(self) -> Steps:
        """What the log, the guard and the settings say of the steps of this launch and of the run."""
        entries, number = read_journal(self._request.paths).entries, self._number
        own = {entry.kind for entry in entries if entry.launch == number}
        earlier = [end.last_step for entry, end in events_of(entries, LaunchEnd) if (entry.launch or 0) < number]
        reached = [step for step in earlier if step is not None]
        handed = self._start.get("handed") or {}
        logged = last_steps(self._metrics)
        begun = read_start_step(self._metrics) if handed.get("step") is None else handed["step"]
        if begun is None and reached:
            begun = reached[-1]
        guarded = EntryKind.GUARD_ATTACHED in own
        stepped = EntryKind.GUARD_VERDICT in own
        return Steps(
            planned=planned_steps(entries, number),
            begun=begun,
            last=logged[-1] if logged else None,
            stride=max(1, logged[-1] - (logged[0] if len(logged) > 1 else begun or 0)) if logged else 1,
            unread=not self._second.done,
            none_taken=guarded and not stepped and not logged,
            none_logged=bool(reached) and not stepped and not logged,
        )

    def _intervals(self) -> list[dict[str, int]]:
        """The logged steps of each attempt, by the marks of their writer; [] where the ranks were started once."""
        steps: dict[int, list[int]] = {}
        try:
            for attempt, point in read_attempts(self._metrics):
                steps.setdefault(attempt, []).append(point.step)
        except OSError:
            return []
        if len(steps) < 2:
            return []
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
        return contained(self._complain, what, work)

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
        self._record.writer.close()
        self._selector.close()
        if self._lease is not None:
            os.close(self._lease)

    def _look(self) -> str | None:
        """Once a second: why the launch is to be stopped, if it is."""
        self._channels.write_halves()
        self._second.look()
        if self._progress().get("state") != self._state_told:
            self._beat(self._processes)  # `status` hears of every change from the heartbeat
        if self._second.asked is not None:
            return self._second.asked
        return "peer" if self._peers is not None and self._peers.have_failed() else None

    def _progress(self) -> Mapping[str, Any]:
        """What the follower last said of it."""
        progress: Mapping[str, Any] = self._second.heard.get("progress") or {}
        return progress

    def _beat(self, processes: Sequence[tuple[int, int]]) -> None:
        self._processes, self._state_told = tuple(processes), self._progress().get("state")
        error = write_heartbeat(self._request.paths.heartbeats_dir, self._heartbeat(processes))
        if error is not None:
            self._complain(f"cannot write the heartbeat: {error.strerror or error}")
        if self._record.waiting:
            self._record.flush()
        self._contained("checkpoints", self._record_new_saves)

    def _heartbeat(self, processes: Sequence[tuple[int, int]]) -> Heartbeat:
        start = self._start
        me = {name: start[name] for name in ("host", "pid", "boot_id", "uid")}
        return Heartbeat(
            **me,
            launch=self._number,
            start_ticks=start["start_ticks"] or 0,
            time=time.time(),
            processes=tuple(processes),
            progress=self._progress() or None,
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


# --- Admission, then the launch


def launch(request: LaunchRequest) -> LaunchResult:
    """Run one launch to its end. Raises `LaunchRefused` when nothing was started, `Refusal` for a copied run."""
    paths = request.paths
    if shutil.which(request.command[0], path=request.environ.get("PATH")) is None:
        raise LaunchRefused(f"`{request.command[0]}` is not an executable on the PATH", "activate its environment first")
    _refuse_copied(paths)  # before the lock, which writes its holder into the directory
    with hold_admission(paths):
        _refuse_copied(paths)
        one = _admit(request)
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


def _admit(request: LaunchRequest) -> Launch:
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
    return Launch(request, number, secrets.token_hex(16), writer)
