"""What the state of a plain torch optimizer carries under the key `chronicle`: a description that is made when it is needed.

A script may call `optimizer.state_dict()` at every step and throw the result away, so nothing is computed by the call itself.
The description is made when the state is pickled, copied or read. What torch returns refers to the optimizer's own tensors:
a file holds them as they are when it is written, and so must its description. A state that is still held when the next
optimizer step begins is described right before that step, at most once in `STEPS_BETWEEN` steps. A state that is written
only after further steps, or by another thread meanwhile, says that it is not described.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from chronicle.resume.faults import or_else, raised_by_script, reason_of, record_without_session, shield

__all__ = ["STEPS_BETWEEN", "Description"]

STEPS_BETWEEN = 50  # optimizer steps between two descriptions of states that are only held


def _unknown(problem: Exception) -> dict[str, Any]:
    return {"unknown": {"memory": f"the guard failed: {reason_of(problem)}"}}


def _failed(problem: Exception, otherwise: Any) -> Any:
    """The script's own save goes on, without a description."""
    record_without_session("save", problem)
    return otherwise


class Description(Mapping[str, Any]):
    """A mapping that is filled when it is needed, and pickled as a plain ordered dict.

    `make` describes memory now; `missed(why)` is the record of a state that can no longer be described; `saved(record)` is
    called once, when the state is really written.
    """

    __slots__ = ("__weakref__", "_is_saved", "_make", "_missed", "_record", "_saved", "_thread")

    def __init__(
        self,
        record: Mapping[str, Any] | None = None,
        make: Callable[[], Mapping[str, Any]] = dict,
        missed: Callable[[str], Mapping[str, Any]] = lambda why: {},
        saved: Callable[[Mapping[str, Any]], None] = lambda record: None,
    ) -> None:
        self._record, self._make, self._missed, self._saved = record, make, missed, saved
        self._thread = threading.get_ident()
        self._is_saved = record is not None

    @property
    def is_made(self) -> bool:
        """Whether memory has been described, or can no longer be."""
        return self._record is not None

    @or_else(lambda problem, *_: _failed(problem, _unknown(problem)))
    def made(self) -> Mapping[str, Any]:
        """The record, made now if it was not yet."""
        if self._record is None:
            if threading.get_ident() != self._thread:
                self._record = self._missed("another thread wrote the state while training went on")
            else:
                self._record = self._made_now()
        return self._record

    def _made_now(self) -> Mapping[str, Any]:
        try:
            return self._make()
        except Exception as problem:
            if raised_by_script(problem):
                raise
            return self._missed(f"the guard failed: {reason_of(problem)}")

    def expire(self) -> None:
        """Memory changes now, and nobody described this state before."""
        if self._record is None:
            self._record = self._missed("the state was written only after further optimizer steps")

    def _written(self) -> Mapping[str, Any]:
        record = self.made()
        if not self._is_saved:
            self._is_saved = True
            shield(self._saved, lambda problem: None)(record)
        return record

    def __getitem__(self, key: str) -> Any:
        return self._written()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._written())

    def __len__(self) -> int:
        return len(self._written())

    @or_else(lambda problem, self, *_: _failed(problem, self))
    def __deepcopy__(self, memo: Any) -> "Description":
        self.made()
        return self

    @or_else(lambda problem, *_: _failed(problem, (OrderedDict, (), None, None, iter(_unknown(problem).items()))))
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (OrderedDict, (), None, None, iter(self._written().items()))
