"""What the guard compares right before the first optimizer step of a launch, in this order; the rows are in `rules.py`.

Always: the optimizer that steps is the guarded one, and every scheduler drives a guarded one; as many ranks train as requested;
a launch that loaded nothing is the first of its run, or asked for a fresh start; what a rollback asked for is being applied.
After a resume, against the checkpoint's manifest or a rollback's contract: memory (`check_memory`), modes of the models, what
is trained (`check_trained`), buffers, frozen parameters and objects as of the load (`check_loaded`), whether the state was
sound and is the newest, the data position, and the first batch of every rank.

Files and random generators are compared at the load (`load.py`). Every load of a process opens its own expectation, so all this
happens again after it. A value that was not recorded at the save is not compared.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from chronicle.resume.checks.check import Check, attempt
from chronicle.resume.checks.memory import check_loaded, check_memory, check_mode
from chronicle.resume.checks.run import check_identity, check_ranks, check_unspoilt
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.load import Loads
from chronicle.resume.memory import OTHERS, Memory
from chronicle.resume.trained import check_trained
from chronicle.resume.verdict import StartingPoint


def check_first_step(
    loads: Loads,
    live: LiveState,
    found: Memory,
    *,
    optimizer: Any,
    requested: int | None,
    world_size: int,
    first_batches: Sequence[tuple[int, Check]],
    same_data: bool = False,
) -> Iterator[Check]:
    """Every comparison of this page, in its order. `found` describes the memory of `live`, `optimizer` is about to step.

    `requested`: ranks the launcher was asked for, None if unknown; `first_batches`: what each rank found of its own.
    """
    start = loads.start
    yield from attempt("identity of the optimizer", "M5", lambda: check_identity(live, optimizer, _others(start)))
    yield from attempt("writers", "M6", loads.check_writers)
    if not loads.expectation(None, None).accepts("world_size"):
        yield from attempt("ranks", "PF04", lambda: check_ranks(requested, world_size))
    if start.loaded_from is None:
        yield from attempt("resume", "L2", lambda: loads.check_unseen(found, live, optimizer))
    loads.read_again()
    yield from attempt("options of the rollback", "M4", lambda: _begin_options(loads, live))
    expectation = start.expectation
    if expectation is None:
        return
    if start.loaded_from is None:
        yield from attempt("sound weights", "F11", lambda: check_unspoilt(expectation.memory, None))
    yield from attempt("memory", "M1", lambda: check_memory(expectation, found, rank=live.rank, at_first_step=True))
    yield from attempt("training mode", "M1", lambda: check_mode(expectation, found))
    trained = partial(check_trained, expectation, found, same_data=same_data)
    yield from attempt("what is trained", "M6", trained)
    yield from attempt("owner", "M6", loads.check_owner)
    state = loads.state
    if state is not None:
        yield from attempt("state after the load", "M1", lambda: check_loaded(expectation, state, found, rank=live.rank))
    yield from attempt("newest checkpoint", "F9", loads.check_newest)
    yield from attempt("next batch", "M4", lambda: loads.data.check(live.data, first_batches))


def _others(start: StartingPoint) -> Sequence[str] | None:
    """Classes of optimizers that stepped the same parameters before the save; None when nothing was loaded."""
    memory = start.expectation.memory if start.expectation else None
    return None if not start.resumed else tuple((memory.topology if memory else {}).get(OTHERS) or ())


def _begin_options(loads: Loads, live: LiveState) -> list[Check]:
    start = loads.start
    checks = loads.honours.begin(start.expectation, live, start.start_step or 0)
    start.learn(carried=loads.honours.carried)
    return checks
