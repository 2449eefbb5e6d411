"""What settings and manifests are made of: pydantic's models, or where an engine has no pydantic our own few lines."""

try:
    from pydantic import BaseModel, Field, ValidationError
    from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12
except ImportError:
    from typing import TypedDict

    from laserbatch.retrieval_pools.plain_records import BaseModel, Field, ValidationError

__all__ = ["BaseModel", "Field", "TypedDict", "ValidationError"]
