"""Stores of other trackers, written by the trackers themselves, imported and compared with what their own API reads.

    python -m benchmarks.trackers [PLAY…]

Each play writes a store with the real package, reads every point of it by that package's own interface, imports the store with
`chronicle import`, and compares run by run, channel by channel, step by step and value by value. W&B has no interface that
reads its offline files: there the reference is what was handed to `log`, and the package's own protobuf classes count the
records. A package that is not installed is named and not played.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from chronicle import runs

Points = Counter[tuple[str, int, float]]  # (channel, step, value); NaN as -0.123456789
Found = dict[str, Points]  # by the run's name
STEPS = 300
NOT_A_NUMBER = -0.123456789


class Play(NamedTuple):
    """One store: the packages it needs, how it is written and read there; what it returns is (source to import, theirs)."""

    packages: tuple[str, ...]
    make: Callable[[Path], tuple[str, Found]]


def counted(points: Iterable[tuple[str, int, float]]) -> Points:
    return Counter((name, step, NOT_A_NUMBER if math.isnan(value) else float(value)) for name, step, value in points)


def loss(step: int, shift: float = 0.0) -> float:
    return 2.0 + 3.0 * math.exp(-step / 90) + 0.1 * math.sin(step * 1.7) + shift + (4.0 if step == 210 else 0.0)


def script(place: Path, text: str, **variables: str) -> None:
    """Run a few lines with the real package, in a process and directory of their own."""
    quiet = {
        **os.environ,
        "WANDB_SILENT": "true",
        "WANDB_MODE": "offline",
        "HOME": str(place),
        "TRACKIO_DIR": str(place / "tk"),
    }
    subprocess.run(
        [sys.executable, "-c", text],
        cwd=place,
        env={**quiet, **variables},
        check=True,
        timeout=300,
        capture_output=True,
    )


# --- W&B

WANDB = """
import os, math, wandb
first, last, shift = int(os.environ["FIRST"]), int(os.environ["LAST"]), float(os.environ["SHIFT"])
name, own, kill = os.environ["NAME"], os.environ["OWN"], os.environ["KILL"]
run = wandb.init(project="p", name=name, id=os.environ["ID"], resume="allow", config={"lr": 1e-3}, dir=".")
def loss(step):
    return 2.0 + 3.0 * math.exp(-step / 90) + 0.1 * math.sin(step * 1.7) + shift + (4.0 if step == 210 else 0.0)
for step in range(first, last):
    values = {"train/loss": loss(step), "lr": 1e-3 * (1 - step / 300), "norms": {"grad": 1.0 + step / 7}}
    if step == 250:
        values["train/loss"] = float("nan")
    run.log({**values, "train/global_step": step} if own else values, **({} if own else {"step": step}))
if kill:
    import time
    time.sleep(3)
    os.kill(os.getpid(), 9)
run.finish()
"""


def wandb_points(first: int, last: int, shift: float = 0.0) -> Points:
    rows = [("train/loss", n, math.nan if n == 250 else loss(n, shift)) for n in range(first, last)]
    rows += [("lr", n, 1e-3 * (1 - n / 300)) for n in range(first, last)]
    return counted(rows + [("norms/grad", n, 1.0 + n / 7) for n in range(first, last)])


def wandb_run(
    place: Path, name: str, first: int, last: int, *, own: str = "", kill: str = "", shift: float = 0.0, run: str = ""
) -> None:
    try:
        script(
            place,
            WANDB,
            NAME=name,
            FIRST=str(first),
            LAST=str(last),
            OWN=own,
            KILL=kill,
            SHIFT=str(shift),
            ID=run or name,
        )
    except subprocess.CalledProcessError as problem:
        if not kill or problem.returncode != -9:
            raise RuntimeError(problem.stderr.decode()[-400:]) from problem


def wandb_one(place: Path) -> tuple[str, Found]:
    wandb_run(place, "base", 0, STEPS)
    return "wandb", {"base": wandb_points(0, STEPS)}


def wandb_two(place: Path) -> tuple[str, Found]:
    wandb_run(place, "one", 0, STEPS)
    wandb_run(place, "two", 0, 100, shift=1.0)
    return ".", {"one": wandb_points(0, STEPS), "two": wandb_points(0, 100, 1.0)}


def wandb_rolled_back(place: Path) -> tuple[str, Found]:
    """One id, two sessions: the second begins 50 steps back, by the trainer's own step."""
    wandb_run(place, "hf", 0, 200, own="yes")
    wandb_run(place, "hf", 150, STEPS, own="yes")
    return "wandb", {"hf": wandb_points(0, 200) + wandb_points(150, STEPS)}


def wandb_killed(place: Path) -> tuple[str, Found]:
    """The process is killed: the file ends where the last whole record does, as the package's own classes count them."""
    wandb_run(place, "cut", 0, 120, kill="yes")
    (file,) = place.rglob("*.wandb")
    steps = history_records(file)
    return "wandb", {"cut": wandb_points(0, steps)}


def history_records(path: Path) -> int:
    """How many history records the package's own protobuf classes find in the whole frames of a file."""
    import struct

    from wandb.proto import wandb_internal_pb2

    data, at, part, found = path.read_bytes(), 7, b"", 0
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0 or at + 7 + size > len(data):
            break
        part = data[at + 7 : at + 7 + size] if kind in (1, 2) else part + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found += record.WhichOneof("record_type") == "history"
    return found


# --- trackio

TRACKIO = """
import math, trackio
def loss(step, shift):
    return 2.0 + 3.0 * math.exp(-step / 90) + 0.1 * math.sin(step * 1.7) + shift + (4.0 if step == 210 else 0.0)
for shift, name in enumerate(("alpha", "beta")):
    trackio.init(project="proj", name=name, config={"lr": 1e-3}, embed=False)
    for step in [*range(200), *range(150, 300)] if name == "beta" else range(300):
        trackio.log({"train/loss": loss(step, shift), "lr": 1e-3, "odd": float("nan") if step == 50 else 1.0}, step=step)
    trackio.finish()
"""


def trackio_project(place: Path) -> tuple[str, Found]:
    script(place, TRACKIO)
    found = {}
    for name in ("alpha", "beta"):
        text = ("import json, sys; from trackio.sqlite_storage import SQLiteStorage as s; "
                f"json.dump(s.get_logs('proj', '{name}'), sys.stdout, default=str)")  # fmt: skip
        out = subprocess.run([sys.executable, "-c", text], env={**os.environ, "TRACKIO_DIR": str(place / "tk")}, check=True,
                             capture_output=True, text=True).stdout  # fmt: skip
        rows = json.loads(out[out.index("[") :])
        found[name] = counted(
            (key, row["step"], value) for row in rows for key, value in row.items() if key not in ("step", "timestamp")
        )
    return "tk/proj.db", found


# --- TensorBoard


def accumulated(place: Path) -> Points:
    """Every scalar of a directory, in both of TensorBoard's forms, orphaned ones included."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    read.Reload()
    found = counted((tag, event.step, event.value) for tag in read.Tags()["scalars"] for event in read.Scalars(tag))
    tensors = ((tag, event) for tag in read.Tags()["tensors"] for event in read.Tensors(tag))
    return found + counted((tag, event.step, make_ndarray(event.tensor_proto).item()) for tag, event in tensors)


def tensorboard_one(place: Path) -> tuple[str, Found]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(place / "tb")) as writer:
        for step in range(STEPS):
            writer.add_scalar("train/loss", loss(step), step)
            writer.add_scalar("lr", 1e-3, step, new_style=True)
    return "tb", {"tb": accumulated(place / "tb")}


def tensorboard_rolled_back(place: Path) -> tuple[str, Found]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(place / "tb")) as writer:
        for step in range(200):
            writer.add_scalar("train/loss", loss(step), step)
    with SummaryWriter(str(place / "tb"), purge_step=150, filename_suffix=".second") as writer:
        for step in range(150, STEPS):
            writer.add_scalar("train/loss", loss(step, 0.5), step)
    return "tb", {"tb": accumulated(place / "tb")}


def tensorboard_together(place: Path) -> tuple[str, Found]:
    from torch.utils.tensorboard import SummaryWriter

    writers = {name: SummaryWriter(str(place / "tb" / name)) for name in ("one", "two")}
    for step in range(STEPS):
        for shift, writer in enumerate(writers.values()):
            writer.add_scalar("train/loss", loss(step, shift), step)
    for writer in writers.values():
        writer.close()
    return "tb", {name: accumulated(place / "tb" / name) for name in writers}


# --- MLflow


def mlflow_store(place: Path, uri: str) -> Found:
    import mlflow
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(tracking_uri=uri), {}
    experiment = client.create_experiment("e", artifact_location=(place / "artifacts").as_uri())
    for shift, name in enumerate(("red", "blue")):
        run = client.create_run(experiment, run_name=name)
        for step in range(STEPS):
            batch = [("train/loss", loss(step, shift)), ("lr", 1e-3)]
            metrics = [
                mlflow.entities.Metric(key, value, 1_700_000_000_000 + 1000 * step, step) for key, value in batch
            ]
            client.log_batch(run.info.run_id, metrics=metrics)
        client.set_terminated(run.info.run_id)
        history = [one for key in ("train/loss", "lr") for one in client.get_metric_history(run.info.run_id, key)]
        found[name] = counted((one.key, one.step, one.value) for one in history)
    return found


def mlflow_database(place: Path) -> tuple[str, Found]:
    return "mlflow.db", mlflow_store(place, f"sqlite:///{place / 'mlflow.db'}")


def mlflow_files(place: Path) -> tuple[str, Found]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return "mlruns", mlflow_store(place, (place / "mlruns").as_uri())


# --- tables


def lightning_table(place: Path) -> tuple[str, Found]:
    import pandas
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(place), name="csv", version=0)
    for step in range(STEPS):
        logger.log_metrics({"train_loss": loss(step), "lr-AdamW": 1e-3}, step)
        if step % 50 == 49:
            logger.log_metrics({"val_loss": loss(step) - 0.5}, step)
    logger.save()
    file = place / "csv" / "version_0" / "metrics.csv"
    table = pandas.read_csv(file)
    found = counted((name, int(row["step"]), row[name]) for _, row in table.iterrows() for name in table.columns
                    if name != "step" and not math.isnan(row[name]))  # fmt: skip
    return str(file.relative_to(place)), {"csv": found}


def panel_table(place: Path) -> tuple[str, Found]:
    """A panel of two runs in the shape of W&B's download, written and read by pandas."""
    import pandas

    columns: dict[str, list[object]] = {"Step": list(range(STEPS))}
    for shift, name in enumerate(("red", "blue")):
        values = [loss(step, shift) if step % 2 == shift or shift == 0 else None for step in range(STEPS)]
        columns |= {
            f"{name} - train/loss": values,
            f"{name} - train/loss__MIN": values,
            f"{name} - train/loss__MAX": values,
        }
    pandas.DataFrame(columns).to_csv(place / "panel.csv", index=False, quoting=1)
    table = pandas.read_csv(place / "panel.csv")
    found = {}
    for name in ("red", "blue"):
        column = table[["Step", f"{name} - train/loss"]].dropna()
        found[name] = counted(("train/loss", int(step), value) for step, value in column.itertuples(index=False))
    return "panel.csv", found


PLAYS: dict[str, Play] = {
    "wandb, one run": Play(("wandb",), wandb_one),
    "wandb, two runs": Play(("wandb",), wandb_two),
    "wandb, rolled back": Play(("wandb",), wandb_rolled_back),
    "wandb, killed": Play(("wandb",), wandb_killed),
    "trackio, two runs": Play(("trackio",), trackio_project),
    "tensorboard, one run": Play(("torch", "tensorboard"), tensorboard_one),
    "tensorboard, rolled back": Play(("torch", "tensorboard"), tensorboard_rolled_back),
    "tensorboard, two runs": Play(("torch", "tensorboard"), tensorboard_together),
    "mlflow, database": Play(("mlflow",), mlflow_database),
    "mlflow, files": Play(("mlflow",), mlflow_files),
    "lightning, table": Play(("lightning", "pandas"), lightning_table),
    "panel of two runs": Play(("pandas",), panel_table),
}


def imported(place: Path, source: str, names: Iterable[str]) -> Found:
    """Import the store as a user would, and read each run through `chronicle.open`."""
    names = list(names)
    words = [sys.executable, "-m", "chronicle", "import", source, *([] if len(names) > 1 else ["--run", names[0]])]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=300, env=here)
    if done.returncode:
        raise RuntimeError(f"chronicle import: {done.returncode}: {done.stderr.strip()[-300:]}")
    found = {}
    prefix = "panel-" if source == "panel.csv" else "tb-" if source == "tb" and len(names) > 1 else ""
    for name in names:
        at = place / "logs" / name
        run = runs.open(at if at.is_dir() else place / "logs" / f"{prefix}{name}")
        curves = [(channel, run.curve(channel, abandoned=True)) for channel in run.channels]
        found[name] = counted(
            (channel, step, value)
            for channel, curve in curves
            for step, value in zip(curve.step, curve.value, strict=True)
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="imports compared with what the trackers' own interfaces read")
    parser.add_argument("plays", nargs="*", help="parts of the names of plays")
    wanted = parser.parse_args().plays
    chosen = {name: play for name, play in PLAYS.items() if not wanted or any(part in name for part in wanted)}
    equal = played = 0
    for name, play in chosen.items():
        missing = [package for package in play.packages if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name:28} not played: {', '.join(missing)} is not installed")
            continue
        played += 1
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            try:
                source, theirs = play.make(place)
                ours = imported(place, source, theirs)
            except Exception as problem:  # noqa: BLE001 one play does not end the others
                print(f"{name:28} FAILED: {type(problem).__name__}: {str(problem)[:300]}")
                continue
        total = sum(sum(points.values()) for points in theirs.values())
        apart = sum(sum(((theirs[run] - ours[run]) + (ours[run] - theirs[run])).values()) for run in theirs)
        equal += apart == 0 and total > 0
        print(f"{name:28} {len(theirs)} runs, {total} points: {'equal' if not apart else f'{apart} POINTS APART'}")
        for run in theirs:
            for odd in list(theirs[run] - ours[run])[:3] + list(ours[run] - theirs[run])[:3]:
                print(f"    {run}: {odd} {'theirs' if odd in theirs[run] else 'ours'}")
    print(f"{equal} of {played} stores equal, point by point; {len(chosen) - played} not played")
    return 0 if equal == played else 1


if __name__ == "__main__":
    sys.exit(main())
