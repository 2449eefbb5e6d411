"""A faster Triton interpreter with the same results.

Triton's interpreter replaces all operations of `triton.language` by its own at each call of a function within a kernel,
although the launch has done so already, and builds a table of all types at each look-up of a type.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Replace the operations of a module once in a launch, and look up the numpy type of each Triton type once."""
    from triton.runtime import interpreter

    launch, replace_operations = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done_in_launch: set[frozenset[str]] = set()

    def launched(executor, *arguments, **options) -> None:
        done_in_launch.clear()
        try:
            launch(executor, *arguments, **options)
        finally:
            done_in_launch.clear()

    modules_of: dict[Callable, frozenset[str]] = {}

    def replaced_once(function: Callable):
        modules = modules_of.get(function)
        if modules is None:
            named = {module.__name__ for module in function.__globals__.values() if inspect.ismodule(module)}
            modules = modules_of[function] = frozenset(named & {"triton.language", "triton.language.core"})
        if modules in done_in_launch:
            return None  # only the launch, which comes first, uses the returned scope
        scope = replace_operations(function)
        done_in_launch.add(modules)
        return scope

    look_up, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type(triton_type):
        name = triton_type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = look_up(triton_type)
        return numpy_types[name]

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.multiple(interpreter, _patch_lang=replaced_once, _get_np_dtype=numpy_type),
    ):
        yield
