# vLLM need not be installed: all of it is Any to checkers.
from typing import Any

def __getattr__(name: str) -> Any: ...
