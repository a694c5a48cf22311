"""The facts that the trainer reports to `chronicle.preflight` before its first step.

They are gathered on every rank and judged on the main rank; a refusal ends every rank.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from bit_transformer.data.bits import decode_bits, repair_parity
from bit_transformer.data.loaders import Batch
from bit_transformer.footprint import Room, measure_room
from bit_transformer.model.transformer import BitTransformer, count_model_parameters
from bit_transformer.recipes import Recipe
from bit_transformer.training.setup import TrainingRun
from chronicle.audit import describe_device, open_evidence
from chronicle.errors import ChronicleError
from chronicle.preflight import CheckVerdict, DecodedSample, RankFacts, TrainerFacts, check_before_first_step
from chronicle.preflight.gate import SKIP_VARIABLE

_MAX_PREDICTED_LRS = 100_000
_DIGEST_BELOW = 50_000_000
_NOT_PART_OF_THE_PLAN = ("log_every", "summary", "eval_every", "eval_windows", "checkpoint_every")


def check_launch(run: TrainingRun, batch: Batch, *, first_step: int,
                 experiments: Mapping[str, Any] | None = None) -> list[str]:
    """Run the preflight over all ranks; return the sentences of its warnings. Raises ChronicleError on every rank alike.

    `experiments` are the results of a trial (`trial.py`); None before the first step.
    """
    if experiments is None:
        _record_evidence(run)
    found = dict(experiments or {})
    finite = found.pop("gradients_finite", None)
    ranks = gather_object([_rank_facts(run, batch, finite)])
    correct, seconds = _try_collective(run.accelerator)
    leak = _future_leak(run.bare_model, batch.bits_BT[:1]) if run.counted <= _DIGEST_BELOW else None
    last = min(run.recipe.schedule.total_steps, first_step + _MAX_PREDICTED_LRS)
    facts = _facts(run, batch, ranks=_with_room(ranks, run.room), collective_correct=correct, collective_seconds=seconds,
                   future_leak=leak, learning_rates=tuple(run.learning_rate_at(step) for step in range(first_step, last)))
    return _judge(run.accelerator, replace(facts, memory_needed=run.room.parts, memory_ways=run.room.ways, **found))


def require_room(accelerator: Any, recipe: Recipe) -> Room:
    """Compare the memory that the recipe needs with the free memory, before the model is built.

    Raises ChronicleError on every rank alike where it does not fit.
    """
    room = measure_room(accelerator, recipe)
    free = [one for one in room.free_by_rank if one is not None]
    if free and room.needed.total > min(free) and "PF31" not in os.environ.get(SKIP_VARIABLE, "").split(","):
        mine = RankFacts(rank=accelerator.process_index, host=socket.gethostname(), pid=os.getpid(),
                         device=_device_name(accelerator.device))
        ranks = _with_room(gather_object([mine]), room)
        _judge(accelerator, TrainerFacts(ranks=ranks, memory_needed=room.parts, memory_ways=room.ways))
    return room


def _judge(accelerator: Any, facts: TrainerFacts) -> list[str]:
    """Judge the facts on the main rank; every rank gets the sentences of the warnings, or raises the refusal."""
    answer: list[list[str] | tuple[str, str | None, int]] = [[]]
    if accelerator.is_main_process:
        try:
            results = check_before_first_step(facts)
            answer = [[f"{one.check} {one.title}: {one.message}" for one in results if one.verdict is CheckVerdict.WARN]]
        except ChronicleError as problem:
            answer = [(str(problem), problem.remedy, problem.exit_code)]
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if isinstance(answer[0], tuple):
        raise PreflightRefused(*answer[0])
    return answer[0]


def _with_room(ranks: Sequence[RankFacts], room: Room) -> tuple[RankFacts, ...]:
    return tuple(replace(one, memory_free=room.free_by_rank[one.rank]) for one in ranks)


def _record_evidence(run: TrainingRun) -> None:
    """Record what this rank measured of itself, for `chronicle claim`. Every rank writes its own record."""
    evidence = open_evidence(rank=run.accelerator.process_index)
    evidence.process(
        world_size=run.topology.torch_world_size, device=describe_device(run.accelerator.device),
        wrapper=run.topology.sharding, backend=run.topology.backend, precision=run.recipe.mixed_precision,
        world_sizes_seen=run.topology.world_sizes)
    # the shape in memory: a run that grew has another one than its recipe started with
    evidence.model(logical=run.bare_model.config.num_parameters, counted=run.counted,
                   local=count_model_parameters(run.model), config=asdict(run.bare_model.config))


class PreflightRefused(ChronicleError):
    """The preflight failed on the main rank; every rank ends with its exit code."""

    def __init__(self, message: str, remedy: str | None, exit_code: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


def _facts(run: TrainingRun, batch: Batch, *, ranks: tuple[RankFacts, ...], learning_rates: tuple[float, ...],
           collective_correct: bool, collective_seconds: float, future_leak: float | None) -> TrainerFacts:
    recipe, topology, model = run.recipe, run.topology, run.bare_model
    config = {key: value for key, value in recipe.to_json().items() if key not in _NOT_PART_OF_THE_PLAN}
    num_samples = sum(store.num_samples for store in run.data.stores)
    return TrainerFacts(
        config=config, params_logical=model.config.num_parameters, params_counted=run.counted,
        params_by_module={name: count_model_parameters(module) for name, module in model.named_children()},
        tied_expected=False, tied_in_memory=model.embedding.weight is model.head.weight, ranks=ranks,
        world_sizes_seen=topology.world_sizes, wrapper=topology.sharding, wrapper_requested=topology.expected_wrapper,
        precision=recipe.mixed_precision, precision_supported=_precision_works(recipe.mixed_precision, topology.device),
        compile_requested=recipe.compile, compile_possible=run.not_compiled is None if recipe.compile else None,
        collective_correct=collective_correct, collective_seconds=collective_seconds,
        dataset="+".join(recipe.data.sources), dataset_bytes=num_samples * recipe.data.window_bytes,
        num_samples=num_samples, data_addressable=True, num_workers=recipe.data.num_workers,
        # a window in run-length form is not text: its bits are not decoded as bytes
        samples=() if recipe.data.compress_end else tuple(
            _decoded(row, recipe.model.vocab == 256) for row in batch.bits_BT[:2]),
        masked_fractions=(1 - float(batch.num_bits_B.sum()) / batch.bits_BT.numel(),),
        future_leak=future_leak,
        planned_steps=recipe.schedule.total_steps, scheduler=f"LambdaLR({recipe.schedule.shape})",
        scheduler_horizon=recipe.schedule.total_steps, scheduler_steps_per_update=1.0, learning_rates=learning_rates,
        accumulation=recipe.accumulation_steps,
        micro_batch=run.data.plan.batch_size // (topology.torch_world_size * recipe.accumulation_steps),
        checkpoint_bytes=run.counted * 12, checkpoints_kept=recipe.schedule.total_steps // recipe.checkpoint_every + 1)


def _rank_facts(run: TrainingRun, batch: Batch, gradients_finite: bool | None) -> RankFacts:
    local, parameters = count_model_parameters(run.model), list(run.bare_model.parameters())
    replica = local <= _DIGEST_BELOW and not any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in parameters)
    return RankFacts(rank=run.accelerator.process_index, host=socket.gethostname(), pid=os.getpid(),
                     device=_device_name(run.accelerator.device), params_local=local,
                     # parts of one model differ, replicas must not
                     weights_digest=_digest(*parameters) if replica else None,
                     first_batch_digest=_digest(batch.bits_BT), gradients_finite=gradients_finite)


def _device_name(device: torch.device) -> str:
    return f"cpu:{os.getpid()}" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _decoded(symbols_T: Tensor, as_bytes: bool) -> DecodedSample:
    content = bytes(symbols_T.tolist()) if as_bytes else bytes(decode_bits(symbols_T).tolist())
    exact = as_bytes or repair_parity(symbols_T)[1] == 0
    return DecodedSample(text=content.decode(errors="replace"), length=symbols_T.numel(), masked=0, exact=exact)


@torch.no_grad()
def _precision_works(precision: str, device: str) -> bool:
    """Whether a matrix product in the precision of the autocast gives the right result."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    try:
        ones = torch.ones(16, 16, dtype=kind, device=device)
        return bool((ones @ ones == 16).all())
    except RuntimeError:
        return False


@torch.no_grad()
def _future_leak(model: BitTransformer, symbols_1T: Tensor) -> float | None:
    """Change the last symbol and return by how much the logits before it moved. Collective: weights may be sharded."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    changed = symbols_1T.to(device).clone()
    changed[:, -1] = 1 - changed[:, -1].clamp(max=1)
    difference = model(symbols_1T.to(device)).logits_BTV[:, :-1] - model(changed).logits_BTV[:, :-1]
    model.train(was_training)
    return float(difference.abs().max())


def _try_collective(accelerator: Any) -> tuple[bool, float]:
    started = time.perf_counter()
    total = accelerator.reduce(torch.tensor([float(accelerator.process_index)], device=accelerator.device))
    expected = accelerator.num_processes * (accelerator.num_processes - 1) / 2
    return float(total.item()) == expected, time.perf_counter() - started
