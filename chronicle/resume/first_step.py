"""What the guard compares right before the first optimizer step of a launch. This is the complete list.

Always:
- the optimizer that steps is the guarded one, and every scheduler drives a guarded optimizer (`check_identity`);
- as many ranks train as requested from the launcher (`check_ranks`);
- a launch that loaded nothing is the first of its run, or asked for a fresh start (`Loads.check_unseen`);
- warm-up, skipped batches and reshuffle that a rollback asked for are being applied (`Honours.begin`).

After a resume, against the manifest of the checkpoint or the contract of a rollback:
- learning rates now, in the next 20 steps and far ahead; step counts; optimizer classes, groups, their options and the
  order of the parameters; moments and weights; schedulers; loss scaler; averaged weights; topology (`check_memory`);
- training or evaluation mode of the models (`check_mode`);
- what is trained: configuration of the modules, dataset, shape of the batches, scheduler states (`check_trained`);
- buffers, frozen parameters and registered objects, as they were right after the load (`check_loaded`);
- that the state was sound when it was saved (`check_unspoilt`);
- that no newer checkpoint was skipped (`Loads.check_newest`);
- the data position, and the first batch of every rank (`DataWatch.check`).

Files and random generators are compared earlier, at the load (`load.py`); what differed there is judged here. Every load of a
process opens its own expectation, so all this happens again at the first step after it. For 50 steps after the first one the
LR in use is compared with its forecast (`checks/tripwires.py`). A value that was not recorded at the save is not compared.
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
    start.carried = loads.honours.carried
    return checks
