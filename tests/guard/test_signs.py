"""Early signs: measured in real models, judged against what the launch itself showed, recorded once, never harmful."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from chronicle.resume.signs import RULES, EarlySigns, SignJudge, query_keys, router_entropy

TINY = {"vocab_size": 64, "max_position_embeddings": 32}
LLAMA = {**TINY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_key_value_heads=4, num_local_experts=4)),
}


def train(model: nn.Module, steps: int, every: int) -> tuple[list[tuple[int, dict[str, float]]], list[Exception]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told: list[tuple[int, dict[str, float]]] = []
    failed: list[Exception] = []
    signs = EarlySigns(lambda step, values: told.append((step, values)), every, failed.append)
    signs.attach([model], [optimizer])
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 64, (4, 16), generator=draw)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return told, failed


@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_measured_at_the_steps_asked_for(name: str) -> None:
    torch.manual_seed(0)
    told, failed = train(MODELS[name](), 12, 4)
    assert failed == [] and [step for step, _ in told] == [4, 8, 12]
    assert all(0.0 < values["update_ratio"] < 0.5 for _, values in told)
    assert "qk_spectrum" not in told[0][1] and all(0.0 < values["qk_spectrum"] <= 1.0 for _, values in told[1:])
    assert all(("router_entropy" in values) is (name == "mixtral") for _, values in told)


def test_measuring_changes_no_bit_of_the_training() -> None:
    weights = []
    for every in (1, 1000):
        torch.manual_seed(0)
        model = MODELS["mixtral"]()
        train(model, 3, every)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_ratio_is_that_of_the_step() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
    EarlySigns(lambda step, values: told.append(values), 1).attach([model], [optimizer])
    before = model.weight.detach().clone()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    wanted = (model.weight.detach() - before).norm() / before.norm()
    assert told[0]["update_ratio"] == pytest.approx(float(wanted), rel=1e-4)


def test_a_change_in_one_direction_has_no_entropy() -> None:
    """The spectrum of a head's product, against one computed from the whole matrices."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32))
    pair, attention = query_keys(model)[0], model.encoder.layer[0].attention.self
    assert pair.spectrum() is None
    q, k = attention.query.weight, attention.key.weight
    old_q, old_k = q.detach().clone(), k.detach().clone()
    with torch.no_grad():
        q += 0.01 * torch.randn_like(q)
        k += 0.01 * torch.randn_like(k)
    spectra = []
    for head in (slice(8 * h, 8 * h + 8) for h in range(4)):
        product = (q - old_q)[head].T @ old_k[head] + old_q[head].T @ (k - old_k)[head]
        shares = torch.linalg.svdvals(product.detach()).square()
        shares = shares / shares.sum()
        spectra.append(float(torch.special.entr(shares).sum() / torch.tensor(16.0).log()))
    assert pair.spectrum() == pytest.approx(min(spectra), rel=1e-3)
    with torch.no_grad():
        q += torch.outer(torch.ones(32), torch.randn(32))
    assert pair.spectrum() < 0.35 < min(spectra)


def test_the_entropy_of_a_router() -> None:
    even = torch.eye(4).repeat(16, 1)
    assert float(router_entropy(even)) == pytest.approx(1.0)
    assert float(router_entropy((torch.eye(4)[0].repeat(64, 1), torch.zeros(64, dtype=torch.long)))) == pytest.approx(0.0)
    assert router_entropy(even[:16]) is None and router_entropy("text") is None


def see(judge: SignJudge, values: list[float], *, start: int = 110, lr: float = 1e-3) -> list[int]:
    return [
        start + 10 * index for index, value in enumerate(values) if judge.see(start + 10 * index, {"update_ratio": value}, lr)
    ]


def test_a_sign_is_four_measurements_beyond_what_was_usual() -> None:
    usual = [1.0] * 20
    assert see(SignJudge(), [*usual, 3.1, 3.1, 3.1, 2.9, 3.1, 3.1]) == []
    assert see(SignJudge(), [*usual, 3.1, 3.1, 3.1, 3.1, 3.1]) == [340]
    assert see(SignJudge(), [*usual, *[float("nan")] * 4]) == [340]
    assert see(SignJudge(), [*usual, *[4.0] * 4, 1.0, *[4.0] * 4]) == [340, 390]
    assert {rule.channel for rule in RULES} == {"update_ratio", "qk_spectrum", "router_entropy"}


def test_a_warm_up_is_not_what_is_usual() -> None:
    judge = SignJudge()
    for index in range(60):  # ten times as large at its end as at its beginning
        assert judge.see(110 + 10 * index, {"update_ratio": 0.1 + index / 60}, 1e-5 * (index + 1)) == []
    assert see(judge, [1.0] * 40, start=1000, lr=6e-4) == []


SCRIPT = """
import sys, torch, chronicle
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0); torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
chronicle.attach(None, model, optimizer)
for step in range(400):
    if step >= 340:
        for group in optimizer.param_groups: group["lr"] = 2e-2
    ids = torch.randint(0, 32, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    chronicle.log(step + 1, loss=loss)
"""


def test_a_launch_that_asks_records_them_and_one_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("CHRONICLE_SIGNS", "10")
    command = [sys.executable, "-m", "chronicle_ml", "run", "--run", "signs", "--", sys.executable, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "logs" / "signs"
    rows = [json.loads(line) for line in (run / "launches" / "0001" / "signs.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10, 401, 10))
    entries = [json.loads(line) for file in (run / "journal").glob("*.jsonl") for line in file.read_text().splitlines()]
    signs = [entry for entry in entries if "early-sign" in json.dumps(entry)]
    assert any("update_ratio is" in json.dumps(sign) for sign in signs) and len(signs) <= 2  # each channel once
    assert "guard.fault" not in json.dumps(entries)
    status = subprocess.run(
        [sys.executable, "-m", "chronicle_ml", "status", "--run", "signs"], capture_output=True, text=True, check=False
    )
    assert "update_ratio" in status.stdout


def test_without_the_setting_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chronicle.resume.journal import GuardJournal
    from chronicle.resume.signs import record_signs

    journal = GuardJournal(None, launch=None, rank=lambda: 0)
    here = {"CHRONICLE_LAUNCH_DIR": str(tmp_path)}
    for text in ("", "0", "off", "often"):
        environ = {**here, "CHRONICLE_SIGNS": text}
        assert record_signs([], [], journal, environ, first_step=0, failed=lambda _: None) is None
    assert list(tmp_path.iterdir()) == [] and "`often`: expected a number of steps" in capsys.readouterr().err
