"""What a launch prints and records: one metrics line per step, text lines at intervals, the table at its end.

Only the main rank writes metrics and prints. Losses are in nats per symbol, with bits per byte beside them; 9.0 bits per
byte is the loss of a coin flip, 8.0 where symbols are bytes. Ranks, devices and parameters are the guard's to record.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from bit_transformer.data.bits import BITS_PER_BYTE
from bit_transformer.data.loaders import Batch, spread_windows
from bit_transformer.evaluation.held_out import (
    MOST_READ,
    baselines,
    evaluate,
    export_int8_beside_float32,
    mixture_bpb,
)
from bit_transformer.model.conversion import GROWTH_WARMUP_STEPS
from bit_transformer.model.transformer import BitTransformer
from bit_transformer.recipes import Recipe
from bit_transformer.training.setup import TrainingData, TrainingRun, measure_sizes
from bit_transformer.training.state import StepResult, TrainingProgress
from chronicle.data.usage import write_start
from chronicle.journal import JournalWriter
from chronicle.journal.events import Exported, Gate, Growth, JournalEvent
from chronicle.launch.ranks import open_rank_output
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths


def bits_per_byte(nats_per_symbol: float, vocab: int = 2) -> float:
    """Convert a mean loss in nats per predicted symbol to bits per byte: nine bits with parity, or one byte."""
    return nats_per_symbol / math.log(2) * (BITS_PER_BYTE if vocab == 2 else 1)


class LaunchLog:
    """The metrics, printed lines and journal entries of one launch."""

    def __init__(self, environ: Mapping[str, str], *, is_main: bool, recipe: Recipe) -> None:
        self._recipe, self._is_main = recipe, is_main
        self._launch = int(environ.get("CHRONICLE_LAUNCH", "0"))
        run_dir, launch_dir = environ.get("CHRONICLE_RUN_DIR"), environ.get("CHRONICLE_LAUNCH_DIR")
        self._run = RunPaths(Path(run_dir)) if run_dir and is_main else None
        self._directory = Path(launch_dir) if launch_dir and is_main else None
        self._metrics: MetricsWriter | None = None  # from `start` on
        self._samples: TextIO | None = None
        self._is_first = True  # no step has been reported
        self._symbol, self._coin_flip = ("bit", 9.0) if recipe.model.vocab == 2 else ("byte", 8.0)

    def announce(self, data: TrainingData, device: str) -> None:
        """Print data, model and plan before anything takes long."""
        recipe = self._recipe
        told = ", ".join(f"{store.name} {store.num_samples:,} windows" for store in data.stores)
        self._say(f"data: {told} of {recipe.data.window_bytes} bytes, from {recipe.data.data_dir or 'memory'}")
        self._say(f"model: {recipe.model.num_parameters:,} parameters on {device}, {recipe.mixed_precision} autocast, "
                  f"{recipe.sharding}")
        self._say(f"plan: {recipe.schedule.total_steps:,} steps of {recipe.data.batch_size} windows")

    def start(self, run: TrainingRun, *, resumed_from: Path | None) -> None:
        """Print and record what this launch starts with."""
        progress = run.progress
        position, origin = progress.segments.position(progress.step), resumed_from or "no checkpoint"
        self._say(f"start of {self._recipe.name} after step {progress.step}, at batch {position} of the data, from {origin}, "
                  f"ranks {measure_sizes(run.accelerator)}")
        if run.not_compiled:
            self._say(f"not compiled: {run.not_compiled}")
        if self._run is not None:
            told = write_start(self._run, progress.plan, progress.segments, first_step=progress.step, launch=self._launch)
            self._say(f"data: {told}")
        if self._directory is not None:
            self._metrics = MetricsWriter(self._directory / "metrics.jsonl")
            self._samples = (self._directory / "samples.jsonl").open("a", buffering=1)

    def step(self, progress: TrainingProgress, step: StepResult, *, learning_rate: float, batch: Batch,
             seconds: float) -> dict[str, float]:
        """Return the metrics of a step, and print a line for the first and every `log_every` steps."""
        bpb = bits_per_byte(step.loss, self._recipe.model.vocab)
        tokens = progress.step * progress.plan.batch_size * self._recipe.window_symbols
        values = {"loss": step.loss, "loss_bpb": bpb, "lr": learning_rate, "grad_norm": step.grad_norm,
                  "tokens": tokens, "step_seconds": round(seconds, 6)}
        total = sum(step.source_rows.values())
        values |= {f"loss/{name}": loss for name, loss in step.source_losses.items()}
        values |= {f"ratio/{name}": rows / total for name, rows in step.source_rows.items()}
        self.took(batch)
        if self._is_first or progress.step % self._recipe.log_every == 0:
            self._say(f"step {progress.step}/{self._recipe.schedule.total_steps} | loss {step.loss:.4f} nats/{self._symbol} "
                      f"({bpb:.2f} bits/byte, coin flip {self._coin_flip:.1f}) | "
                      f"lr {learning_rate:.3e} | grad_norm {step.grad_norm:.2f} | {seconds * 1e3:.0f} ms")
        self._is_first = False
        return values

    def evaluation(self, progress: TrainingProgress, found: Mapping[str, float]) -> dict[str, float]:
        """Return the held-out bits per byte of the sources and of their mixture as metrics, and print them."""
        mean = mixture_bpb(found, self._recipe.data.sources)
        told = ", ".join(f"{name} {bpb:.3f}" for name, bpb in found.items())
        self._say(f"held-out at step {progress.step}: {told}, mixture {mean:.3f} bits/byte "
                  f"(coin flip {self._coin_flip:.1f})")
        return {"eval_bpb": mean, **{f"eval_bpb/{name}": bpb for name, bpb in found.items()}}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the step's one metrics line."""
        if self._metrics:
            self._metrics.write(step, values)

    def saved(self, progress: TrainingProgress, path: Path) -> None:
        """Print that a checkpoint is on disk."""
        self._say(f"saved checkpoint of step {progress.step}: {path}")

    def took(self, batch: Batch) -> None:
        """Write the digest of a step's batch, also of one whose gradient is not finite: equal digests are the same data."""
        if self._samples:
            self._samples.write(f'{{"step":{batch.step + 1},"digest":"{batch.digest}"}}\n')

    def gate(self, progress: TrainingProgress) -> None:
        """Report that the safety gate has closed, or is open again."""
        gate = progress.gate
        self._report(progress.step, Gate.from_json({"state": str(gate.state)}),
                     f"{gate.state}: {gate.why or 'the held-out loss is within its limit again'}")

    def grown(self, progress: TrainingProgress, growth: Growth) -> None:
        """Report a growth."""
        self._report(progress.step, growth, (
            f"twice the {growth.kind}, {growth.before:,} to {growth.after:,} parameters, same function; the optimizer starts "
            f"anew, the LR is multiplied by 1/√2 and warmed up over {GROWTH_WARMUP_STEPS} steps"))

    def _report(self, step: int, event: JournalEvent, text: str) -> None:
        """Say something on stderr and in the journal."""
        if self._is_main:
            print(f"{event.KIND} at step {step}: {text}", file=sys.stderr)
        if self._run is not None:
            with JournalWriter(self._run) as journal:
                journal.write(event, step=step, launch=self._launch or None, title=text)

    def summary(self, model: BitTransformer | None, data: TrainingData, progress: TrainingProgress) -> None:
        """Print the finished model's held-out loss beside baselines on the same bytes, and export it.

        `model` is the gathered model on the main rank; other ranks pass None.
        """
        if not self._is_main or model is None:
            return
        found = evaluate(model, data.held_out)
        columns = []  # of the table, one a source
        for store in data.stores:
            train = spread_windows(store, MOST_READ // self._recipe.data.window_bytes).numpy().tobytes()
            yardsticks = baselines(train, data.held_out[store.name].numpy().tobytes())
            columns.append({"model": found[store.name], "coin flip": self._coin_flip, **yardsticks})
        sizes = ", ".join(f"{name} {windows.numel():,} bytes" for name, windows in data.held_out.items())
        self._say(f"the same held-out text for every row: {sizes}, in windows of {self._recipe.data.window_bytes}; unigram, "
                  f"order 3, xz and zstd have read up to {MOST_READ:,} bytes of each source's training text before it")
        self._say(f"{'bits/byte, held out':<20}" + "".join(f"{name:>12}" for name in found))
        for name in columns[0]:
            self._say(f"{name:<20}" + "".join(f"{column[name]:>12.3f}" for column in columns))
        if not self._recipe.export:
            return
        path = self._directory / "export" / "int8.safetensors" if self._directory else None
        exported = export_int8_beside_float32(model, data.held_out, self._recipe.data.sources, path)
        small = ", ".join(f"{row.name} {row.bytes:,} bytes, {row.bpb:.3f} bits/byte, {row.ms_per_window:.2f} ms a window"
                          for row in exported)
        self._say(f"export: {small}; {path or 'not written, no launch directory (start with `chronicle run --`)'}")
        self._report(progress.step, Exported(rows=tuple(asdict(row) for row in exported)), small)

    def end(self, progress: TrainingProgress, *, stopped: bool) -> None:
        """Print how the launch ended, and close its files."""
        self._say(f"{'stopped on request' if stopped else 'finished'} after step {progress.step}")
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
