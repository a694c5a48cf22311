"""A guarded trainer that reports nothing itself: what ranks, model, data and LRs are is seen and written down."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import chronicle
from chronicle.audit import open_evidence
from chronicle.audit.claims import ClaimVerdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.cli.main import run as command
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """A launch that `chronicle run` has started."""
    paths = RunPaths(tmp_path / "logs" / "tr")
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h", "argv": ["python", "train.py"]})
    monkeypatch.setenv("CHRONICLE_RUN_DIR", str(paths.run_dir))
    monkeypatch.setenv("CHRONICLE_LAUNCH", "1")
    monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(paths.launch_dir(1)))
    monkeypatch.chdir(tmp_path)
    return paths


def train(paths, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16)
    run = chronicle.attach(paths.run_dir, model, optimizer, scheduler, data=loader)
    batches = iter(loader)
    for _ in range(steps):
        x, y = next(batches)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    place = paths.run_dir.parents[1] / "checkpoints" / "step-3.pt"
    place.parent.mkdir(exist_ok=True)
    torch.save(state, place)
    return run


def checks(capsys):
    capsys.readouterr()
    command(["preflight", "--json"])
    return {one["check"]: one["verdict"] for one in json.loads(capsys.readouterr().out)["checks"]}


def test_a_plain_loop_answers_half_of_the_catalogue(paths, capsys):
    train(paths)
    found = checks(capsys)
    assert list(found.values()).count("unknown") <= 12 and len(found) == 16
    answered = ("PF01", "PF04", "PF15", "PF19")
    assert {name: found[name] for name in answered} == {**dict.fromkeys(answered, "pass"), "PF15": "warn"}
    assert not {"fail"} & set(found.values())


def test_claims_about_it_are_answered(paths):
    train(paths)
    evidence = read_evidence(paths, read_journal(paths))
    for field, said, wanted in (
        ("params", "9", ClaimVerdict.SUPPORTED),
        ("ranks", "1", ClaimVerdict.SUPPORTED),
        ("devices", "2", ClaimVerdict.CONTRADICTED),
        ("params", "10", ClaimVerdict.CONTRADICTED),
        ("precision", "bf16", ClaimVerdict.NO_EVIDENCE),  # autocast cannot be seen from here
    ):
        assert [one.verdict for one in judge_claim({field: said}, evidence)] == [wanted], field


def test_a_trainer_that_reports_itself_is_left_alone(paths):
    open_evidence().model(logical=7, counted=7, local=7)
    train(paths)
    lines = (paths.launch_dir(1) / "evidence" / "rank-0.jsonl").read_text().splitlines()
    assert len(lines) == 1 and not list(read_journal(paths).of_kind("preflight"))


def test_the_hugging_face_trainer_leaves_fourteen_open(paths, capsys):
    transformers = pytest.importorskip("transformers")
    from chronicle.resume.transformers import ChronicleCallback

    ids = torch.randint(0, 100, (64, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    shape = transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir="checkpoints", max_steps=4, per_device_train_batch_size=4, save_steps=2, warmup_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(shape)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[ChronicleCallback(paths.run_dir)])
    trainer.train()
    found = checks(capsys)
    assert list(found.values()).count("unknown") <= 14
    assert found["PF11"] == found["PF14"] == "pass"
