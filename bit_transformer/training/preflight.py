"""What the trainer says about itself before its first step, for the preflight (`chronicle.preflight`).

Gathered on every rank, judged on the main one, obeyed by all: no rank trains while another has refused.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bit_transformer.data.bits import decode_bits, repair_parity
from bit_transformer.data.loaders import Batch, SampleStore
from bit_transformer.footprint import Room
from bit_transformer.model.transformer import BitTransformer, count_model_parameters
from bit_transformer.recipes import Recipe
from bit_transformer.training.distributed import Topology
from chronicle.audit import describe_device, open_evidence
from chronicle.data import DataPlan
from chronicle.errors import ChronicleError
from chronicle.preflight import CheckVerdict, DecodedSample, RankFacts, TrainerFacts, check_before_first_step
from chronicle.preflight.gate import SKIP_VARIABLE

_MAX_PREDICTED_LRS = 100_000
_DIGEST_BELOW = 50_000_000
_NOT_PART_OF_THE_PLAN = ("log_every", "summary", "eval_every", "eval_windows", "checkpoint_every")


def check_launch(accelerator: Any, *, recipe: Recipe, model: nn.Module, bare_model: BitTransformer, counted: int,
                 topology: Topology, room: Room, plan: DataPlan, stores: tuple[SampleStore, ...], batch: Batch,
                 learning_rate_at: Callable[[int], float], first_step: int, not_compiled: str | None,
                 experiments: Mapping[str, Any] | None = None) -> list[str]:
    """Run the preflight over all ranks; return the warnings' sentences. Raises ChronicleError on every rank alike.

    `experiments` are the facts of a trial (`trial.py`), once it is over.
    """
    if experiments is None:
        _record_evidence(accelerator, recipe, model, bare_model, counted, topology)
    found = dict(experiments or {})
    finite = found.pop("gradients_finite", None)
    ranks = gather_object([_rank_facts(accelerator, model, bare_model, batch, finite)])
    correct, seconds = _try_collective(accelerator)
    leak = _future_leak(bare_model, batch.bits_BT[:1]) if counted <= _DIGEST_BELOW else None
    facts = _facts(recipe, model, bare_model, counted, topology, plan, stores, batch, _with_room(ranks, room),
                   tuple(learning_rate_at(step) for step in range(
                       first_step, min(recipe.schedule.total_steps, first_step + _MAX_PREDICTED_LRS))),
                   correct, seconds, not_compiled, leak)
    return _judge(accelerator, replace(facts, memory_needed=room.parts, memory_ways=room.ways, **found))


def require_room(accelerator: Any, room: Room) -> None:
    """Refuse on every rank alike what cannot fit, before a model is built that would take all there is."""
    free = [one for one in room.free_by_rank if one is not None]
    if not free or room.needed.total <= min(free) or "PF31" in os.environ.get(SKIP_VARIABLE, "").split(","):
        return
    mine = RankFacts(rank=accelerator.process_index, host=socket.gethostname(), pid=os.getpid(),
                     device=_device_name(accelerator.device))
    ranks = _with_room(gather_object([mine]), room)
    _judge(accelerator, TrainerFacts(ranks=ranks, memory_needed=room.parts, memory_ways=room.ways))


def _judge(accelerator: Any, facts: TrainerFacts) -> list[str]:
    """The preflight over these facts on the main rank; every rank gets the warnings' sentences, or the refusal."""
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


def _record_evidence(accelerator: Any, recipe: Recipe, model: nn.Module, bare_model: BitTransformer, counted: int,
                     topology: Topology) -> None:
    """What this rank sees of itself, for `chronicle claim`; every rank writes its own."""
    evidence = open_evidence(rank=accelerator.process_index)
    evidence.process(
        world_size=topology.torch_world_size, device=describe_device(accelerator.device), wrapper=topology.sharding,
        backend=topology.backend, precision=recipe.mixed_precision,
        world_sizes_seen={"launcher": topology.launcher_world_size, "torch": topology.torch_world_size,
                          "accelerate": topology.accelerate_num_processes})
    # the shape in memory: a run that grew has another one than its recipe began with
    evidence.model(logical=bare_model.config.num_parameters, counted=counted, local=count_model_parameters(model),
                   config=asdict(bare_model.config))


class PreflightRefused(ChronicleError):
    """The preflight failed on the main rank; every rank ends with its exit code."""

    def __init__(self, message: str, remedy: str | None, exit_code: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


def _facts(recipe: Recipe, model: nn.Module, bare_model: BitTransformer, counted: int, topology: Topology,
           plan: DataPlan, stores: tuple[SampleStore, ...], batch: Batch, ranks: tuple[RankFacts, ...],
           learning_rates: tuple[float, ...], collective_correct: bool, collective_seconds: float,
           not_compiled: str | None, future_leak: float | None) -> TrainerFacts:
    config = {key: value for key, value in recipe.to_json().items() if key not in _NOT_PART_OF_THE_PLAN}
    shares = topology.torch_world_size * recipe.accumulation_steps
    return TrainerFacts(
        config=config, params_logical=bare_model.config.num_parameters, params_counted=counted,
        params_by_module={name: count_model_parameters(module) for name, module in bare_model.named_children()},
        tied_expected=False, tied_in_memory=bare_model.embedding.weight is bare_model.head.weight, ranks=ranks,
        world_sizes_seen={"launcher": topology.launcher_world_size, "torch": topology.torch_world_size,
                          "accelerate": topology.accelerate_num_processes},
        wrapper=topology.sharding, wrapper_requested=topology.expected_wrapper,
        precision=recipe.mixed_precision, precision_supported=_precision_works(recipe.mixed_precision, topology.device),
        compile_requested=recipe.compile, compile_possible=not_compiled is None if recipe.compile else None,
        collective_correct=collective_correct, collective_seconds=collective_seconds,
        dataset="+".join(recipe.data.sources),
        dataset_bytes=sum(store.num_samples for store in stores) * recipe.data.window_bytes,
        num_samples=sum(store.num_samples for store in stores), data_addressable=True, num_workers=recipe.data.num_workers,
        # a window in run-length form is no text: its bits are not looked at as bytes
        samples=() if recipe.data.compress_end else tuple(
            _decoded(row, recipe.model.vocab == 256) for row in batch.bits_BT[:2]),
        masked_fractions=(1 - float(batch.num_bits_B.sum()) / batch.bits_BT.numel(),),
        future_leak=future_leak,
        planned_steps=recipe.schedule.total_steps, scheduler=f"LambdaLR({recipe.schedule.shape})",
        scheduler_horizon=recipe.schedule.total_steps, scheduler_steps_per_update=1.0, learning_rates=learning_rates,
        accumulation=recipe.accumulation_steps, micro_batch=plan.batch_size // shares,
        checkpoint_bytes=counted * 12, checkpoints_kept=recipe.schedule.total_steps // recipe.checkpoint_every + 1)


def _rank_facts(accelerator: Any, model: nn.Module, bare_model: BitTransformer, batch: Batch,
                gradients_finite: bool | None) -> RankFacts:
    device = accelerator.device
    local = count_model_parameters(model)
    replica = local <= _DIGEST_BELOW and not any(
        isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in bare_model.parameters())
    digest = _digest(*bare_model.parameters()) if replica else None  # parts of one model differ, replicas must not
    return RankFacts(rank=accelerator.process_index, host=socket.gethostname(), pid=os.getpid(), device=_device_name(device),
                     params_local=local, weights_digest=digest, first_batch_digest=_digest(batch.bits_BT),
                     gradients_finite=gradients_finite)


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
    """One matrix product in the precision of the autocast: right, and finite."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    try:
        ones = torch.ones(16, 16, dtype=kind, device=device)
        return bool((ones @ ones == 16).all())
    except RuntimeError:
        return False


@torch.no_grad()
def _future_leak(model: BitTransformer, symbols_1T: Tensor) -> float | None:
    """Change the last symbol; return by how much the logits before it moved. Every rank calls it: weights may be parts."""
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
