"""What a person can do about a breach of the envelope: the line to type."""

from chronicle.resume.envelope.breach import Breach
from chronicle.resume.events import Saved
from chronicle.resume.hub import Observer
from chronicle.resume.training import Training

NUM_KEPT = 64


class WayOut(Observer):
    """Knows the saves of this launch that nothing spoilt."""

    about = "way out"

    def __init__(self, training: Training) -> None:
        self._training = training
        self.saved_steps: list[int] = []  # of this launch, newest last

    def saved(self, event: Saved) -> None:
        """A sound checkpoint is one to go back to."""
        memory = event.memory
        if memory is not None and not memory.spoilt and memory.step is not None:
            self.saved_steps = [*self.saved_steps[1 - NUM_KEPT :], memory.step]

    def words(self, breach: Breach) -> str:
        """The line to type where the weights are spoilt; "" for none."""
        paths, start = self._training.journal.paths, self._training.start
        if breach.tier != "propose" or paths is None:
            return ""
        sound = self._newest_before(breach)
        if sound is None and (start.loaded_from is not None or start.state_loaded):
            sound = start.start_step or 0
        if sound is None:
            return f"no sound checkpoint of this launch is known; type: chronicle watch --once --run {paths.run}"
        return f"to roll back, type: chronicle rollback --to {sound} --run {paths.run}"

    def _newest_before(self, breach: Breach) -> int | None:
        """The newest save before the breach: where it was last well, or the step before it began."""
        last = breach.low
        if last is None and breach.step is not None:
            last = breach.step - 1
        if last is None:
            return None
        return next((step for step in reversed(self.saved_steps) if step <= last), None)
