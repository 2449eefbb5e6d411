from typing import Any

SuffixDecodingCache: Any
