"""Hooks of the guard and `torch.compile`: no hook is ever traced, and calls of a compiled model are seen from outside.

A hook on a module or optimizer is Python code that runs inside the compiled call. Dynamo would trace it (`hashlib` ends a
`fullgraph=True` run), break the graph, or compile it as frames of its own until the recompile limit warns. So:

- `outside_graphs` makes a hook that does nothing while it is traced, and is skipped by frame evaluation where it really runs.
- `see_compiled_calls` looks at the arguments of a compiled model before dynamo gets them. `torch.compile(model)` makes an
  `OptimizedModule`, whose `__call__` is ordinary Python; `model.compile()` sets `_compiled_call_impl`.

A model that is called inside a compiled function (`torch.compile(train_step)`) cannot be seen: nothing is said about it.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from chronicle.resume.faults import shield
from chronicle.resume.patches import around, change, change_object, is_changed, marked

See = Callable[[Any, Any, Any], None]  # called as a hook on a module is
_SEES: "weakref.WeakKeyDictionary[Any, See]" = weakref.WeakKeyDictionary()  # by inner model
_known: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # OptimizedModule -> reference to the model


def outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `hook` only outside of graphs; when dynamo traces it, it is empty."""
    from torch import compiler

    undisturbed = import_module("torch._dynamo").disable(hook)  # the first optimizer of a process imports it anyway

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        if not compiler.is_compiling():
            undisturbed(*args, **kwargs)

    skip_in_graphs(guarded)
    return guarded


def on_gradient(hook: Callable[..., None], failed: Callable[[Exception], Any]) -> Callable[..., None]:
    """A hook on the gradient of a parameter. `failed` hears of an error in it."""
    made = outside_graphs(shield(hook, failed))
    made.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning when the model is saved whole
    return made


def _without_transforms(hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """In `vmap`, `grad` and other transforms of `torch.func` each operation makes a wrapped tensor; within this none does."""
    context: Any = contextlib.nullcontext()
    if sys.modules["torch"]._C._functorch.peek_interpreter_stack() is not None:
        context = sys.modules["torch._functorch.pyfunctorch"].temporarily_clear_interpreter_stack()
    with context:
        hook(*args, **kwargs)


class ModelHook:
    """A hook on a model. A pickle of the model, or a copy, holds a function in its place that does nothing.

    So a model that is saved whole can be loaded where chronicle is not installed, and its copy is not watched. `failed` hears
    of an error in it.
    """

    def __init__(self, hook: Callable[..., None], failed: Callable[[Exception], Any]) -> None:
        whole: Callable[..., None] = functools.partial(_without_transforms, hook)
        self._hook = outside_graphs(shield(whole, failed))
        skip_in_graphs(ModelHook.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


def see_compiled_calls(model: Any, see: See) -> None:
    """From now on `see(model, args, kwargs)` is called before every call of a compiled form of `model`.

    It does not matter whether the model is compiled before or after this, alone or inside a wrapper such as DDP.
    """
    _SEES[model] = see
    _patch()
    _known.clear()
    see_own_compilation(model)


def see_own_compilation(module: Any) -> None:
    """After `module.compile()`: look at its calls, if it is or contains a model that is watched."""
    compiled = module.__dict__.get("_compiled_call_impl")
    if compiled is None or is_changed(compiled) or _watched_in(module) is None:
        return
    owner = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(owner(), args, kwargs)
        return compiled(*args, **kwargs)

    before = outside_graphs(_before_call)
    change_object(module, "_compiled_call_impl", marked(skip_in_graphs(call)))


def compiled_part(model: Any) -> Any:
    """The model inside an `OptimizedModule`; any other model itself."""
    return model.__dict__.get("_modules", {}).get("_orig_mod", model)


def _held(module: Any) -> Any:
    """The watched model that a compiled module holds, or None; it is looked up once."""
    known = None if module is None else _known.get(module)
    if known is None and module is not None:
        found = _watched_in(module)
        _known[module] = known = (lambda: None) if found is None else weakref.ref(found)
    return None if known is None else known()


def _before_call(module: Any, args: Any, kwargs: Any) -> None:
    """A compiled module is called."""
    model = _held(module)
    if model is not None:
        _SEES[model](model, args, kwargs)


def _watched_in(module: Any) -> Any:
    return next((inner for inner in compiled_part(module).modules() if inner in _SEES), None)


def _patch() -> None:
    """Wrap two methods of torch (`patches.py`). Instances are not touched: a model can still be copied and pickled."""
    import_module("torch._dynamo")
    change("compiled models", _looking)
    change("compilation", functools.partial(around, after=_compiled))


def _compiled(result: None, given: None, module: Any, *_: Any, **__: Any) -> None:
    see_own_compilation(module)


def _looking(original: Any) -> Any:
    before = outside_graphs(_before_call)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, args, kwargs)
        return original(self, *args, **kwargs)

    return skip_in_graphs(__call__)


def skip_in_graphs(function: Any) -> Any:
    """The function itself, whose own frame frame evaluation leaves alone; its callees are compiled as before."""
    import_module("torch._dynamo.eval_frame").skip_code(function.__code__)
    return function
