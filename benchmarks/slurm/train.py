"""A small training over several nodes, under `srun` or in pods; the standard library only, so that a start costs little.

Every step the nodes wait for each other over TCP. The first node saves every `SAVE_EVERY` steps (a real torch file, written in
two halves), and once more where a signal tells it to stop. `truth.jsonl` gets what really happened. An argument is another
directory than `checkpoints`; each task of an array has a `truth-<task>.jsonl`.
"""

import json
import os
import signal
import socket
import sys
import time

NODE = int(os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX") or 0)
COUNT = int(os.environ.get("SLURM_NNODES") or os.environ.get("PET_NNODES") or 1)
JOB, LAUNCH = os.environ.get("SLURM_JOB_ID", "0"), int(os.environ["CHRONICLE_LAUNCH"])
PORT = int(os.environ.get("TRAIN_PORT") or 20000 + int(JOB) % 1000)
SAVE_EVERY, STEP_SECONDS, SAVE_SECONDS = 10, 0.2, float(os.environ.get("SAVE_SECONDS", "2"))
CHECKPOINTS = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
TRUTH = f"truth-{os.environ['SLURM_ARRAY_TASK_ID']}.jsonl" if "SLURM_ARRAY_TASK_ID" in os.environ else "truth.jsonl"
told = []


def note(event, step, **more):
    line = json.dumps(
        {"t": time.time(), "event": event, "step": step, "launch": LAUNCH, "node": NODE, "pid": os.getpid(), **more}
    )
    with open(TRUTH, "a") as file:
        file.write(line + "\n")


def connect():
    """The first node's connections to the others, or another's to the first one."""
    if COUNT == 1:
        return []
    if NODE == 0:
        with socket.create_server(("", PORT), reuse_port=True) as server:
            server.settimeout(120)
            return [server.accept()[0] for _ in range(COUNT - 1)]
    for _ in range(600):
        try:
            return [socket.create_connection((os.environ["HEAD"], PORT), timeout=5)]
        except OSError:
            time.sleep(0.2)
    raise ConnectionError("the first node does not answer")


def together(peers):
    """One step of all nodes: b"." to go on, b"s" where one of them was told to stop, b"f" when the training is finished."""
    mine = b"s" if told else b"."
    if NODE == 0:
        words = [mine, *(read(peer) for peer in peers)]
        answer = b"s" if b"s" in words else b"f" if os.path.exists("finish") else b"."
        for peer in peers:
            peer.sendall(answer)
        return answer
    peers[0].sendall(mine)
    return read(peers[0])


def read(peer):
    peer.settimeout(600)
    word = peer.recv(1)
    if not word:
        raise ConnectionError("connection closed by peer")
    return word


def save(step):
    note("saving", step)
    with open(f"made/step-{step}.pt", "rb") as source:
        content = source.read()
    os.makedirs(CHECKPOINTS, exist_ok=True)
    with open(f"{CHECKPOINTS}/step-{step}.pt", "wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(SAVE_SECONDS)
        file.write(content[len(content) // 2 :])
    note("saved", step)


def main():
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda got, frame: told.append(got))
    step = int(os.environ.get("CHRONICLE_RESUME_STEP") or 0)
    note("started", step)
    peers = connect()
    while True:
        time.sleep(STEP_SECONDS)
        word = together(peers)
        step += 1
        if NODE == 0:
            note("step", step)
            print(f"step {step} loss {1 / step:.4f}", flush=True)
            if step % SAVE_EVERY == 0 or word != b".":
                save(step)
        if word != b".":
            note("stopped", step)
            return 0


if __name__ == "__main__":
    sys.exit(main())
