"""Planted causes on a Trainer of transformers that nobody edits: a small causal language model, two micro-batches a step.

Four of them are no cause: what was changed has no effect, and "reproduced" is the only right answer.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.causes import Cause, Later, Training, edit, set_variable
from benchmarks.replay.planting import PLANTED, fault
from chronicle.replay.verdict import ReplayVerdict

TRAIN = PLANTED + '''
import json, os, sys, threading, time
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

torch.set_num_threads(1)
words = {}
rows = [[words.setdefault(word, len(words)) for word in line.split()] for line in open("corpus.txt")]
torch.manual_seed(3)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, **json.load(open("model.json"))))
more = json.load(open("arguments.json"))
args = TrainingArguments(
    "checkpoints", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=int(sys.argv[1]), save_steps=10,
    logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, learning_rate=1e-2, warmup_steps=5, **more,
)
now = {"step": 0, "micro": 0}


def collate(samples):
    line = torch.tensor(samples)
    batch = {"input_ids": line, "attention_mask": torch.ones_like(line), "labels": line.clone()}
    now["micro"] += 1
    step = begun + (now["micro"] + 1) // 2
    if step == at:
        if kind == "masked":
            batch["labels"][:, : line.shape[1] // 2] = -100
        if kind == "shifted":
            batch["input_ids"] = line.roll(1, 1)
        if kind == "attention":
            batch["attention_mask"][:, -place:] = 0
        if kind == "cut":
            batch = {name: value[:, :-1] for name, value in batch.items()}
        if kind == "fewer":
            batch = {name: value[:-1] for name, value in batch.items()}
    if kind == "hour":
        batch["input_ids"][0, 0] = time.time_ns() // 1000 % 60
    return batch


def flip(tensor, bit):
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[place % flat.numel()] ^= 1 << bit


class Faults(TrainerCallback):
    def on_step_begin(self, args, state, control, model, optimizer, **rest):
        now["step"] = state.global_step + 1
        if now["step"] == at:
            moments = getattr(optimizer, "optimizer", optimizer).state[model.transformer.h[0].mlp.c_fc.weight]
            if kind == "second":
                flip(moments["exp_avg_sq"], 27)
            if kind == "counter":
                moments["step"] += 50
            if kind == "drawn":
                torch.rand(2)

    def on_pre_optimizer_step(self, args, state, control, model, **rest):
        if now["step"] == at and kind == "embedding":
            flip(model.transformer.wte.weight.grad, 25)
        if now["step"] == at and kind == "lost":
            for parameter in model.parameters():
                parameter.grad.zero_()
        if kind == "threads":
            order, ready = [], threading.Barrier(8)
            def add(number):
                ready.wait()
                order.append(number)
            for thread in (workers := [threading.Thread(target=add, args=(number,)) for number in range(8)]):
                thread.start()
            for thread in workers:
                thread.join()
            total = 0.0
            for number in order:
                total = total * 1.1 + number
            model.transformer.wte.weight.grad.mul_(1 + 1e-3 * total)

    def on_step_end(self, args, state, control, model, optimizer, lr_scheduler, **rest):
        if state.global_step == at and kind == "twice":
            lr_scheduler.step()
        if state.global_step >= at and kind == "group":
            optimizer.param_groups[1]["weight_decay"] = 0.5


def broken(module, inputs, output):
    if kind == "logits" and now["step"] == at:
        output = output.clone()
        flip(output, 24)
    if kind == "lane" and now["step"] == at:
        output = output.clone()
        output[..., place % 16] *= 2
    return output


(model.lm_head if kind == "logits" else model.transformer.h[1].mlp).register_forward_hook(broken)


class Saver(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if kind == "savedmoments" and self.state.global_step == at:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            kept = {p: {name: value.clone() for name, value in state.items()} for p, state in inner.state.items()}
            for state in inner.state.values():
                state["exp_avg"].zero_()
            super()._save_optimizer_and_scheduler(output_dir)
            inner.state.update(kept)
        else:
            super()._save_optimizer_and_scheduler(output_dir)


last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
begun = int(last.rpartition("-")[2]) if last else 0
Saver(model, args, data_collator=collate, train_dataset=rows, callbacks=[Faults()]).train(resume_from_checkpoint=last)
'''
STEPS, ASKED = 34, 27


def _lay(directory: Path) -> None:
    (directory / "train.py").write_text(TRAIN)
    (directory / "model.json").write_text(json.dumps({"resid_pdrop": 0.1, "activation_function": "gelu_new"}))
    (directory / "arguments.json").write_text(json.dumps({"max_grad_norm": 1.0, "adam_beta2": 0.99}))
    words = [f"w{number}" for number in range(50)]
    lines = [" ".join(words[(11 * row + place * place + row // 7) % 50] for place in range(12)) for row in range(600)]
    (directory / "corpus.txt").write_text("\n".join(lines))


TRAINER = Training(lay=_lay, command=[sys.executable, "train.py", str(STEPS)], asked=ASKED)


def causes() -> Iterator[Cause]:
    """All of them; steps and places differ."""
    verdict = ReplayVerdict
    recorded = [
        ("nothing planted", "", verdict.REPRODUCED), ("labels masked", "masked", verdict.DATA),
        ("inputs shifted by a word", "shifted", verdict.DATA), ("part of the attention mask lost", "attention", verdict.DATA),
        ("rows cut short", "cut", verdict.DATA), ("a row fewer", "fewer", verdict.DATA),
        ("bit of a second moment", "second", verdict.UNEXPLAINED), ("step counter of a moment", "counter", verdict.UNEXPLAINED),
        ("bit of the embedding's gradient", "embedding", verdict.UNEXPLAINED),
        ("all gradients lost", "lost", verdict.UNEXPLAINED),
        ("bit of a logit", "logits", verdict.UNEXPLAINED), ("a lane of the MLP doubled", "lane", verdict.UNEXPLAINED),
        ("random numbers drawn", "drawn", verdict.STATE), ("the schedule stepped twice", "twice", verdict.STATE),
        ("decay of one group", "group", verdict.STATE),
    ]  # fmt: skip
    for number, (name, kind, expected) in enumerate(recorded):
        step = 22 + number % 4
        planted = fault(kind, step, 5 * number + 2) if kind else ""
        yield Cause(name=f"{name}, step {step}", expected=expected, fault=planted, training=TRAINER)
    wrong = fault("savedmoments", 20)
    yield Cause(name="the checkpoint holds other moments", expected=verdict.STATE, fault=wrong, training=TRAINER)
    for name, kind in (("order of threads", "threads"), ("a word by the clock", "hour")):
        yield Cause(name=name, expected=verdict.RANDOM, fault=fault(kind, 0), stays=True, training=TRAINER)
    changed: list[tuple[str, Later, ReplayVerdict]] = [
        ("activation in the model's file", edit("model.json", "gelu_new", "relu"), verdict.CODE),
        ("clip in the file of arguments", edit("arguments.json", "1.0", "0.01"), verdict.CODE),
        ("beta2, which the load sets back", edit("arguments.json", "0.99", "0.9"), verdict.REPRODUCED),
        ("a seed that the load makes void", edit("train.py", "manual_seed(3)", "manual_seed(4)"), verdict.REPRODUCED),
        ("one word of the text", _change_a_word, verdict.DATA),
        ("a comment in the script", edit("train.py", "class Saver", "# as it was\nclass Saver"), verdict.REPRODUCED),
        ("a variable without effect", set_variable("NVIDIA_TF32_OVERRIDE", "0"), verdict.REPRODUCED),
    ]
    for name, later, expected in changed:
        yield Cause(name=name, expected=expected, later=later, training=TRAINER)


def _change_a_word(directory: Path, environ: dict[str, str]) -> None:
    lines = (directory / "corpus.txt").read_text().splitlines()
    (directory / "corpus.txt").write_text("\n".join(line.replace("w7 ", "w8 ", 1) for line in lines))
