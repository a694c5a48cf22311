"""The trainer's side of `chronicle.preflight`: its facts before the first step, and the trial of `preflight --full`.

Facts are gathered on every rank and judged on the main rank; a refusal ends every rank. The trial uses the same setup and the
same step as the training loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bit_transformer.data.bits import decode_bits, repair_parity
from bit_transformer.data.loaders import Batch
from bit_transformer.errors import NonFiniteGradients
from bit_transformer.evaluation.telemetry import agreement, certainty_of_output, place_frequencies
from bit_transformer.model.transformer import BitTransformer, count_model_parameters, next_symbol_losses
from bit_transformer.recipes import Recipe
from bit_transformer.training.report import LaunchLog
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.setup import (
    TrainingRun,
    build_run,
    catch_stop_signals,
    load_checkpoint,
    open_data,
    start_progress,
    start_ranks,
)
from bit_transformer.training.state import StepResult, StepTally, TrainingProgress
from chronicle.audit import describe_device, open_evidence
from chronicle.errors import ChronicleError
from chronicle.preflight import CheckVerdict, DecodedSample, RankFacts, TrainerFacts, check_before_first_step
from chronicle.resume.adapters.accelerate import observe_accelerator
from chronicle.resume.fingerprint import rng_digests

_MAX_PREDICTED_LRS = 100_000
_DIGEST_BELOW = 50_000_000
_LEAK_POSITIONS = 16
_NOT_PART_OF_THE_PLAN = ("log_every", "summary", "eval_every", "eval_windows", "checkpoint_every")


class PreflightRefused(ChronicleError):
    """The preflight failed on the main rank; every rank ends with its exit code."""

    def __init__(self, message: str, remedy: str | None, exit_code: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


def check_launch(run: TrainingRun, batch: Batch, *, first_step: int,
                 experiments: Mapping[str, Any] | None = None) -> list[str]:
    """Run the preflight over all ranks; return the sentences of its warnings. Raises ChronicleError on every rank alike.

    `experiments` are the results of a trial; None before the first step.
    """
    if experiments is None:
        _record_evidence(run)
    found = dict(experiments or {})
    ranks = gather_object([_rank_facts(run, batch, found.pop("gradients_finite", None))])
    facts = replace(_facts(run, batch, first_step), ranks=tuple(ranks), **found)
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
    name = f"cpu:{os.getpid()}" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return RankFacts(rank=accelerator.process_index, host=socket.gethostname(), pid=os.getpid(), device=name)


def _rank_facts(run: TrainingRun, batch: Batch, gradients_finite: bool | None) -> RankFacts:
    local, parameters = count_model_parameters(run.model), list(run.bare_model.parameters())
    is_cut = any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in parameters)
    weights = None  # parts of one model differ, replicas must not
    if local <= _DIGEST_BELOW and not is_cut:
        weights = digest_values(parameters)
    return replace(_this_rank(run.accelerator), params_local=local, weights_digest=weights,
                   first_batch_digest=digest_values(batch.bits_BT), gradients_finite=gradients_finite)


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


# --- The trial of `chronicle preflight --full`
#
# A fit on one batch is saved half-way and resumed in a fresh process. The launcher is started twice with one directory: the
# first start fits, saves half-way, and records digests of the memory and the losses; the second loads that checkpoint,
# compares memory, and repeats the second half. The guard is off, and the run gets no step, metric or checkpoint.

STEPS = 200
SAME_LOSS = 1e-4  # relative; on a CPU the second half is bit-identical

TakeStep = Callable[[TrainingRun, Batch, StepTally, Sequence[int]], StepResult]


def find_trial(environ: Mapping[str, str]) -> Trial | None:
    """Return the trial that preflight asked for through the environment; None for an ordinary launch."""
    directory = environ.get("CHRONICLE_PREFLIGHT_DIR")
    if environ.get("CHRONICLE_PREFLIGHT") != "full" or not directory:
        return None
    return Trial(Path(directory), num_steps=int(environ.get("CHRONICLE_PREFLIGHT_STEPS") or STEPS))


def run_trial(trial: Trial, recipe: Recipe, take_step: TakeStep, *, accident: str | None = None) -> None:
    """Run one of the two starts with the `take_step` of the training loop. Raises ChronicleError where a check fails."""
    stop_asked = catch_stop_signals()
    accelerator = start_ranks(recipe)
    log = LaunchLog({}, is_main=accelerator.is_main_process, recipe=recipe)
    data = open_data(recipe)
    progress = start_progress(recipe, data)
    log.announce_model(accelerator.device.type)
    run = build_run(recipe, accelerator, data, progress, start=trial.start.path)
    load_checkpoint(run, trial.start, accident=accident)
    trial.compare_memory(accelerator, progress)
    batch = data.steps(progress, accelerator)[0].to(accelerator.device)
    log.start(run, resumed_from=trial.start.path, warnings=check_launch(run, batch, first_step=0))

    tally = StepTally(tuple(recipe.data.sources), accelerator.device)
    run.model.train()
    for _ in range(progress.step, trial.num_steps):
        step = take_step(run, batch, tally, stop_asked)
        if not step.finite:
            check_launch(run, batch, first_step=0, experiments={"gradients_finite": False})
            raise NonFiniteGradients(f"gradients of step {progress.step + 1} are not finite (grad_norm {step.grad_norm})")
        progress.step += 1
        if run.ema is not None:
            run.ema.update(run.bare_model)
        trial.after_step(run, step, batch)
        if step.stop:
            return
    experiments = trial.conclude(run, batch)
    if experiments is not None:
        check_launch(run, batch, first_step=0, experiments=experiments)


class Trial:
    """One of the two starts; the notes of the first make it the second."""

    def __init__(self, directory: Path, *, num_steps: int) -> None:
        self.num_steps = num_steps
        self._directory, self._checkpoint, self._notes = directory, directory / "checkpoint", directory / "losses.json"
        self.resumes = self._notes.is_file()
        self.start = ResumePoint(path=self._checkpoint if self.resumes else None)
        self._half = num_steps // 2
        self._losses: list[float] = []
        self._channels: dict[str, list[float]] = {}
        self._save_seconds = 0.0
        self._different = ""

    def compare_memory(self, accelerator: Any, progress: TrainingProgress) -> None:
        """Compare what the load restored with what the first start had, in the second start."""
        if not self.resumes:
            return
        before, now = json.loads(self._memory_path(accelerator).read_text()), digest_memory(accelerator, progress)
        missing = [name for name in before if before[name] != now.get(name)]
        if missing:
            self._different = f"{', '.join(missing)} of rank {accelerator.process_index}"

    def after_step(self, run: TrainingRun, step: StepResult, batch: Batch) -> None:
        """Record the figures of a step; save when half of the steps are done. Collective."""
        self._losses.append(step.loss)
        values = {"loss": step.loss, "grad_norm": step.grad_norm}
        if run.bare_model.config.vocab == 2 and run.progress.step % max(1, self.num_steps // 10) == 0:
            values |= _telemetry(run.bare_model, batch.bits_BT)
        for name, value in values.items():
            self._channels.setdefault(name, []).append(value)
        if not self.resumes and run.progress.step == self._half:
            started = time.perf_counter()
            run.accelerator.save_state(str(self._checkpoint), safe_serialization=True)
            self._save_seconds = time.perf_counter() - started
            self._memory_path(run.accelerator).write_text(json.dumps(digest_memory(run.accelerator, run.progress)))

    def conclude(self, run: TrainingRun, batch: Batch) -> dict[str, Any] | None:
        """Return the facts of the trial; None after the first start, which only writes its records."""
        accelerator = run.accelerator
        if not self.resumes:
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                size = sum(path.stat().st_size for path in self._checkpoint.rglob("*") if path.is_file())
                notes = {"losses": self._losses, "save_seconds": self._save_seconds, "bytes": size}
                self._notes.write_text(json.dumps(notes))
            return None
        notes = json.loads(self._notes.read_text())
        different = [text for text in gather_object([self._different]) if text]
        difference = _micro_batch_difference(accelerator, run.model, batch, max(2, run.recipe.accumulation_steps))
        before = notes["losses"][self._half :]
        is_equal = len(before) == len(self._losses) and all(
            math.isclose(one, other, rel_tol=SAME_LOSS) for one, other in zip(before, self._losses, strict=True))
        return {"gradients_finite": True, "save_round_trip": "; ".join(different[:3]), "save_seconds": notes["save_seconds"],
                "checkpoint_bytes": notes["bytes"], "fit_losses": tuple(notes["losses"]), "fit_resumed_equal": is_equal,
                "micro_batch_difference": max(gather_object([difference])),
                "telemetry": {name: tuple(values) for name, values in self._channels.items()}}

    def _memory_path(self, accelerator: Any) -> Path:
        return self._directory / f"memory-rank-{accelerator.process_index}.json"


def digest_memory(accelerator: Any, progress: TrainingProgress) -> dict[str, str]:
    """Return a digest of every object that a checkpoint must restore, by name. Tensors are compared bit for bit."""
    live = observe_accelerator(accelerator)
    found: dict[str, Any] = {
        "weights": [model.state_dict() for model in live.models],
        "schedule": [getattr(bound.scheduler, "last_epoch", None) for bound in live.schedulers],
        "progress and data position": progress.state_dict(),
        "averaged weights": [one.state_dict() for one in accelerator._custom_objects if type(one).__name__ == "Ema"],
        "random numbers": rng_digests()}
    for optimizer in live.optimizers:
        found.setdefault("learning rates", []).extend(group["lr"] for group in optimizer.param_groups)
        for state in optimizer.state.values():
            for key, value in state.items():
                found.setdefault(f"optimizer {key}", []).append(value)
    return {name: digest_values(values) for name, values in found.items()}


@torch.no_grad()
def _micro_batch_difference(accelerator: Any, model: nn.Module, batch: Batch, parts: int) -> float:
    """Return |loss of the batch − mean loss of its parts| / loss: whether accumulation gives the loss of the batch."""
    was_training = model.training
    model.eval()

    def mean_loss(part: Batch) -> float:
        with accelerator.autocast():
            logits = model(part.bits_BT).logits_BTV
        losses_BT = part.without_padding(next_symbol_losses(logits, part.bits_BT))
        return float(losses_BT.sum() / part.num_predicted_B().sum())

    whole = mean_loss(batch)
    mean = sum(mean_loss(part) for part in batch.split(parts)) / parts
    model.train(was_training)
    return abs(whole - mean) / abs(whole) if whole else 0.0


@torch.no_grad()
def _telemetry(model: BitTransformer, bits_BT: Tensor) -> dict[str, float]:
    """Return mean K and S of the predictions. C and the flip rate are left out: the batch does not change."""
    logits_BT2 = model(bits_BT).logits_BTV
    return {"K": float(certainty_of_output(logits_BT2).mean()),
            "S": float(agreement(logits_BT2, place_frequencies(bits_BT)).mean())}
