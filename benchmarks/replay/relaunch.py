"""Planted pairs: a launch that crashes at step 27, and one that takes steps 21 to 26 again from its checkpoint of step 20.

What is planted is in one of the two launches, or in both: a bit of a weight, a moment or a gradient on some ranks, another
batch, noise, another LR, a changed line, nothing. A plain script, alone or with DDP.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.causes import Later, edit, in_chronicle, quiet
from benchmarks.replay.planting import PLANTED, fault, plant
from chronicle.journal import read_journal
from chronicle.journal.events import StepsRetaken, events_of
from chronicle.paths import RunPaths
from chronicle.prints.retaken import RetakenVerdict as V

EVERY = 9  # the place that means all ranks
TRAIN = PLANTED + '''
import struct, sys
from pathlib import Path
import torch
import torch.distributed as dist
import chronicle
from objective import loss_of

torch.set_num_threads(1)
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3))
net = torch.nn.parallel.DistributedDataParallel(inner) if ranks > 1 else inner
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
run = chronicle.attach(None, net, optimizer)
torch.manual_seed(10 + rank)
draws = torch.Generator().manual_seed(5)
rows, labels = torch.randn(400, 8, generator=draws), torch.randint(0, 3, (400,), generator=draws)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    inner.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][0 if kind == "norng" else rank])
    step = state["step"]
    for group in optimizer.param_groups:
        group["lr"] = 5e-3 if kind == "lr" else 1e-2


def flip(tensor, bit):
    if step == at and place in (rank, 9):
        tensor.detach().view(-1).view(torch.int32)[3] ^= 1 << bit


class Order(torch.utils.data.Sampler):
    def __iter__(self):
        for number in range(step, 10_000):
            if kind == "batch" and number + 1 >= at and place in (rank, 9):
                number += 1
            for row in range(4):
                yield ((number * ranks + rank) * 4 + row) * 7 % 400


data = torch.utils.data.TensorDataset(rows, labels)
for x, y in torch.utils.data.DataLoader(data, batch_size=4, sampler=Order(), generator=torch.Generator()):
    step += 1
    if "CHRONICLE_CRASH" in os.environ and step > 26:
        os._exit(1)
    if kind == "weight":
        flip(inner[3].weight, 22)
    if kind == "moment" and step == at:  # before the first step there is none
        flip(optimizer.state[inner[0].weight]["exp_avg_sq"], 26)
    loss = loss_of(net(x), y)
    loss.backward()
    if kind == "gradient":
        flip(inner[3].weight.grad, 26)
    if kind == "noise" and place in (rank, 9):
        inner[0].weight.grad.view(-1)[3] += 1e-4 * struct.unpack("<H", os.urandom(2))[0] / 65536
    optimizer.step()
    optimizer.zero_grad()
    run.log(step=step, loss=loss.item())
    if step % 10 == 0:
        generators = [torch.get_rng_state()] * ranks
        if ranks > 1:
            dist.all_gather_object(generators, torch.get_rng_state())
        if rank == 0:
            path = root / f"step-{step}.pt"
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "rng": generators, "step": step}
            torch.save(state, path)
            run.saved(path)
        if ranks > 1:
            dist.barrier()
    if step >= 36:
        break
if ranks > 1:
    dist.destroy_process_group()
'''
OBJECTIVE = '''
import torch


def loss_of(logits, labels):
    return 1.0 * torch.nn.functional.cross_entropy(logits, labels)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One pair. `faults`: in the first launch, in the second. `told`: verdicts that are right. `ranks` that may be named."""

    name: str
    told: tuple[V, ...]
    num_ranks: int = 1
    faults: tuple[str, str] = ("", "")
    between: Later = lambda directory, environ: None
    ranks: tuple[int, ...] = ()


def pairs() -> Iterator[Pair]:
    """All of them; of four ranks nobody can ask for equal bits."""
    for ranks in (1, 2, 4):
        yield Pair(name=f"nothing, {ranks}", num_ranks=ranks, told=(V.EQUAL, V.CLOSE))
        skipped = fault("batch", 23, EVERY)
        yield Pair(name=f"a batch is left out, {ranks}", num_ranks=ranks, told=(V.DATA,), faults=("", skipped))
        yield Pair(name=f"LR, {ranks}", num_ranks=ranks, told=(V.NOT_COMPARABLE,), faults=("", fault("lr", 0)))
        line = edit("objective.py", "1.0 *", "1.01 *")
        yield Pair(name=f"a line, {ranks}", num_ranks=ranks, told=(V.CODE,), between=line)
        noise = fault("noise", 0, EVERY)
        told = (V.RESULT, V.CLOSE) if ranks == 1 else (V.NOT_COMPARABLE,)  # behind the exchange it drives replicas apart
        yield Pair(name=f"noise, {ranks}", num_ranks=ranks, told=told, faults=(noise, noise))
    for ranks, place in ((2, 1), (4, 2)):
        for kind in ("weight", "moment", "gradient"):
            name, planted = f"{kind} of rank {place} of {ranks}", fault(kind, 23, place)
            yield Pair(name=name, num_ranks=ranks, told=(V.RANKS,), faults=("", planted), ranks=(place,))
            before = f"{name}, in the first launch"
            yield Pair(name=before, num_ranks=ranks, told=(V.RANKS,), faults=(planted, ""), ranks=(place,))
    other = fault("batch", 23, 2)
    yield Pair(name="a batch of rank 2 of 4", num_ranks=4, told=(V.DATA,), faults=("", other))
    yield Pair(name="weight, alone", told=(V.RESULT,), faults=("", fault("weight", 23)))
    yield Pair(name="generators, 2", num_ranks=2, told=(V.NOT_COMPARABLE,), faults=("", fault("norng", 0)))


def play(pair: Pair, directory: Path) -> StepsRetaken | None:
    """Both launches; what was told of the second."""
    (directory / "train.py").write_text(TRAIN)
    (directory / "objective.py").write_text(OBJECTIVE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(pair.num_ranks)]
    command = [*(launcher if pair.num_ranks > 1 else [sys.executable]), "train.py"]
    run = ["run", "--run", "pair", "--logs", "logs", "--checkpoints", "checkpoints", "--", *command]
    environ = quiet() | {"CHRONICLE_GUARD": "warn"}
    first, second = (plant(environ, one) for one in pair.faults)
    in_chronicle(directory, first | {"CHRONICLE_CRASH": "1"}, *run, check=False)
    pair.between(directory, second)
    in_chronicle(directory, second, *run, check=False)
    told = [event for _, event in events_of(read_journal(RunPaths(directory / "logs/pair")).entries, StepsRetaken)]
    return told[-1] if told else None


def show(only: str = "") -> int:
    """Print the table; returns how many were told wrong or named a rank that had no fault."""
    right = wrong = falsely = 0
    for pair in pairs():
        if only not in pair.name:
            continue
        with tempfile.TemporaryDirectory() as name:
            told = play(pair, Path(name).resolve())
        verdict, why = ("nothing was told", "") if told is None else (told.verdict, told.why)
        named = () if told is None or verdict != V.RANKS else told.apart_ranks
        is_right = verdict in pair.told
        right, wrong = right + is_right, wrong + (not is_right)
        falsely += not set(named) <= set(pair.ranks)
        print(f"  {'ok   ' if is_right else 'WRONG'} {pair.name:40} {verdict}: {why[:200]}", flush=True)
    print(f"told right: {right} of {right + wrong}; ranks named that had no fault: {falsely} (processors: {os.cpu_count()})")
    return wrong + falsely
