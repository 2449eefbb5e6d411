"""Triton's interpreter with less to do again: it computes the same.

A call of a function within a kernel looks for every operation of `triton.language` again, to replace it by the
interpreter's, though the launch of the kernel has done so. Each operation makes a table of all types, to look one up.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Within a launch replace the operations of a module once, and look each type's numpy type up once."""
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
            return None  # only a launch, which is the first, uses what is returned
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
