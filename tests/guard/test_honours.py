"""`rollback --warmup`, `--skip-batches`, `--reshuffle` through the real command, applied by the guard itself.

The expectation is independent: LRs from the schedule's formula, samples from an unguarded run that was never interrupted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import chronicle
from chronicle import ResumeRefused
from chronicle.cli.main import run as command
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.fingerprint import steppers_of
from chronicle.watch.advice import collect_candidates, collect_history
from rollback.checkpoint.manifest import read_manifest
from rollback.propose import propose
from tests.detect.test_propose import event
from tests.guard.honours_runs import GAMMA, LR, OnAccelerate, Weight, samples

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def roll_back(run_dir: Path, checkpoints: Path, step: int, *words: str) -> int:
    where = ["--run", run_dir.name, "--logs", str(run_dir.parent), "--checkpoints", str(checkpoints)]
    return command(["rollback", "--to", str(step), *words, "--yes", *where])


def scheduled(step: int) -> float:
    """LR of the step after `step` completed ones."""
    return float(LR * GAMMA**step)


def lrs(told: list[tuple[float, list[int]]]) -> list[float]:
    return [lr for lr, _ in told]


def ids(told: list[tuple[float, list[int]]]) -> list[list[int]]:
    return [read for _, read in told]


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(entry.data) for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# ---- Accelerate ----------------------------------------------------------------------------------------------------


def test_warm_up_and_skip_are_carried_out_once_and_go_on_after_a_crash(run_dir: Path, root: Path) -> None:
    """A crash in the middle of the ramp: the next launch takes it up where it was, and skips nothing again."""
    stream = ids(OnAccelerate(None).train(0, 40))
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "4", "--skip-batches", "2") == 0
    told = OnAccelerate(run_dir).load(root / "opt_step-5").train(5, 2, root / "opt_step-7")
    again = OnAccelerate(run_dir).load(root / "opt_step-5").train(5, 2)  # a crash before the save
    later = OnAccelerate(run_dir).load(root / "opt_step-7").train(7, 13, root / "opt_step-20")
    last = OnAccelerate(run_dir).load(root / "opt_step-20").train(20, 6)
    assert again == told
    expected = [scheduled(5 + k) * min(1.0, (k + 1) / 4) for k in range(21)]
    assert lrs([*told, *later, *last]) == pytest.approx(expected, rel=1e-12)
    assert ids([*told, *later, *last]) == stream[7:28]
    # two launches stopped right at their save: the batch that would have followed is not on record
    assert [v["verdict"] for v in verdicts(run_dir)] == ["passed"] * 3 + ["unverified"] * 2
    assert {one["name"] for v in verdicts(run_dir) for one in v.get("not_compared", ())} == {"next batch"}
    carried = [[(c["warmup"], c["skip"]) for c in v.get("carried", ())] for v in verdicts(run_dir)]
    assert carried == [[], [(4, 2)], [(4, 2)], [(4, 2)], [(4, 2)]]


def test_checkpoints_and_scheduler_never_see_the_lower_lr(run_dir: Path, root: Path) -> None:
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "4") == 0
    launch = OnAccelerate(run_dir).load(root / "opt_step-5")
    launch.train(5, 2, root / "opt_step-7")
    assert launch.optimizer.param_groups[0]["lr"] == launch.scheduler.get_last_lr()[0]
    assert launch.scheduler.get_last_lr()[0] == pytest.approx(scheduled(7), rel=1e-12)
    manifest = read_manifest(root / "opt_step-7")
    memory: Any = manifest.memory if manifest else None
    assert memory["groups"][0]["lr"] == pytest.approx(scheduled(7), rel=1e-12)


def test_skipped_batches_are_those_of_optimizer_steps(run_dir: Path, root: Path) -> None:
    stream = ids(OnAccelerate(None, accumulation=2).train(0, 20))
    OnAccelerate(run_dir, accumulation=2).train(0, 3, root / "opt_step-3")
    assert roll_back(run_dir, root, 3, "--skip-batches", "2") == 0
    told = OnAccelerate(run_dir, accumulation=2).load(root / "opt_step-3").train(3, 8)
    assert ids(told) == stream[5:13]


def test_reshuffle_is_another_order_of_what_the_epoch_still_has(run_dir: Path, root: Path) -> None:
    stream = ids(OnAccelerate(None).train(0, 24))
    OnAccelerate(run_dir).train(0, 3, root / "opt_step-3")
    assert roll_back(run_dir, root, 3, "--reshuffle") == 0
    told = OnAccelerate(run_dir).load(root / "opt_step-3").train(3, 2, root / "opt_step-5")
    told += OnAccelerate(run_dir).load(root / "opt_step-5").train(5, 11)
    rest = ids(told)[:5]
    assert rest != stream[3:8] and sorted(rest) == sorted(stream[3:8])
    assert ids(told)[5:] == stream[8:16]  # the next epoch is what it would have been


def test_a_second_rollback_leaves_out_more(run_dir: Path, root: Path) -> None:
    stream = ids(OnAccelerate(None).train(0, 32))
    OnAccelerate(run_dir).train(0, 3, root / "opt_step-3")
    assert roll_back(run_dir, root, 3, "--skip-batches", "2") == 0
    OnAccelerate(run_dir).load(root / "opt_step-3").train(3, 7, root / "opt_step-10")
    assert roll_back(run_dir, root, 10, "--skip-batches", "9") == 0
    told = OnAccelerate(run_dir).load(root / "opt_step-10").train(10, 6)
    assert ids(told) == stream[21:27]


def test_loader_that_is_prepared_after_the_load_is_changed_then(run_dir: Path, root: Path) -> None:
    stream = ids(OnAccelerate(None).train(0, 16))
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--skip-batches", "2") == 0
    told = OnAccelerate(run_dir, late=True).load(root / "opt_step-5").train(5, 6)
    assert ids(told) == stream[7:13]


def test_a_second_warm_up_ends_the_first(run_dir: Path, root: Path) -> None:
    OnAccelerate(run_dir).train(0, 3, root / "opt_step-3")
    assert roll_back(run_dir, root, 3, "--warmup", "10") == 0
    OnAccelerate(run_dir).load(root / "opt_step-3").train(3, 2, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "2") == 0
    told = OnAccelerate(run_dir).load(root / "opt_step-5").train(5, 3, root / "opt_step-8")
    told += OnAccelerate(run_dir).load(root / "opt_step-8").train(8, 2)
    assert lrs(told) == pytest.approx([scheduled(5 + k) * (0.5, 1, 1, 1, 1)[k] for k in range(5)], rel=1e-12)


@pytest.mark.parametrize(("option", "own"), [("--skip-batches", "skip_first_batches"), ("--reshuffle", "set_seed")])
def test_order_that_no_seed_fixes_is_refused_with_the_own_option(
    run_dir: Path, root: Path, option: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain shuffling sampler draws its order from the generator: what comes next is nobody's to leave out."""
    OnAccelerate(run_dir, seedable=False).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, option, *(["2"] if option == "--skip-batches" else [])) == 3
    said = capsys.readouterr().err
    assert option in said and own in said
    assert roll_back(run_dir, root, 5, "--warmup", "3") == 0


def test_sequential_data_can_be_skipped_but_not_reshuffled(run_dir: Path, root: Path) -> None:
    stream = ids(OnAccelerate(None, shuffle=False).train(0, 16))
    OnAccelerate(run_dir, shuffle=False).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--reshuffle") == 3
    assert roll_back(run_dir, root, 5, "--skip-batches", "4") == 0
    told = OnAccelerate(run_dir, shuffle=False).load(root / "opt_step-5").train(5, 6)
    assert ids(told) == stream[9:15]


def test_a_script_that_declares_the_warm_up_is_left_to_it(run_dir: Path, root: Path) -> None:
    OnAccelerate(run_dir, honours=("warmup",)).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "4") == 0
    told = OnAccelerate(run_dir, honours=("warmup",)).load(root / "opt_step-5").train(5, 3)
    assert lrs(told) == pytest.approx([scheduled(5 + k) for k in range(3)], rel=1e-12)


def test_a_launch_that_cannot_do_what_was_asked_is_refused(run_dir: Path, root: Path) -> None:
    """Planned when the order had a seed; the relaunch shuffles without one."""
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--skip-batches", "2") == 0
    with pytest.raises(ResumeRefused):
        OnAccelerate(run_dir, seedable=False).load(root / "opt_step-5").train(5, 1)
    assert "no loader whose order" in json.dumps(verdicts(run_dir)[-1])


def test_a_loader_that_was_iterated_before_the_load_is_refused(run_dir: Path, root: Path) -> None:
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--skip-batches", "2") == 0
    launch = OnAccelerate(run_dir)
    batches = iter(launch.loader)
    next(batches)
    launch.load(root / "opt_step-5")
    with pytest.raises(ResumeRefused):
        launch.accelerator.backward(launch.model(next(batches)[0]))
        launch.optimizer.step()


def test_a_guard_that_is_off_says_what_it_leaves_undone(
    run_dir: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "4", "--skip-batches", "2") == 0
    capsys.readouterr()
    monkeypatch.setenv("CHRONICLE_GUARD", "off")
    told = OnAccelerate(run_dir, honours=("skip",)).load(root / "opt_step-5").train(5, 1)
    assert lrs(told) == pytest.approx([scheduled(5)])
    said = capsys.readouterr().err
    assert "the guard is off: warmup of rollback" in said and "skip" not in said
    assert verdicts(run_dir)[-1]["verdict"] == "off"


def test_without_a_contract_nothing_is_touched(run_dir: Path, root: Path) -> None:
    launch = OnAccelerate(run_dir)
    launch.train(0, 5, root / "opt_step-5")
    resumed = OnAccelerate(run_dir).load(root / "opt_step-5")
    resumed.train(5, 2)
    optimizer = resumed.optimizer.optimizer
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert type(resumed.loader.batch_sampler) is torch.utils.data.BatchSampler


def test_undone_rollback_asks_for_nothing(run_dir: Path, root: Path) -> None:
    OnAccelerate(run_dir).train(0, 5, root / "opt_step-5")
    assert roll_back(run_dir, root, 5, "--warmup", "4", "--skip-batches", "2") == 0
    where = ["--run", run_dir.name, "--logs", str(run_dir.parent), "--checkpoints", str(root)]
    assert command(["undo", "--yes", *where]) == 0
    stream = ids(OnAccelerate(None).train(0, 8))
    told = OnAccelerate(run_dir).load(root / "opt_step-5").train(5, 3)
    assert ids(told) == stream[5:8] and lrs(told) == pytest.approx([scheduled(5 + k) for k in range(3)], rel=1e-12)


# ---- plain torch ---------------------------------------------------------------------------------------------------


class Loop:
    """A loop with one line of ours, over data in order."""

    def __init__(self, run_dir: Path, *, tensor_lr: bool = False, with_data: bool = True) -> None:
        self.model = Weight()
        lr: Any = torch.tensor(LR, dtype=torch.float64) if tensor_lr else LR
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, GAMMA)
        self.loader: Any = DataLoader(samples(), batch_size=4)
        data = {"data": self.loader} if with_data else {}
        self.run = chronicle.attach(run_dir, self.model, self.optimizer, self.scheduler, **data)

    def train(self, begin: int, num_steps: int) -> list[tuple[float, list[int]]]:
        told = []
        for step in range(begin, begin + num_steps):
            (read,) = next(batch for index, batch in enumerate(self.loader) if index == step % len(self.loader))
            before = float(self.model.value.detach())
            self.optimizer.zero_grad()
            self.model(read).backward()
            self.optimizer.step()
            self.scheduler.step()
            told.append((before - float(self.model.value.detach()), read.tolist()))
        return told

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = ("model", "optimizer", "scheduler")
        step = int(path.stem.rpartition("-")[2])
        torch.save({"step": step, **{part: getattr(self, part).state_dict() for part in parts}}, path)
        self.run.session.sealer.finish()

    def load(self, path: Path) -> "Loop":
        state = torch.load(path, weights_only=True)
        for part in ("model", "optimizer", "scheduler"):
            getattr(self, part).load_state_dict(state[part])
        return self


def test_proposal_prints_what_the_guard_of_this_run_carries_out(run_dir: Path, root: Path) -> None:
    """The newest save decides: with an order that a seed fixes the batches are skipped, without one nothing is printed."""

    def proposed() -> str:
        entries = read_journal(RunPaths(run_dir)).entries
        history = collect_history(entries, run=None, launch=None, last_step=20)
        proposal = propose([event(15)], collect_candidates([root], before=15, entries=entries), history)
        return str(proposal and proposal.command)

    launch = OnAccelerate(run_dir)
    launch.train(0, 5, root / "opt_step-5")
    assert proposed() == "chronicle rollback --to 5 --skip-batches 210"
    OnAccelerate(run_dir, seedable=False, fresh_start=True).train(0, 5, root / "opt_step-5")
    assert proposed() == "chronicle rollback --to 5"


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_attached_loop(run_dir: Path, root: Path, tensor_lr: bool) -> None:
    loop = Loop(run_dir, tensor_lr=tensor_lr)
    loop.train(0, 5)
    loop.save(root / "step-5.pt")
    assert roll_back(run_dir, root, 5, "--reshuffle") == 3  # data in order has no seed
    assert roll_back(run_dir, root, 5, "--warmup", "4", "--skip-batches", "2") == 0
    loop = Loop(run_dir, tensor_lr=tensor_lr).load(root / "step-5.pt")
    told = loop.train(5, 2)
    loop.save(root / "step-7.pt")
    told += Loop(run_dir, tensor_lr=tensor_lr).load(root / "step-7.pt").train(7, 4)
    assert lrs(told) == pytest.approx([scheduled(5 + k) * min(1.0, (k + 1) / 4) for k in range(6)], rel=1e-9)
    assert [read[0] // 4 for read in ids(told)] == [7, 0, 1, 2, 3, 4]


def test_attached_loop_without_its_loader_cannot_skip(
    run_dir: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(run_dir, with_data=False)
    loop.train(0, 5)
    loop.save(root / "step-5.pt")
    assert roll_back(run_dir, root, 5, "--skip-batches", "2") == 3
    assert "advance the script's own data iterator" in capsys.readouterr().err


# ---- ranks and frameworks ------------------------------------------------------------------------------------------


def play(run_dir: Path, root: Path, zero: int, *acts: str, num_ranks: int = 2) -> dict[str, dict[int, Any]]:
    """One torchrun of `honours_runs`: act -> rank -> what it told."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    words = [*launcher, "-m", "tests.guard.honours_runs", str(run_dir), str(root), str(zero), *acts]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if zero:
        environment["ACCELERATE_USE_DEEPSPEED"] = "true"
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, dict[int, Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"rank"'):
            record = json.loads(line)
            told.setdefault(record["act"], {})[record["rank"]] = [(lr, read) for lr, read in record["told"]]
    return told


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.sample), 1, 3])
def test_two_ranks_warm_up_skip_and_reshuffle_alike(run_dir: Path, root: Path, zero: int) -> None:
    """DDP, and ZeRO 1 to 3, where one step is a step of the optimizer inside for every group."""
    told = play(run_dir, root, zero, "stream", "save")
    assert roll_back(run_dir, root, 5, "--warmup", "4", "--skip-batches", "2", "--reshuffle") == 0
    told |= play(run_dir, root, zero, "resume")
    expected = [scheduled(5 + k) * min(1.0, (k + 1) / 4) for k in range(8)]
    for rank in (0, 1):
        assert lrs(told["resume"][rank]) == pytest.approx(expected, rel=1e-5)
    stream, resumed = ([sorted(a + b) for a, b in zip(*(ids(told[act][r]) for r in (0, 1)), strict=True)]
                       for act in ("stream", "resume"))  # fmt: skip
    assert sorted(resumed[:3]) == sorted(stream[7:10]) and resumed[3:] == stream[10:15]


class Trained(Weight):
    """As the Trainer calls it."""

    def __init__(self, read: list[list[int]], used: list[float]) -> None:
        super().__init__()
        self.read, self.used = read, used

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        self.read.append(x.tolist())
        return {"loss": super().forward(x), "logits": x}


def train_with_hf(out: Path, run_dir: Path | None, stop_at: int, resume: bool = False) -> list[tuple[float, list[int]]]:
    """12 batches an epoch in two micro-batches a step; the Trainer finds its place by its own arithmetic."""
    import transformers

    from chronicle.resume.transformers import ChronicleCallback

    read: list[list[int]] = []
    used: list[float] = []
    model = Trained(read, used)

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **parts: Any) -> None:
            self.before = model.now()

        def on_optimizer_step(self, *_: Any, **parts: Any) -> None:
            used.append(model.moved(self.before))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_save = control.should_training_stop = state.global_step >= stop_at
            return control

    optimizer = torch.optim.SGD(model.groups(), lr=LR)
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=40, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0,
        save_steps=1000, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=[{"x": index} for index in range(24)],
        optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)),
        callbacks=[Look(), *([ChronicleCallback(run_dir)] if run_dir else [])],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    assert len(read) == 2 * len(used)
    return [(lr, [*read[2 * i], *read[2 * i + 1]]) for i, lr in enumerate(used)]


def test_hf_trainer(run_dir: Path, tmp_path: Path) -> None:
    """It fast-forwards by its own arithmetic, and the stream it meets is the moved one."""
    out = tmp_path / "out"
    stream = ids(train_with_hf(tmp_path / "bare", None, 22))
    train_with_hf(out, run_dir, 4)
    assert roll_back(run_dir, out, 4, "--warmup", "4", "--skip-batches", "3", "--reshuffle") == 0
    told = train_with_hf(out, run_dir, 5, resume=True)
    told += train_with_hf(out, run_dir, 16, resume=True)
    assert lrs(told) == pytest.approx([scheduled(4 + k) * min(1.0, (k + 1) / 4) for k in range(12)], rel=1e-9)
    flat = [sample for step in stream for sample in step]
    here = [sample for step in ids(told) for sample in step]
    assert sorted(here[:8]) == sorted(flat[28:36]) and here[:8] != flat[28:36]  # the rest of an epoch that keeps its length
    assert here[8:] == flat[36:76]


def fit(path: Path, run_dir: Path, max_steps: int, load: Path | None = None) -> list[tuple[float, list[int]]]:
    import lightning.pytorch as pl

    from chronicle.resume.lightning import ChronicleCallback

    told: list[tuple[float, list[int]]] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.read = batch[0].tolist()
            return self.weight(batch[0])

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.before = self.weight.now()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            told.append((self.weight.moved(self.before), self.read))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.weight.groups(), lr=LR)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    callback = ChronicleCallback(run_dir)
    trainer = pl.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(path.parent), callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(samples(), batch_size=4), ckpt_path=None if load is None else str(load))
    trainer.save_checkpoint(path)
    assert callback.session is not None
    callback.session.sealer.finish()
    return told


def test_lightning_warms_up_and_refuses_the_data(
    run_dir: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins its loader anew at a resume, before anybody is told: nothing could be left out of it."""
    fit(root / "step=8.ckpt", run_dir, 8)
    for option in (["--skip-batches", "2"], ["--reshuffle"]):
        assert roll_back(run_dir, root, 8, *option) == 3
    said = capsys.readouterr().err
    assert "train_dataloader" in said and "seed_everything" in said
    assert roll_back(run_dir, root, 8, "--warmup", "4") == 0
    told = fit(root / "step=10.ckpt", run_dir, 16, root / "step=8.ckpt")
    assert lrs(told) == pytest.approx([scheduled(8 + k) * min(1.0, (k + 1) / 4) for k in range(8)], rel=1e-9)


def _prepare_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a launcher; left behind, they would make ranks of the processes that other tests start."""
    from benchmarks.planted_bugs.rig_deepspeed import prepare_environment

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # as it was before, when the test is over
        monkeypatch.delenv(name)
    prepare_environment()
    import deepspeed

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def train_with_deepspeed(
    run_dir: Path, root: Path, stage: int, num_steps: int, load: bool, source: Path | None = None, **parts: bool
) -> list[float]:
    import deepspeed

    model = Weight(torch.float32)
    optimizer = torch.optim.SGD(model.groups(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)  # the engine steps it right after the optimizer
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 1e9,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    chronicle.guard(engine, run_dir=run_dir)
    assert bool(steppers_of((engine.optimizer,))) is (stage == 0)  # as Lightning and the Trainer would meet it
    if load:
        engine.load_checkpoint(str(source or root), **parts)
    used = []
    for _ in range(num_steps):
        before = model.now()
        engine.backward(engine(torch.arange(4)))
        engine.step()
        used.append(model.moved(before))
    engine.save_checkpoint(str(root))
    engine.chronicle.sealer.finish()
    return used


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_raw_deepspeed_warms_up_and_refuses_the_data(
    run_dir: Path, root: Path, stage: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare_one_rank(monkeypatch)
    train_with_deepspeed(run_dir, root, stage, 5, load=False)
    assert roll_back(run_dir, root, 5, "--skip-batches", "2") == 3
    assert "after `load_checkpoint`" in capsys.readouterr().err
    assert roll_back(run_dir, root, 5, "--warmup", "4") == 0
    told = train_with_deepspeed(run_dir, root, stage, 2, load=True)
    told += train_with_deepspeed(run_dir, root, stage, 4, load=True)
    assert told == pytest.approx([scheduled(5 + k) * min(1.0, (k + 1) / 4) for k in range(6)], rel=1e-5)


@pytest.mark.slow
def test_a_deepspeed_script_that_always_loads_may_begin(
    run_dir: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was saved, so nothing is lost; where something was, a load that would find nothing is refused."""
    _prepare_one_rank(monkeypatch)
    assert len(train_with_deepspeed(run_dir, root, 0, 2, load=True)) == 2
    with pytest.raises(ResumeRefused, match="nothing was loaded"):
        train_with_deepspeed(run_dir, root / "elsewhere", 0, 2, load=True)
    (root / "latest").unlink()
    with pytest.raises(ResumeRefused, match="pointer"):
        train_with_deepspeed(run_dir, root, 0, 2, load=True)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=["module", "part"])
def test_deepspeed_begins_a_training_with_the_weights_of_another_run(
    run_dir: Path, root: Path, tmp_path: Path, parts: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script says so by an argument. In a run that has saved it would be half of a resume."""
    _prepare_one_rank(monkeypatch)
    train_with_deepspeed(run_dir, root, 0, 3, load=False)
    other = tmp_path / "logs" / "tuned"
    assert len(train_with_deepspeed(other, tmp_path / "tuned", 0, 2, load=True, source=root, **parts)) == 2
    with pytest.raises(ResumeRefused, match="nothing was loaded"):
        train_with_deepspeed(run_dir, root, 0, 2, load=True, **parts)
