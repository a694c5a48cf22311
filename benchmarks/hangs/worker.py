"""A small training that hangs, or only looks as if it did: `worker.py KIND` under torchrun or alone.

The functions of `HANGS` never return; those of `HEALTHY` take long and do. A line marked `# HANG` is where a hanging rank
stands.
`TRUTH` (a directory) gets what was planted: rank, line, time. Nothing here knows how chronicle looks at it.
"""

import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.file_baton import FileBaton

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
KIND, TRUTH = sys.argv[1], os.environ["TRUTH"]
GUARDED = os.environ.get("GUARDED") == "1"
AT = 40  # the step at which it happens
CULPRIT = min(1, WORLD - 1)


def line_of(function):
    """The line marked `# HANG` in a function."""
    with open(__file__) as source:
        lines = source.read().splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number in range(first, len(lines) + 1) if lines[number - 1].rstrip().endswith("# HANG"))


def tell(function, rank):
    with open(os.path.join(TRUTH, "truth.json"), "w") as file:
        json.dump({"rank": rank, "line": line_of(function), "time": time.time(), "step_seconds": SECONDS[0]}, file)


# --- hangs; each is called on the culprit alone


def loop():
    while True: pass  # noqa: E701  # HANG


def loop_of_tensors():
    x = torch.ones(8)
    while True: x = torch.sin(x)  # noqa: E701  # HANG


def gil():
    sum(itertools.repeat(1))  # HANG


def gil_in_c():
    ctypes.PyDLL(None).qsort(None, 0, 0, None)
    max(itertools.repeat(1))  # HANG


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)  # HANG


def sleeping():
    time.sleep(100000)  # HANG


def lock():
    mine = threading.Lock()
    mine.acquire()
    mine.acquire()  # HANG


def two_locks():
    one, two, ready = threading.Lock(), threading.Lock(), threading.Event()

    def other():
        with two:
            ready.set()
            with one:
                pass

    with one:
        threading.Thread(target=other, daemon=True).start()
        ready.wait()
        two.acquire()  # HANG


def fifo():
    os.mkfifo(os.path.join(TRUTH, "fifo"))
    os.open(os.path.join(TRUTH, "fifo"), os.O_RDONLY)  # HANG


def silent_socket():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)  # HANG


def dead_thread():
    rows = queue.Queue()

    def produce():
        raise RuntimeError("planted: the thread that reads ahead has failed")

    threading.Thread(target=produce, daemon=True).start()
    rows.get()  # HANG


def child():
    subprocess.run(["sleep", "100000"])  # HANG


class Rows(Dataset):
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 8:
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while self.how == "loop":
                pass
            time.sleep(100000)
        return torch.zeros(8)


def stopped_loader():
    list(DataLoader(Rows("stop"), batch_size=4, num_workers=1))  # HANG


def sleeping_loader():
    list(DataLoader(Rows("sleep"), batch_size=4, num_workers=1))  # HANG


def looping_loader():
    list(DataLoader(Rows("loop"), batch_size=4, num_workers=1))  # HANG


# --- hangs of collectives; called on every rank


def skipped():
    if RANK != CULPRIT:
        dist.all_reduce(torch.ones(3))
    else:
        tell(skipped, RANK)
        dist.barrier()  # HANG


def barrier_of_one():
    if RANK == 0:
        tell(barrier_of_one, 0)
        dist.barrier()  # HANG


def receives():
    if RANK == CULPRIT:
        tell(receives, RANK)
        dist.recv(torch.ones(3), src=0)  # HANG


def order():
    if RANK == CULPRIT:
        tell(order, RANK)
        dist.all_gather([torch.ones(7) for _ in range(WORLD)], torch.ones(7))  # HANG
    dist.barrier()


# --- a second set, written when the detection was finished


def full_pipe():
    ends = os.pipe()
    while True:
        os.write(ends[1], bytes(1 << 16))  # HANG


def lost_task():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(os._exit, (1,))  # HANG


def forked_lock():
    mine, held = threading.Lock(), threading.Event()

    def hold():
        with mine:
            held.set()
            time.sleep(1)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        mine.acquire()  # the thread that would let it go is not in the child
        os._exit(0)
    os.waitpid(child, 0)  # HANG


def file_lock():
    path = os.path.join(TRUTH, "locked")
    with open(path, "w") as theirs, open(path, "w") as mine:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX)  # HANG


def stale_build():
    path = os.path.join(TRUTH, "lock")
    open(path, "w").close()
    FileBaton(path).wait()  # HANG


def mutex_in_c():
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # HANG


def full_queue():
    rows = multiprocessing.Queue(1)
    rows.put(0)
    rows.put(1)  # HANG


def nobody_calls():
    server = socket.create_server(("127.0.0.1", 0))
    server.accept()  # HANG


def polls():
    while not os.path.exists(os.path.join(TRUTH, "ready")): pass  # noqa: E701  # HANG


def polls_with_pauses():
    while not os.path.exists(os.path.join(TRUTH, "ready")): time.sleep(0.02)  # noqa: E701  # HANG


FRESH = (
    full_pipe, lost_task, forked_lock, file_lock, stale_build, mutex_in_c, full_queue, nobody_calls, polls, polls_with_pauses,
)  # fmt: skip
HANGS = {
    one.__name__: one
    for one in (
        loop, loop_of_tensors, gil, gil_in_c, stopped, sleeping, lock, two_locks, fifo, silent_socket, dead_thread, child,
        stopped_loader, sleeping_loader, looping_loader, *FRESH,
    )
}  # fmt: skip
COLLECTIVE = {one.__name__: one for one in (skipped, barrier_of_one, receives, order)}


# --- healthy; called on every rank, and return


def compute(seconds, model=None):
    """Work for so long: forward passes, as an evaluation does."""
    layers = model or torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    until = time.time() + seconds
    with torch.no_grad():
        while time.time() < until:
            layers(torch.randn(256, 8 if model is not None else 64))


def evaluation(step):
    if step == AT:
        MODEL[0].eval()
        compute(45, MODEL[0].module if hasattr(MODEL[0], "module") else MODEL[0])
        MODEL[0].train()


def evaluation_of_one(step):
    if step == AT and RANK == 0:
        compute(45)


def save(step):
    if step == AT and RANK == 0:
        with open(os.path.join(TRUTH, "checkpoint"), "wb") as file:
            for _ in range(45):
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
                time.sleep(1)
    if step == AT and WORLD > 1:
        dist.barrier()


def many_saves(step):
    if step % 10 == 0 and RANK == 0:
        for _ in range(6):
            torch.save(torch.randn(200_000), os.path.join(TRUTH, "checkpoint.pt"))
            time.sleep(1)


def compilation(step):
    if step == AT and RANK == 0:
        torch._dynamo.reset()
        for width in (16, 24, 32, 40, 48):
            blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(8)]
            layers = torch.nn.Sequential(*blocks)
            torch.compile(layers)(torch.randn(4, width)).sum().backward()


def slow_first_steps(step):
    if step < 4:
        compute(15)


def uneven(step):
    if step > 5 and random.Random(step * 7 + RANK).random() < 0.1:
        compute(random.Random(step).uniform(0.5, 8))


def naps(step):
    if step in (20, 40):
        time.sleep(9)


class SlowRows(Rows):
    def __getitem__(self, index):
        until, x = time.time() + 5, 0
        while time.time() < until:
            x += len(json.dumps(list(range(random.randint(10, 500)))))
        return torch.zeros(8)


def slow_loader(step):
    if step == AT:
        for _, _ in zip(range(2), DataLoader(SlowRows("ok"), batch_size=4, num_workers=1), strict=False):
            pass


def slow_start(step):
    if step == 1:
        time.sleep(60)


def rare_logs(step):
    compute(0.5)


def tokenises(step):
    if step == AT:
        until, texts = time.time() + 40, 0
        while time.time() < until:
            texts += len(" ".join(sorted(json.dumps([random.random() for _ in range(200)]).split(","))))


def export(step):
    if step == 2 * AT:
        evaluation_at_end = 40
        compute(evaluation_at_end)


HEALTHY = {
    one.__name__: one
    for one in (
        evaluation, evaluation_of_one, save, many_saves, compilation, slow_first_steps, uneven, naps, slow_loader, slow_start,
        rare_logs, tokenises, export,
    )
}  # fmt: skip

MODEL, SECONDS = [], [0.0]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    model = DistributedDataParallel(model) if WORLD > 1 else model
    MODEL.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if GUARDED:
        import chronicle

        chronicle.attach(os.environ.get("CHRONICLE_RUN"), model, optimizer)
    every = 20 if KIND == "rare_logs" else 1
    begin = time.time()
    for step in range(1, 2 * AT + 1):
        if step == AT:
            SECONDS[0] = (time.time() - begin) / AT
            if KIND in HANGS and RANK == CULPRIT:
                tell(HANGS[KIND], RANK)
                HANGS[KIND]()
            if KIND in COLLECTIVE:
                COLLECTIVE[KIND]()
        if KIND in HEALTHY:
            HEALTHY[KIND](step)
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if RANK == 0 and step % every == 0:
            print(f"step {step} loss {loss.item():.4f} lr 0.01", flush=True)
        time.sleep(0.05)
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 a mismatch that gloo noticed
        traceback.print_exc()
        sys.exit(1)
