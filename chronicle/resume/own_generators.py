"""The random generators that a script makes for itself, and where they stand.

A loop draws its noise, its times or its order from a `torch.Generator`, a `numpy.random.Generator` or a `random.Random` of
its own. No global generator tells of it, so such objects are looked for once, when the first batch of a launch enters: in the
variables of the script's own frames and modules, and in what these hold (some thousand objects). A loader's is left out: it
draws a seed from it at each pass, so that it stands elsewhere in every resume, and what else it draws is in the batch. Where
one was found in a variable or an attribute, what that holds now is read, because loops put a new generator there (one an
epoch). Reading draws nothing, and leaves nothing behind: until Python 3.12 a frame keeps a table of its variables once
somebody has asked for it, and hands the same one to a script that calls `locals()`. So such functions are passed by, and the
table is emptied.
"""

import functools
import inspect
import itertools
import random
import sys
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Holder", "find_generators", "state_of"]

MOST, MOST_OBJECTS, MOST_ITEMS, DEEPEST = 16, 20_000, 1000, 6
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range)
LIBRARIES = ("-packages/", "/lib/python", "<frozen", "<string>")
HAND_TABLE_OUT = {"locals", "vars", "exec", "f_locals"}  # names in the code of a function
ONLY_HERE = 3  # references to a table that nobody else holds, as `sys.getrefcount` counts them


class Holder(NamedTuple):
    """What a generator was found in: a variable of a function (by its code), of a module, or an attribute; or by itself.

    `read` returns what is there now. It holds no object of the script but the generator.
    """

    one: Any
    name: str = ""
    code: types.CodeType | None = None
    read: Callable[[], Any] | None = None


def find_generators(ours: str) -> list[Holder]:
    """Where the script holds generators now. `ours`: the directory of this program, whose frames are passed by."""
    kinds, passed, leaves = _kinds()
    torch = sys.modules.get("torch")
    loader = None if torch is None else torch.utils.data.DataLoader
    of_loaders: set[int] = set()
    found: list[Holder] = []
    seen = {id(one) for one in passed}
    waiting = deque((holder, 0) for holder in _roots(ours))
    while waiting and len(seen) < MOST_OBJECTS and len(found) < MOST:
        holder, depth = waiting.popleft()
        thing = holder.one
        if id(thing) in seen or issubclass(type(thing), leaves):
            continue
        seen.add(id(thing))
        if loader is not None and issubclass(type(thing), loader):
            of_loaders.add(id(object.__getattribute__(thing, "__dict__").get("generator")))
        if issubclass(type(thing), kinds):
            found.append(holder)
        elif depth < DEEPEST:
            waiting += [(inner, depth + 1) for inner in _inside(thing)]
    return [holder for holder in found if id(holder.one) not in of_loaders and _can_be_read(holder.one)]


def _kinds() -> tuple[tuple[Any, ...], list[Any], tuple[Any, ...]]:
    """The types of generators, those that are everybody's, and the types of which nothing is looked at."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds: list[Any] = [random.Random]
    passed: list[Any] = [getattr(random, "_inst", None)]
    leaves: list[Any] = [*PLAIN, types.ModuleType]
    if torch is not None:
        kinds.append(torch.Generator)
        leaves += [torch.Tensor, torch.optim.Optimizer]
        passed += [torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
    if numpy is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
        leaves.append(numpy.ndarray)
        passed.append(numpy.random.mtrand._rand)
    return tuple(kinds), passed, tuple(leaves)


def _roots(ours: str) -> Iterator[Holder]:
    frame: types.FrameType | None = sys._getframe(1)
    told: set[int] = set()
    while frame is not None:
        if _is_scripts(frame.f_code.co_filename, ours):
            yield from [Holder(one, name, code=frame.f_code) for name, one in _variables(frame).items()]
            if id(frame.f_globals) not in told:
                told.add(id(frame.f_globals))
                yield from _of_table(frame.f_globals)
        frame = frame.f_back
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and _is_scripts(path, ours) and id(vars(module)) not in told:
            yield from _of_table(vars(module))


def _of_table(table: dict[str, Any]) -> list[Holder]:
    """The variables of a module."""
    return [Holder(one, name, read=functools.partial(table.get, name)) for name, one in tuple(table.items())]


def _variables(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a function that runs; none of a module's own frame, and where the table of them may be handed out."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not HAND_TABLE_OUT.isdisjoint(code.co_names):
        return {}
    table = frame.f_locals
    found = dict(table)
    if type(table) is dict and sys.getrefcount(table) <= ONLY_HERE:
        table.clear()  # else the frame keeps what was in its variables now: a batch, a loss with its graph
    return found


def _is_scripts(path: str, ours: str) -> bool:
    return not path.startswith(ours) and not any(part in path for part in LIBRARIES)


def _inside(thing: Any) -> list[Holder]:
    """What an object holds. No code of its own is called, as far as that can be: a proxy may load what it stands for."""
    kind = type(thing)
    try:
        for base in (dict, list, tuple, set, frozenset, deque):
            if issubclass(kind, base):
                values = dict.values(thing) if base is dict else base.__iter__(thing)
                return [Holder(one) for one in itertools.islice(values, MOST_ITEMS)]
        if kind is types.FunctionType:
            cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
            return [Holder(one) for one in (*cells, *(thing.__defaults__ or ()))]
        if kind in (types.MethodType, types.BuiltinMethodType):
            return [Holder(thing.__self__)]
        if kind is functools.partial:
            return [Holder(one) for one in (thing.func, *thing.args, *thing.keywords.values())]
        if kind is types.GeneratorType:
            return [] if thing.gi_frame is None else [Holder(one) for one in _variables(thing.gi_frame).values()]
        held = object.__getattribute__(thing, "__dict__")
        if type(held) is not dict:
            return []
        return [Holder(one, name, read=_attribute(thing, name)) for name, one in itertools.islice(held.items(), MOST_ITEMS)]
    except Exception:  # noqa: BLE001 it has no variables, another thread changes it, or it is a proxy of nothing
        return []


def _attribute(thing: Any, name: str) -> Callable[[], Any] | None:
    """What reads an attribute later, without keeping the object."""
    try:
        return functools.partial(_read_attribute, weakref.ref(thing), name)
    except TypeError:
        return None


def _read_attribute(thing: "weakref.ref[Any]", name: str) -> Any:
    held = thing()
    return None if held is None else object.__getattribute__(held, "__dict__").get(name)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _can_be_read(one: Any) -> bool:
    try:
        _state_of(one)
    except Exception:  # noqa: BLE001 a kind without a state: random numbers of the system
        return False
    return True


def state_of(holders: Iterable[Holder]) -> int:
    """Where the generators in them stand now, in 32 bits; their order does not matter. 0 for none."""
    holders = list(holders)
    if not holders:
        return 0
    variables = _variables_of({holder.code for holder in holders} - {None})
    kinds, _, _ = _kinds()
    found = 0
    for holder in holders:
        now = holder.read() if holder.read else variables.get(holder.code, {}).get(holder.name)
        found = (found + (_state_of(now if issubclass(type(now), kinds) else holder.one) or 1)) & 0xFFFFFFFF
    return found


def _variables_of(codes: set[Any]) -> dict[Any, dict[str, Any]]:
    """By the code of a function that runs: its variables."""
    found: dict[Any, dict[str, Any]] = {}
    frame: types.FrameType | None = sys._getframe(1) if codes else None
    while frame is not None:
        if frame.f_code in codes and frame.f_code not in found:
            found[frame.f_code] = _variables(frame)
        frame = frame.f_back
    return found


def _state_of(one: Any) -> int:
    if isinstance(one, random.Random):
        _, keys, gauss = one.getstate()
        return zlib.crc32(repr(gauss).encode(), hash(keys) & 0xFFFFFFFF)
    if hasattr(one, "bit_generator"):
        return zlib.crc32(repr(one.bit_generator.state).encode())
    if hasattr(one, "set_state") and hasattr(one, "initial_seed"):  # torch's
        return zlib.crc32(one.get_state().numpy())
    _, keys, place, *rest = one.get_state()
    return zlib.crc32(repr((place, rest)).encode(), zlib.crc32(keys.tobytes()))
