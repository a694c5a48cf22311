"""Faults of labels, templates and LR units, and healthy scripts: each is a function that returns a Trainer, unguarded.

`expected`: the findings of which one must be said before step 1; a healthy case has none. Sources are the reports that a case
was made after. The trainers are the real ones of Transformers and TRL; a case of TRL is left out where it is not installed.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.first_batch.parts import (
    CHATML,
    causal_model,
    chat_tokenizer,
    gpt_tokenizer,
    llama_tokenizer,
    pairs,
    sentence,
    word_tokenizer,
)

HAS_TRL = importlib.util.find_spec("trl") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script."""

    name: str
    expected: tuple[str, ...]
    make: Callable[[str], Any]


CASES: list[Case] = []


def case(name: str, *expected: str, trl: bool = False) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    def add(make: Callable[[str], Any]) -> Callable[[str], Any]:
        if HAS_TRL or not trl:
            CASES.append(Case(name=name, expected=expected, make=make))
        return make

    return add


def arguments(out: str, kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    given = {
        "max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 100, "remove_unused_columns": False, **changes,
    }  # fmt: skip
    return kind(out, **given)


def trainer(out: str, tokenizer: Any, rows: Sequence[Any], collate: Any = None, model: Any = None, **changes: Any) -> Any:
    optimizers = changes.pop("optimizers", None)
    model = model or causal_model(tokenizer)
    return transformers.Trainer(
        model, arguments(out, **changes), train_dataset=list(rows), data_collator=collate or pad_with(tokenizer),
        processing_class=tokenizer, optimizers=(None, None) if optimizers is None else optimizers(model),
    )  # fmt: skip


def pad_with(tokenizer: Any, *, label: int = -100, attend: bool = False, left: bool = False) -> Any:
    """A collator as scripts write it."""

    def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for row in rows:
            gap = longest - len(row["input_ids"])
            for key, fill, values in (
                ("input_ids", tokenizer.pad_token_id, row["input_ids"]),
                ("labels", label, row["labels"]),
                ("attention_mask", int(attend), [1] * len(row["input_ids"])),
            ):
                batch[key].append([fill] * gap + values if left else values + [fill] * gap)
        return {key: torch.tensor(value) for key, value in batch.items()}

    return collate


def rows_of(tokenizer: Any, *, mask: bool = True, answer: int = 4) -> list[dict[str, list[int]]]:
    """Question and answer with the prompt masked and EOS at the end."""
    rows = []
    for question, said in pairs(answer=answer):
        prompt = tokenizer(f"### Question: {question}\n### Answer:")["input_ids"]
        reply = tokenizer(" " + said, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + reply, "labels": ([-100] * len(prompt) if mask else prompt) + reply})
    return rows


# ---- labels ----------------------------------------------------------------------------------------------------------


@case("answer marker not in the text", "all-labels-masked")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, [row | {"labels": [-100] * len(row["labels"])} for row in rows_of(tokenizer)])


@case("answer marker missing in a third of the rows", "prompt-trained-in-some")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer)
    return trainer(out, tokenizer, [r | {"labels": r["input_ids"]} if n % 3 == 0 else r for n, r in enumerate(rows)])


@case("most rows have every label masked", "rows-without-labels")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer)
    return trainer(out, tokenizer, [r | {"labels": [-100] * len(r["labels"])} if n % 4 else r for n, r in enumerate(rows)])


@case("labels are a copy of the padded inputs", "padding-trained")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer), pad_with(tokenizer, label=tokenizer.pad_token_id))


@case("padding without an attention mask, labels copied, EOS is the padding", "padding-trained", "padding-attended")
def _(out: str) -> Any:
    tokenizer = gpt_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer), pad_with(tokenizer, label=tokenizer.pad_token_id, attend=True))


def seq2seq(out: str, ignored: int) -> Any:
    """A small T5 whose labels happen to be as long as its inputs."""
    tokenizer = llama_tokenizer()
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip

    def collate(rows: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
        asked = tokenizer([q for q, _ in rows], padding="max_length", max_length=24, return_tensors="pt")
        said = tokenizer([f"{a} </s>" for _, a in rows], padding="max_length", max_length=24, return_tensors="pt")
        labels = said["input_ids"].masked_fill(said["attention_mask"] == 0, ignored)
        return {"input_ids": asked["input_ids"], "attention_mask": asked["attention_mask"], "labels": labels}

    return transformers.Seq2SeqTrainer(
        transformers.T5ForConditionalGeneration(config), arguments(out, transformers.Seq2SeqTrainingArguments),
        train_dataset=pairs(), data_collator=collate, processing_class=tokenizer,
    )  # fmt: skip


@case("encoder and decoder, padding of the labels not masked", "padding-trained")
def _(out: str) -> Any:
    return seq2seq(out, llama_tokenizer().pad_token_id)


@case("encoder and decoder, labels as long as the inputs")
def _(out: str) -> Any:
    return seq2seq(out, -100)


@case("padding is attended to", "padding-attended")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer), pad_with(tokenizer, attend=True))


@case("collator masks EOS because it is the padding", "eos-not-trained")
def _(out: str) -> Any:
    tokenizer = gpt_tokenizer()
    rows = [{k: row[k] for k in ("input_ids",)} for row in rows_of(tokenizer, mask=False)]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return trainer(out, tokenizer, [r | {"attention_mask": [1] * len(r["input_ids"])} for r in rows], collate)


@case("no text ends with EOS", "eos-missing")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer)
    return trainer(out, tokenizer, [{key: value[:-1] for key, value in row.items()} for row in rows])


@case("labels shifted by the script and by the model", "labels-shifted-twice")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer, mask=False)
    return trainer(out, tokenizer, [row | {"labels": [*row["input_ids"][1:], -100]} for row in rows])


@case("labels of another row", "labels-of-other-text")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer, mask=False)
    other = [rows[(n + 5) % len(rows)]["input_ids"] for n in range(len(rows))]
    wrong = [(o + o)[: len(row["input_ids"])] for row, o in zip(rows, other, strict=True)]
    return trainer(out, tokenizer, [row | {"labels": labels} for row, labels in zip(rows, wrong, strict=True)])


@case("mask upside down: the prompt is learned", "mask-upside-down")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    flipped = []
    for row in rows_of(tokenizer):
        labels = [t if kept == -100 else -100 for t, kept in zip(row["input_ids"], row["labels"], strict=True)]
        flipped.append(row | {"labels": labels})
    return trainer(out, tokenizer, flipped)


@case("truncation cuts every answer", "every-row-cut", "all-labels-masked", "rows-without-labels")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer, answer=12)
    length = max(row["labels"].count(-100) for row in rows) + 4
    tokenizer("x " * 600, truncation=True, max_length=length)  # as `dataset.map` did before
    return trainer(out, tokenizer, [{key: value[:length] for key, value in row.items()} for row in rows])


@case("one row again and again", "rows-repeated")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer)[:1] * 32)


# ---- templates and tokenizers ----------------------------------------------------------------------------------------


def chats(tokenizer: Any, *, again: bool = False, special: bool = False) -> list[dict[str, list[int]]]:
    """Rendered by the tokenizer's template; `special`: the tokenizer adds its own BOS to the text."""
    rows = []
    for question, answer in pairs():
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = tokenizer(text + (tokenizer.eos_token if again else ""), add_special_tokens=special)["input_ids"]
        rows.append({"input_ids": ids, "labels": list(ids)})
    return rows


@case("BOS from the template and from the tokenizer", "bos-doubled")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, chats(tokenizer, special=True))


@case("BOS left out", "bos-missing")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, [{key: value[1:] for key, value in row.items()} for row in rows_of(tokenizer)])


@case("EOS from the template and from the script", "eos-doubled")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, chats(tokenizer, again=True))


@case("ChatML for a tokenizer without its tokens", "foreign-template")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer(template=CHATML)
    return trainer(out, tokenizer, chats(tokenizer, special=True))


@case("texts rendered for another model", "foreign-template")
def _(out: str) -> Any:
    tokenizer = gpt_tokenizer()
    rows = []
    for question, answer in pairs():
        text = f"<|start_header_id|>user<|end_header_id|>{question}<|eot_id|>{answer}<|eot_id|>{tokenizer.eos_token}"
        ids = tokenizer(text)["input_ids"]
        rows.append({"input_ids": ids, "labels": list(ids)})
    return trainer(out, tokenizer, rows)


@case("tokenizer of another model", "id-without-embedding")
def _(out: str) -> Any:
    tokenizer = chat_tokenizer()
    return trainer(out, tokenizer, chats(tokenizer), model=causal_model(llama_tokenizer(), vocab=120))


@case("text that the tokenizer does not know", "unknown-tokens")
def _(out: str) -> Any:
    tokenizer = word_tokenizer()
    texts = [f"Der Fluss {n} bewegt {sentence(n, 2)} das Licht der Lampe" for n in range(32)]
    rows = [{"input_ids": ids, "labels": list(ids)} for ids in tokenizer(texts)["input_ids"]]
    return trainer(out, tokenizer, rows)


# ---- the learning rate -----------------------------------------------------------------------------------------------


def healthy_rows(out: str, **changes: Any) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer), **changes)


def own_schedule(warmup: int, steps: int) -> Any:
    def make(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)

    return make


@case("schedule and warm-up counted in micro-batches", "lr-plan-too-long", "warm-up-length")
def _(out: str) -> Any:
    return healthy_rows(out, gradient_accumulation_steps=4, warmup_steps=4, optimizers=own_schedule(16, 160))


@case("warm-up in micro-batches is longer than the run", "warm-up-never-ends")
def _(out: str) -> Any:
    return healthy_rows(out, gradient_accumulation_steps=8, optimizers=own_schedule(48, 320))


@case("schedule divided by the accumulation twice", "lr-ends-early")
def _(out: str) -> Any:
    return healthy_rows(out, gradient_accumulation_steps=4, optimizers=own_schedule(1, 10))


@case("warm-up asked for, schedule without one", "no-warm-up")
def _(out: str) -> Any:
    return healthy_rows(out, warmup_steps=10, lr_scheduler_type="constant")


@case("LR is 0", "lr-zero")
def _(out: str) -> Any:
    return healthy_rows(out, learning_rate=0.0)


# ---- TRL -------------------------------------------------------------------------------------------------------------


def sft(out: str, tokenizer: Any, rows: Sequence[dict[str, Any]], **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    given = arguments(out, SFTConfig, **{"remove_unused_columns": True, "max_length": 256, **changes})
    return SFTTrainer(causal_model(tokenizer), given, train_dataset=Dataset.from_list(list(rows)), processing_class=tokenizer)


def talks() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs()
    ]


def completions(answer: int = 4) -> list[dict[str, str]]:
    return [{"prompt": question, "completion": " " + said} for question, said in pairs(answer=answer)]


@case("TRL: the prompt is trained on", "prompt-trained", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), completions(), completion_only_loss=False)


@case("TRL: every answer is cut", "every-row-cut", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), completions(answer=20), max_length=24)


@case("TRL: ChatML for a tokenizer without its tokens", "foreign-template", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(template=CHATML), talks())


@case("TRL: texts that begin with BOS already", "bos-doubled", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), [{"text": f"<s>{sentence(n, 6 + n % 5)}"} for n in range(32)])


# ---- healthy ---------------------------------------------------------------------------------------------------------


@case("prompt masked, padded right")
def _(out: str) -> Any:
    return healthy_rows(out, warmup_steps=4)


@case("prompt masked, padded left")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer), pad_with(tokenizer, left=True))


@case("everything trained, Llama's template")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, chats(tokenizer))


@case("everything trained, ChatML with its tokens")
def _(out: str) -> Any:
    tokenizer = chat_tokenizer()
    return trainer(out, tokenizer, chats(tokenizer), lr_scheduler_type="cosine", warmup_steps=0.1)


@case("one token for EOS and padding, EOS trained")
def _(out: str) -> Any:
    tokenizer = gpt_tokenizer()
    return trainer(out, tokenizer, rows_of(tokenizer))


@case("language modelling in blocks, as run_clm")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    ids = [token for n in range(200) for token in tokenizer(sentence(n, 9))["input_ids"]]
    blocks = [ids[n : n + 32] for n in range(0, 32 * 32, 32)]
    return trainer(out, tokenizer, [{"input_ids": block, "labels": list(block)} for block in blocks])


@case("blocks of a tokenizer without padding and BOS")
def _(out: str) -> Any:
    tokenizer = gpt_tokenizer(pad=False)
    ids = [token for n in range(200) for token in tokenizer(sentence(n, 9))["input_ids"]]
    blocks = [{"input_ids": ids[n : n + 32], "labels": ids[n : n + 32]} for n in range(0, 32 * 32, 32)]
    model = causal_model(tokenizer)
    return trainer(out, tokenizer, blocks, transformers.default_data_collator, model, gradient_accumulation_steps=4)


@case("masked language modelling")
def _(out: str) -> Any:
    tokenizer = word_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    rows = [{"input_ids": tokenizer(sentence(n, 8 + n % 4))["input_ids"]} for n in range(32)]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    return trainer(out, tokenizer, rows, collate, transformers.BertForMaskedLM(config))


@case("encoder and decoder")
def _(out: str) -> Any:
    tokenizer = word_tokenizer()
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    rows = [
        {"input_ids": tokenizer(sentence(n, 9))["input_ids"], "labels": tokenizer(sentence(n, 3 + n % 3))["input_ids"]}
        for n in range(32)
    ]
    return trainer(out, tokenizer, rows, transformers.DataCollatorForSeq2Seq(tokenizer, model), model)


@case("classification")
def _(out: str) -> Any:
    tokenizer = word_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    rows = [{"input_ids": tokenizer(sentence(n, 5 + n % 4))["input_ids"], "label": n % 2} for n in range(32)]
    model = transformers.BertForSequenceClassification(config)
    return trainer(out, tokenizer, rows, transformers.DataCollatorWithPadding(tokenizer), model)


@case("label smoothing, accumulation, warm-up of the Trainer")
def _(out: str) -> Any:
    return healthy_rows(out, label_smoothing_factor=0.1, gradient_accumulation_steps=4, warmup_steps=8)


@case("constant LR")
def _(out: str) -> Any:
    return healthy_rows(out, lr_scheduler_type="constant")


@case("constant with warm-up")
def _(out: str) -> Any:
    return healthy_rows(out, lr_scheduler_type="constant_with_warmup", warmup_steps=5)


@case("own schedule of the right length")
def _(out: str) -> Any:
    return healthy_rows(out, gradient_accumulation_steps=4, optimizers=own_schedule(4, 40))


@case("a stable phase and a short decay")
def _(out: str) -> Any:
    kwargs = {"num_decay_steps": 10, "num_stable_steps": 26}
    return healthy_rows(out, lr_scheduler_type="warmup_stable_decay", warmup_steps=4, lr_scheduler_kwargs=kwargs)


@case("a rare long row is cut")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    return trainer(out, tokenizer, [{k: v[:34] for k, v in row.items()} for row in rows_of(tokenizer, answer=2)])


@case("a few repeated rows")
def _(out: str) -> Any:
    tokenizer = llama_tokenizer()
    rows = rows_of(tokenizer)
    return trainer(out, tokenizer, [rows[n - n % 4 if n % 4 == 1 else n] for n in range(len(rows))])


@case("TRL: texts", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), [{"text": sentence(n, 6 + n % 5)} for n in range(32)], warmup_steps=4)


@case("TRL: prompt and completion", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), completions())


@case("TRL: conversations, ChatML", trl=True)
def _(out: str) -> Any:
    return sft(out, chat_tokenizer(), talks())


@case("TRL: conversations, Llama's template", trl=True)
def _(out: str) -> Any:
    return sft(out, llama_tokenizer(), talks(), gradient_accumulation_steps=2)


@case("TRL: packed", trl=True)
def _(out: str) -> Any:
    texts = [{"text": sentence(n, 6 + n % 5)} for n in range(400)]
    return sft(out, llama_tokenizer(), texts, packing=True, packing_strategy="wrapped", max_length=32)


@case("TRL: preferences", trl=True)
def _(out: str) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tokenizer = llama_tokenizer()
    rows = [{"prompt": q, "chosen": " " + a, "rejected": " " + sentence(n, 3)} for n, (q, a) in enumerate(pairs())]
    given = arguments(out, DPOConfig, remove_unused_columns=True)
    return DPOTrainer(
        causal_model(tokenizer), causal_model(tokenizer), args=given, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
