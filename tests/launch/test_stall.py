"""Standing still: rhythm, evidence, stacks by a signal that harms nobody, the rank that differs, and what is said."""

import os
import selectors
import signal
import subprocess
import sys
import time

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import EndCause, Incident, LaunchEnd, events_of
from chronicle.launch.ending import Seen, judge_end
from chronicle.launch.launchers import build_environment
from chronicle.launch.live_metrics import Place, PrintedMetrics
from chronicle.launch.processes import read_process, walk_children
from chronicle.launch.pulse import (
    PULSES_VARIABLE,
    PulseWriter,
    ask_for_stacks,
    make_pulses_dir,
    read_announcements,
    read_pulses,
    remove_pulses_dir,
)
from chronicle.launch.ranks import RankWatch
from chronicle.launch.rhythm import FLOOR_SECONDS, START_SECONDS, Rhythm, Silences
from chronicle.launch.stacks import (
    PATIENT_SECONDS,
    CodeLine,
    ProcessReading,
    RankDoing,
    Stand,
    judge_rank,
    judge_stands,
    main_stack,
    parse_dump,
)
from chronicle.launch.stall import StallWatch
from chronicle.paths import RunPaths

# --- rhythm


def test_silence_is_measured_by_the_launchs_own_gaps_and_not_by_its_start():
    rhythm = Rhythm(0.0)
    assert rhythm.limit == START_SECONDS and not rhythm.started
    for step in range(1, 300):
        rhythm.sign(60.0 + step * 0.1)
        assert rhythm.p99 is None or rhythm.p99 < 0.2
    assert rhythm.start_seconds == pytest.approx(60.2)
    assert rhythm.p99 == pytest.approx(0.1) and rhythm.limit == pytest.approx(FLOOR_SECONDS + 0.2)
    for save in range(1, 10):  # a save of 20 s in every tenth step belongs to the rhythm
        for step in range(10):
            rhythm.sign(90.0 + save * 21.0 + step * 0.1)
    assert rhythm.p99 > 19.0 and rhythm.limit > FLOOR_SECONDS + 38.0


def test_a_start_that_took_long_once_may_take_twice_as_long_again():
    assert Rhythm(0.0, start_seconds=300.0).limit == 600.0


def test_a_silence_that_ended_by_itself_is_known_from_then_on_and_in_the_next_launch():
    silences = Silences()
    assert silences.patience(frozenset({"train.py:7 (upload)"})) == 0.0
    silences.ended(frozenset({"train.py:7 (upload)"}), 40.0)
    again = Silences(silences.to_json())
    assert again.patience(frozenset({"train.py:7 (upload)", "x"})) == 80.0
    assert again.patience(frozenset({"train.py:9 (step)"})) == 0.0


# --- what a rank did


def stack(*names, path="/home/u/train.py", line=7):
    return tuple(CodeLine(path, line + number, name) for number, name in enumerate(names))


def readings(*, cpu=0.0, below=0.0, moved=0, state="S", count=5):
    ends = [(cpu * share, below * share, int(moved * share)) for share in (number / (count - 1) for number in range(count))]
    return [ProcessReading(state, own, {99: child}, bytes_) for own, child, bytes_ in ends]


SAME = [stack("step", "<module>")] * 4
DEEP = [(CodeLine("/x/site-packages/torch/nn/modules/linear.py", 134, "forward"), *stack("evaluate"))] * 4
LOOP = [(CodeLine("t.py", 3 + number % 2, "spin"), CodeLine("t.py", 9, "<module>")) for number in range(4)]
OTHER = [stack(f"forward{number}", "evaluate", "<module>") for number in range(4)]
COMPILES = [stack("compile_fx", path="/x/site-packages/torch/_inductor/compile_fx.py")] * 4


@pytest.mark.parametrize(
    "seen, stacks, verdict, patient",
    [
        (readings(), SAME, "stands", False),
        (readings(), [], "stands", False),  # without a stack the kernel's view is enough
        (readings(state="T"), [], "stands", False),
        (readings(state="D"), [], "stands", True),
        (readings(cpu=9.0), SAME, "stands", False),  # one call that holds the GIL
        (readings(cpu=9.0), LOOP, "stands", False),  # a loop on the spot: another line of the same function
        (readings(cpu=9.0), OTHER, "works", False),  # an evaluation
        (readings(cpu=9.0), DEEP, "stands", True),  # an evaluation of one layer: seen, a healthy run was called hung
        (readings(cpu=9.0), SAME[:2], "unknown", False),  # too few stacks to say: no alarm
        (readings(cpu=9.0), [], "unknown", False),
        (readings(cpu=9.0), COMPILES, "stands", True),
        (readings(below=9.0), OTHER, "works", False),  # its data loader or its compiler works
        (readings(below=9.0), SAME, "stands", False),  # a loader worker that loops
        (readings(moved=1 << 20), SAME, "works", False),  # a save
        (readings(moved=4000), SAME, "stands", False),  # log lines
    ],
)
def test_a_rank_works_when_data_moves_or_its_stack_changes_and_unknown_is_no_alarm(seen, stacks, verdict, patient):
    found = judge_rank(seen, 10.0, 0, stacks)
    assert (found.verdict, found.patience > 0) == (verdict, patient), found.why


def test_the_dumps_that_we_asked_for_are_not_data_that_moved():
    assert judge_rank(readings(moved=200_000), 10.0, 190_000, SAME).verdict == "stands"


# --- which rank differs

TORCH = "/v/site-packages/torch/"
ALLREDUCE = (CodeLine(TORCH + "distributed/distributed_c10d.py", 3, "all_reduce"), CodeLine("/u/train.py", 52, "step"))
BARRIER = (CodeLine(TORCH + "distributed/distributed_c10d.py", 9, "barrier"), CodeLine("/u/train.py", 60, "main"))
BACKWARD = (CodeLine(TORCH + "autograd/graph.py", 9, "_engine_run_backward"), CodeLine("/u/train.py", 50, "step"))
OWN = (CodeLine("/usr/lib/python3.11/threading.py", 327, "wait"), CodeLine("/u/train.py", 43, "load"))


def stands(*stacks, **changed):
    made = [Stand(rank=rank, pid=100 + rank, state="S", stack=one) for rank, one in enumerate(stacks)]
    return [one._replace(**changed.get(f"r{one.rank}", {})) for one in made]


@pytest.mark.parametrize(
    "seen, culprits",
    [
        (stands(OWN), (0,)),
        (stands(ALLREDUCE, OWN), (1,)),
        (stands(BACKWARD, OWN), (1,)),
        (stands(BACKWARD, BACKWARD, r1={"idle": False}), (1,)),  # a backward pass that computes is no wait
        (stands(ALLREDUCE, BARRIER, ALLREDUCE), (1,)),
        (stands(BARRIER, ALLREDUCE, ALLREDUCE), (0,)),
        (stands(ALLREDUCE, ALLREDUCE, r1={"state": "T", "stack": ()}), (1,)),
        (stands(OWN, OWN, r0={"stopped_below": (7,)}), (0,)),
        (stands(ALLREDUCE, ALLREDUCE, r0={"ended": "its process is gone", "state": "", "stack": ()}), (0,)),
        (stands(ALLREDUCE, ALLREDUCE, r1={"stack": (), "idle": False}), (1,)),
        (stands(ALLREDUCE, ALLREDUCE, r0={"steps": 9}, r1={"steps": 8}), (1,)),
        (stands(ALLREDUCE, BARRIER), ()),  # two ranks in two collectives: nothing tells which is wrong
        (stands(ALLREDUCE, ALLREDUCE), ()),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_and_no_other(seen, culprits):
    assert judge_stands(seen).culprits == culprits


def test_a_backward_pass_waits_for_others_only_while_it_computes_nothing():
    assert stands(BACKWARD)[0].waits and not stands(BACKWARD, r0={"idle": False})[0].waits


def test_the_users_line_is_named_and_not_the_librarys():
    one = stands(OWN)[0]
    assert str(one.place) == "u/train.py:43 (load)" and "threading.py:327" in one.words
    assert "waits for other ranks in all_reduce" in stands(ALLREDUCE)[0].words
    missing = one._replace(stack=(), wchan="pipe_read", why="it is another program")
    assert "pipe_read" in missing.words and "it is another program" in missing.words


# --- pulses, and the signal that harms nobody


@pytest.fixture
def pulses():
    directory = make_pulses_dir()
    assert directory is not None
    yield directory
    remove_pulses_dir(directory)
    assert not directory.exists()


@pytest.fixture
def children():
    started = []
    yield started
    for child in started:
        child.kill()
        child.wait(20)
        if child.stdout is not None:
            child.stdout.close()


def start(children, pulses, code, **more):
    """A Python as `chronicle run` starts it; returns once it has printed a line."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
    ours = {"CHRONICLE_RUN": "r", "CHRONICLE_RUN_DIR": pulses, PULSES_VARIABLE: pulses}
    environ = build_environment(plain, ours, grace_seconds=1.0) | more
    child = subprocess.Popen([sys.executable, "-u", "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    children.append(child)
    assert child.stdout.readline() == "ready\n"
    return child


def until(condition):
    for _ in range(600):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def stack_at(one, line):
    """Ask until the process stands on this line: it is on its way there."""

    def look():
        assert ask_for_stacks(one) == ""
        time.sleep(0.05)
        dumps = one.path.read_text().split("(most recent call first):\n")
        found = main_stack(parse_dump("Thread 0x1 (most recent call first):\n" + dumps[-1])) if len(dumps) > 1 else ()
        return found if found and found[0].line == line else None

    return until(look)


WAITS = "import time\ndef here():\n    print('ready')\n    time.sleep(600)\nhere()\n"


def test_a_waiting_process_prints_its_stack_and_goes_on(children, pulses):
    child = start(children, pulses, WAITS)
    one = read_announcements(pulses)[child.pid]
    assert not one.forked
    assert stack_at(one, 4) == (CodeLine("<string>", 4, "here"), CodeLine("<string>", 5, "<module>"))
    assert child.poll() is None


def test_a_process_whose_c_code_holds_the_gil_prints_its_stack(children, pulses):
    child = start(children, pulses, "import itertools\nprint('ready')\nsum(itertools.repeat(1))\n")
    one = read_announcements(pulses)[child.pid]
    assert stack_at(one, 3)
    assert child.poll() is None


THEN = "\nprint('ready')\ntime.sleep(600)\n"
NOT_ANY_MORE = "import signal, time\nfor n in range(35, 64): signal.signal(n, signal.SIG_DFL)" + THEN
BLOCKS = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(35, 64))" + THEN
REPLACED = "import os, sys\nprint('ready')\nos.execvpe('sleep', ['sleep', '600'], {})\n"
CLOSED = "import os, time\nos.closerange(3, 50)\nopen('/dev/null')" + THEN


@pytest.mark.parametrize("code", [NOT_ANY_MORE, BLOCKS, REPLACED, CLOSED])
def test_no_signal_goes_to_a_process_that_would_not_print(children, pulses, code):
    """Its default action would end the process: a handler taken back, an `exec`, a descriptor that is another file by now."""
    child = start(children, pulses, code)
    one = read_announcements(pulses)[child.pid]
    if code == REPLACED:
        until(lambda: "sleep" in read_process(child.pid).name)
    assert ask_for_stacks(one) != ""
    time.sleep(0.2)
    assert child.poll() is None


def test_a_stopped_process_and_a_reused_pid_get_no_signal(children, pulses):
    child = start(children, pulses, WAITS)
    one = read_announcements(pulses)[child.pid]
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: read_process(child.pid).state == "T")
    assert "stopped" in ask_for_stacks(one)
    one.path.rename(one.path.with_name(one.path.name.replace(f"{one.process.start_ticks}-", "12345-")))
    assert child.pid not in read_announcements(pulses)


def test_a_forked_worker_has_a_file_of_its_own(children, pulses):
    code = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint('ready')\ntime.sleep(600)\n"
    child = start(children, pulses, code)
    found = until(lambda: read_announcements(pulses) if len(read_announcements(pulses)) == 2 else None)
    (worker,) = (one for pid, one in found.items() if pid != child.pid)
    try:
        assert worker.forked and not found[child.pid].forked
        assert stack_at(worker, 2)
        assert found[child.pid].path.read_text() == ""
    finally:
        os.kill(worker.process.pid, signal.SIGKILL)


def test_guard_off_announces_nothing(children, pulses):
    start(children, pulses, WAITS, CHRONICLE_GUARD="off")
    assert read_announcements(pulses) == {}


def test_a_pulse_says_steps_and_work(pulses):
    writer = PulseWriter(3, {PULSES_VARIABLE: str(pulses)})
    for step in range(5):
        writer.sign(lambda step=step: 10.0 * step + 9.0)
        writer.sign(lambda step=step: 10.0 * step + 10.0)  # a second forward pass of the step
        writer.step(lambda step=step: 10.0 * step + 11.0)
    (pulse,) = read_pulses(pulses)
    assert (pulse.rank, pulse.steps, pulse.stepped_at, pulse.signs) == (3, 5, 51.0, 10)
    PulseWriter(0, {}).step()  # without a supervisor
    PulseWriter(0, {PULSES_VARIABLE: str(pulses / "missing")}).step()


def test_directories_of_supervisors_that_are_gone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("chronicle.launch.pulse.MEMORY", tmp_path)
    gone, foreign = tmp_path / "x", tmp_path / "chronicle-1-2-3-abcd"
    mine = make_pulses_dir()
    words = mine.name.split("-")
    gone = tmp_path / "-".join([*words[:2], "4194303", "1", "abcd"])
    foreign = tmp_path / "chronicle-77-4194303-1-abcd"  # of another pid namespace: it may be alive
    gone.mkdir()
    foreign.mkdir()
    other = make_pulses_dir()
    assert not gone.exists() and foreign.exists() and mine.exists() and other.exists()


# --- the watch


class Watched:
    """A `StallWatch` whose clock is set by hand, around real processes."""

    def __init__(self, tmp_path, pulses, ranks, **more):
        self.now, self.steps, self.output, self.said = 1000.0, 0, 0, []
        self.paths = RunPaths(tmp_path / "logs" / "r")
        self.paths.launch_dir(1).mkdir(parents=True)
        self.writer = JournalWriter(self.paths)
        self.watch = StallWatch(
            pulses=pulses, tree=lambda: walk_children(os.getpid()), rank_pids=lambda: ranks,
            signs=lambda: (self.steps, 0, self.output), step=lambda: self.steps,
            say=self.said.append, write=lambda event, **words: self.writer.write(event, launch=1, **words),
            directory=self.paths.launch_dir(1), host="n1", launch=1, clock=lambda: self.now, **more,
        )  # fmt: skip

    def pass_seconds(self, seconds, stepping=False):
        told = False
        for _ in range(int(seconds)):
            self.now += 1.0
            self.steps += stepping
            told = self.watch.tick() or told
            if self.watch.state == "looked at":
                time.sleep(0.05)  # a dump takes a moment
        return told

    def incidents(self):
        return [event for _, event in events_of(read_journal(self.paths).entries, Incident)]


def test_a_stall_is_told_once_with_rank_and_line_and_closed_when_the_launch_goes_on(tmp_path, children, pulses):
    first, second = start(children, pulses, WAITS), start(children, pulses, WAITS)
    os.kill(second.pid, signal.SIGSTOP)
    watched = Watched(tmp_path, pulses, {0: first.pid, 1: second.pid}, devices=lambda: {"GPU-1": 1.0})
    assert not watched.pass_seconds(60, stepping=True)
    assert watched.watch.state == "steps"
    assert not watched.pass_seconds(10)
    assert watched.watch.state == "quiet" and watched.watch.progress(5000.0)["since"] == 4990.0
    assert watched.pass_seconds(40)
    (stall,) = watched.incidents()
    assert stall.status == "open" and stall.evidence[0]["culprits"] == [1]
    assert "rank 1 on n1" in stall.text and "SIGSTOP" in stall.text and "GPU-1 100% busy" in stall.text
    assert "<string>:4 (here)" in stall.text  # where the other one waits
    dump = watched.paths.run_dir / stall.evidence[0]["file"]
    assert "line 4 in here" in dump.read_text()
    assert watched.watch.state == "stands" and not watched.pass_seconds(100) and len(watched.incidents()) == 1
    watched.pass_seconds(3, stepping=True)
    opened, closed = watched.incidents()
    assert closed.status == "recovered" and "goes on after" in closed.text
    entries = [entry for entry, _ in events_of(read_journal(watched.paths).entries, Incident)]
    assert entries[1].refs == (entries[0].id,) or list(entries[1].refs) == [entries[0].id]
    assert opened.evidence[0]["places"]["0"] in watched.watch.rhythm()["silences"]
    assert not watched.pass_seconds(100), "a silence in a place that was quiet for 137 s before"


def test_a_launch_that_logs_nothing_yet_has_longer(tmp_path, children, pulses):
    child = start(children, pulses, WAITS)
    watched = Watched(tmp_path, pulses, {0: child.pid})
    assert not watched.pass_seconds(START_SECONDS)
    assert watched.pass_seconds(30)


def test_a_rank_that_stops_soon_after_its_first_steps_has_a_rhythm_all_the_same(tmp_path, children, pulses):
    """They were done before the first look at its pulse: 120 s passed as if it had never begun."""
    child = start(children, pulses, WAITS)
    watched = Watched(tmp_path, pulses, {0: child.pid})
    watched.pass_seconds(20)
    writer = PulseWriter(0, {PULSES_VARIABLE: str(pulses)})
    for step in range(40):
        writer.step(lambda step=step: watched.now + 0.02 * step)
    watched.now += 1.0
    watched.watch.tick()
    rhythm = watched.watch._of_ranks[0]
    assert rhythm.started and rhythm.p99 is not None and rhythm.p99 < 0.1 and rhythm.limit < 15


def test_another_node_that_works_is_waited_for(tmp_path, children, pulses):
    child = start(children, pulses, WAITS)
    elsewhere = ["node n2: steps"]
    watched = Watched(tmp_path, pulses, {0: child.pid}, others_work=lambda: elsewhere[0])
    watched.pass_seconds(60, stepping=True)
    assert not watched.pass_seconds(50)
    assert watched.watch.state == "stands here"  # also while it looks again, so that two nodes do not wait for each other
    elsewhere[0] = ""
    assert watched.pass_seconds(100)


def test_a_process_that_announced_nothing_is_told_with_the_reason(tmp_path, children, pulses):
    child = subprocess.Popen(["sleep", "600"])
    children.append(child)
    watched = Watched(tmp_path, pulses, {0: child.pid})
    watched.pass_seconds(60, stepping=True)
    assert watched.pass_seconds(40)
    assert "no stack: this process announced no signal" in watched.incidents()[0].text
    assert child.poll() is None


def test_a_silent_rank_is_told_although_the_others_go_on(tmp_path, children, pulses):
    """Ranks with pulses have rhythms of their own."""
    child = start(children, pulses, WAITS)
    watched = Watched(tmp_path, pulses, {0: os.getpid(), 1: child.pid})
    alive = PulseWriter(0, {PULSES_VARIABLE: str(pulses)})
    (mine,) = pulses.glob("*.pulse")
    ticks = read_process(child.pid).start_ticks
    theirs = pulses / f"{child.pid}-{ticks}.pulse"

    def step(both):
        alive.step(lambda: watched.now)
        if both:
            theirs.write_bytes(mine.read_bytes()[:4] + (1).to_bytes(4, "little") + mine.read_bytes()[8:])

    for _ in range(60):
        step(both=True)
        assert not watched.pass_seconds(1)
    told = []
    for _ in range(40):
        step(both=False)
        told.append(watched.pass_seconds(1))
    assert any(told) and watched.incidents()[0].evidence[0]["culprits"] == [1]
    assert "no step for 2" in watched.incidents()[0].text  # its own silence, not the launch's
    assert "; rank 0 goes on" in watched.incidents()[0].text


def test_a_rank_that_takes_steps_is_never_the_one_that_stands():
    """On a busy machine the silent rank may not have answered, and the other one is seen to compute."""
    stands = [Stand(rank=0, pid=10, idle=False, stack=(CodeLine("train.py", 3, "step"),)), Stand(rank=1, pid=11)]
    assert judge_stands(stands).culprits == (0,) and judge_stands(stands, [0]).culprits == (1,)
    assert judge_stands(stands, [0, 1]).culprits == (0,)  # nobody stands: told as before


def test_a_stopped_stall_is_a_hang_and_starts_again():
    ending = judge_end(Seen(exit_code=143, stopped_by="stall", stall="no step for 30 s: rank 1 …"))
    assert ending.cause is EndCause.HANG and "rank 1" in ending.because


# --- the whole

HANGS = """
import os, pathlib, sys, time
begin = 1
def stuck():
    time.sleep(600)
for step in range(begin, 41):
    if step == 30 and not pathlib.Path("again").exists():
        pathlib.Path("again").touch()
        stuck()
    print(f"step {step} loss {3 - step * 0.05:.3f} lr 1e-3", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_hang_is_stopped_as_a_hang_and_the_run_goes_on_by_itself(driver):
    (driver.directory / "train.py").write_text(HANGS)
    driver.start(
        [sys.executable, "train.py"], "--on-stall", "stop", "--restarts", "2", "--restart-pause", "0", "--grace", "2"
    )
    assert driver.wait(200) == 0, driver.out.read_text()[-3000:]
    first, second = (LaunchEnd.view(entry.data) for entry in driver.entries("launch.end"))
    assert (first.cause, first.stopped_by, second.cause) == ("hang", "stall", "ended")
    assert "train.py:5 (stuck)" in first.because and first.rhythm["p99"] < 5.0
    assert "STALL: no step for" in driver.out.read_text()
    (stall,) = driver.entries("incident")
    assert stall.data["evidence"][0]["culprits"] == [0]


def test_status_says_how_long_ago_the_last_step_was_and_what_is_usual():
    from chronicle.cli.status import _standing

    steps = {"state": "steps", "since": 100.0, "usual": 0.5, "p99": 0.7}
    assert _standing(steps, 105.0, 2.0) == "0.5 s/step (p99 0.7 s), last heartbeat 2 s ago"
    assert _standing(steps | {"state": "quiet"}, 160.0, 2.0).startswith("no step for 1 min (0.5 s/step")
    assert "STANDS STILL: no step for 1 min · rank 1" in _standing(steps | {"state": "stands", "words": "rank 1"}, 160.0, 2.0)
    assert "is starting" in _standing({"state": "starts", "since": 100.0}, 160.0, 2.0)
    assert _standing({"state": "steps"}, 1.0, 1.0) == "not known"


def test_no_heavy_module_is_loaded_for_a_launch_that_goes_well():
    code = "import sys, chronicle.launch.launching; print([m for m in ('pickle', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout



def test_a_ranks_grandchild_that_appears_later_does_not_take_its_place(children, tmp_path):
    """Seen: a compiler's worker, started by the rank's child, became rank 0, and the real one was not looked at."""
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "if len(sys.argv) > 1:\n"
        "    while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        "    os.environ.pop('X', None)\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    pathlib.Path('grandchild').write_text(str(child.pid))\n"
        "    child.wait()\n"
        "else:\n"
        "    subprocess.Popen([sys.executable, __file__, 'child']).wait()\n"
    )
    (tmp_path / "rank.py").write_text(code)
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py")], cwd=tmp_path, env=os.environ | {"RANK": "0"}, start_new_session=True
    )
    children.append(rank)
    selector = selectors.PollSelector()
    watch = RankWatch(selector, clock=time.monotonic)
    try:
        until(lambda: len(walk_children(rank.pid)) == 1)
        watch.look()
        assert watch.pids[0] == rank.pid
        (tmp_path / "go").touch()
        until((tmp_path / "grandchild").exists)
        watch.look()
        assert watch.pids[0] == rank.pid
    finally:
        watch.close()
        os.killpg(rank.pid, signal.SIGKILL)


def test_a_rank_that_was_seen_at_work_in_this_silence_is_not_told_by_one_look(tmp_path, children, pulses, monkeypatch):
    """Seen: a slow data loader was in one function in every stack of its third look."""
    child = start(children, pulses, WAITS)
    found = [RankDoing("works", "its stack changes", busy=True)]
    monkeypatch.setattr("chronicle.launch.stall.judge_rank", lambda *_: found[0])
    watched = Watched(tmp_path, pulses, {0: child.pid})
    watched.pass_seconds(60, stepping=True)
    assert not watched.pass_seconds(30) and "its stack changes" in watched.watch.words
    found[0] = RankDoing("stands", "does not leave its function", busy=True)
    assert not watched.pass_seconds(60)
    assert watched.pass_seconds(PATIENT_SECONDS)


def test_a_busy_rank_that_prints_is_left_alone_longer(tmp_path, children, pulses, monkeypatch):
    """It may wait for a device on one line in every sample; an idle one that prints (a monitor's thread) is told."""
    child = start(children, pulses, WAITS)
    found = [RankDoing("stands", "does not leave its function", busy=True)]
    monkeypatch.setattr("chronicle.launch.stall.judge_rank", lambda *_: found[0])
    watched = Watched(tmp_path, pulses, {0: child.pid})
    watched.pass_seconds(60, stepping=True)
    for _ in range(60):
        watched.output += 80
        assert not watched.pass_seconds(1)
    found[0] = RankDoing("stands", "uses no CPU")
    told = False
    for _ in range(60):
        watched.output += 80
        told = watched.pass_seconds(1) or told
    assert told


def test_a_trainer_whose_step_counter_restarts_goes_on(tmp_path):
    """Its lines are no metrics any more, and still signs of progress."""
    printed = PrintedMetrics(tmp_path / "metrics.jsonl", clock=lambda: 1.0, say=lambda _: None)
    before = printed.seen
    for step in [*range(1, 40), *range(1, 200)]:
        printed.take([f"step {step} loss 2.0".encode()], Place())
        assert printed.seen > before
        before = printed.seen


def test_the_main_thread_is_the_last_that_began_in_a_module_else_the_oldest():
    """faulthandler prints the newest thread first; a thread may run a module of its own (`runpy`)."""
    worker, main, other = (CodeLine("a.py", 1, "wait"), CodeLine("t.py", 2, "run")), (CodeLine("b.py", 1, "<module>"),), (
        CodeLine("c.py", 1, "step"), CodeLine("m.py", 9, "<module>"))  # fmt: skip
    assert main_stack([worker, main, worker]) == main
    assert main_stack([main, other, worker]) == other
    assert main_stack([worker, worker[1:]]) == worker[1:]
    assert main_stack([]) == ()


def test_the_time_that_is_left_is_told_where_the_number_of_steps_is_known(tmp_path):
    from chronicle.cli.status import _left
    from chronicle.story.read import read_story
    from tests.builders.story_runs import StoryRun

    run = StoryRun(tmp_path, "left")
    run.start(1, argv=["python", "train.py", "--max_steps", "1000"])
    run.metrics(1, {step: {"loss": 1.0} for step in range(1, 41)})
    story = read_story(run.paths)
    (row,) = _left(story, 1, {"usual": 0.5})
    assert row.text == "960 of 1,000 steps are left: about 8 min"
    assert not list(_left(story, 1, {})) and not list(_left(story, 2, {"usual": 0.5}))
