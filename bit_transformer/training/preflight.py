"""The trainer's side of `chronicle.preflight`: its facts before the first step.

Facts are gathered on every rank and judged on the main rank; a refusal ends every rank.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from bit_transformer.data.bits import decode_bits, repair_parity
from bit_transformer.data.loaders import Batch
from bit_transformer.model.transformer import BitTransformer, count_model_parameters
from bit_transformer.training.setup import (
    TrainingRun,
)
from chronicle.audit import describe_device, open_evidence
from chronicle.errors import ChronicleError
from chronicle.preflight import CheckVerdict, DecodedSample, RankFacts, TrainerFacts, check_before_first_step

_MAX_PREDICTED_LRS = 100_000
_DIGEST_BELOW = 50_000_000
_LEAK_POSITIONS = 16
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
    is_correct, seconds = _try_collective(run.accelerator)
    samples: tuple[DecodedSample, ...] = ()
    if not recipe.data.compress_end:  # a window in run-length form is not text
        samples = tuple(_decoded(row, recipe.model.vocab) for row in batch.bits_BT[:2])
    return TrainerFacts(
        config=config, params_logical=model.config.num_parameters, params_counted=run.counted,
        params_by_module={name: count_model_parameters(module) for name, module in model.named_children()},
        tied_expected=False, tied_in_memory=model.embedding.weight is model.head.weight,
        world_sizes_seen=topology.world_sizes, wrapper=topology.sharding, wrapper_requested=topology.expected_wrapper,
        precision=recipe.mixed_precision, precision_supported=_precision_works(recipe.mixed_precision, topology.device),
        compile_requested=recipe.compile, compile_possible=run.not_compiled is None if recipe.compile else None,
        collective_correct=is_correct, collective_seconds=seconds,
        dataset="+".join(recipe.data.sources), dataset_bytes=num_samples * recipe.data.window_bytes,
        num_samples=num_samples, data_addressable=True, num_workers=recipe.data.num_workers, samples=samples,
        masked_fractions=(1 - float(batch.num_bits_B.sum()) / batch.bits_BT.numel(),),
        future_leak=_future_leak(model, batch.bits_BT[:1]) if run.counted <= _DIGEST_BELOW else None,
        planned_steps=total_steps, scheduler=f"LambdaLR({recipe.schedule.shape})", scheduler_horizon=total_steps,
        scheduler_steps_per_update=1.0, learning_rates=tuple(map(run.learning_rate_at, range(first_step, last))),
        accumulation=recipe.accumulation_steps,
        checkpoint_bytes=run.counted * 12, checkpoints_kept=total_steps // recipe.checkpoint_every + 1)


def _this_rank(accelerator: Any) -> RankFacts:
    device = accelerator.device
    name = f"cpu:{os.getpid()}"
    if device.type != "cpu":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return RankFacts(rank=accelerator.process_index, host=socket.gethostname(), pid=os.getpid(), device=name)


def _rank_facts(run: TrainingRun, batch: Batch) -> RankFacts:
    local, parameters = count_model_parameters(run.model), list(run.bare_model.parameters())
    is_cut = any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in parameters)
    weights = None  # parts of one model differ, replicas must not
    if local <= _DIGEST_BELOW and not is_cut:
        weights = digest_values(parameters)
    return replace(_this_rank(run.accelerator), params_local=local, weights_digest=weights,
                   first_batch_digest=digest_values(batch.bits_BT))


def _decoded(symbols_T: Tensor, vocab: int) -> DecodedSample:
    if vocab == 256:
        content, is_exact = bytes(symbols_T.tolist()), True
    else:
        content, is_exact = bytes(decode_bits(symbols_T).tolist()), repair_parity(symbols_T)[1] == 0
    return DecodedSample(text=content.decode(errors="replace"), length=symbols_T.numel(), masked=0, exact=is_exact)


@torch.no_grad()
def _precision_works(precision: str, device: str) -> bool:
    """Whether a matrix product in the precision of the autocast gives the right result."""
    try:
        ones = torch.ones(16, 16, dtype=torch.bfloat16 if precision == "bf16" else torch.float32, device=device)
        return bool((ones @ ones == 16).all())
    except RuntimeError:
        return False


@torch.no_grad()
def _future_leak(model: BitTransformer, symbols_1T: Tensor) -> float:
    """Change all symbols from a position on, at up to 16 positions, and return by how much earlier logits moved at most.

    Collective: weights may be sharded.
    """
    was_training = model.training
    model.eval()
    symbols_1T = symbols_1T.to(next(model.parameters()).device)
    logits_1TV, largest = model(symbols_1T).logits_BTV, 0.0
    last = symbols_1T.shape[1] - 1
    for position in sorted({1 + number * (last - 1) // (_LEAK_POSITIONS - 1) for number in range(_LEAK_POSITIONS)}):
        changed = symbols_1T.clone()
        changed[:, position:] = 1 - changed[:, position:].clamp(max=1)
        difference = model(changed).logits_BTV[:, :position] - logits_1TV[:, :position]
        largest = max(largest, float(difference.abs().max()))
    model.train(was_training)
    return largest


def _try_collective(accelerator: Any) -> tuple[bool, float]:
    started = time.perf_counter()
    total = accelerator.reduce(torch.tensor([float(accelerator.process_index)], device=accelerator.device))
    expected = accelerator.num_processes * (accelerator.num_processes - 1) / 2
    return float(total.item()) == expected, time.perf_counter() - started


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
