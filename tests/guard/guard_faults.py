"""Errors injected into the guard: one into every function of its packages, while real small runs train.

`python -m tests.guard.guard_faults [torch] [accelerate] [transformers] [lightning] [fabric] [deepspeed] [--one-each]
[--error KIND] [--every N]`

The functions are found by inspection: a run without errors notes every function of the package that is called, and the moment
(attach, load, save, step, exit). Then the run is repeated once for each pair, and the function raises at its first call in
that moment. A run is two launches in one process: train, save, train; then resume and train. It must end, with the losses of
the run without errors, and the error must stand in the journal or on stderr. `faults.py`, which catches them, is left out.

`--one-each` raises once in every function, over all frameworks, at the moment among its own at which fewest others raise.
`--error` picks what is raised. KeyboardInterrupt is no error of the guard: it must leave the run as itself.
"""

import argparse
import gc
import io
import os
import shutil
import socket
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import chronicle

__all__ = ["SCENARIOS", "Injection", "Outcome", "find_functions", "inject", "main"]

CHRONICLE = str(Path(chronicle.__file__).parent) + os.sep
PACKAGES = tuple(CHRONICLE + name + os.sep for name in ("resume", "prints"))
SHIELD = PACKAGES[0] + "faults.py"
# A wrapper that calls the original and a shielded function, and nothing else: an error before its first line is one in the call
# of the framework's own function. Nothing could catch it.
SHELLS = (
    "outside_graphs.<locals>.guarded",
    "ModelHook.__call__",
    "around.<locals>.call",
    "_preparing.<locals>.prepare",
    "_saving.<locals>.save_state",
    "_loading.<locals>.load_state",
    "_noting.<locals>.__next__",
    "_handing.<locals>.__iter__",
    "_watch_clipping.<locals>.listening",
    "_watch_backward.<locals>.listening",
    "ChronicleCallback._step_seen.<locals>.training_step",
    "ChronicleCallback.setup.<locals>.save_checkpoint",
    "_wrap.<locals>.method",
    "hook_engine_steps.<locals>.step",
    "_saving.<locals>.save_checkpoint",
    "_loading.<locals>.load_checkpoint",
)
NO_FUNCTIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>", "__getattr__")  # the last: an import
WORDS = "injected by the benchmark"


class InjectedError(RuntimeError):
    """Raised inside the guard."""


def _out_of_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError(WORDS)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: InjectedError(WORDS),
    "recursion": lambda: RecursionError(WORDS),
    "memory": lambda: MemoryError(WORDS),
    "device-memory": _out_of_memory,
    "type": lambda: TypeError(WORDS),
    "interrupt": lambda: KeyboardInterrupt(WORDS),
}


@dataclass
class Moment:
    """What the run is doing right now."""

    name: str = "attach"


MOMENT = Moment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One function of the guard and the moment at which it raises."""

    name: str
    moment: str
    code: CodeType = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run with one error."""

    injection: Injection
    raised: bool
    ended: str  # why the run did not end well; "": it did
    recorded: bool


# ---- the runs ---------------------------------------------------------------------------------------------------------


def train_torch(top: Path) -> list[float]:
    """A plain loop: `attach`, states with `torch.save`, `saved`."""
    import torch

    losses: list[float] = []
    for launch in (1, 2):
        MOMENT.name = "attach"
        torch.manual_seed(launch)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        run = chronicle.attach(str(top / "logs" / "r"), model, optimizer, scheduler)
        if launch == 2:
            MOMENT.name = "load"
            state = torch.load(top / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        for step in range(6 * (launch - 1), 6 + 3 * launch):
            MOMENT.name = "step"
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            run.log(loss=losses[-1])
            if step == 5:
                MOMENT.name = "save"
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                torch.save({name: part.state_dict() for name, part in parts.items()}, top / "state.pt")
                run.saved(top / "state.pt")
        MOMENT.name = "exit"
        _finish(run.session)
    return losses


def train_accelerate(top: Path) -> list[float]:
    """Accelerate: `guard`, `save_state`, `load_state`."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    losses: list[float] = []
    for launch in (1, 2):
        MOMENT.name = "attach"
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        torch.manual_seed(launch)
        accelerator = chronicle.guard(Accelerator(cpu=True), run_dir=str(top / "logs" / "r"))
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if launch == 2:
            MOMENT.name = "load"
            accelerator.load_state(str(top / "checkpoint"))
        for step in range(6 * (launch - 1), 6 + 3 * launch):
            MOMENT.name = "step"
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            if step == 5:
                MOMENT.name = "save"
                accelerator.save_state(str(top / "checkpoint"))
        MOMENT.name = "exit"
        _finish(getattr(accelerator, "chronicle", None))
    return losses


def train_transformers(top: Path) -> list[float]:
    """HF Trainer with the callback."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from chronicle.resume.transformers import ChronicleCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            out = self.layer(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    class Moments(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            MOMENT.name = "step"

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            MOMENT.name = "save" if state.global_step % args.save_steps == 0 else "step"

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            MOMENT.name = "exit"

    losses: list[float] = []
    rows = [{"x": torch.full((4,), float(i % 5)), "labels": torch.zeros(1)} for i in range(64)]
    for launch in (1, 2):
        MOMENT.name = "attach"
        torch.manual_seed(launch)
        arguments = TrainingArguments(
            str(top / "out"), max_steps=5 + 2 * launch, save_steps=4, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, per_device_train_batch_size=4, seed=1,
        )  # fmt: skip
        callbacks = [Moments(), ChronicleCallback(str(top / "logs" / "r"))]
        trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=callbacks)
        MOMENT.name = "load"
        trainer.train(resume_from_checkpoint=str(top / "out" / "checkpoint-4") if launch == 2 else None)
        losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses


def train_lightning(top: Path) -> list[float]:
    """Lightning with the callback."""
    import lightning.pytorch as pl
    import torch

    from chronicle.resume.lightning import ChronicleCallback

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            MOMENT.name = "step"
            loss = self.layer(batch[0]).square().mean()
            losses.append(float(loss))
            return loss

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            MOMENT.name = "save"

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.arange(256.0).reshape(64, 4) / 256)
    for launch in (1, 2):
        MOMENT.name = "attach"
        torch.manual_seed(launch)
        trainer = pl.Trainer(
            max_steps=4 * launch, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[ChronicleCallback(str(top / "logs" / "r"))],
        )  # fmt: skip
        MOMENT.name = "load"
        resumed = str(top / "step=4.ckpt") if launch == 2 else None
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resumed)
        MOMENT.name = "save"
        trainer.save_checkpoint(top / "step=4.ckpt")
        MOMENT.name = "exit"
        for callback in trainer.callbacks:
            if isinstance(callback, ChronicleCallback):
                _finish(callback._session)
    return losses


def train_fabric(top: Path) -> list[float]:
    """Lightning Fabric: `guard` before `setup`, `fabric.save` and `fabric.load` with a scheduler among the state."""
    import torch
    from lightning.fabric import Fabric

    losses: list[float] = []
    for launch in (1, 2):
        MOMENT.name = "attach"
        torch.manual_seed(launch)
        fabric = chronicle.guard(Fabric(accelerator="cpu", devices=1), run_dir=str(top / "logs" / "r"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = fabric.setup(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        if launch == 2:
            MOMENT.name = "load"
            fabric.load(top / "state.ckpt", state)
        for step in range(state["step"], 6 + 3 * launch):
            MOMENT.name = "step"
            loss = model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            if step == 5:
                MOMENT.name = "save"
                state["step"] = step + 1
                fabric.save(top / "state.ckpt", state)
        MOMENT.name = "exit"
        _finish(getattr(getattr(getattr(fabric, "chronicle", None), "guard", None), "session", None))
    return losses


def train_deepspeed(top: Path) -> list[float]:
    """A DeepSpeed engine with ZeRO-1 on one process, its schedule from the configuration, accumulation over two batches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_SKIP_CUDA_CHECK": "1"}
    import deepspeed
    import torch

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo")
    configuration = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    losses: list[float] = []
    for launch in (1, 2):
        MOMENT.name = "attach"
        torch.manual_seed(launch)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(configuration))
        chronicle.guard(engine, run_dir=str(top / "logs" / "r"))
        if launch == 2:
            MOMENT.name = "load"
            engine.load_checkpoint(str(top / "checkpoints"))
        for step in range(6 * (launch - 1), 6 + 3 * launch):
            for micro in (0, 1):
                MOMENT.name = "step"
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + micro))
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
            if step == 5:
                MOMENT.name = "save"
                engine.save_checkpoint(str(top / "checkpoints"))
        MOMENT.name = "exit"
        _finish(getattr(engine, "chronicle", None))
        engine.destroy()
    return losses


def _finish(session: Any) -> None:
    """What the end of the process does, with the guard's own shield around it."""
    if session is not None:
        with session.faults.contained("exit"):
            session.sealer.finish()


SCENARIOS: dict[str, Callable[[Path], list[float]]] = {
    "torch": train_torch,
    "accelerate": train_accelerate,
    "transformers": train_transformers,
    "lightning": train_lightning,
    "fabric": train_fabric,
    "deepspeed": train_deepspeed,
}


# ---- finding functions, and raising in them ---------------------------------------------------------------------------


def find_functions(train: Callable[[Path], list[float]]) -> tuple[list[Injection], list[float]]:
    """Every function of the guard that this run calls, with each moment at which it does; and the run's losses."""
    found: dict[tuple[CodeType, str], Injection] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_filename != SHIELD:
            name = f"{code.co_filename.removeprefix(CHRONICLE)}:{code.co_qualname}"
            if code.co_name not in NO_FUNCTIONS and code.co_qualname not in SHELLS:
                found.setdefault((code, MOMENT.name), Injection(name=name, moment=MOMENT.name, code=code))

    with _directory() as top, _quiet():
        train(top)  # imports
    with _directory() as top, _traced(trace), _quiet():
        losses = train(top)
    return list(found.values()), losses


def one_each(found: dict[str, list[Injection]]) -> dict[str, list[Injection]]:
    """Of the pairs of all frameworks, one for every function: at the moment that was chosen least often until then."""
    pairs: dict[str, list[tuple[str, Injection]]] = {}
    for framework, injections in found.items():
        for one in injections:
            pairs.setdefault(one.name, []).append((framework, one))
    counts: Counter[str] = Counter()
    chosen: dict[str, list[Injection]] = {framework: [] for framework in found}
    for several in pairs.values():
        framework, one = min(several, key=lambda pair: (counts[pair[1].moment], len(chosen[pair[0]])))
        counts[one.moment] += 1
        chosen[framework].append(one)
    return chosen


def inject(
    train: Callable[[Path], list[float]], injection: Injection, expected: list[float], error: str = "error"
) -> Outcome:
    """One run in which this function raises once."""
    raised = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if not raised and event == "call" and frame.f_code is injection.code and injection.moment in ("", MOMENT.name):
            raised.append(True)
            raise ERRORS[error]()

    ended = ""
    with _directory() as top:
        with _traced(trace), _quiet() as said:
            try:
                losses = train(top)
                if losses != expected:
                    ended = "other losses"
                if error == "interrupt":
                    ended = "the interrupt was swallowed"
            except SystemExit as end:  # Lightning makes an exit with code 1 of an interrupt
                ended = "" if error == "interrupt" and end.code == 1 else f"{type(end).__name__}: {end}"[:300]
            except KeyboardInterrupt:
                ended = "" if error == "interrupt" else "KeyboardInterrupt"
            except BaseException as problem:
                ended = f"{type(problem).__name__}: {problem}"[:300]
        written = "".join(path.read_text() for path in sorted((top / "logs").rglob("*.json*")))
    recorded = error == "interrupt" or WORDS in written or WORDS in said.getvalue()
    return Outcome(injection=injection, raised=bool(raised), ended=ended, recorded=recorded)


class _directory:
    """A new directory, removed at the end, together with whatever the run left in memory."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="guard-faults-"))
        return self._path

    def __exit__(self, *problem: Any) -> None:
        from chronicle.resume.adapters import hooks
        from chronicle.resume.envelope import promises

        shutil.rmtree(self._path, ignore_errors=True)
        hooks._sessions.clear()  # what is still alive of this run must not take the next run's errors
        promises._listeners.clear()
        gc.collect()


class _traced:
    """Calls `trace` for every Python call, in every thread."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def __exit__(self, *problem: Any) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


class _quiet:
    """Collects what is printed."""

    def __enter__(self) -> io.StringIO:
        self._said = io.StringIO()
        self._out, self._err = redirect_stdout(io.StringIO()), redirect_stderr(self._said)
        self._out.__enter__()
        self._err.__enter__()
        warnings.simplefilter("ignore")
        return self._said

    def __exit__(self, *problem: Any) -> None:
        self._err.__exit__(None, None, None)
        self._out.__exit__(None, None, None)


def play(names: list[str], options: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    """The outcome of every injection in the chosen frameworks."""
    found, losses = {}, {}
    for name in names:
        found[name], losses[name] = find_functions(SCENARIOS[name])
    if options.one_each:
        found = one_each(found)
    for name, injections in found.items():
        for injection in [one for one in injections if options.only in f"{one.name} {one.moment}"][:: options.every]:
            outcome = inject(SCENARIOS[name], injection, losses[name], options.error)
            if not outcome.raised:  # a thread's function: its moment is not the same in every run
                outcome = inject(SCENARIOS[name], replace(injection, moment=""), losses[name], options.error)
            yield name, outcome


def main() -> int:
    """Print one line for every run that ended or was not recorded, and the totals; 1 if there was one, else 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("frameworks", nargs="*", default=[])
    parser.add_argument("--one-each", action="store_true", help="every function once, over all frameworks")
    parser.add_argument("--error", choices=list(ERRORS), default="error", help="what is raised")
    parser.add_argument("--only", default="", help="a part of the function's name or the moment")
    parser.add_argument("--every", type=int, default=1, help="only every n-th injection")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    functions = set()
    for framework, outcome in play(options.frameworks or list(SCENARIOS), options):
        one = outcome.injection
        totals["injected"] += outcome.raised
        functions.add(one.name)
        totals["ended"] += bool(outcome.ended)
        totals["recorded"] += outcome.raised and outcome.recorded
        if outcome.ended or (outcome.raised and not outcome.recorded) or not outcome.raised:
            state = outcome.ended or ("not recorded" if outcome.raised else "not reached")
            print(f"{framework}: {one.name} at {one.moment}: {state}", flush=True)
    print(
        f"injected {totals['injected']} (into {len(functions)} functions)  "
        f"runs ended {totals['ended']}  recorded {totals['recorded']}"
    )
    return 1 if totals["ended"] or totals["recorded"] < totals["injected"] else 0


if __name__ == "__main__":
    sys.exit(main())
