"""A load under guard: the expected state, what the files and the memory hold, and what is checked later.

Two kinds of loads exist. An adapter announces the load of a checkpoint directory before and after it happens. A plain
loop loads an optimizer state, which carries its own description of memory. A trainer that loads without either is
compared with the checkpoint of its step in the journal (`check_unseen`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume.batches import DataWatch
from chronicle.resume.checks.check import Check, noted
from chronicle.resume.checks.memory import LoadedState, check_generators, check_memory
from chronicle.resume.checks.run import (
    check_contract,
    check_digest,
    check_files,
    check_fresh_start,
    check_newest,
    check_run_state,
    check_sound,
)
from chronicle.resume.contract import Contract, Expectation, Options, accepted_changes, load_contract, same_checkpoint
from chronicle.resume.fingerprint import (
    LiveState,
    buffers_digest,
    fingerprint_memory,
    frozen_parameters,
    object_digests,
    rng_digests,
)
from chronicle.resume.honours import Honours
from chronicle.resume.journal import GuardJournal
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.save import read_memory
from chronicle.resume.verdict import Ranks, StartingPoint
from chronicle.resume.writers import claim_run
from chronicle.story.plain import plain

__all__ = ["Loads"]


class Loads:
    """The loads of one process. What they promise is in `start`, what the last one left in memory in `state`."""

    def __init__(
        self,
        options: Options,
        journal: GuardJournal,
        ranks: Ranks,
        start: StartingPoint,
        data: DataWatch,
        honours: Honours,
    ) -> None:
        self._options, self._journal, self._ranks = options, journal, ranks
        self.start, self.data, self.honours = start, data, honours
        self.state: LoadedState | None = None
        self._objects_before: Mapping[str, str] = {}

    def check_before(self, root: Path, memory: Memory | None, live: LiveState) -> list[Check]:
        """Files and journal, before any state is replaced. `memory`: what the adapter read inside the checkpoint."""
        self._objects_before = object_digests(live)
        contract, memory = self.contract(), memory or read_memory(root)
        self.start.identity = {} if memory is None else memory.identity
        self.start.expectation = self._expect(root, memory, contract)
        if self._ranks.rank != 0:
            return []  # one rank reads files and journal, all hear the verdict
        history = self._journal.read()
        # a rollback edits the file: then its digest in the journal is out of date
        known = None if self.start.expectation.contract else history.digests.get(str(root))
        files = [*check_files(root), *check_digest(root, known)]
        if not any(check.code == "F11" for check in files):
            files += check_sound(memory, root)
        return [*files, *check_contract(contract, root, memory, history), *check_run_state(root, memory, history)]

    def check_after(self, live: LiveState) -> list[Check]:
        """Memory right after the load, on every rank."""
        found = fingerprint_memory(live)
        self.state = LoadedState(
            buffers=found.ranks[0].buffers,
            frozen=found.frozen,
            objects=found.objects,
            objects_before=self._objects_before,
        )
        self.data.loaded(live.data)
        self.honours.loaded(self.start.expectation, live)
        return check_memory(self.start.expectation or Expectation(basis="none"), found, rank=live.rank)

    def check_generators(self, topology: Mapping[str, Any]) -> list[Check]:
        """Random generators of this rank; call it once the framework has restored them."""
        if self.start.expectation is None:
            return []
        rank = self._ranks.rank
        found = Memory(ranks=(RankDigest(rank=rank, rng=rng_digests()),), topology=topology)
        return check_generators(self.start.expectation, found, rank=rank)

    def state_loaded(self, memory: Memory | None, live: LiveState) -> None:
        """A plain loop loads an optimizer state that carries `memory`; it is compared at the first step."""
        self.start.state_loaded = True
        self.start.identity = {} if memory is None else memory.identity
        contract, step = self.contract(), memory.step if memory else None
        bound = contract if contract is not None and step is not None and contract.step == step else None
        self.start.expectation = self.expectation(memory, bound)
        self.honours.loaded(self.start.expectation, live)

    def first_batch(self, observe: Callable[[], LiveState]) -> None:
        """The first batch is about to change running statistics: note them now.

        An adapter's load is known already. A plain loop does not announce its loads, so what it holds now is what it loaded.
        """
        if self.state is not None or self.start.state_loaded:
            live = observe()
            state = self.state or LoadedState(frozen=frozen_parameters(live))
            self.state = replace(state, buffers=buffers_digest(live))

    def check_unseen(self, found: Memory, live: LiveState) -> list[Check]:
        """For a launch in which no adapter saw a load: the trainer loads by itself, or it loaded nothing.

        A trainer at the step of a checkpoint in the journal is compared with that checkpoint. Only the first launch of a run,
        and one that asked for a fresh start, may load nothing.
        """
        contract, expectation = self.contract(), self.start.expectation
        if self.start.state_loaded and (self._options.fresh_start or (expectation and expectation.memory)):
            return []  # the state itself carried its description
        history = self._journal.read()
        pending = contract if contract is not None and contract.rollback not in history.fulfilled else None
        if self._options.fresh_start or (pending is None and not history.checkpoints):
            return []
        is_main = self._ranks.rank == 0
        step = found.optimizer_steps[1] if found.optimizer_steps else 0
        root = next(
            (Path(path) for saved, path in reversed(history.checkpoints) if step and saved == step and path), None
        )
        memory = None if root is None else read_memory(root)
        unknown = root is None or memory is None
        if unknown and step and not self.start.state_loaded and (pending is None or pending.optimizer_step == step):
            self.start.state_loaded = True
            self.start.no_basis = f"the guard saw no load, but the optimizer is at step {step}"
            self.start.expectation = self.expectation(None, pending)
        if root is None or memory is None:
            return check_fresh_start(found, history, pending) if is_main and not self.start.state_loaded else []
        self.start.loaded_from, self.start.expectation = root, self._expect(root, memory, contract)
        self.honours.loaded(self.start.expectation, live)
        return [*check_files(root), *check_contract(contract, root, memory, history)] if is_main else []

    def check_newest(self) -> list[Check]:
        """Whether a newer checkpoint was skipped. Not checked at the load: a script that only evaluates may load any."""
        root, expectation = self.start.loaded_from, self.start.expectation
        if root is None or expectation is None or self._ranks.rank != 0 or expectation.accepts("checkpoint"):
            return []
        return check_newest(expectation.memory, root, self._journal.read(), expectation.contract)

    def check_owner(self) -> list[Check]:
        """Noted when another run saved what was loaded, and nobody declared this run a fork or copy of it."""
        found, own = self.start.identity, self._journal.run_id
        if self._ranks.rank != 0 or not own or found.get("run_id") in (None, "", own):
            return []
        history = self._journal.read()
        if found["run_id"] in history.copied_from | history.parents:
            return []
        name = plain(found.get("run") or found["run_id"])
        belongs = f"this checkpoint belongs to run {name} (launch {found.get('launch')}, step {found.get('step')})"
        cause = f"{belongs}; for a fork on purpose: `chronicle init --from CHECKPOINT`"
        return [noted("run", "M6", expected=own, found=str(found["run_id"]), where="identity in the checkpoint", cause=cause)]

    def check_writers(self) -> list[Check]:
        """Noted when another living process writes this run. From here on this process is known to write it."""
        paths = self._journal.paths
        if self._ranks.rank != 0 or paths is None:
            return []
        other = claim_run(paths, self._journal.launch)
        if not other:
            return []
        cause = f"{other} writes this run too: two launches overwrite each other's checkpoints; end one of them"
        return [noted("writers", "M6", expected="one launch", found=other, where="writer.lock of the run", cause=cause)]

    def contract(self) -> Contract | None:
        """The contract of the run's last rollback. Raises `ChronicleError` when it cannot be read."""
        return load_contract(self._journal.paths.contract_path) if self._journal.paths else None

    def expectation(self, memory: Memory | None, bound: Contract | None) -> Expectation:
        """What memory must hold, given a checkpoint's memory and the contract that applies to it."""
        return Expectation(
            basis="contract" if bound else ("manifest" if memory else "none"),
            memory=memory,
            contract=bound,
            accepted=accepted_changes(bound, self._options.accept_change),
            by_script=self._options.honours,
        )

    def _expect(self, root: Path, memory: Memory | None, contract: Contract | None) -> Expectation:
        bound = contract if contract is not None and same_checkpoint(contract, root, memory) else None
        return self.expectation(memory, bound)
