"""The configuration of a model that its weights do not show, as flat facts: row of a difference, name, value.

Two models with equal weights can differ in dropout, activation, epsilon, attention scale, LoRA alpha, or a part that is left in
evaluation mode. `model_facts` gives the class and the plain attributes of every module, the configuration objects of
the model (`config` of Transformers, Diffusers and PEFT, dataclasses, namespaces), and tensors that no checkpoint holds.
`folded` names equal values of a stack once: `transformer.h.*.attn.dropout.p`.

An attribute is configuration for certain where it is an argument of the constructor, one of torch's `__constants__`, or none
that counts. Only those are recorded: others a script may set as it trains. Values that move while a launch trains are found by
comparing (`trained.py`). Private names, paths, and switches of the implementation are left out.
"""

import dis
import enum
import functools
import inspect
import json
import math
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from chronicle.resume.samples import digest, sample_of
from rollback.channels import Role, role_of

MAX_TEXT = 200  # characters of one value
MAX_ITEMS = 64  # of a list or mapping
MAX_BYTES = 200_000  # of the facts in JSON; above, a difference is said by module
SKIPPED: Any = object()
FIRM, TENSOR = "model", "tensor"  # rows

Fact = tuple[str, str, Any]  # row, name, value
Facts = dict[str, dict[str, Any]]  # row -> name -> value

WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule", "DeepSpeedEngine"}
WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
CARRIERS = ("torch.distributed.", "torch._dynamo.", "torch.nn.utils.parametrize", "accelerate.")  # classes that only wrap
CONFIGS = {"config", "cfg", "params", "args", "hparams", "model_args", "model_config", "peft_config", "opt", "opts"}
# No part of what is computed: how it is computed, where it came from, what is returned beside it, what is printed
VOLATILE = {
    "training", "forward", "name_or_path", "transformers_version", "diffusers_version", "peft_version", "torch_dtype", "dtype",
    "attn_implementation", "use_cache", "gradient_checkpointing", "grad_checkpointing", "is_gradient_checkpointing",
    "architectures", "output_attentions", "output_hidden_states", "return_dict", "inference_mode", "base_model_name_or_path",
    "fused_attn", "device", "device_map", "hf_device_map", "warnings_issued", "model_parallel", "is_parallelizable",
    "pretrained_cfg", "default_cfg", "model_tags", "kernel_config", "generation_config", "all_tied_weights_keys", "torchscript",
    "max_seq_len_cached", "use_reentrant", "auto_mapping", "revision", "mask_check", "compile_config", "quantization_config",
    "gradient_checkpointing_kwargs", "process_group", "backend", "inplace", "flash", "loss_type", "trainer", "logger",
}  # fmt: skip
OF_A_RUN = {"epochs", "num_epochs", "max_epochs", "max_steps", "steps", "batch", "batch_size", "seed",
            "output_dir", "out_dir", "save_dir", "log_dir", "resume", "workers", "num_workers", "accumulation", "shuffle",
            "optimizer", "scheduler", "weight_decay", "train_batch_size", "devices", "gpus"}  # fmt: skip
NUM_TENSORS = 64
DIGITS = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole part of a module's name


def model_facts(models: Sequence[Any]) -> Iterator[Fact]:
    """The configuration of these models."""
    facts = list[Fact]()
    seen: dict[int, Any] = {}  # configuration objects, which many modules share
    modules = dict(_named_modules(models))
    for name, module in modules.items():
        facts += _of_module(f"{name}." if name else "", module, seen)
    yield from facts if len(json.dumps(folded(facts))) <= MAX_BYTES else _capped(facts)
    yield from _unsaved_tensors(modules)


def _unsaved_tensors(modules: Mapping[str, Any]) -> Iterator[Fact]:
    """Tensors that the script's own modules compute with and that no checkpoint holds: rotary frequencies, class weights.

    Those of a library's modules follow from their configuration, which is compared; some grow with the inputs.
    [shape, dtype, values at eight places], of the first in a stack. At most 64.
    """
    found = set[str]()
    for name, module in modules.items():
        kind = class_of(module)
        if not is_of_the_script(kind):
            continue
        unsaved = getattr(module, "_non_persistent_buffers_set", ())
        own = {key: thing for key, thing in vars(module).items() if _is_plain_tensor(thing)}
        for key, thing in ({key: module._buffers.get(key) for key in unsaved} | own).items():
            place = pattern_of(f"{name}.{key}" if name else key)
            if not key.startswith("_") and place not in found and len(found) < NUM_TENSORS and (values := _values(thing)):
                found.add(place)
                yield TENSOR, place, values


def _is_plain_tensor(thing: Any) -> bool:
    return hasattr(thing, "detach") and hasattr(thing, "layout") and not getattr(thing, "requires_grad", True)


def _values(tensor: Any) -> list[Any]:
    """[] for what has no values that could be read."""
    if not _is_plain_tensor(tensor) or tensor.is_meta or tensor.numel() == 0 or str(tensor.layout) != "torch.strided":
        return []
    values = [] if tensor.is_complex() else sample_of(tensor, 8).double().tolist()
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), [plain_value(float(f"{one:.6g}")) for one in values]]


def folded(facts: Iterable[Fact]) -> Facts:
    """Facts by row and name; where all members of a stack have one value, its pattern stands for them."""
    stacks: dict[str, list[Fact]] = {}
    for fact in facts:
        stacks.setdefault(pattern_of(fact[1]), []).append(fact)
    found: Facts = {}
    for pattern, members in stacks.items():
        row, _, value = members[0]
        if len(members) > 1 and all((one[0], one[2]) == (row, value) for one in members):
            members = [(row, pattern, value)]
        for row, name, value in members:
            found.setdefault(row, {})[name] = value
    return found


def _capped(facts: Iterable[Fact]) -> Iterator[Fact]:
    """A digest for each module of a model with very many different ones."""
    modules: dict[str, list[Fact]] = {}
    for fact in facts:
        modules.setdefault(fact[1].rpartition(".")[0], []).append(fact)
    for name, own in modules.items():
        yield FIRM, f"{name}.configuration", short_digest(own)[:8]


def pattern_of(name: str) -> str:
    """`h.0.attn` -> `h.*.attn`."""
    return DIGITS.sub("*", name)


# ---- modules ---------------------------------------------------------------------------------------------------------


def unwrapped(model: Any) -> Any:
    """The model inside DDP, FSDP, DeepSpeed and `torch.compile`."""
    for _ in range(8):
        if type(model).__name__ not in WRAPPERS:
            break
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return model


def _named_modules(models: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every module that is no wrapper, by its name without wrappers; of several models each has a number."""
    for index, model in enumerate(models):
        start = f"model {index}" if len(models) > 1 else ""
        for name, module in unwrapped(model).named_modules():
            if type(module).__name__ in WRAPPERS or type(module).__name__ == "CheckpointWrapper":
                continue
            yield ".".join(filter(None, (start, plain_name(name)))), module


def plain_name(name: str) -> str:
    """The name of a module or weight without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS).removeprefix("module.")


def class_of(module: Any) -> type:
    """The class that was written, not the one that a wrapper made of it (`FSDPBlock`, `ParametrizedLinear`)."""
    return next((kind for kind in type(module).__mro__ if not kind.__module__.startswith(CARRIERS)), type(module))


def _of_module(prefix: str, module: Any, seen: dict[int, Any]) -> Iterator[Fact]:
    """One module, with the configuration objects that no module before it holds."""
    kind = class_of(module)
    certain, later, own = constructor_arguments(kind), _set_later(kind), is_of_the_script(kind)
    yield FIRM, f"{prefix}class", kind.__name__
    for key, thing in vars(module).items():
        if key.startswith("_") or key in VOLATILE:
            continue
        if _holds_options(key, thing, own):
            yield from _config(prefix + key, thing, seen)
            continue
        value = plain_value(thing)
        if value is SKIPPED:
            continue
        steady = key in certain or not isinstance(value, int) or isinstance(value, bool)
        if steady and key not in later:
            yield FIRM, prefix + key, value
    if "config" not in vars(module) and isinstance(getattr(kind, "config", None), property):  # Diffusers
        yield from _config(f"{prefix}config", quietly(lambda: module.config), seen)


def _holds_options(key: str, thing: Any, own: bool) -> bool:
    """Whether an attribute is a configuration object: by its name, or a mapping that a script's own module keeps."""
    if isinstance(thing, (str, int, float, bool, type(None), types.FunctionType)):
        return False
    return key in CONFIGS or (own and isinstance(thing, Mapping))


def quietly(work: Callable[[], Any]) -> Any:
    """What it returns; None where foreign code (a property, `extra_repr`) raises."""
    try:
        return work()
    except Exception:  # noqa: BLE001 foreign code
        return None


@functools.lru_cache(maxsize=4096)
def constructor_arguments(kind: type) -> frozenset[str]:
    """Names of the constructor's arguments, over all base classes, and torch's constants."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(getattr(base, "__constants__", ()) or ())
        code = getattr(base.__dict__.get("__init__"), "__code__", None)
        if code is not None:
            names |= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return frozenset(names - {"self"})


@functools.lru_cache(maxsize=4096)
def is_of_the_script(kind: type) -> bool:
    """Whether a class is the script's own, and no installed library's."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "__main__" or file is None:
        return True
    homes = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return "site-packages" not in file and not any(file.startswith(home + "/") for home in homes if home)


@functools.lru_cache(maxsize=4096)
def _set_later(kind: type) -> frozenset[str]:
    """Attributes that a class of the script assigns outside its constructor: it may change them from epoch to epoch."""
    names: set[str] = set()
    for base in filter(is_of_the_script, kind.__mro__):
        for name, thing in vars(base).items():
            code = getattr(thing, "__code__", None)
            if code is not None and name != "__init__":
                names |= {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(names)


def other_mode(models: Sequence[Any], seen: Mapping[int, bool] | None = None) -> list[str]:
    """Modules that are in evaluation mode although their model trains; `seen` are earlier modes of them by `id`."""
    known = seen or {}
    modes = {name: known.get(id(module), module.training) for name, module in _named_modules(models)}
    if not models or not all(known.get(id(unwrapped(model)), model.training) for model in models):
        return []
    off = [name for name, training in modes.items() if not training]
    on = {pattern_of(name) for name, training in modes.items() if training}
    return sorted({name if pattern_of(name) in on else pattern_of(name) for name in off})


# ---- configuration objects and plain values --------------------------------------------------------------------------


def _config(name: str, thing: Any, seen: dict[int, Any]) -> Iterator[Fact]:
    """The values of a configuration object, once; nothing for anything else.

    One that also holds the run's own options (learning rate, seed, output) is no configuration of the model: it may change.
    """
    if thing is None or id(thing) in seen:
        return
    seen[id(thing)] = thing
    flat = quietly(lambda: dict(_flat(_contents(thing) or {}))) or {}
    is_of_the_run = any(key in OF_A_RUN or role_of(key) is Role.LR for key in (key.rpartition(".")[2] for key in flat))
    for key, value in flat.items() if not is_of_the_run else ():
        yield FIRM, f"{name}.{key}", value


def _contents(thing: Any) -> Mapping[str, Any] | None:
    """What a configuration object holds; None when it is none."""
    if isinstance(thing, Mapping):
        return thing
    if callable(getattr(thing, "to_dict", None)):
        found = quietly(thing.to_dict)
        return found if isinstance(found, Mapping) else None
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name, None) for field in fields(thing)}
    if hasattr(thing, "__dict__") and not callable(thing) and not hasattr(thing, "state_dict"):
        contents: Mapping[str, Any] = vars(thing)
        return contents
    return None


def _flat(values: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, thing in values.items():
        name = str(key)
        if name.startswith("_") or name in VOLATILE:
            continue
        inner = _contents(thing) if depth < 4 and not isinstance(thing, (str, bytes)) else None
        if inner is not None and len(inner) <= MAX_ITEMS:
            yield from _flat(inner, f"{prefix}{name}.", depth + 1)
        elif (value := plain_value(thing)) is not SKIPPED:
            yield f"{prefix}{name}", value


def plain_value(thing: Any, depth: int = 0) -> Any:
    """A value as JSON stores it; `SKIPPED` for objects, tensors, paths and whatever else is no plain configuration.

    Also for what cannot be read: a foreign class may forbid its `len`, an iteration or a comparison.
    """
    try:
        return _plain_value(thing, depth)
    except Exception:  # noqa: BLE001 methods of foreign code
        return SKIPPED


def _plain_value(thing: Any, depth: int) -> Any:
    if thing is None or isinstance(thing, (bool, int)):
        return thing.value if isinstance(thing, enum.Enum) else thing
    if isinstance(thing, float):
        return float(thing) if math.isfinite(thing) else str(thing)
    if isinstance(thing, enum.Enum):
        return thing.name
    if isinstance(thing, str):
        return _text(thing)
    if isinstance(thing, (tuple, list, set, frozenset)):
        return _items(sorted(thing, key=repr) if isinstance(thing, (set, frozenset)) else thing, depth)
    if isinstance(thing, Mapping):
        return _mapping(thing, depth)
    if isinstance(thing, functools.partial):
        parts = [plain_value(thing.func), plain_value(thing.args, depth + 1), plain_value(thing.keywords, depth + 1)]
        return [None if part is SKIPPED else part for part in parts]  # a module bound to it has no value
    if isinstance(thing, (type, types.FunctionType, types.BuiltinFunctionType)):
        return getattr(inspect.unwrap(thing), "__qualname__", "") or SKIPPED
    if type(thing).__module__ == "numpy" and hasattr(thing, "item") and getattr(thing, "ndim", 1) == 0:
        return plain_value(thing.item())
    return SKIPPED


def _text(text: str) -> Any:
    if text.startswith(("/", "~", "./", "../", "http://", "https://")) or "\\" in text:
        return SKIPPED
    return text if len(text) <= MAX_TEXT else f"{text[:40]}… ({len(text)} characters, {short_digest(text)})"


def _items(things: Iterable[Any], depth: int) -> Any:
    if depth > 3:
        return SKIPPED
    things = [one for one in things]  # noqa: C416 `list` asks for the length, which e3nn's tuples forbid
    if len(things) > 8 * MAX_ITEMS:
        return SKIPPED  # data, not configuration
    values = [plain_value(item, depth + 1) for item in things]
    if any(value is SKIPPED for value in values):
        return SKIPPED
    return values if len(values) <= MAX_ITEMS else f"{len(values)} values ({short_digest(values)})"


def _mapping(things: Mapping[Any, Any], depth: int) -> Any:
    if depth > 3 or len(things) > 8 * MAX_ITEMS:
        return SKIPPED
    values = {str(key): plain_value(value, depth + 1) for key, value in things.items()}
    if any(value is SKIPPED for value in values.values()):
        return SKIPPED
    return values if len(values) <= MAX_ITEMS else f"{len(values)} entries ({short_digest(values)})"


def short_digest(thing: Any) -> str:
    """The first 64 bits of the SHA-256 of a plain value, in hex."""
    return digest(json.dumps(thing, sort_keys=True, default=str).encode())
