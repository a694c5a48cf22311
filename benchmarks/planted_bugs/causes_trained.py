"""Causes that leave every weight as it was: what is trained is another model, on other data, or in other portions."""

from typing import Any

from benchmarks.planted_bugs.plan import Plan, cause

ACC, DDP, HF, PL, PT = "accelerate", "ddp", "transformers", "lightning", "torch"
CONFIGURATION = "a stranger's script, 2026-11-22: model configuration changed between launches"
DATA = "a stranger's script, 2026-11-22: data changed between launches"


def _other_model(rig: str, name: str, before: str, after: str) -> None:
    @cause(rig, name, CONFIGURATION)
    def _(plan: Plan) -> None:
        plan.first["model"], plan.again["model"] = before, after


for rig in (ACC, PT, PL, DDP):
    _other_model(rig, "dropout switched off", "dropout", "dropout off")
for rig in (ACC, PT, PL):
    _other_model(rig, "another activation", "dropout", "relu")
    _other_model(rig, "another epsilon of the layer norm", "layer norm", "layer norm, other eps")
    _other_model(rig, "another scale of the attention", "scaled", "scaled, other scale")


for rig in (ACC, PT):

    @cause(rig, "a part of the model is left in evaluation mode", CONFIGURATION)
    def _(plan: Plan) -> None:
        plan.first["model"] = "dropout"
        plan.after_load.append(lambda launch: launch.model[2].eval())


@cause(HF, "dropout switched off", CONFIGURATION)
def _(plan: Plan) -> None:
    plan.after_load.append(lambda parts: setattr(parts["model"].dropout, "p", 0.0))


def _evaluate_dropout(parts: Any) -> None:
    """After `model.train()` of the first step's forward pass, as a validation inside a callback does."""
    parts["model"].dropout.train = lambda mode=True: parts["model"].dropout  # the Trainer calls `model.train()` every step
    parts["model"].dropout.training = False


@cause(HF, "a part of the model is left in evaluation mode", CONFIGURATION)
def _(plan: Plan) -> None:
    plan.after_load.append(_evaluate_dropout)


for rig in (ACC, HF):

    @cause(rig, "other rows in a dataset of the same size", DATA)
    def _(plan: Plan) -> None:
        plan.again["data_seed"] = 99


for rig in (HF, PL):

    @cause(rig, "another dataset", DATA)
    def _(plan: Plan) -> None:
        plan.again["num_rows"] = 600


for rig in (ACC, PL):

    @cause(rig, "shuffling switched off", DATA)
    def _(plan: Plan) -> None:
        plan.first["shuffle"], plan.again["shuffle"] = True, False


@cause(PL, "twice the batch size", DATA)
def _(plan: Plan) -> None:
    plan.again["batch"] = 8
