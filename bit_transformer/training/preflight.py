"""The trainer's side of `chronicle.preflight`: its facts before the first step.

Facts are gathered on every rank and judged on the main rank; a refusal ends every rank.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from bit_transformer.data.loaders import Batch
from bit_transformer.model.transformer import count_model_parameters
from bit_transformer.training.setup import (
    TrainingRun,
)
from chronicle.audit import describe_device, open_evidence
from chronicle.errors import ChronicleError
from chronicle.preflight import CheckVerdict, RankFacts, TrainerFacts, check_before_first_step

_MAX_PREDICTED_LRS = 100_000
_NOT_PART_OF_THE_PLAN = ("log_every", "summary", "eval_every", "eval_windows", "checkpoint_every")


class PreflightRefused(ChronicleError):
    """The preflight failed on the main rank; every rank ends with its exit code."""

    def __init__(self, message: str, remedy: str | None, exit_code: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


def check_launch(run: TrainingRun, batch: Batch, *, first_step: int) -> list[str]:
    """Run the preflight over all ranks; return the sentences of its warnings. Raises ChronicleError on every rank alike."""
    _record_evidence(run)
    ranks = gather_object([_rank_facts(run, batch)])
    facts = replace(_facts(run, batch, first_step), ranks=tuple(ranks))
    return _judge(run.accelerator, facts, first_step)


def _judge(accelerator: Any, facts: TrainerFacts, first_step: int | None = None) -> list[str]:
    """Judge the facts on the main rank; every rank gets the sentences of the warnings, or raises the refusal."""
    answer: list[Any] = [[], None]  # the warnings; what a refusal is made of
    if accelerator.is_main_process:
        try:
            for one in check_before_first_step(facts, start_step=first_step):
                if one.verdict is CheckVerdict.WARN:
                    answer[0].append(f"{one.check} {one.title}: {one.message}")
        except ChronicleError as problem:
            answer[1] = (str(problem), problem.remedy, problem.exit_code)
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    warnings, refusal = answer
    if refusal is not None:
        raise PreflightRefused(*refusal)
    return list(warnings)


def _record_evidence(run: TrainingRun) -> None:
    """Record what this rank measured of itself, for `chronicle audit`. Every rank writes its own record."""
    evidence, topology = open_evidence(rank=run.accelerator.process_index), run.topology
    evidence.process(world_size=topology.torch_world_size, device=describe_device(run.accelerator.device),
                     wrapper=topology.sharding, backend=topology.backend, precision=run.recipe.mixed_precision,
                     world_sizes_seen=topology.world_sizes)
    # the shape in memory: a run that grew has another one than its recipe started with
    evidence.model(logical=run.bare_model.config.num_parameters, counted=run.counted,
                   local=count_model_parameters(run.model), config=asdict(run.bare_model.config))


def _facts(run: TrainingRun, batch: Batch, first_step: int) -> TrainerFacts:
    """Everything but the ranks. Collective."""
    recipe, topology, model, data = run.recipe, run.topology, run.bare_model, run.data
    config = recipe.to_json()
    for name in _NOT_PART_OF_THE_PLAN:
        del config[name]
    num_samples = sum(store.num_samples for store in data.stores)
    total_steps = recipe.schedule.total_steps
    last = min(total_steps, first_step + _MAX_PREDICTED_LRS)
    return TrainerFacts(
        config=config, params_logical=model.config.num_parameters, params_counted=run.counted,
        params_by_module={name: count_model_parameters(module) for name, module in model.named_children()},
        tied_expected=False, tied_in_memory=model.embedding.weight is model.head.weight,
        world_sizes_seen=topology.world_sizes, wrapper=topology.sharding, wrapper_requested=topology.expected_wrapper,
        precision=recipe.mixed_precision,
        compile_requested=recipe.compile, compile_possible=run.not_compiled is None if recipe.compile else None,
        dataset="+".join(recipe.data.sources), dataset_bytes=num_samples * recipe.data.window_bytes,
        num_samples=num_samples, data_addressable=True, num_workers=recipe.data.num_workers,
        masked_fractions=(1 - float(batch.num_bits_B.sum()) / batch.bits_BT.numel(),),
        planned_steps=total_steps, scheduler=f"LambdaLR({recipe.schedule.shape})", scheduler_horizon=total_steps,
        scheduler_steps_per_update=1.0, learning_rates=tuple(map(run.learning_rate_at, range(first_step, last))),
        accumulation=recipe.accumulation_steps,
        checkpoint_bytes=run.counted * 12, checkpoints_kept=total_steps // recipe.checkpoint_every + 1)


def _rank_facts(run: TrainingRun, batch: Batch) -> RankFacts:
    device = run.accelerator.device
    name = f"cpu:{os.getpid()}"
    if device.type != "cpu":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return RankFacts(rank=run.accelerator.process_index, host=socket.gethostname(), pid=os.getpid(), device=name,
                     params_local=count_model_parameters(run.model), first_batch_digest=digest_values(batch.bits_BT))


def digest_values(values: Any) -> str:
    """Return a digest of tensors (bit for bit), plain values, and lists and mappings of them."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        value = getattr(value, "_local_tensor", value)  # a sharded parameter: this rank's part
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()
