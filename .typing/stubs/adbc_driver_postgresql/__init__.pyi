from enum import Enum

class StatementOptions(Enum):
    BATCH_SIZE_HINT_BYTES = ...
