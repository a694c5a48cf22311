"""State that moves while a launch trains, and that nobody registered: averages, patience, normalisers, curricula, buffers.

Looked at are objects that the script names at its top level, or that the trainer holds (callbacks, samplers), by their
attributes, without calling any of their methods. One counts where it holds tensors or arrays that move, or numbers that move
now and then. What moves at every step and is only a number may be a meter, and a class that can be `reset` holds nothing that
is meant to last.

Before the step after a save its files are searched for values and names of what moved. What is in none of them is said once.
Files that cannot be searched (compressed, or too large) end the search. Variables of a function are not reached.
"""

import functools
import re
import struct
import sys
import weakref
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.resume.configuration import SKIPPED, is_of_the_script, plain_value
from chronicle.resume.events import Ended, Loaded, StepBegins
from chronicle.resume.fingerprint import LiveState, Parts
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.moving import Facts, moved
from chronicle.resume.samples import digest, ends_of, is_array, is_generator, own_shard, plain_bytes, raw_bytes
from chronicle.resume.training import Training
from rollback.checkpoint.state_digest import NUM_ELEMENTS

NUM_LOOKS = 3  # steps of a launch between which is looked
NUM_OBJECTS, NUM_ATTRIBUTES, NUM_KEYS, DEPTH = 64, 64, 64, 3
MOST_BYTES, HEAD = 16 << 20, 512  # of a file that is read whole; of each record of an archive
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
POSITION = re.compile(r"_?(global_)?(step|epoch|iter|iteration|pos|position|cursor)s?(_count)?", re.IGNORECASE)
OURS = ("chronicle", "rollback")
NUMBER, VALUES = "n", "v"  # kinds of facts: a number, or tensors and whole collections
NAMED = (deque, dict, list)  # collections that count where a script names them
MANY = (*NAMED, tuple)
PLAIN = bool | int | float | str | None


class _Seen(NamedTuple):
    """What lies under a key: its fact, and itself."""

    fact: str
    value: Any


class Unregistered(Observer):
    """What one process finds of it."""

    about = "unregistered state"

    def __init__(self, training: Training) -> None:
        self._observe = weakref.WeakMethod(training.observe)  # the exit of the process knows this object, and no model
        self._journal = training.journal
        self._first: Facts = {}
        self._last: Facts = {}
        self._looks = 0
        self._often: set[str] = set()  # numbers that moved from one step to the next
        self._ids: dict[str, set[int]] = {}  # of collections: one that is made anew in every step is no state
        self._saved: dict[str, list[bytes]] = {}  # of a save whose files are not searched yet: key -> what shows it in a file
        self._step: int | None = None
        self._paths: list[Path] = []  # that were written since the step before
        self._said: set[str] = set()
        self._unread: set[str] = set()

    def loaded(self, event: Loaded) -> None:
        """What differs from now on was moved by the training."""
        self._first, self._last, self._looks, self._saved, self._paths = {}, {}, 0, {}, []

    def written(self, path: Any) -> None:
        """Something was written there: by the guard's adapter, or by the script beside it."""
        if isinstance(path, str | Path):
            self._paths = [*self._paths[-NUM_OBJECTS:], Path(path)]

    def step_begins(self, event: StepBegins) -> Rest | None:
        """The first steps show what moves; the step after a save, that its files are written."""
        observe = self._observe()
        if observe is None or (self._looks >= NUM_LOOKS and not self._saved):
            return RESTS
        now = _facts(self._look(observe()))
        if self._looks < NUM_LOOKS:
            self._looks += 1
            self._often |= set(moved(self._last, now))
            self._first = {**now, **self._first}
            self._last = now
        self.settle()
        self._paths = []
        return None

    def ended(self, event: Ended) -> None:
        """No step follows the last save."""
        self.settle()

    def at_save(self, live: LiveState, step: int | None) -> Facts:
        """What moved so far and counts, as it is now, for the checkpoint."""
        seen, parts = self._look(live), Parts()
        now = _facts(seen)
        found = [key for key in moved(self._first, now) if self._counts(key, now[key], step)][:NUM_KEYS]
        self._step, self._saved = step, {}
        for key in found:
            traces = parts.take(key, functools.partial(_traces, key, seen[key].value))
            if traces is not None:
                self._saved[key] = traces
        return {key: now[key] for key in found}

    def _look(self, live: LiveState) -> dict[str, _Seen]:
        """What lies there now. An object that cannot be looked at is said, once."""
        parts = Parts()
        seen = _look_at_all(live, parts)
        for name in parts.unknown.keys() - self._unread:
            self._unread.add(name)
            text = f"`{name}` cannot be looked at: {parts.unknown[name]}"
            self._journal.tell("state-not-read", text, step=self._step, tier="notice")
        for name, thing in _things().items():
            self._ids.setdefault(name, set()).add(id(thing))
        return seen

    def _counts(self, key: str, fact: str, step: int | None) -> bool:
        """Whether it may be state. What is the step itself, or is called so, is a position, which is compared as such."""
        name = key.rpartition(".")[2]
        if POSITION.fullmatch(name) or fact == f"{NUMBER}{step}" or len(self._ids.get(key, ())) > 1:
            return False
        return fact[0] == VALUES or key not in self._often

    def settle(self) -> None:
        """The save and what the script wrote after it are over: say what is in none of the files."""
        saved, self._saved = self._saved, {}
        names = dict.fromkeys(name for key in saved if (name := key.partition(".")[0]) not in self._said)
        if not names or not self._paths:
            return
        evidence, things = Evidence(self._paths), _things()
        for name in names if evidence.is_whole else ():
            own = [key for key in saved if key.partition(".")[0] == name]
            if name in things and not any(evidence.holds(saved[key]) for key in own):
                self._said.add(name)
                self._tell(name, type(things[name]).__name__, own)

    def _tell(self, name: str, kind: str, keys: Sequence[str]) -> None:
        listed = ", ".join(key.partition(".")[2] or "its content" for key in keys[:3])
        more = " and more" if len(keys) > 3 else ""
        text = f"`{name}` ({kind}) moves and is in no file of this checkpoint: {listed}{more}"
        said = f"not saved: {text}; a resume begins with another one"
        self._journal.tell("state-not-saved", text, step=self._step, tier="notice", said=said)


# ---- objects, and their values as facts --------------------------------------------------------------------------------

_holders: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()  # what trainers hold, by name


def hold(things: Iterable[Any]) -> None:
    """Objects that a trainer holds and calls: its callbacks, its sampler."""
    for thing in things:
        if hasattr(thing, "__weakref__"):
            _holders[type(thing).__name__] = thing


def _things() -> dict[str, Any]:
    main = vars(sys.modules["__main__"])
    named = {name: thing for name, thing in list(main.items()) if not name.startswith("_") and _may_count(thing)}
    ids = set(map(id, named.values()))
    return named | {name: thing for name, thing in _holders.items() if id(thing) not in ids and _may_count(thing)}


def _may_count(thing: Any) -> bool:
    kind: Any = type(thing)
    if isinstance(thing, NAMED):
        return bool(thing)
    if kind.__module__ == "builtins" or isinstance(thing, type) or not hasattr(thing, "__dict__") or hasattr(kind, "reset"):
        return False
    if kind.__module__.partition(".")[0] in OURS or hasattr(thing, "param_groups"):
        return False
    declares = callable(getattr(kind, "load_state_dict", None))
    is_data = hasattr(kind, "__getitem__") or hasattr(thing, "dataset") or hasattr(thing, "callback_handler")
    if is_of_the_script(kind):
        return declares or not is_data
    if hasattr(thing, "optimizer") or (hasattr(kind, "__iter__") and not hasattr(kind, "named_parameters")):
        return False  # a library's scheduler, or what is iterated: LRs and batches are compared as such
    return declares or (not is_data and callable(getattr(kind, "state", None)))


def facts_of(live: LiveState) -> dict[str, str]:
    """Facts of every object that may count: `name.attribute` -> kind and value. What cannot be read is left out."""
    return _facts(_look_at_all(live, Parts()))


def _facts(seen: Mapping[str, _Seen]) -> dict[str, str]:
    return {key: one.fact for key, one in seen.items()}


def _look_at_all(live: LiveState, parts: Parts) -> dict[str, _Seen]:
    """What lies in every object that may count, by `name.attribute`. What cannot be read is left to `parts`."""
    hold(getattr(live.feed, name, None) for name in ("sampler", "batch_sampler"))
    models = [*live.models, *(getattr(model, "module", None) for model in live.models)]
    known = {id(one) for one in (*models, *live.averages.values(), *live.objects.values(), live.scaler)}
    known |= {id(bound.scheduler) for bound in live.schedulers}
    known |= {id(part) for model in live.models for part in model.modules()}
    known.discard(id(None))
    params = {id(p): tuple(p.shape) for model in live.models for p in model.parameters()}
    own = parts.take("own tensors", lambda: set(_places(live.models)), set())
    found: dict[str, _Seen] = {}
    for name, thing in list(_things().items())[:NUM_OBJECTS]:
        if id(thing) in known or _holds_the_model(thing, params):
            continue
        if not isinstance(thing, NAMED):
            values = functools.partial(_values, name, thing, known)
        elif _is_state(thing, set(params.values()), own):
            values = functools.partial(iter, [(name, thing)])
        else:
            continue
        found |= parts.take(name, functools.partial(_seen, values), {})
    return found


def _seen(values: Callable[[], Iterator[tuple[str, Any]]]) -> dict[str, _Seen]:
    return {key: _Seen(_fact(value), value) for key, value in values()}


def _fact(value: Any) -> str:
    return NUMBER + repr(value) if isinstance(value, PLAIN) else VALUES + digest(plain_bytes(value, NUM_ATTRIBUTES))


def _holds_the_model(thing: Any, params: Mapping[int, Any]) -> bool:
    """Whether its weights are those of a model that is guarded: a wrapper (DDP, FSDP, a compiled model), and no average."""
    own = [*thing.parameters()] if hasattr(thing, "_parameters") and hasattr(thing, "named_parameters") else []
    return bool(own) and all(id(p) in params for p in own)


def _places(models: Iterable[Any]) -> Iterator[int]:
    for model in models:
        yield from (own_shard(tensor).data_ptr() for tensor in (*model.parameters(), *model.buffers()))


def _is_state(thing: Any, shapes: set[tuple[int, ...]], own: set[int]) -> bool:
    """A collection that the script names: one of tensors shaped as weights but not these, or a queue of more than numbers."""
    values = list(thing.values() if isinstance(thing, dict) else thing)[:NUM_ATTRIBUTES]
    if isinstance(thing, deque):
        return not _is_plain(values)
    tensors = [one for one in values if hasattr(one, "untyped_storage")]
    alike = [one for one in tensors if tuple(one.shape) in shapes and own_shard(one).data_ptr() not in own]
    return bool(tensors) and 2 * len(alike) >= len(values)


def _values(prefix: str, thing: Any, known: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name: numbers, texts, arrays, generators, collections of these; and so in what it holds."""
    known, own = known | {id(thing)}, dict(vars(thing))
    for part in ("_parameters", "_buffers", "_modules"):
        if isinstance(own.get(part), dict):  # of a module
            own = {**own.pop(part), **own}
    for key, one in list(own.items())[:NUM_ATTRIBUTES]:
        name = f"{prefix}.{key}"
        if id(one) in known or str(key).startswith("__"):
            continue
        if isinstance(one, str) and plain_value(one) is SKIPPED:
            continue  # a path
        if isinstance(one, PLAIN) or is_array(one) or is_generator(one):
            yield name, one
        elif isinstance(one, MANY):
            if not _is_plain(one):
                yield name, one
        elif depth < DEPTH and _is_looked_into(one):
            yield from _values(name, one, known, depth + 1)


def _is_plain(thing: Any, depth: int = 0) -> bool:
    """Whether it is numbers and texts alone: a history, and no state."""
    if isinstance(thing, MANY):
        return depth >= DEPTH or all(_is_plain(one, depth + 1) for one in _members(thing))
    return isinstance(thing, PLAIN)


def _is_looked_into(thing: Any) -> bool:
    kind: Any = type(thing)
    return hasattr(thing, "__dict__") and (hasattr(thing, "named_parameters") or is_of_the_script(kind))


def _members(things: Any) -> Sequence[Any]:
    """The first and the last of a collection."""
    return ends_of(things.values() if isinstance(things, dict) else things, NUM_ATTRIBUTES)


# ---- what a save wrote ---------------------------------------------------------------------------------------------------


class Evidence:
    """The beginnings of all that is in some files, and of the files beside them. Not `is_whole`: some could not be read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.is_whole = True
        parts = []
        for path in dict.fromkeys(_files(paths)):
            try:
                parts += list(self._read(path))
            except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
                self.is_whole = False
        self._bytes = b"\0".join(parts)

    def _read(self, path: Path) -> Iterator[bytes]:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD)
            if head[:2] == b"PK":
                with zipfile.ZipFile(file) as archive:
                    for record in archive.infolist():
                        self.is_whole = self.is_whole and record.compress_type == zipfile.ZIP_STORED
                        with archive.open(record) as content:
                            yield content.read(MOST_BYTES if record.filename.endswith(".pkl") else HEAD)
                return
            self.is_whole = self.is_whole and not head.startswith(COMPRESSED) and size <= MOST_BYTES
            yield head + file.read(MOST_BYTES)

    def holds(self, traces: Iterable[bytes]) -> bool:
        """Whether one of these is there."""
        return any(trace in self._bytes for trace in traces)


def _traces(key: str, value: Any) -> list[bytes]:
    """What shows in a file that this was saved: the first elements of its tensors; of a number its name, or its exact value."""
    if not isinstance(value, PLAIN):
        return [needle for tensor in _arrays(value) for needle in _needles(tensor)]
    name = key.rpartition(".")[2]
    found = [name.lstrip("_").encode()] if len(name) > 3 else []
    if isinstance(value, float) and value:
        found += [struct.pack(">d", value), repr(value).encode()]
    return found


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files of these paths, and those beside a file. A path that is gone stands for itself: it cannot be read."""
    for path in paths:
        if path.is_dir():
            yield from (one for one in sorted(path.rglob("*")) if one.is_file())
        elif path.is_file():
            begun = path.stat().st_mtime - 60
            beside = (one for one in sorted(path.parent.iterdir()) if one.is_file() and one.stat().st_mtime >= begun)
            yield from (path, *(one for one in beside if one.suffix not in (".py", ".log", ".txt")))
        else:
            yield path


def _arrays(thing: Any, depth: int = 0) -> Iterator[Any]:
    if is_array(thing):
        yield thing
    elif isinstance(thing, MANY) and depth < DEPTH:
        for one in _members(thing):
            yield from _arrays(one, depth + 1)


def _needles(thing: Any) -> Iterator[bytes]:
    """The first elements as bytes, as they are and in half precision; none for what has too few to be known by."""
    if not hasattr(thing, "detach"):
        thing = sys.modules["torch"].as_tensor(thing) if thing.dtype.kind in "fiu" else None
    if thing is None or thing.is_sparse or thing.is_meta:
        return
    first = own_shard(thing).detach().reshape(-1)[:NUM_ELEMENTS].cpu()
    if first.numel() and bool((first != 0).any()):
        torch, kinds = sys.modules["torch"], {first.dtype}
        if first.is_floating_point():
            kinds |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        raw = [raw_bytes(first.to(kind)) for kind in kinds if first.numel() * kind.itemsize >= 4]
        yield from (*raw, *(one.decode("latin-1").encode() for one in raw))  # an array in an old pickle is text
