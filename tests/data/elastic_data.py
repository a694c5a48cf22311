"""Kill a plain script at random points, in its saves too, on 2, 1, 2, … ranks, and compare what its weights saw with the plan.

    python -m tests.data.elastic_data --kills 20

Two sources of tars that nobody here would write (long names, PAX and GNU headers, three fields a sample) are indexed as they
are. A script of plain torch under DDP reads them through `PlanDataset`, saves with `torch.save` into the final name, and is
started by `chronicle run --restarts`. A process outside kills one rank at a random moment, every third time (with `--in-saves`
every time) while a save is being written, of those that come after the next whole save: where every first save is cut, a run
makes no progress, and `chronicle run` waits longer and longer, as it should. In the end the steps that the weights descend
from are laid together: each sample of the plan must be there once, in the plan's order. Prints one line a launch, and the
counts. Ends with 1 where a sample is lost or repeated.

Where every first save of a launch is cut, nothing whole exists to go on from, and no launch gets further than the first save:
that is no drill of the data any more. It is said after `MOST_WITHOUT_SAVE` such launches, with code 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

from chronicle.data.plan_dataset import PlanDataset

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 8
MOST_WITHOUT_SAVE = 10
SAVE_BYTES = 12 * (16 * 150_000 + 2 * 150_000 + 1)  # of the script's model with two moments

SCRIPT = '''
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from chronicle.data import PlanDataset

def decode(sample):
    return torch.tensor(list(sample["txt"][:16]), dtype=torch.float32) / 255, sample["meta.json"].decode()

steps, global_batch = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 150_000), nn.ReLU(), nn.Linear(150_000, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = PlanDataset({"data/web.index": 7, "data/code.index": 3}, seed=5, decode=decode)
loader = data.loader(global_batch // world, num_workers=1, num_samples=steps * global_batch)
step, handed = 0, os.environ.get("CHRONICLE_RESUME_FROM")
if handed:
    saved = torch.load(handed)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["data"])
    step = saved["step"]
os.makedirs("ck", exist_ok=True)
launch = int(os.environ["CHRONICLE_LAUNCH"])
with open(f"seen-{rank}.jsonl", "a", buffering=1) as seen:
    for x, names in loader:
        time.sleep(0.05)  # a step of a larger model
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        seen.write(json.dumps([launch, step, rank, [json.loads(name)["id"] for name in names]]) + "\\n")
        if step % 4 == 0:
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict(),
                            "step": step}, f"ck/step-{step}.pt")
            dist.barrier()
dist.barrier()
dist.destroy_process_group()
os._exit(0)
'''
LAUNCHER = '''
import os, sys
world = "1" if int(os.environ["CHRONICLE_LAUNCH"]) % 2 == 0 else "2"
words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", world, "train.py", *sys.argv[1:]]
os.execv(sys.executable, [sys.executable, *words])
'''


def write_foreign_tars(root: Path, *, shards: int = 10, samples: int = 200) -> None:
    """Write two sources: GNU and PAX headers, names above 100 characters, directories, three fields a sample."""
    draw = random.Random(0)
    for source, form in (("web", tarfile.GNU_FORMAT), ("code", tarfile.PAX_FORMAT)):
        (root / source).mkdir(parents=True)
        for number in range(shards):
            with tarfile.open(root / source / f"part.{number:03d}.tar", "w", format=form) as tar:
                folder = tarfile.TarInfo("some.dir")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
                for index in range(samples):
                    key = f"some.dir/{'x' * (120 if index % 17 == 0 else 3)}{number}-{index}"
                    identity = json.dumps({"id": f"{source}-{number}-{index}"}).encode()
                    text = draw.randbytes(draw.randint(20, 900))
                    for field, content in (("txt", text), ("meta.json", identity), ("cls", b"1")):
                        member = tarfile.TarInfo(f"{key}.{field}")
                        member.size, member.mtime = len(content), 1.5
                        tar.addfile(member, io.BytesIO(content))


def main() -> int:
    """Run the drill; the exit code is 1 where a sample is lost or repeated."""
    parser = argparse.ArgumentParser(prog="python -m tests.data.elastic_data")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-saves", action="store_true", help="kill in saves only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return drill(Path(name), options.kills, options.steps, options.seed, in_saves_only=options.in_saves)


def drill(place: Path, kills: int, steps: int, seed: int, *, in_saves_only: bool = False) -> int:
    """Run the script to its end under `kills` kills in `place`, and print the counts."""
    write_foreign_tars(place / "shards")
    (place / "train.py").write_text(SCRIPT)
    (place / "launcher.py").write_text(LAUNCHER)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHRONICLE_MLFLOW_URI": "off"}
    chronicle = [sys.executable, "-m", "chronicle.cli.main"]
    indexing = [*chronicle, "data", "index", "shards/web", "shards/code", "--out", "data"]
    subprocess.run(indexing, cwd=place, env=environ, check=True)
    words = [*chronicle, "run", "--run", "drill", "--checkpoints", "ck", "--restarts", str(3 * kills + 3), "--crashes",
             str(3 * kills + 3), "--restart-pause", "0.1", "--", sys.executable, "launcher.py", str(steps), str(GLOBAL_BATCH)]
    draw = random.Random(seed)
    with open(place / "out.log", "wb") as out:
        run = subprocess.Popen(words, cwd=place, env=environ, stdout=out, stderr=subprocess.STDOUT)
    killed = in_saves = cut = without_save = 0
    aimed = _aim(draw, in_saves_only or killed % 3 == 2)
    pids: list[int] = []
    looked = 0.0
    while run.poll() is None:
        time.sleep(0.0005)
        if not pids and time.monotonic() - looked > 0.3:  # looked up before it is time, so that a kill comes at once
            pids, looked = _ranks(place), time.monotonic()
        if killed < kills and pids and _is_due(place, aimed):
            os.kill(draw.choice(pids) if not aimed["save"] else pids[0], signal.SIGKILL)
            killed, in_saves, pids = killed + 1, in_saves + bool(aimed["save"]), []
            cut += _is_cut(place)
            without_save = 0 if _has_whole_save(place) else without_save + 1
            if without_save == MOST_WITHOUT_SAVE:
                run.terminate()
                run.wait()
                print(f"{without_save} launches were killed before any save was whole: nothing exists to go on from. "
                      "Save more often, or kill more rarely")
                return 1
            where = "at a save" if aimed["save"] else "between"
            print(f"kill {killed}: {where}, {cut} saves cut so far, {len(_lines(place))} steps of ranks done", flush=True)
            aimed = _aim(draw, in_saves_only or killed % 3 == 2)
            while _ranks(place) and run.poll() is None:
                time.sleep(0.05)
            aimed["from"], aimed["time"] = len(_lines(place)), time.time()
    lost, repeated, moved = _compare(place, steps)
    launches = len({one[0] for one in _lines(place)})
    print(f"exit code {run.returncode}, {killed} kills ({in_saves} aimed at saves, {cut} cut one), {launches} launches took "
          f"steps; of {steps * GLOBAL_BATCH} samples {lost} lost, {repeated} repeated, {moved} at another step")
    return int(bool(run.returncode or lost or repeated or moved or killed < kills))


def _aim(draw: random.Random, save: bool) -> dict[str, float]:
    return {"save": save, "after": draw.randint(1, 2) if save else draw.randint(1, 14), "from": 0, "time": 0}


def _is_due(place: Path, aimed: dict[str, float]) -> bool:
    """In a save: one that is being written now, after so many whole ones. Else: so many lines of steps after a kill."""
    if not aimed["save"]:
        return len(_lines(place)) >= aimed["from"] + aimed["after"]
    found = sorted((path.stat() for path in (place / "ck").glob("step-*.pt")), key=lambda one: one.st_mtime_ns)
    whole = sum(one.st_size >= SAVE_BYTES and one.st_mtime > aimed["time"] for one in found)
    return (bool(found) and whole >= aimed["after"] and found[-1].st_size < 0.9 * SAVE_BYTES
            and time.time() - found[-1].st_mtime < 0.05)


def _is_cut(place: Path) -> bool:
    """Whether the newest checkpoint is shorter than its tensors."""
    time.sleep(0.2)
    found = sorted((path.stat() for path in (place / "ck").glob("step-*.pt")), key=lambda one: one.st_mtime_ns)
    return bool(found) and found[-1].st_size < SAVE_BYTES


def _has_whole_save(place: Path) -> bool:
    return any(path.stat().st_size >= SAVE_BYTES for path in (place / "ck").glob("step-*.pt"))


def _ranks(place: Path) -> list[int]:
    """The ranks of the drill, rank 0 first: processes that run train.py in its directory and have a rank."""
    found = {}
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and os.readlink(directory / "cwd") == str(place):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                values = dict(one.partition(b"=")[::2] for one in (directory / "environ").read_bytes().split(b"\0"))
                parent = int((directory / "stat").read_bytes().rpartition(b")")[2].split()[1])
                if b"train.py" in words and b"torch.distributed.run" not in words and b"RANK" in values:
                    found[int(directory.name)] = (int(values[b"RANK"]), parent)
        except (OSError, ValueError):
            continue
    return [pid for pid, (_, parent) in sorted(found.items(), key=lambda one: one[1]) if parent not in found]  # no workers


def _lines(place: Path) -> list[list[object]]:
    return [json.loads(line) for path in place.glob("seen-*.jsonl") for line in path.read_text().split("\n")[:-1]]


def _planned(place: Path, steps: int) -> list[str]:
    """The names of the samples in the undisturbed order."""
    sources = {place / "data/web.index": 7, place / "data/code.index": 3}
    data = PlanDataset(sources, seed=5)
    return [json.loads(data[number]["meta.json"])["id"] for number in range(steps * GLOBAL_BATCH)]


def _compare(place: Path, steps: int) -> tuple[int, int, int]:
    """Return the samples of the plan that the weights did not see, saw more often than planned, and saw at another step."""
    wanted = _planned(place, steps)
    last: dict[int, int] = {}
    for launch, step, _, _ in _lines(place):
        last[int(str(step))] = max(last.get(int(str(step)), 0), int(str(launch)))
    seen: dict[int, list[tuple[int, list[str]]]] = {}
    for launch, step, rank, names in _lines(place):
        if last[int(str(step))] == launch:
            seen.setdefault(int(str(step)), []).append((int(str(rank)), list(names)))  # type: ignore[call-overload]
    found = {step: [name for _, names in sorted(rows) for name in names] for step, rows in seen.items()}
    flat = [name for names in found.values() for name in names]
    moved = sum(found.get(step + 1, []) != wanted[step * GLOBAL_BATCH:(step + 1) * GLOBAL_BATCH] for step in range(steps))
    asked, had = Counter(wanted), Counter(flat)  # the plan itself reads a small source again
    return (asked - had).total(), (had - asked).total(), moved


if __name__ == "__main__":
    sys.exit(main())
