"""The random generators that a script makes for itself, and where they stand.

A loop draws its noise, its times or its order from a `torch.Generator`, a `numpy.random.Generator` or a `random.Random` of its
own. No global generator tells of it, so such objects are looked for once, when the first batch of a launch enters: in the
variables of the script's own frames and modules, and in what these hold (some thousand objects). Reading draws nothing.
"""

import functools
import itertools
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["find_generators", "state_of"]

MOST, MOST_OBJECTS, MOST_ITEMS, DEEPEST = 16, 20_000, 1000, 6
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range)
LIBRARIES = ("-packages/", "/lib/python", "<frozen", "<string>")


def find_generators(ours: str) -> list[Any]:
    """The generators that the script holds now. `ours`: the directory of this program, whose frames are passed by."""
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
    found: list[Any] = []
    seen = {id(one) for one in passed}
    waiting = deque((value, 0) for value in _roots(ours))
    while waiting and len(seen) < MOST_OBJECTS and len(found) < MOST:
        thing, depth = waiting.popleft()
        if id(thing) in seen or issubclass(type(thing), tuple(leaves)):
            continue
        seen.add(id(thing))
        if issubclass(type(thing), tuple(kinds)):
            found.append(thing)
        elif depth < DEEPEST:
            waiting += [(value, depth + 1) for value in _inside(thing)]
    return [one for one in found if _can_be_read(one)]


def _roots(ours: str) -> Iterator[Any]:
    frame: types.FrameType | None = sys._getframe(1)
    told: set[int] = set()
    while frame is not None:
        if _is_scripts(frame.f_code.co_filename, ours):
            yield from tuple(frame.f_locals.values())
            if id(frame.f_globals) not in told:
                told.add(id(frame.f_globals))
                yield from tuple(frame.f_globals.values())
        frame = frame.f_back
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and _is_scripts(path, ours) and id(vars(module)) not in told:
            yield from tuple(vars(module).values())


def _is_scripts(path: str, ours: str) -> bool:
    return not path.startswith(ours) and not any(part in path for part in LIBRARIES)


def _inside(thing: Any) -> list[Any]:
    """What an object holds. No code of its own is called, as far as that can be: a proxy may load what it stands for."""
    kind = type(thing)
    try:
        for base in (dict, list, tuple, set, frozenset, deque):
            if issubclass(kind, base):
                values = dict.values(thing) if base is dict else base.__iter__(thing)
                return list(itertools.islice(values, MOST_ITEMS))
        if kind is types.FunctionType:
            cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
            return [*cells, *(thing.__defaults__ or ())]
        if kind in (types.MethodType, types.BuiltinMethodType):
            return [thing.__self__]
        if kind is functools.partial:
            return [thing.func, *thing.args, *thing.keywords.values()]
        if kind is types.GeneratorType:
            return [] if thing.gi_frame is None else list(thing.gi_frame.f_locals.values())
        held = object.__getattribute__(thing, "__dict__")
        return list(itertools.islice(held.values(), MOST_ITEMS)) if type(held) is dict else []
    except Exception:  # noqa: BLE001 it has no variables, another thread changes it, or it is a proxy of nothing
        return []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _can_be_read(one: Any) -> bool:
    try:
        state_of([one])
    except Exception:  # noqa: BLE001 a kind without a state: random numbers of the system
        return False
    return True


def state_of(generators: Iterable[Any]) -> int:
    """Where they all stand, in 32 bits; their order does not matter. 0 for none."""
    found = 0
    for one in generators:
        if isinstance(one, random.Random):
            _, keys, gauss = one.getstate()
            part = zlib.crc32(repr(gauss).encode(), hash(keys) & 0xFFFFFFFF)
        elif hasattr(one, "bit_generator"):
            part = zlib.crc32(repr(one.bit_generator.state).encode())
        elif hasattr(one, "set_state") and hasattr(one, "initial_seed"):  # torch's
            part = zlib.crc32(one.get_state().numpy())
        else:
            _, keys, place, *rest = one.get_state()
            part = zlib.crc32(repr((place, rest)).encode(), zlib.crc32(keys.tobytes()))
        found = (found + (part or 1)) & 0xFFFFFFFF
    return found
