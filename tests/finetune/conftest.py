"""One tiny model on disk for all tests of the command, and settings that train it in a second."""

import pytest

from tests.finetune import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Directory of a two-layer Llama with a byte tokenizer, as ``--model`` takes it."""
    return tiny.save(tmp_path_factory.mktemp("base"), chat=True)


@pytest.fixture
def options(base, tmp_path):
    """Arguments of a short run on 24 rows; tests change what they are about."""
    data = tiny.write(tmp_path / "train.jsonl", tiny.rows(24))
    return {
        "model": str(base),
        "data": [str(data)],
        "output_dir": str(tmp_path / "out"),
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["all-linear"],
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
