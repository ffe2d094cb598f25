"""One tiny model on disk for all tests of the command."""

import pytest

from tests.finetune import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Directory of a two-layer Llama with a byte tokenizer, as `--model` takes it."""
    return tiny.save(tmp_path_factory.mktemp("base"), chat=True)


@pytest.fixture
def options(base, tmp_path):
    """`tiny.options` in a directory of the test's own."""
    return tiny.options(base, tmp_path)
