"""Fixtures over the small tokenizers."""

import pytest
from small_tokenizers import KINDS
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session", params=list(KINDS))
def any_tokenizer(request) -> PreTrainedTokenizerFast:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return KINDS["thinking"]()
