# pyarrow ships no types, and generates pyarrow.compute when it is imported: all of it is Any to checkers.
from typing import Any

def __getattr__(name: str) -> Any: ...
