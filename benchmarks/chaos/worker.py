"""bit_transformer with planted faults: `torchrun … worker.py ARGUMENTS`; `CHAOS` names the campaign's directory.

Rank 0 appends a line for each step to `steps.log`: time, start (launch or attempt), step, loss, LR, digest of the samples.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.chaos.faults import Planted, newest_checkpoint
from bit_transformer import train as trainer


def main() -> int:
    """Train with the faults; the arguments are the trainer's."""
    directory, rank = Path(os.environ["CHAOS"]), int(os.environ["RANK"])
    arguments = sys.argv[1:]
    planted = Planted(directory, rank)
    launch = (
        os.environ.get("CHRONICLE_LAUNCH")
        or f"{os.environ['CHAOS_START']}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    )
    if "CHRONICLE_LAUNCH" not in os.environ:  # nobody hands it a checkpoint: the newest by its number
        newest = newest_checkpoint(directory)
        arguments += ["--resume", "fresh" if newest is None else str(newest / "accelerator_state")]
    if planted.take_accident():
        arguments += ["--accident", "schedule-restarts"]
    log = open(directory / "steps.log", "a", buffering=1) if rank == 0 else None  # noqa: SIM115
    state: dict[str, Any] = {}
    take_step, losses = trainer.take_step, trainer.next_symbol_losses
    save_state, save = Accelerator.save_state, torch.save

    def step_with_faults(run: Any, batch: Any, *others: Any) -> Any:
        state["run"] = run
        planted.before_step(run.progress.step)
        rate = run.learning_rate
        step = take_step(run, batch, *others)
        time.sleep(float(os.environ.get("CHAOS_STEP_SECONDS", "0")))
        if log is not None and step.finite:
            log.write(
                f"{time.time():.3f} {launch} {run.progress.step + 1} {step.loss.hex()} {rate.hex()} {batch.digest}\n"
            )
        return step

    def losses_or_nan(*parts: Any) -> Any:
        found = losses(*parts)
        if planted.nan:
            planted.nan, found = False, found * float("nan")
        return found

    def save_state_with_faults(self: Any, *parts: Any, **options: Any) -> Any:
        planted.before_save(state["run"].progress.step, state["run"].bare_model)
        return save_state(self, *parts, **options)

    def save_or_die(thing: Any, target: Any, *parts: Any, **options: Any) -> None:
        save(thing, target, *parts, **options)
        if planted.cut_at:
            os.truncate(target, planted.cut_at)
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.take_step, trainer.next_symbol_losses = step_with_faults, losses_or_nan
    Accelerator.save_state, torch.save = save_state_with_faults, save_or_die  # type: ignore[method-assign]
    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
