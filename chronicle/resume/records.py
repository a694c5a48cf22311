"""Descriptions of saved states, kept in the run's directory under digests of what was saved (`<run>/states`).

A plain loop saves wherever it likes, in files that are none of ours. What it saves is known again by its content: the digest of
the optimizer's state, as `state_dict()` gave it and `load_state_dict()` gets it; for an optimizer that has no state (SGD)
the digest of the model's weights. Moved and renamed files keep both, and so does a file in which a rollback changed the LR.
Other runs beside this one are looked through as well: a fork begins from a checkpoint of its parent.
`rollback.checkpoint.state_digest` computes the same digest from a file, without torch.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chronicle.resume.fingerprint import own_shard
from chronicle.resume.memory import MEMORY_VERSION, Memory
from rollback.checkpoint.state_digest import MOST_DEPTH, NUM_ELEMENTS, evenly, header
from rollback.disk.durable import write_atomic

NOT_RECORDED = "no record of this state is known here: it was saved without the guard, or by a run whose directory is elsewhere"
NUM_KEPT = 512  # records of one launch and rank
NUM_RANKS = 8  # that keep theirs; the others read rank 0's


class Records:
    """The records of one run, as one rank keeps and finds them. `directory` None: nothing is kept or found."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._kept: list[Path] = []

    def keep(self, memory: Memory, digest: str, *, replaces: bool = True) -> None:
        """Keep the description of a state that was taken. `digest`: of the optimizer's state, "" when that is empty.

        `replaces`: also where there is one already.
        """
        if self._directory is None or self._rank >= NUM_RANKS:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(memory.to_json(), separators=(",", ":"), default=str) + "\n"
        weights = next((one.weights for one in memory.ranks), "")
        for name in filter(None, (digest, f"weights-{weights}" if weights else "")):
            path = self._directory / f"{name}.{self._rank}.json"
            if not replaces and path.exists():
                continue
            write_atomic(path, text, durable=False)
            self._kept.append(path)
        while len(self._kept) > NUM_KEPT:
            self._kept.pop(0).unlink(missing_ok=True)

    def of_state(self, digest: str) -> Memory | None:
        """What memory was when an optimizer's state of this digest was taken; None where nobody recorded it."""
        return self._find(digest) if digest else None

    def of_weights(self, digest: str) -> Memory | None:
        """What memory was when a state with weights of this digest was taken last; None where nobody recorded it."""
        return self._find(f"weights-{digest}") if digest else None

    def _find(self, name: str) -> Memory | None:
        for path in self._places(name):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(record, dict) and record.get("v") == MEMORY_VERSION:
                    return Memory.from_json(record)
        return None

    def _places(self, name: str) -> Iterator[Path]:
        """This rank's own record, then rank 0's; of this run, then of the runs beside it."""
        if self._directory is None:
            return
        for rank in dict.fromkeys((self._rank, 0)):
            yield self._directory / f"{name}.{rank}.json"
        for rank in dict.fromkeys((self._rank, 0)):
            yield from sorted(self._directory.parent.parent.glob(f"*/{self._directory.name}/{name}.{rank}.json"))


def optimizer_states(thing: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The states of optimizers, as torch's `state_dict` makes them, in an object that is being written."""
    if isinstance(thing, Mapping):
        if "param_groups" in thing and isinstance(thing.get("state"), Mapping):
            yield thing
            return
        thing = tuple(thing.values())
    if isinstance(thing, tuple | list) and depth < MOST_DEPTH:
        for one in thing:
            yield from optimizer_states(one, depth + 1)


def state_digest(state: Mapping[str, Any]) -> str:
    """Digest of an optimizer's `state_dict` by the first elements of some of its tensors; "" when it has none."""
    rows = []
    for place, entry in enumerate(_entries(state)):
        for key in sorted(entry, key=str):
            if hasattr(entry[key], "numel") and entry[key].numel():
                rows.append((place, key, entry[key]))
    if not rows:
        return ""
    total = hashlib.sha256()
    for place, key, tensor in evenly(rows):
        own = own_shard(tensor).detach()
        total.update(header(place, key, tuple(own.shape), str(own.dtype).removeprefix("torch.")))
        total.update(first_bytes(own))
    return total.hexdigest()[:32]


def _entries(state: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    """What the optimizer keeps of each parameter, in the order of its groups."""
    for group in state["param_groups"]:
        for parameter in group["params"]:
            entry = state["state"].get(parameter)
            yield entry if isinstance(entry, Mapping) else {}


def first_bytes(tensor: Any) -> bytes:
    """Its first elements, at most `NUM_ELEMENTS`, in the order of its indices."""
    import torch

    first = tensor.reshape(-1) if tensor.is_contiguous() else tensor[(slice(0, NUM_ELEMENTS),) * tensor.dim()].reshape(-1)
    raw: bytes = first[:NUM_ELEMENTS].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return raw
