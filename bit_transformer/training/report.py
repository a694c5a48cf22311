"""What a launch prints and records: one metrics line per step, text lines at intervals, its facts at the start.

Only the main rank writes metrics and prints. Losses are in nats per symbol, with bits per byte beside them; 9.0 bits per
byte is the loss of a coin flip, 8.0 where symbols are bytes.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE
from bit_transformer.data.loaders import Batch, SampleStore
from bit_transformer.evaluation.gate import Monitor, Notice, measure_model, sample_texts
from bit_transformer.evaluation.held_out import (
    MOST_READ,
    HeldOut,
    baselines,
    evaluate,
    export_int8_beside_float32,
    mixture_bpb,
)
from bit_transformer.evaluation.telemetry import Floors
from bit_transformer.model.conversion import WARMUP_STEPS as GROWTH_WARMUP
from bit_transformer.model.transformer import BitTransformer, count_model_parameters
from bit_transformer.recipes import Recipe
from bit_transformer.training.setup import TrainingRun
from bit_transformer.training.state import StepResult, TrainingProgress
from chronicle.audit import open_evidence
from chronicle.audit.rank import digest_json
from chronicle.data.usage import write_start
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Exported, Growth, PlanDeclared
from chronicle.launch.ranks import open_rank_output
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.preflight.facts import find_plan
from chronicle.resume.batch_record import LastFrames

_SAMPLE_BYTES, _TELL_SECONDS = 64, 10.0
_CPU_FLOPS = 3e10  # of one core in float32 at best: enough to tell seconds from hours
_LONG_SECONDS = 10


def bits_per_byte(nats_per_symbol: float, vocab: int = 2) -> float:
    """Convert a mean loss in nats per predicted symbol to bits per byte: nine bits with parity, or one byte."""
    return nats_per_symbol / math.log(2) * (BITS_PER_BYTE if vocab == 2 else 1)


def _step_flops(recipe: Recipe) -> float:
    """FLOPs of one optimizer step over all ranks: 6 × matrix elements plus causal attention, nothing twice."""
    d, num_layers, symbols = recipe.model.d_model, recipe.model.num_layers, recipe.window_symbols
    matrices = num_layers * (4 * d * d + 2 * d * recipe.model.d_ff) + d * recipe.model.vocab
    return recipe.data.batch_size * symbols * 6 * (matrices + num_layers * d * (symbols + 1))


class LaunchLog:
    """The metrics, printed lines and journal entries of one launch."""

    def __init__(self, environ: Mapping[str, str], *, is_main: bool, recipe: Recipe) -> None:
        self._recipe, self._is_main = recipe, is_main
        self._launch = int(environ.get("CHRONICLE_LAUNCH") or 0)
        run_dir, launch_dir = environ.get("CHRONICLE_RUN_DIR"), environ.get("CHRONICLE_LAUNCH_DIR")
        self._run = RunPaths(Path(run_dir)) if run_dir and is_main else None
        self._directory = Path(launch_dir) if launch_dir and is_main else None
        self._metrics: MetricsWriter | None = None  # from `start` on
        self._samples: TextIO | None = None
        self._frames = LastFrames(self._directory)
        self._evidence = open_evidence(environ)
        self._is_first = True  # no step has been reported
        self._rows_read = 0  # by this rank, in this launch
        self._symbol, self._coin_flip = ("bit", 9.0) if recipe.model.vocab == 2 else ("byte", 8.0)

    def announce_data(self, stores: Sequence[SampleStore]) -> None:
        """Print the sizes of the opened sources."""
        data = self._recipe.data
        told = ", ".join(f"{store.name} {store.num_samples:,} windows" for store in stores)
        self._say(f"data: {told} of {data.window_bytes} bytes, from {data.data_dir or 'memory'}")

    def announce_model(self, device: str) -> None:
        """Print the size of the model that is about to be built."""
        recipe = self._recipe
        self._say(f"model: building {recipe.model.num_parameters:,} parameters on {device}, {recipe.mixed_precision} "
                  f"autocast, {recipe.sharding}")

    def announce_plan(self, world_size: int, device: str) -> None:
        """Print what a step will cost; on a CPU also where that is long."""
        recipe, flops = self._recipe, _step_flops(self._recipe) / world_size
        line = (f"plan: {recipe.schedule.total_steps:,} steps of {recipe.data.batch_size} windows, "
                f"{flops / 1e12:.2g} TFLOP a step and rank")
        seconds = flops / _CPU_FLOPS
        if device == "cpu" and seconds > _LONG_SECONDS:
            told = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            line += (f": one CPU core needs {told} or more for each. Use a GPU or a smaller batch "
                     f"(--set batch_size={world_size * recipe.accumulation_steps})")
        self._say(line)

    def start(self, run: TrainingRun, *, resumed_from: Path | None, warnings: Sequence[str] = ()) -> None:
        """Print and record what this launch starts with; parameters are counted before and after wrapping."""
        plan, progress = run.data.plan, run.progress
        facts = {"recipe": self._recipe.name, "parameters_logical": run.bare_model.config.num_parameters,
                 "parameters_local": count_model_parameters(run.model), **run.topology.to_json(),
                 "plan_hash": plan.plan_hash[:12], "data_position": progress.segments.position(progress.step),
                 "start_step": progress.step, "resumed_from": str(resumed_from) if resumed_from else None}
        self._say(f"start {json.dumps(facts)}")
        for warning in warnings:
            self._say(f"preflight: {warning}")
        if run.not_compiled:
            self._say(f"preflight: not compiled: {run.not_compiled}")
        total_steps = self._recipe.schedule.total_steps
        for source, drawn in zip(plan.sources, plan.drawn_before(progress.segments.position(total_steps)), strict=True):
            if drawn > source.num_samples:
                self._say(f"data: source `{source.name}` has {source.num_samples:,} windows and runs out: it is read "
                          f"{drawn / source.num_samples:.1f} times over {total_steps:,} steps, in another order each time")
        if self._run is not None:
            told = write_start(self._run, plan, progress.segments, first_step=progress.step, launch=self._launch)
            self._say(f"data: {told}")
        if self._directory is not None:
            self._metrics = MetricsWriter(self._directory / "metrics.jsonl")
            text = json.dumps({**facts, "recipe_fields": self._recipe.to_json()}, indent=1) + "\n"
            (self._directory / "trainer.json").write_text(text, encoding="utf-8")
            self._samples = (self._directory / "samples.jsonl").open("a", buffering=1)

    def step(self, progress: TrainingProgress, step: StepResult, *, learning_rate: float, batch: Batch,
             seconds: float) -> dict[str, float]:
        """Return the metrics of a step, and print a line for the first and every `log_every` steps."""
        bpb = bits_per_byte(step.loss, self._recipe.model.vocab)
        values = {"loss": step.loss, "loss_bpb": bpb, "lr": learning_rate, "grad_norm": step.grad_norm,
                  "tokens": progress.bits_seen, "step_seconds": round(seconds, 6)}
        total = sum(step.source_rows.values())
        values |= {f"loss/{name}": loss for name, loss in step.source_losses.items()}
        values |= {f"ratio/{name}": rows / total for name, rows in step.source_rows.items()}
        if self._samples:  # two launches with equal digests provably saw the same data
            self._samples.write(f'{{"step":{progress.step},"digest":"{batch.digest}"}}\n')
        frame = {"step": progress.step, "digest": batch.digest, **values}
        self._frames.add(lambda: frame)
        self._rows_read += len(batch.bits_BT)
        is_told = progress.step % self._recipe.log_every == 0
        if is_told:
            self._record_data(progress)
        if is_told or self._is_first:
            self._say(f"step {progress.step}/{self._recipe.schedule.total_steps} | loss {step.loss:.4f} nats/{self._symbol} "
                      f"({bpb:.2f} bits/byte, coin flip {self._coin_flip:.1f}) | "
                      f"lr {learning_rate:.3e} | grad_norm {step.grad_norm:.2f} | {seconds * 1e3:.0f} ms")
        self._is_first = False
        return values

    def _record_data(self, progress: TrainingProgress) -> None:
        window, sources = self._recipe.data.window_bytes, progress.plan.sources
        digest = digest_json([[source.name, source.digest, source.weight] for source in sources])
        self._evidence.data(step=progress.step, samples=self._rows_read, bytes=self._rows_read * window,
                            dataset="+".join(self._recipe.data.sources), dataset_digest=digest,
                            dataset_bytes=sum(source.num_samples for source in sources) * window)

    def evaluation(self, progress: TrainingProgress, found: Mapping[str, HeldOut]) -> dict[str, float]:
        """Return the held-out figures as metrics, and print them."""
        mean = mixture_bpb(found, self._recipe.data.sources)
        told = ", ".join(f"{name} {held.bpb:.3f}" for name, held in found.items())
        self._say(f"held-out at step {progress.step}: {told}, mixture {mean:.3f} bits/byte "
                  f"(coin flip {self._coin_flip:.1f})")
        values = {"eval_bpb": mean}
        for name, held in found.items():
            values |= {f"eval_bpb/{name}": held.bpb, f"eval_parity_bpb/{name}": held.parity_bpb}
        return values

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the step's one metrics line."""
        if self._metrics:
            self._metrics.write(step, values)

    def saved(self, progress: TrainingProgress, path: Path) -> None:
        """Print that a checkpoint is on disk."""
        self._say(f"saved checkpoint of step {progress.step}: {path}")

    def keep_frames(self, batch: Batch, step: StepResult) -> None:
        """Write the last steps before a non-finite gradient beside the metrics."""
        frame = {"step": batch.step + 1, "digest": batch.digest, "loss": step.loss, "grad_norm": step.grad_norm}
        self._frames.add(lambda: frame)
        self._frames.keep("the gradient is not finite")

    def notice(self, step: int, notice: Notice) -> None:
        """Report a notice on stderr and in the journal."""
        if self._is_main:
            print(f"{notice.event.KIND} at step {step}: {notice.text}", file=sys.stderr)
        if self._run is not None:
            with JournalWriter(self._run) as journal:
                journal.write(notice.event, step=step, launch=self._launch or None, title=notice.text)

    def telemetry(self, progress: TrainingProgress, model: BitTransformer, held_out: Mapping[str, Tensor]) -> dict[str, float]:
        """Return K, C and S of what the model writes; empty for byte models and where telemetry is off. Collective."""
        monitor = progress.monitor
        if monitor.floors is None:
            return {}
        found = measure_model(model, held_out, monitor.frequencies_9, windows=monitor.windows)
        self._say(f"telemetry at step {progress.step}: K {found.k:.3f}, C {found.c:.3f}, S {found.s:.3f} of what the model "
                  f"writes (the data: C {monitor.floors.c_floor:.2f} to {monitor.floors.c_ceiling:.2f}, "
                  f"S above {monitor.floors.s_floor:.2f})")
        return asdict(found)

    def grown(self, progress: TrainingProgress, kind: str, model: BitTransformer, before: int) -> None:
        """Report a growth, and journal it as a declared change of the run's plan."""
        after = model.config.num_parameters
        self.notice(progress.step, Notice(Growth(kind=kind, before=before, after=after), (
            f"twice the {kind}, {before:,} to {after:,} parameters, same function; the optimizer starts anew, the LR is "
            f"multiplied by 1/√2 and warmed up over {GROWTH_WARMUP} steps")))
        self._evidence.model(logical=after, counted=after, local=count_model_parameters(model), config=asdict(model.config))
        plan = find_plan(read_journal(self._run).entries, progress.step) if self._run is not None else None
        if plan is None or self._run is None:
            return
        declared = PlanDeclared(declared={**plan.declared, "params": after}, reason="growth")
        with JournalWriter(self._run) as journal:
            journal.write(declared, step=progress.step, launch=self._launch or None,
                          title=f"plan changed: {kind} doubled at a plateau, as the recipe says")

    def summary(self, model: BitTransformer | None, stores: Sequence[SampleStore], held_out: Mapping[str, Tensor],
                progress: TrainingProgress, *, averaged: bool) -> None:
        """Print the finished model's held-out loss beside baselines on the same bytes, export it, and draw samples.

        `model` is the gathered model on the main rank; other ranks pass None.
        """
        if not self._is_main or model is None:
            return
        found = evaluate(model, held_out, rank=0, world_size=1)
        rows = {"averaged weights" if averaged else "model": {name: held.bpb for name, held in found.items()}}
        for store in stores:
            every = max(1, store.num_samples // 4000)
            train = b"".join(store.read(row).tobytes() for row in range(0, store.num_samples, every))
            for name, value in baselines(train, held_out[store.name].numpy().tobytes()).items():
                rows.setdefault(name, {})[store.name] = value
        sizes = ", ".join(f"{name} {windows.numel():,} bytes" for name, windows in held_out.items())
        self._say(f"the same held-out text for every row: {sizes}, in windows of {self._recipe.data.window_bytes}; unigram, "
                  f"order 3, xz and zstd have read up to {MOST_READ:,} bytes of each source's training text before it")
        self._say(f"{'bits/byte, held out':<20}" + "".join(f"{name:>12}" for name in found))
        for name, values in rows.items():
            self._say(f"{name:<20}" + "".join(f"{values[source]:>12.3f}" for source in found))
        if self._recipe.export:
            self._export(model, held_out, progress.step)
        if model.config.vocab == 2 and progress.monitor.floors is not None:
            self._sample(model, progress.monitor, progress.monitor.floors)

    def _export(self, model: BitTransformer, held_out: Mapping[str, Tensor], step: int) -> None:
        path = self._directory / "export" / "int8.safetensors" if self._directory else None
        rows = export_int8_beside_float32(model, held_out, self._recipe.data.sources, path)
        for row in rows:
            self._say(f"export {row.name}: {row.bytes:,} bytes, {row.bpb:.3f} bits/byte ({row.bpb / rows[0].bpb - 1:+.1%}), "
                      f"{row.ms_per_window:.2f} ms a window")
        if path is None:
            self._say("export: not written, since there is no launch directory (start with `chronicle run --`)")
            return
        small = ", ".join(f"{row.name} {row.bytes:,} bytes {row.bpb:.3f} bits/byte" for row in rows)
        self.notice(step, Notice(Exported(rows=tuple(asdict(row) for row in rows)), small))

    def _sample(self, model: BitTransformer, monitor: Monitor, floors: Floors) -> None:
        self._say(f"samples: drawing 4 texts of {_SAMPLE_BYTES} bytes, a pass through the model for every bit")
        samples = sample_texts(model, "The ", _SAMPLE_BYTES, count=4, after_byte=self._tell_of_bytes())
        for text in samples.texts:
            self._say(f"sample: {samples.prompt + text!r}")
        found = samples.telemetry(monitor.frequencies_9)
        outside = samples.outside(floors, found)
        verdict = f"{outside} outside" if outside else "within"
        self._say(f"samples: {samples.num_repairs} of {samples.num_bytes} parity bits repaired; K {found.k:.3f}, "
                  f"C {found.c:.3f}, S {found.s:.3f}, {verdict} the floors of the data")

    def _tell_of_bytes(self, *, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
        """Return a callback that prints the progress of the samples every ten seconds."""
        told_at = clock()

        def after_byte(done: int) -> None:
            nonlocal told_at
            if clock() - told_at >= _TELL_SECONDS:
                told_at = clock()
                self._say(f"samples: {done} of {_SAMPLE_BYTES} bytes")

        return after_byte

    def end(self, progress: TrainingProgress, *, stopped: bool) -> None:
        """Print and record how the launch ended, and close its files."""
        said, reason = ("stopped on request",) * 2 if stopped else ("finished", "completed")
        self._say(f"{said} after step {progress.step}")
        self._record_data(progress)
        self._evidence.end(step=progress.step, reason=reason)
        if self._metrics:
            self._metrics.close()
        if self._samples:
            self._samples.close()

    def _say(self, line: str) -> None:
        if self._is_main:
            print(line)


def open_output(environ: Mapping[str, str]) -> None:
    """Make stdout and stderr write whole lines; under `chronicle run` they go to this rank's own log.

    The supervisor writes that log, so that a full disk costs lines and never a `print` that raises here.
    """
    if open_rank_output(environ=environ):
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
