"""Every object of others that the guard changes: what, by whose name, why, and until when. No other file changes one.

Hooks that a library offers (`register_…_hook`, callbacks, entry points) come first and are no changes. A row stands here where
there is no hook. Classes and modules are changed once a process, and only those that are imported; what a version does not have
is left out. Objects that a script hands to the guard are changed for themselves alone. A change keeps
arguments, results and errors as they are; an error of the guard never passes it.
`chronicle/launch/startup/sitecustomize.py` changes the Trainer itself: it runs where chronicle may not be installed.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARK = "_chronicle"  # what a changed function carries
FOR_GOOD = "as long as the process lives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One row. A target is `module:name` or `module:Class.name`; of objects that are handed to the guard `Class.name` alone."""

    targets: tuple[str, ...]
    why: str
    until: str = FOR_GOOD


_DCP = "torch.distributed.checkpoint"
_FABRIC = "lightning.fabric.fabric:Fabric."

PATCHES: Mapping[str, Patch] = {
    "files": Patch(targets=("torch:save",), why="torch keeps no hook for what is written"),
    "distributed saves": Patch(targets=(f"{_DCP}.state_dict_saver:_save_state_dict",), why="every kind of them calls it"),
    "asynchronous saves": Patch(
        targets=(f"{_DCP}._async_thread_executor:_ThreadBasedAsyncCheckpointExecutor.execute_save",
                 f"{_DCP}._async_process_executor:_ProcessBasedAsyncCheckpointExecutor.execute_save"),
        why="what is written is the state of the moment at which such a save begins",
    ),
    "loaders": Patch(
        targets=("torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
                 "torchdata.stateful_dataloader.stateful_dataloader:_StatefulBaseDataLoaderIter.__next__"),
        why="the place of a batch in its pass, and labels that are no input of the model",
    ),
    "prepared loaders": Patch(
        targets=("accelerate.data_loader:DataLoaderShard.__iter__", "accelerate.data_loader:DataLoaderDispatcher.__iter__"),
        why="the same labels, where the loader has copied them to a device",
    ),
    "compiled models": Patch(
        targets=("torch._dynamo.eval_frame:OptimizedModule.__call__",), why="a hook inside a graph would be compiled"
    ),
    "compilation": Patch(targets=("torch.nn.modules.module:Module.compile",), why="`model.compile()` after `attach`"),
    "clipping": Patch(
        targets=("torch.nn.utils.clip_grad:_clip_grads_with_norm_",),
        why="whether it clips what the optimizer steps", until="the first steps of a launch, and those after a save, are over",
    ),
    "Fabric": Patch(
        targets=(f"{_FABRIC}setup", f"{_FABRIC}setup_module", f"{_FABRIC}setup_optimizers", f"{_FABRIC}save", f"{_FABRIC}load"),
        why="Fabric gives its callbacks the module alone",
    ),
    "Trainer": Patch(targets=("transformers.trainer:Trainer.train",), why="a callback is not told whose it is"),
    "a step taken twice": Patch(
        targets=("Parameter.grad",),
        why="FSDP2 gives gradients to its shards alone; `twice.py` also puts back what the second pass moves in modules",
        until="the second backward pass is over",
    ),
    "handed over": Patch(
        targets=(
            "Accelerator.chronicle", "Accelerator.save_state", "Accelerator.load_state", "Accelerator.prepare",
            "Accelerator.init_trackers", "DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.load_checkpoint",
            "DeepSpeedEngine.step", "Trainer.training_step", "DataLoader.batch_sampler", "BatchSampler.sampler",
            "Module._compiled_call_impl",
        ),
        why="saves, loads and steps of one object; options of a rollback", until="the object is gone",
    ),
}  # fmt: skip

_kept: dict[str, Any] = {}  # target -> what was there


def _find(target: str) -> tuple[Any, str]:
    """Who holds it, None where it is not imported or of another version; and its name there."""
    module, _, path = target.partition(":")
    kind, _, name = path.rpartition(".")
    holder = sys.modules.get(module)
    return getattr(holder, kind, None) if kind else holder, name


def change(row: str, make: Callable[[Any], Any], only: str = "") -> None:
    """Put `make(original)` in place of the row's targets (of those that end in `only`), once, where this version has them."""
    for target in PATCHES[row].targets:
        holder, name = _find(target)
        original = getattr(holder, name, None)
        if target.endswith(only) and original is not None and not is_changed(original):
            _kept[target] = original
            setattr(holder, name, marked(functools.wraps(original)(make(original))))


def undo(row: str) -> None:
    """Put back what was there."""
    for target in PATCHES[row].targets:
        if target in _kept:
            setattr(*_find(target), _kept.pop(target))


def change_object(thing: Any, name: str, value: Any) -> None:
    """Give one object that the script handed over another attribute of this name."""
    assert any(target.endswith(f".{name}") for row in PATCHES.values() for target in row.targets)
    if name == "batch_sampler":  # torch forbids it to scripts; the loader reads it at every pass
        object.__setattr__(thing, name, value)
    else:
        setattr(thing, name, value)


def release(thing: Any, name: str) -> None:
    """Take back what `change_object` put over a method of the class."""
    vars(thing).pop(name, None)


def marked(call: Any) -> Any:
    """The function itself, known as ours from now on."""
    setattr(call, MARK, True)
    return call


def wrapped_for_torch(step: Any) -> Any:
    """A `step` of ours that schedulers take for one that torch has wrapped."""
    step._wrapped_by_lr_sched = True
    return step


def is_changed(call: Any) -> bool:
    """Whether this is a function of ours, with the original inside."""
    return bool(getattr(call, MARK, False))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def around(
    original: Callable[..., Any], *, before: Callable[..., Any] = _nothing, after: Callable[..., Any] = _nothing
) -> Callable[..., Any]:
    """`original` between `before(*args, **kwargs)` and `after(result, given, *args, **kwargs)`, which must raise nothing.

    `given` is what `before` returned.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result, given, *args, **kwargs)
        return result

    marked(call)
    return call
