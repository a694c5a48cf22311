"""`--warmup`, `--skip-batches`, `--reshuffle`: guard or script carry them out, and have to have said that they can. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollback.errors import PlanRefused
from rollback.plan.request import RollbackRequest

WARMUP, SKIP, RESHUFFLE = "warmup", "skip", "reshuffle"
HONOURED = (WARMUP, SKIP, RESHUFFLE)

# what a person can do with a trainer that does not; "" is for scripts of no known writer
_OWN: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        WARMUP: "no option of the Trainer warms up again after a resume: scale with --lr-scale instead",
        SKIP: "the Trainer skips what was trained on and no more: leave the batches out of `train_dataset` "
        "(`ignore_data_skip` would start the data anew)",
        RESHUFFLE: "give the Trainer another `data_seed` together with `ignore_data_skip`",
    },
    "accelerate": {
        WARMUP: "let the script's own scheduler warm up again, or scale with --lr-scale",
        SKIP: "call `accelerator.skip_first_batches(loader, N)` in the script",
        RESHUFFLE: "call `set_seed` with another seed before the loaders are prepared",
    },
    "deepspeed": {
        WARMUP: "raise `scheduler.params.warmup_num_steps` in the DeepSpeed config beyond this step, or scale with --lr-scale",
        SKIP: "advance the script's own data iterator by N batches after `load_checkpoint`",
        RESHUFFLE: "give the script's own data loader another seed",
    },
    "lightning": {
        WARMUP: "let `configure_optimizers` warm up again, or scale with --lr-scale",
        SKIP: "leave the batches out in `train_dataloader` (Lightning itself has no option for it)",
        RESHUFFLE: "call `seed_everything` with another seed",
    },
    "": {
        WARMUP: "let the script's own scheduler warm up again, or scale with --lr-scale",
        SKIP: "advance the script's own data iterator by N batches after the load",
        RESHUFFLE: "give the script's own data loader another seed",
    },
}


def refuse_unhonoured(request: RollbackRequest, honours: frozenset[str], format_name: str) -> None:
    """Raise `PlanRefused` for the first of the three that was asked for and that this run does not carry out."""
    asked = {
        WARMUP: ("--warmup", request.warmup_steps),
        SKIP: ("--skip-batches", request.skip_batches),
        RESHUFFLE: ("--reshuffle", request.reshuffle),
    }
    for name, (option, value) in asked.items():
        if value and name not in honours:
            raise PlanRefused(
                f"{option} is carried out by the trainer or its guard, and the run that saved this checkpoint has not said "
                "that it can",
                remedy=f"{own_option(name, format_name)}; or let the script carry it out and say so: "
                f'`chronicle.guard(…, honours=("{name}",))`',
            )


def own_option(name: str, format_name: str) -> str:
    """What does the same with the trainer's own means."""
    writer = next((known for known in ("transformers", "lightning", "deepspeed", "accelerate") if known in format_name), "")
    if format_name.startswith("accelerate"):
        writer = "accelerate"
    return _OWN[writer][name]
