"""CSV files of any format, read as text in batches; what is in doubt is counted, shown or refused (`csv_faults.py`)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.csv_faults import (
    Doubts,
    encoding_doubt,
    encoding_fault,
    open_lines,
    python_reader,
    quote_fault,
)
from laserbatch.pipeline.tables.settings import FileFormat, SourceFiles


def read_csv(path: Path, files: SourceFiles, note: Callable[[str], object]) -> Iterator[pa.RecordBatch]:
    """A CSV as text columns: nothing is guessed, so the zip code 01234 stays one."""
    form = files.csv_format(path)
    delimiter = form.delimiter
    converted = None
    if len(delimiter) > 1:  # MovieLens' `::`
        with pa.input_stream(str(path)) as raw:
            converted = pa.py_buffer(raw.read().replace(delimiter.encode(form.encoding), b"\x1f"))
        delimiter = "\x1f"

    def opened() -> pa.NativeFile:
        return pa.input_stream(str(path)) if converted is None else pa.BufferReader(converted)

    form = replace(form, delimiter=delimiter)
    names = files.column_names
    if names is None:
        with open_lines(opened(), form.encoding) as lines:
            names = next(filter(None, python_reader(lines, form)), [])  # Arrow too passes empty lines over
    read = pacsv.ReadOptions(encoding=form.encoding, column_names=files.column_names)
    parse = pacsv.ParseOptions(
        delimiter=delimiter,
        quote_char=form.quote or False,
        escape_char=form.escape or False,
        newlines_in_values=bool(form.quote or form.escape),
    )
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=["", *form.null_values]
    )
    doubts, num_rows = Doubts(path, form), 0

    def tell(*more: str | None) -> None:
        for doubt in filter(None, (*doubts.notes(), encoding_doubt(path, form.encoding), *more)):
            note(doubt)

    try:
        with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
            for rows in reader:
                doubts.add(rows, num_rows)
                num_rows += rows.num_rows
                yield rows
    except pa.ArrowInvalid:
        read.use_threads = False  # one thread says in which row it was
        with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
            for _ in reader:
                pass
        raise
    except GeneratorExit:  # who looks at the first rows alone is told of what those leave in doubt
        tell(form.quote and quote_fault(path, form))
        raise
    tell()
    if form.quote and (fault := quote_fault(path, form, is_sure=doubts.over_lines.num > 0)):
        raise TableError(fault)


def csv_fault(path: Path, form: FileFormat, error: Exception) -> str | None:
    """Why a CSV cannot be read, where its encoding or its quotes say so."""
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return encoding_fault(path, form.encoding)
    return quote_fault(path, form) if form.quote and not isinstance(error, OSError) else None
