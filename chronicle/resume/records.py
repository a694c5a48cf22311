"""Descriptions of saved states, kept in the run's directory under digests of what was saved (`<run>/states`).

A plain loop saves wherever it likes, in files that are none of ours. What it saves is known again by its content: the digest of
the optimizer's state, as `state_dict()` gave it and `load_state_dict()` gets it; for an optimizer that has no state (SGD)
the digest of the model's weights. Moved and renamed files keep both, and so does a file in which a rollback changed the LR.
Other runs beside this one are looked through as well: a fork begins from a checkpoint of its parent.
`rollback.checkpoint.state_digest` computes the same digest from a file, without torch.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chronicle.resume.beside import StateFiles
from chronicle.resume.memory import MEMORY_VERSION, Memory
from chronicle.resume.samples import first_bytes, own_shard
from rollback.checkpoint.state_digest import MOST_DEPTH, evenly, header

NOT_RECORDED = "no record of this state is known here: it was saved without the guard, or by a run whose directory is elsewhere"
WEIGHTS = "weights-{}"  # name of the record of a state that is known by its weights
NUM_KEPT = 512  # records of one launch and rank


class Records:
    """The records of one run, as one rank keeps and finds them. `directory` None: nothing is kept or found."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._files = StateFiles(directory, rank, version=MEMORY_VERSION, ending=".json", num_kept=NUM_KEPT)

    def keep(self, memory: Memory, digest: str, *, replaces: bool = True) -> None:
        """Keep the description of a state that was taken. `digest`: of the optimizer's state, "" when that is empty.

        `replaces`: also where there is one already.
        """
        record, weights = memory.to_json(), next((one.weights for one in memory.ranks), "")
        for name in (digest, weights and WEIGHTS.format(weights)):
            self._files.write(name, record, replaces=replaces)

    def of_state(self, digest: str) -> Memory | None:
        """What memory was when an optimizer's state of this digest was taken; None where nobody recorded it."""
        record = self._files.read(digest, beside=True)
        return Memory.from_json(record) if record else None

    def of_weights(self, digest: str) -> Memory | None:
        """What memory was when a state with weights of this digest was taken last; None where nobody recorded it."""
        return self.of_state(digest and WEIGHTS.format(digest))


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
