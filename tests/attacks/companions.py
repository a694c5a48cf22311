"""Hostile files beside healthy state: manifests, counters, pointers, names, neighbours. The state itself is what torch writes.

`COMPANIONS` maps a label to what plants it in a checkpoint of step 10 that every command would otherwise accept.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.hostile_files import safetensors, torch_zip

STEP = 10
GROUPS = [{"lr": 9e-4, "initial_lr": 1e-3, "params": [0]}]
SCHEDULER = {
    "last_epoch": STEP,
    "_step_count": STEP + 1,
    "base_lrs": [1e-3],
    "_last_lr": [9e-4],
    "gamma": 0.9,
    "step_size": 10,
}


def healthy(root: Path) -> Path:
    """`checkpoint-10` of transformers below `root`."""
    path = root / f"checkpoint-{STEP}"
    path.mkdir(parents=True)
    optimizer = {"state": {0: {"step": float(STEP)}}, "param_groups": GROUPS}
    for name, content in {
        "optimizer.pt": optimizer,
        "scheduler.pt": SCHEDULER,
        "rng_state.pth": {"python": [1]},
    }.items():
        (path / name).write_bytes(torch_zip(pickle.dumps(content, 2)))
    (path / "model.safetensors").write_bytes(safetensors({}))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    return path


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(content) and None


def _manifest(**fields: Any) -> Callable[[Path], None]:
    record = {"v": 1, "step": STEP, "digests": "complete", "files": []} | fields
    return _write("chronicle-manifest.json", json.dumps(record).encode())


def _pointer(make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda path: make(path.parent / "latest") and None


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _fifo_manifest(path: Path) -> None:
    os.mkfifo(path / "chronicle-manifest.json")


def _neighbour(name: str, plant: Callable[[Path], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        shutil.copytree(path, path.parent / name)
        plant(path.parent / name)

    return make


def _group(**fields: Any) -> Callable[[Path], None]:
    optimizer = {"state": {0: {"step": float(STEP)}}, "param_groups": [GROUPS[0] | fields]}
    return _write("optimizer.pt", torch_zip(pickle.dumps(optimizer, 2)))


def _counter(**fields: Any) -> Callable[[Path], None]:
    return _write("scheduler.pt", torch_zip(pickle.dumps(SCHEDULER | fields, 2)))


def _file(**fields: Any) -> Callable[[Path], None]:
    return _manifest(files=[{"path": "optimizer.pt", "size": 1, "sha256": "ab", "crc32": "00000000"} | fields])


COMPANIONS: dict[str, Callable[[Path], object]] = {
    "nothing hostile": lambda path: None,
    "counters nested deeply": _write("trainer_state.json", b'{"a":' * 200_000),
    "counters of five thousand digits": _write("trainer_state.json", b'{"global_step": 1' + b"0" * 5000 + b"}"),
    "counters of four thousand digits": _write("trainer_state.json", b'{"global_step": 1' + b"0" * 4000 + b"}"),
    "counters that are NaN": _write("trainer_state.json", b'{"global_step": NaN, "epoch": Infinity}'),
    "counters beyond a float": _write("trainer_state.json", b'{"global_step": 1e999}'),
    "counters that are a list": _write("trainer_state.json", b"[1, 2]"),
    "counters that are text": _write("trainer_state.json", b'{"global_step": "ten"}'),
    "a terabyte of counters": lambda path: _sparse(path / "trainer_state.json"),
    "a history of anything": _write(
        "trainer_state.json", b'{"global_step": 10, "log_history": [null, 1, {"step": {}}]}'
    ),
    "a rank of eleven digits": lambda path: (path / "rng_state_99999999999.pth").touch(),
    "a data-parallel rank of eleven digits": lambda path: [
        (path / "global_step10").mkdir(),
        (path / "global_step10" / "mp_rank_00_model_states.pt").touch(),
        (path / "global_step10" / "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt").touch(),
    ],
    "arguments that are garbage": _write("training_args.bin", b"\x80\x02garbage"),
    "a device under another name": lambda path: (path / "notes.bin").symlink_to("/dev/zero"),
    "a device that the manifest lists": lambda path: [
        (path / "notes.bin").symlink_to("/dev/zero"),
        _manifest(files=[{"path": "notes.bin", "size": 0, "sha256": "ab"}])(path),
    ],
    "manifest that is a pipe": _fifo_manifest,
    "manifest that is a device": lambda path: (path / "chronicle-manifest.json").symlink_to("/dev/zero"),
    "manifest that is a directory": lambda path: (path / "chronicle-manifest.json").mkdir(),
    "manifest of a terabyte": lambda path: _sparse(path / "chronicle-manifest.json"),
    "manifest with a zero byte in a name": _file(path="a\0b"),
    "manifest with a number for a name": _file(path=5),
    "manifest with a negative size": _file(size=-1),
    "manifest with an infinite size": _write(
        "chronicle-manifest.json", b'{"v": 1, "files": [{"path": "optimizer.pt", "size": Infinity}]}'
    ),
    "manifest with a fractional size": _file(size=1e308),
    "manifest with digests that are lists": _file(sha256=[1], crc32=[2]),
    "manifest of an endless step": _manifest(step=10**4000),
    "manifest of an endless launch": _manifest(launch=10**400),
    "memory that is a list": _manifest(memory=[1]),
    "memory of other shapes": _manifest(memory={"groups": 5, "schedulers": "x", "next_lrs": {"a": 1}, "data": [[]]}),
    "memory of nulls": _manifest(memory={"groups": [1], "schedulers": [None], "next_lrs": [[None]], "data": {"x": 1}}),
    "memory of texts": _manifest(
        memory={"groups": [{"lr": "x"}], "schedulers": [{"last_lr": ["a"]}], "next_lrs": [["a"]]}
    ),
    "memory whose rows are no rows": _manifest(memory={"groups": GROUPS, "next_lrs": [1, 2], "lr_source": []}),
    "pointer of a terabyte": _pointer(_sparse),
    "pointer that is no text": _pointer(lambda path: path.write_bytes(b"\xff\xfe\x00\x01")),
    "pointer with a zero byte": _pointer(lambda path: path.write_bytes(b"a\0b")),
    "pointer that steers the terminal": _pointer(lambda path: path.write_bytes(b"../../etc\x1b[2J")),
    "pointer that is a pipe": _pointer(lambda path: os.mkfifo(path)),
    "pointer to a device": _pointer(lambda path: path.symlink_to("/dev/zero")),
    "neighbour with a damaged manifest": _neighbour(
        "checkpoint-20", lambda path: (path / "chronicle-manifest.json").write_text("{")
    ),
    "neighbour of two hundred digits": _neighbour("checkpoint-" + "9" * 200, lambda path: None),
    "neighbour whose name breaks the line": _neighbour("checkpoint-30\nerror: all is well", lambda path: None),
    "neighbour that is a pipe": lambda path: os.mkfifo(path.parent / "checkpoint-40"),
    "neighbour that is a link to itself": lambda path: (path.parent / "checkpoint-40").symlink_to("checkpoint-40"),
    "rate that is NaN": _group(lr=float("nan")),
    "rate that is infinite": _group(lr=float("inf")),
    "rate near the largest float": _group(lr=1e308, initial_lr=1e308),
    "rate that is negative": _group(lr=-1.0),
    "rate of a thousand bits": _group(lr=2**400),
    "counter of a thousand bits": _counter(last_epoch=2**400, _step_count=2**400 + 1),
    "counter that is negative": _counter(last_epoch=-(10**9)),
    "counter that is text": _counter(last_epoch="ten"),
    "step of a thousand bits": _write(
        "optimizer.pt", torch_zip(pickle.dumps({"state": {0: {"step": 2**400}}, "param_groups": GROUPS}, 2))
    ),
}
