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
- that no newer checkpoint was skipped (`Loads.check_newest`);
- the data position, and the first batch of every rank (`DataWatch.check`).

Files and random generators are compared earlier, at the load (`load.py`). For 50 steps after the first one the LR in use is
compared with its forecast (`checks/tripwires.py`). A value that was not recorded at the save is not compared.
"""

from collections.abc import Mapping
from typing import Any

from chronicle.resume.checks.check import Check, attempt
from chronicle.resume.checks.memory import check_loaded, check_memory, check_mode
from chronicle.resume.checks.run import check_identity, check_ranks
from chronicle.resume.checks.trained import check_trained
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.load import Loads
from chronicle.resume.memory import Memory

__all__ = ["check_first_step"]


def check_first_step(
    loads: Loads,
    live: LiveState,
    found: Memory,
    *,
    optimizer: Any,
    requested: int | None,
    world_size: int,
    first_batches: Mapping[int, str],
    same_data: bool = False,
) -> list[Check]:
    """Every comparison of this page, in its order. `found` describes the memory of `live`, `optimizer` is about to step.

    `requested`: ranks the launcher was asked for, None if unknown; `first_batches`: rank -> digest of its first batch.
    """
    start = loads.start
    checks = [*check_identity(live, optimizer), *attempt("writers", "M6", loads.check_writers)]
    if not loads.expectation(None, None).accepts("world_size"):
        checks += check_ranks(requested, world_size)
    if start.loaded_from is None:
        checks += loads.check_unseen(found, live)
    checks += loads.honours.begin(start.expectation, live, start.start_step or 0)
    start.carried = loads.honours.carried
    if start.expectation is None:
        return checks
    checks += check_memory(start.expectation, found, rank=live.rank, at_first_step=True)
    checks += check_mode(start.expectation, found)
    expectation = start.expectation
    checks += attempt("what is trained", "M6", lambda: check_trained(expectation, found, same_data=same_data))
    checks += loads.check_owner()
    if loads.state is not None:
        checks += check_loaded(start.expectation, loads.state, found, rank=live.rank)
    return [*checks, *loads.check_newest(), *loads.data.check(live.data, first_batches)]
