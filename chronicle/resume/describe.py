"""Describes memory: at a save, for the checkpoint; and right before the next step, for `reference.py`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chronicle.resume.events import Loaded
from chronicle.resume.fingerprint import LiveState, fingerprint_memory
from chronicle.resume.hub import Observer
from chronicle.resume.memory import OTHERS, Memory
from chronicle.resume.moving import facts_of_buffers
from chronicle.resume.written import Head, heads_of

if TYPE_CHECKING:
    from chronicle.resume.parts import Parts


class Describer(Observer):
    """Makes the descriptions of one process, from what its parts know."""

    about = "training mode"

    def __init__(self, parts: "Parts") -> None:
        self._parts, self._training = parts, parts.training
        self.identity: Mapping[str, Any] = {}  # of the state that was described last
        self._newest: tuple[int, Memory] | None = None  # the last one, and how many steps this launch had taken then
        self.heads: Mapping[str, Head] = {}  # of the weights, then
        self.others: set[str] = set()  # classes of optimizers that are not guarded and step the same parameters

    def loaded(self, event: Loaded) -> None:
        """Another state has another identity."""
        self.identity, self._newest = {}, None

    def is_of_now(self, memory: Memory) -> bool:
        """Whether this is the last description, and no step was taken since."""
        if self._newest is None:
            return False
        steps, newest = self._newest
        return steps == self._training.steps_here and newest.identity == memory.identity

    def at_save(self, seen: str | None = None) -> Memory:
        """Memory as it is now, for a checkpoint that is being saved; `ranks` holds this rank alone.

        `seen`: the position in the data at the save, when that was earlier than now.
        """
        parts, training = self._parts, self._training
        parts.honours.restore_lrs()
        live = training.live()
        parts.lrs.knows(live.schedulers)
        witness = parts.lrs.witness
        memory = fingerprint_memory(live, lr_source=witness.source, recent_lrs=tuple(parts.lrs.recent))
        parts.lrs.foretell(memory.next_lrs)
        step = training.step if memory.step is None else memory.step
        if not self.identity or self.identity["step"] != step:
            shared = parts.data.record_id if training.ranks.world_size > 1 else ""
            self.identity = training.journal.new_identity(step, shared)
        own = replace(memory.ranks[0], batches=parts.data.position if seen is None else seen)
        with training.contained("buffers"):
            own = replace(own, each_buffer=facts_of_buffers(live.models), moving=parts.moving.keys)
        unregistered: Mapping[str, str] = {}
        with training.contained("unregistered state"):
            unregistered = parts.unregistered.at_save(live, step)
        with training.contained("options of the parameter groups"):
            parts.reference.options.see(live.optimizers)
        found = replace(
            self.with_habits(memory, live),
            step=step,
            identity=self.identity,
            moved_options=tuple(sorted(parts.reference.options.moved)),
            spoilt=parts.envelope.at_save(),
            ranks=(own,),
            unregistered=unregistered,
            habits=parts.reference.habits,
            seen_frozen=parts.reference.frozen_now(memory.frozen),
        )
        found = parts.honours.add_to(found, live)
        self._newest = training.steps_here, found
        with training.contained("weights of the save"):
            self.heads = heads_of(live.models) if training.ranks.rank == 0 else {}
        return found

    def before_next_step(self) -> Memory:
        """Memory right before the first step after a save; of the digests of its tensors that of the weights."""
        live = self._training.live()
        found = self.with_habits(fingerprint_memory(live, digests=False), live, since_save=True)
        step = self._training.step if found.step is None else found.step
        return replace(found, step=step)

    def with_habits(self, memory: Memory, live: LiveState, *, since_save: bool = False) -> Memory:
        """With what is trained, and with which optimizers beside the guarded ones."""
        others = {OTHERS: sorted(self.others)} if self.others else {}
        trained: Mapping[str, Any] = {}
        with self._training.contained("record of what is trained"):
            trained = self._parts.trained.record(live, since_save=since_save)
        return replace(memory, topology={**memory.topology, **others}, trained=trained)
