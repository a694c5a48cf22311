"""Runs at the start of every Python process under `chronicle run`, so that an unedited HF Trainer script is guarded.

`chronicle run` puts this directory in front of PYTHONPATH; torchrun, accelerate and deepspeed hand it to their ranks. Python
imports the first `sitecustomize` that it finds. This one waits until `transformers.trainer` is imported, gives way to the
user's own `sitecustomize`, and is done. When a Trainer begins to train, it gets the guard's callback.

It notes when the process began: files that are younger may be the launch's own.

Under torchrun it says which start of the ranks this process belongs to (`announce_attempt`): it may be over before anybody
looks.

It also announces a signal at which the process prints the stacks of its threads (`announce_stacks`), for a rank that hangs.

Any Python may run this file, also an old one without chronicle: it needs the standard library alone and raises nothing.
"""
# No annotations, so that an old Python reads it too.
# mypy: ignore-errors

import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
AWAITED = "transformers.trainer"
said = []


class TrainerAwaited:
    """A finder that finds one module, once: the one in which the Trainer is, or one to be seeded."""

    def __init__(self, awaited=AWAITED, then=None):
        self.awaited = awaited
        self.then = then or enter_trainers

    def find_spec(self, name, path=None, target=None):
        """The awaited module's spec, whose loader does what is to be done once the module is there; None for all others."""
        if name != self.awaited or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                spec.loader.exec_module = then_do(spec.loader.exec_module, self.then)
                return spec
        return None


def then_do(load, then):
    """What fills the module in, and does something with it afterwards."""

    def exec_module(module):
        load(module)
        then(module)

    return exec_module


def enter_trainers(module):
    """From now on every Trainer that begins to train has the guard's callback."""
    kind = getattr(module, "Trainer", None)
    original = getattr(kind, "train", None)
    if original is None:
        return say("this version of transformers has no `Trainer.train`")

    def train(self, *args, **kwargs):
        try:
            from chronicle.resume.adapters.transformers import enter

            enter(self)
        except Exception as problem:  # noqa: BLE001 an error of the guard must not end a training
            say(type(problem).__name__ + ": " + str(problem))
        return original(self, *args, **kwargs)

    kind.train = train


def say(why):
    """One line, once: what is not guarded must not pass for guarded."""
    if not said:
        said.append(why)
        sys.stderr.write("chronicle guard: this HF Trainer is not guarded (" + why + "); training continues\n")


def announce_stacks(forked=False):
    """Register `faulthandler` on a signal that nobody uses, and say so in a file named after this process.

    The supervisor sends that signal to processes with such a file alone, and only while they catch it. The dump is written by
    the signal's C handler: it needs no GIL and runs no code of Python.
    """
    directory = os.environ.get("CHRONICLE_PULSES")
    if not directory or not os.path.isdir(directory):
        return
    try:
        import _signal
        import faulthandler

        with open("/proc/self/stat", "rb") as stat:
            ticks = stat.read().rpartition(b")")[2].split()[19].decode()
        free = range(_signal.SIGRTMIN + 11, _signal.SIGRTMAX)
        number = next((n for n in free if _signal.getsignal(n) == _signal.SIG_DFL), None) if not stacks else stacks[1]
        if number is None:
            return
        name = "-".join((str(os.getpid()), ticks, str(number), "f" if forked else "e")) + ".stacks"
        file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        if not stacks:
            os.register_at_fork(after_in_child=lambda: announce_stacks(forked=True))  # to a file of its own
        stacks[:] = [file, number]  # the parent's descriptor stays open: its number may be a file of the script by now
    except Exception:  # noqa: BLE001 a process without stacks is said to have none
        pass


def announce_attempt():
    """A file `<restart count>-<rank>.attempt` with this process's pid and start time. The first Python of a rank writes it."""
    directory, rank = os.environ.get("CHRONICLE_PULSES"), os.environ.get("RANK", "")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not directory or not (count.isdigit() and rank.isdigit()):
        return
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = stat.read().rpartition(b")")[2].split()[19]
        path = os.path.join(directory, count + "-" + rank + ".attempt")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(file, str(os.getpid()).encode() + b" " + ticks)
        os.close(file)
    except OSError:
        pass  # it was said already, or there is nowhere to say it


stacks = []  # descriptor and signal


def seed_all():
    """In a rehearsal: every process begins with the same random numbers, as far as its script does not say otherwise."""
    import random

    random.seed(1)
    sys.meta_path.insert(0, TrainerAwaited("numpy", lambda module: module.random.seed(1)))
    sys.meta_path.insert(0, TrainerAwaited("torch", lambda module: module.manual_seed(1)))


def give_way():
    """Import the `sitecustomize` that Python would have taken without this directory, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.normpath(entry) != HERE]  # absolute: the directory may be gone
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401 the user's
    except ImportError as problem:
        if getattr(problem, "name", None) != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


if os.environ.get("CHRONICLE_RUN_DIR") and os.environ.get("CHRONICLE_GUARD", "").strip().lower() != "off":
    if AWAITED in sys.modules:
        enter_trainers(sys.modules[AWAITED])
    else:
        sys.meta_path.insert(0, TrainerAwaited())
    announce_stacks()
    announce_attempt()
    if os.environ.get("CHRONICLE_LAUNCH_DIR") and os.environ.get("CHRONICLE_PRINTS", "").strip().lower() != "off":
        sys._chronicle_began = time.time()  # `chronicle/prints/launch_facts.py` asks for it at the first step
    if os.environ.get("CHRONICLE_REHEARSAL"):
        seed_all()
give_way()
