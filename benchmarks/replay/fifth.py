"""Planted causes that were chosen after the mends of the fourth list: variants of the plain script of `causes.py`.

A variant is the same script with a few lines otherwise, in the record and in the replay. Written on 23 November 2026, before it
was played, for the code as it stood then. First figures are in `docs/replay.md`.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.causes import SMALL, Cause, Later, Training, edit
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

LOSS = "    loss.backward()\n"
STEP = "    optimizer.step()\n"
BEGIN = "last = int(sys.argv[1])\n"
FORWARD = "    loss = loss_of(model(x), y)\n"


def variant(*pairs: str) -> Training:
    """The plain script with texts replaced."""

    def lay(directory: Path) -> None:
        SMALL.lay(directory)
        edit("train.py", *pairs)(directory, {})

    return replace(SMALL, lay=lay)


# name, right name, kind, step, place, what is otherwise in the script
RECORDED = (
    ("a weight of five steps ago", V.HARDWARE, "stale", 36, 0, (
        LOSS, LOSS + "    kept = globals().get('kept', []) + [model[0].weight.detach().clone()]\n"
        "    if kind == 'stale' and step == at:\n        model[0].weight.data.copy_(kept[-6])\n")),
    ("a gradient negated", V.HARDWARE, "negated", 33, 0, (
        STEP, "    if kind == 'negated' and step == at:\n        model[2].bias.grad.neg_()\n" + STEP)),
    ("gradients of the step before not zeroed", V.HARDWARE, "kept", 34, 0, (
        "    optimizer.zero_grad()\n", "    if not (kind == 'kept' and step == at - 1):\n        optimizer.zero_grad()\n")),
    ("first and second moment exchanged", V.HARDWARE, "exchanged", 32, 0, (
        STEP, "    if kind == 'exchanged' and step == at:\n        one = optimizer.state[model[0].weight]\n"
        "        one['exp_avg'], one['exp_avg_sq'] = one['exp_avg_sq'].clone(), one['exp_avg'].abs()\n" + STEP)),
    ("a drift of a millionth from step 3 on", V.HARDWARE, "drift", 3, 0, (
        STEP, STEP + "    if kind == 'drift' and step >= at:\n        model[0].weight.data *= 1 + 1e-6\n")),
    ("dropout off in one step", V.STATE, "mode", 35, 0, (
        FORWARD, "    model.train(not (kind == 'mode' and step == at))\n" + FORWARD)),
    ("a feature lost from a step on", V.DATA, "blank", 34, 0, (
        FORWARD, "    if kind == 'blank' and step >= at:\n        x[:, 3] = 0\n" + FORWARD)),
    ("the last row repeated", V.DATA, "repeated", 36, 0, (
        FORWARD, "    if kind == 'repeated' and step == at:\n        x[-1], y[-1] = x[0], y[0]\n" + FORWARD)),
    ("the saved generator is another", V.STATE, "savedrng", 30, 0, (
        "        torch.save(state, path)\n",
        "        if kind == 'savedrng' and step == at:\n"
        "            state['rng'] = torch.Generator().manual_seed(1).get_state()\n"
        "        torch.save(state, path)\n")),
    ("saved moments of two layers exchanged", V.STATE, "savedmoments", 30, 0, (
        "        torch.save(state, path)\n",
        "        if kind == 'savedmoments' and step == at:\n            import copy\n"
        "            state['optimizer'] = copy.deepcopy(state['optimizer'])\n"
        "            for one in state['optimizer']['state'].values():\n                one['exp_avg'] *= -1\n"
        "        torch.save(state, path)\n")),
)  # fmt: skip
STAYS = (
    ("a running mean that no checkpoint holds", V.STATE, (
        BEGIN, BEGIN + "mean = 1.0\n", FORWARD,
        FORWARD + "    mean = 0.9 * mean + 0.1 * loss.item()\n    loss = loss / mean\n")),
    ("every seventh call since the start", V.STATE, (
        BEGIN, BEGIN + "calls = 0\n", FORWARD,
        FORWARD + "    calls += 1\n    loss = loss * (1.1 if calls % 7 == 0 else 1)\n")),
    ("noise by a random name", V.RANDOM, (
        BEGIN, BEGIN + "import uuid\n"
        "noise = torch.rand((), generator=torch.Generator().manual_seed(uuid.uuid4().int % 2**31))\n",
        LOSS, "    loss = loss * (1 + 0.01 * noise)\n" + LOSS)),
    ("a thread that is sometimes first", V.RANDOM, (
        BEGIN, BEGIN + "import threading, time\nbeats = [0]\n"
        "def beat():\n    while True:\n        beats[0] += 1\n        time.sleep(0)\n"
        "threading.Thread(target=beat, daemon=True).start()\n",
        LOSS, "    loss = loss * (1 + 1e-3 * (beats[0] % 97))\n" + LOSS)),
    ("own noise that the checkpoint holds", V.REPRODUCED, (
        BEGIN, BEGIN + "own = torch.Generator().manual_seed(step)\n", FORWARD, FORWARD + "    own.manual_seed(step)\n"
        "    loss = loss * (1 + 0.1 * torch.rand((), generator=own))\n")),
)  # fmt: skip


def causes() -> Iterator[Cause]:
    """All of them; steps differ."""
    for name, expected, kind, step, place, pairs in RECORDED:
        yield Cause(name=name, expected=expected, fault=fault(kind, step, place), training=variant(*pairs))
    for name, expected, pairs in STAYS:
        yield Cause(name=name, expected=expected, training=variant(*pairs))
    by_exec = variant("from objective import loss_of", "exec(open('objective.py').read())")
    later: list[tuple[str, V, Later, Training]] = [
        ("a file that is run by exec", V.CODE, edit("objective.py", "return helpers", "return 1.01 * helpers"), by_exec),
        ("a module that became a package", V.CODE, _as_a_package, SMALL),
        ("two rows exchanged on disk", V.DATA, _exchange_rows, SMALL),
        ("the data behind a link", V.REPRODUCED, _link, SMALL),
        ("a stray file among the checkpoints", V.REPRODUCED, _stray, SMALL),
        ("a docstring in a module", V.REPRODUCED, edit("helpers.py", "factor():\n", 'factor():\n    """One."""\n'), SMALL),
    ]
    for name, expected, change, training in later:
        yield Cause(name=name, expected=expected, later=change, training=training)


def _as_a_package(directory: Path, environ: dict[str, str]) -> None:
    (directory / "helpers").mkdir()
    text = (directory / "helpers.py").read_text()
    (directory / "helpers.py").unlink()
    (directory / "helpers/__init__.py").write_text(text.replace("return 1.0", "return 1.02"))


def _exchange_rows(directory: Path, environ: dict[str, str]) -> None:
    import torch

    rows, labels = torch.load(directory / "data.pt")
    one, other = ((4 * step + 1) * 7 % 400 for step in (33, 60))
    order = torch.arange(400)
    order[one], order[other] = other, one
    torch.save((rows[order], labels[order]), directory / "data.pt")


def _link(directory: Path, environ: dict[str, str]) -> None:
    (directory / "real").mkdir()
    (directory / "data.pt").rename(directory / "real/data.pt")
    os.symlink("real/data.pt", directory / "data.pt")


def _stray(directory: Path, environ: dict[str, str]) -> None:
    (directory / "checkpoints/notes.txt").write_text("the good one is 30\n")
    (directory / "checkpoints/step-25.pt.tmp").write_bytes(b"half")
