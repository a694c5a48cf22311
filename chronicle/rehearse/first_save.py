"""The first save of a real launch, rehearsed in part: a second process loads it as the last rehearsal did, and takes a step.

It runs beside the launch, by `[rehearse] first_save = true`, and ends with it. The rehearsal of the same command says where the
script writes and how it resumes: the second process gets a copy of the checkpoint in a place of its own, and a port of its own.
Its guard says whether the state was loaded whole; its batch and options are compared with those of the launch. Without room for
it nothing is started.
"""

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chronicle.journal.events import Rehearsed, filled_with
from chronicle.launch.devices import read_devices, read_host_memory
from chronicle.launch.handover import RESUME_FROM, RESUME_STEP
from chronicle.launch.live_metrics import last_point
from chronicle.launch.scratch import free_port
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.prints.compared import RESULT
from chronicle.rehearse.judge import Compared, Rank, Row, Verdict, without
from chronicle.rehearse.launches import Place, Until, environment_of, play, read_played
from chronicle.rehearse.rehearse import Answer, Rehearsal, begun, of_prints
from chronicle.resume.rehearsal import Asked
from rollback.checkpoint.below import saved_in
from rollback.checkpoint.layout import Checkpoint

POLL_SECONDS = 2.0
MOST_MEMORY = 0.5  # of the host, in use while a second process is started
IDLE_BYTES = 1 << 30  # in use on a device that nobody works on


def rehearse_first_save(
    paths: RunPaths, last: Rehearsed, command: Sequence[str], scratch: Path, over: threading.Event
) -> tuple[int, Answer] | None:
    """Wait for the first save of this launch, load it in a second process, and compare: the launch, and the answer.

    None where the launch ends before, which `over` says.
    """
    out = _out_of(last, command)
    place = Place(name="first", scratch=scratch, is_copy=out is None)
    root = Path.cwd() / (out or "")
    saved = _first_save(root, over)
    if saved is None or saved.step is None:
        return None
    began, launch = time.monotonic(), max(list_launch_numbers(paths))
    asked = Rehearsal(command=tuple(command), at=saved.step, to=saved.step + 1, signal="")
    why, environ = room_for(saved, scratch)
    if why:
        untold = Compared(rows=(Row(Rank.NOT_COMPARED, "the resume", why),))
        return launch, Answer(asked=asked, compared=untold, seconds=0.0)
    place.prepare()
    mine = place.out / saved.path.relative_to(root)
    mine.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copy2 if saved.single_file else shutil.copytree
    copy(saved.path, mine)
    environ |= {RESUME_FROM: str(mine), RESUME_STEP: str(saved.step)}
    until = Until(step=asked.to, is_over=over.is_set)
    played = play(place, place.fill(last.resume, mine), environment_of(Asked(end=asked.to), environ), until)
    while not over.wait(POLL_SECONDS):
        point = last_point(paths.metrics_path(launch))
        if point is not None and point.step >= asked.to:
            break
    first = read_played(paths, root, launch)
    results = replace(first, prints=without(first.prints, RESULT))  # other bits are no fault
    rows = (*begun(played, asked.at, asked.to), *of_prints(first, results, played, (asked.at, asked.to)))
    compared = Compared(rows=rows, basis=Verdict.HELD)
    return launch, Answer(asked=asked, compared=compared, seconds=time.monotonic() - began)


def _out_of(last: Rehearsed, command: Sequence[str]) -> str | None:
    """What stands where the rehearsed command has `{out}`; None where it has none."""
    for words in (last.command, last.resume):
        for pattern, word in zip(words, command, strict=False):
            found = filled_with(pattern, word) or {}
            if "out" in found:
                return found["out"]
    return None


def _first_save(root: Path, over: threading.Event) -> Checkpoint | None:
    """The first checkpoint that was not there before, once it does not grow any more."""
    before, size = saved_in(root).keys(), -1
    while not over.wait(POLL_SECONDS):
        new = [one for step, one in saved_in(root).items() if step not in before]
        if new and new[0].size_bytes == size:
            return new[0]
        size = new[0].size_bytes if new else -1
    return None


def room_for(saved: Checkpoint, scratch: Path) -> tuple[str, dict[str, str]]:
    """Why there is no room for a second process ("": there is), and its variables."""
    port = str(free_port())
    environ = {"MASTER_PORT": port, "PET_MASTER_PORT": port}
    if shutil.disk_usage(scratch).free < 2 * saved.size_bytes:
        return f"no room for a copy of the checkpoint at `{scratch}`", environ
    if read_host_memory().get("memory_fraction", 1.0) > MOST_MEMORY:
        return "no room for a second process: less than half of the memory is free", environ
    devices = read_devices()
    free = [one.uuid for one in devices if one.memory < IDLE_BYTES]
    num_busy = len(devices) - len(free)
    if num_busy > len(free):
        return f"no room for a second process: {num_busy} devices are in use, {len(free)} are free", environ
    if num_busy:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(free[:num_busy])
    return "", environ
