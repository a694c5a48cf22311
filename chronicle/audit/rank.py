"""What a rank records about itself: one JSON line per fact. Trainers call this in every rank.

    evidence = open_evidence()                     # does nothing without `chronicle run`
    evidence.process(world_size=2, device={"kind": "cpu"}, wrapper="DistributedDataParallel", precision="bf16")
    evidence.model(logical=771176450, counted=771176450, local=771176450, config={"d_model": 1792, "layers": 20})
    evidence.data(step=100, samples=6400, bytes=1474560, dataset="stdlib", dataset_digest="…")
    evidence.device(step=100, busy_fraction=0.93, memory_bytes=17_000_000_000)
    evidence.end(step=3000)

File: `$CHRONICLE_LAUNCH_DIR/evidence/rank-<r>.jsonl`, one `os.write` per line; the supervisor seals its digest in the
journal at the end. Standard library only, no torch. A full disk does not raise: missing evidence is UNSUPPORTED later.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.launch.processes import read_boot_id, read_process
from chronicle.launch.ranks import rank_of

VERSION = 1


def open_evidence(environ: Mapping[str, str] = os.environ, *, rank: int | None = None) -> RankEvidence:
    """Return the evidence file of this rank. Without a launch directory it writes nothing."""
    number = rank if rank is not None else rank_of(environ) or 0
    directory = environ.get("CHRONICLE_LAUNCH_DIR")
    return RankEvidence(Path(directory) / "evidence" / f"rank-{number}.jsonl" if directory else None, number)


def digest_json(value: Any) -> str:
    """Return the sha256 of a JSON value with sorted keys, so that equal configurations give equal digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


class RankEvidence:
    """Appends facts of one rank. Every method may be called repeatedly; the newest line counts."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._fd: int | None = None
        self._broken = path is None

    def process(self, *, world_size: int, device: Mapping[str, Any], **more: Any) -> None:
        """Record this process. `device` is what `describe_device` returns.

        `more`: `wrapper` (the class around the model), `backend`, `precision`, and `world_sizes_seen`, which maps launcher,
        torch and accelerate to the world size each reports: when they differ, ranks train independently.
        """
        me = read_process(os.getpid())
        self._write(
            "process",
            host=socket.gethostname().split(".")[0],
            pid=os.getpid(),
            start_ticks=None if me is None else me.start_ticks,
            boot_id=read_boot_id(),
            world_size=world_size,
            device=dict(device),
            **more,
        )

    def model(
        self, *, logical: int | None, counted: int | None, local: int | None, config: Mapping[str, Any] | None = None
    ) -> None:
        """Record three parameter counts: by formula, counted before wrapping, and held by this rank after wrapping."""
        digest = None if config is None else digest_json(config)
        self._write("model", logical=logical, counted=counted, local=local, config=config, config_digest=digest)

    def data(self, *, step: int, samples: int | None, **more: Any) -> None:
        """Record what this rank has read so far, counted in its loader; None: not counted.

        `more`: `bytes`, `tokens`, `dataset` (its name), `distinct_samples`; `dataset_digest`, `dataset_bytes` and `shards`.
        """
        self._write("data", step=step, samples=samples, **more)

    def device(self, *, step: int, busy_fraction: float | None, memory_bytes: int | None) -> None:
        """Record a sample of the device: fraction of time busy since the last sample, and memory in use."""
        self._write("device", step=step, busy_fraction=busy_fraction, memory_bytes=memory_bytes)

    def end(self, *, step: int, reason: str = "completed") -> None:
        """Record the end of this rank: the last completed step and the reason."""
        self._write("end", step=step, reason=reason)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._broken or self.path is None:
            return
        record = {"v": VERSION, "kind": kind, "t": round(time.time(), 3), "rank": self.rank, **fields}
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            if self._fd is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if os.write(self._fd, line) != len(line):
                raise OSError("short write")
        except OSError as error:
            self._broken = True
            print(f"chronicle: evidence of rank {self.rank} is no longer written: {error.strerror or error}", file=sys.stderr)


# --- Parameter counts and devices of any torch module


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameter counts of a model. `local`: held by this process; `whole`: of the full model, where shards state it."""

    local: int
    whole: int
    trainable: int


def count_parameters(model: Any) -> ParameterCounts:
    """Count a torch module's parameters, each storage once, without importing torch.

    Tied weights share one storage and count once. A ZeRO-3 parameter has no elements of its own and states its size in
    `ds_numel` (transformers#22193: 0 counted).
    """
    seen: set[Any] = set()
    local = whole = trainable = 0
    for _, parameter in model.named_parameters():
        key = _storage_key(parameter)
        if key in seen:
            continue
        seen.add(key)
        held = int(_local_of(parameter).numel())
        full = int(getattr(parameter, "ds_numel", 0) or parameter.numel())
        local += held
        whole += full
        trainable += full if parameter.requires_grad else 0
    return ParameterCounts(local=local, whole=whole, trainable=trainable)


def describe_device(device: Any) -> dict[str, Any]:
    """Describe a device with an id that is equal for ranks sharing one device and different for different devices.

    CUDA: the UUID. CPU: host and pid, because each rank is a process of its own.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    host = socket.gethostname().split(".")[0]
    torch = sys.modules.get("torch")
    if kind != "cuda" or torch is None:
        return {"kind": kind, "id": f"{host}/{os.getpid()}", "host": host}
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")) or f"{host}/{getattr(device, 'index', None)}"
    return {"kind": "cuda", "id": uuid, "host": host, "name": properties.name, "memory_bytes": properties.total_memory}


def _local_of(parameter: Any) -> Any:
    """Return the local part of a DTensor; any other parameter unchanged."""
    part = getattr(parameter, "_local_tensor", None)
    return parameter if part is None else part


def _storage_key(parameter: Any) -> Any:
    """Return a key equal for tied weights (same storage, offset and shape). A tensor without memory (meta device) is unique."""
    tensor = _local_of(parameter)
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (AttributeError, RuntimeError, NotImplementedError):
        pointer = 0
    if not pointer:
        return id(parameter)
    return pointer, tensor.storage_offset(), tuple(tensor.shape)
