"""The first batch in words: what its rows and the plan of the LR say, and an HF Trainer that says it before step 1."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle.resume.batch_reader import read_rows
from chronicle.resume.first_batch import (
    IGNORED,
    RowSetting,
    TokenRow,
    find_in_batch,
    format_batch,
    tell_batch,
)
from chronicle.resume.horizon import LrCurve, find_in_plan

BOS, EOS, PAD = 0, 1, 2
CAUSAL = RowSetting(shifts_labels=True, pad=PAD, eos=EOS)


def row(prompt: int, answer: int, *, pad: int = 0, seed: int = 0, **changes: Any) -> TokenRow:
    """BOS, prompt (masked), answer, EOS, padding; the tokens depend on the seed."""
    body = [10 + (seed * 7 + index * 3) % 80 for index in range(prompt + answer)]
    ids = [BOS, *body, EOS] + [PAD] * pad
    labels = [IGNORED] * (1 + prompt) + ids[1 + prompt : 2 + prompt + answer] + [IGNORED] * pad
    attended = [True] * (2 + prompt + answer) + [False] * pad
    given = {"ids": tuple(ids), "labels": tuple(labels), "attended": tuple(attended), **changes}
    return TokenRow(**given)


def rows(count: int = 4) -> list[TokenRow]:
    return [row(5, 4 + n, pad=count - n, seed=n) for n in range(count)]


def names(batch: list[TokenRow]) -> list[str]:
    return [finding.name for finding in find_in_batch(batch, CAUSAL)]


def with_labels(change: Any) -> list[TokenRow]:
    return [TokenRow(ids=one.ids, labels=tuple(change(one)), attended=one.attended) for one in rows()]


def test_healthy_rows_have_no_findings() -> None:
    assert names(rows()) == []
    assert names([TokenRow(ids=one.ids) for one in rows()]) == []  # no labels and no mask: nothing is claimed


@pytest.mark.parametrize(
    ("finding", "batch"),
    [
        ("all-labels-masked", with_labels(lambda one: [IGNORED] * len(one.ids))),
        ("padding-trained", with_labels(lambda one: one.ids)),
        ("labels-shifted-twice", with_labels(lambda one: [*one.ids[1:], IGNORED])),
        ("eos-not-trained", with_labels(lambda one: [IGNORED if i in (EOS, PAD) else i for i in one.ids])),
        ("rows-repeated", [rows()[0]] * 4),
    ],
)
def test_planted_fault_is_found(finding: str, batch: list[TokenRow]) -> None:
    assert finding in names(batch)


def test_labels_of_a_decoder_are_a_text_of_their_own_also_where_they_are_as_long_as_the_inputs() -> None:
    """Padding in them is trained on unless it is masked; masked padding is no part of the row."""
    import torch

    inputs = {"input_ids": torch.full((2, 8), 20), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    padded = torch.tensor([[11, 12, 13, EOS, PAD, PAD, PAD, PAD], [14, 15, EOS, PAD, PAD, PAD, PAD, PAD]])
    setting = RowSetting(pad=PAD, eos=EOS)
    forgotten = read_rows((), inputs | {"labels": padded}, apart=True)
    assert [one.name for one in find_in_batch(forgotten, setting)] == ["padding-trained"]
    masked = read_rows((), inputs | {"labels": padded.masked_fill(padded == PAD, IGNORED)}, apart=True)
    assert find_in_batch(masked, setting) == []


def test_three_rows_are_shown_with_what_is_masked_and_without_text_where_it_is_kept_out() -> None:
    told = tell_batch(rows(), CAUSAL, lambda ids: " ".join(str(one) for one in ids))
    assert (told["num_rows"], len(told["rows"]), told["num_copies"]) == (4, 3, 0)
    assert [part["kind"] for part in told["rows"][0]["parts"]] == ["masked", "trained", "padding"]
    assert told["rows"][0]["parts"][0]["text"].startswith("0 10 13")
    assert "masked     6" in format_batch(told)[2]
    assert "text" not in json.dumps(tell_batch(rows(), CAUSAL, None))


def ramp(warmup: int, total: int, planned: int) -> tuple[float, ...]:
    return tuple(min(n / warmup if warmup else 1.0, max(0.0, (total - n) / (total - warmup))) for n in range(planned))


@pytest.mark.parametrize(
    ("finding", "plan"),
    [
        ("lr-zero", LrCurve(lrs=(0.0,) * 40, planned=40)),
        ("warm-up-never-ends", LrCurve(lrs=ramp(80, 400, 40), planned=40, accumulation=8)),
        ("lr-ends-early", LrCurve(lrs=ramp(1, 10, 40), planned=40, accumulation=4)),
    ],
)
def test_fault_of_the_plan_is_found(finding: str, plan: LrCurve) -> None:
    assert finding in [one.name for one in find_in_plan(plan)]


@pytest.mark.parametrize(
    "plan",
    [
        LrCurve(lrs=ramp(4, 40, 40), planned=40, accumulation=4, horizon=40),
        LrCurve(lrs=(1.0,) * 40, planned=40),
        LrCurve(lrs=ramp(0, 40, 40), planned=40),
        LrCurve(lrs=ramp(4, 60, 40), planned=40, horizon=60, accumulation=4),  # a longer run is planned
        LrCurve(lrs=(1.0, 2.0, 3.0), planned=3),  # too short to have a shape
        LrCurve(lrs=()),
    ],
)
def test_healthy_plan_has_no_findings(plan: LrCurve) -> None:
    assert find_in_plan(plan) == []


def test_rows_without_a_tokenizer_are_numbers_unless_text_is_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("1", "0"):
        monkeypatch.setenv("CHRONICLE_BATCH_TEXT", setting)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = chronicle.attach(tmp_path / setting, model, optimizer)
        model(torch.tensor([[7, 8, 9, 3]])).sum().backward()
        optimizer.step()
        assert run.session is not None
        told = json.dumps(entries(tmp_path / setting, "guard.first_batch")[-1].data)
        assert '"tokens": 4' in told and ("7 8 9 3" in told) is (setting == "1")


# ---- the HF Trainer --------------------------------------------------------------------------------------------------


def tokenizer_of(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {name: n for n, name in enumerate(["<s>", "</s>", "<pad>", *(f"w{n}" for n in range(60))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def train(out: Path, run_dir: Path, *, masked: bool = False, spoil_at: int = 0, text: str = "") -> None:
    """Six steps of a tiny GPT-2; its loss becomes NaN at step `spoil_at`."""
    transformers = pytest.importorskip("transformers")
    import torch

    from chronicle.resume.transformers import ChronicleCallback

    class Spoil(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if spoil_at and state.global_step + 1 == spoil_at:
                with torch.no_grad():
                    model.transformer.wte.weight.fill_(float("nan"))

    torch.manual_seed(0)
    tokenizer = tokenizer_of(transformers)
    ids = [tokenizer(" ".join(f"w{(n * 5 + i * 3) % 60}" for i in range(8)))["input_ids"] + [1] for n in range(32)]
    rows = [{"input_ids": one, "labels": [IGNORED] * 9 if masked else one, "attention_mask": [1] * 9} for one in ids]
    config = transformers.GPT2Config(
        vocab_size=63, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    arguments = transformers.TrainingArguments(
        str(out), max_steps=6, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows, processing_class=tokenizer,
        callbacks=[Spoil(), ChronicleCallback(run_dir)],
    ).train()  # fmt: skip


def entries(run_dir: Path, kind: str) -> list[Any]:
    from chronicle.journal import read_journal
    from chronicle.paths import RunPaths

    return list(read_journal(RunPaths(run_dir)).of_kind(kind))


def test_all_labels_masked_is_said_before_the_first_step(
    tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "out", run_dir, masked=True)
    (seen,) = entries(run_dir, "guard.first_batch")
    assert [one["name"] for one in seen.data["findings"]] == ["all-labels-masked"]
    assert seen.step == 0
    assert capfd.readouterr().err.count("first batch: all-labels-masked") == 1
    assert [(one.step, one.data["kind"], one.data["tier"]) for one in entries(run_dir, "incident")] == [
        (0, "all-labels-masked", "warn")
    ]


def test_setting_keeps_text_out_of_the_journal(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launch").mkdir()
    monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(tmp_path / "launch"))
    monkeypatch.setenv("CHRONICLE_BATCH_TEXT", "0")
    train(tmp_path / "out", run_dir, spoil_at=2)
    (seen,) = entries(run_dir, "guard.first_batch")
    assert "text" not in json.dumps(seen.data["batch"])
