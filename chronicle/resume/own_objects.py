"""The script's own objects right after their own load.

A stream that a script hands to `attach(objects=…)` has read on when its first batch comes. That is no other state than the
saved one: what counts is what `load_state_dict` left. So the class's method tells, for the objects that were handed over.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from chronicle.resume.faults import shield

LOAD = "load_state_dict"
_SEES: "weakref.WeakKeyDictionary[Any, Callable[[], None]]" = weakref.WeakKeyDictionary()


def see_own_loads(objects: Mapping[str, Any], see: Callable[[str, Any], None], failed: Callable[[Exception], None]) -> None:
    """From now on `see(name, object)` is called after every `load_state_dict` of these; what cannot be watched is left out."""
    for name, thing in objects.items():
        kind = type(thing)
        own = next((base for base in kind.__mro__ if LOAD in base.__dict__), None)
        try:
            _SEES[thing] = shield(functools.partial(_see, see, name, weakref.ref(thing)), failed)
            if own is not None and not hasattr(own.__dict__[LOAD], "_chronicle"):
                setattr(own, LOAD, _telling(own.__dict__[LOAD]))
        except TypeError:  # no reference, no hash, or a class that cannot be changed
            continue


def _see(see: Callable[[str, Any], None], name: str, reference: "weakref.ref[Any]") -> None:
    thing = reference()
    if thing is not None:
        see(name, thing)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            told = _SEES.get(self)
        except TypeError:
            told = None
        if told is not None:
            told()
        return result

    load_state_dict._chronicle = True  # type: ignore[attr-defined]
    return load_state_dict
