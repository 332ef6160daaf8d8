"""What the directory of a Hugging Face causal LM holds; needs no numerics, so that an agent can look before a worker.

Everything is read from the directory alone, nothing is downloaded, and no code in it is run. Weights are taken from
safetensors: a pickle could run code.
"""

from __future__ import annotations

from pathlib import Path

from service.errors import InputError
from service.extras import require_extra

FIELD = "hf_model"
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_hf_model(directory: Path) -> None:
    """See that transformers is installed and that the directory has a configuration, and no weights but safetensors.

    Raises:
        UnavailableError: transformers is not installed.
        InputError: the directory cannot be used.
    """
    require_extra("hf")
    if not (directory / CONFIG).is_file():
        raise InputError(
            f"{directory} has no {CONFIG}" if directory.is_dir() else f"{directory} is no directory",
            field=FIELD,
            remedy="give the directory of a model that save_pretrained wrote, or one with a config.json alone",
        )
    if not has_weights(directory) and any((directory / name).exists() for name in PICKLED):
        raise InputError(
            f"the weights in {directory} are pickled, and a pickle can run code",
            field=FIELD,
            remedy="save the model again with save_pretrained(…, safe_serialization=True)",
        )


def has_weights(directory: Path) -> bool:
    """Whether there are trained weights; without them the model is drawn from the seed."""
    return any((directory / name).is_file() for name in WEIGHTS)


def has_tokenizer(directory: Path) -> bool:
    """Whether text is for the directory's own tokenizer; without one tokens are bytes."""
    return any((directory / name).is_file() for name in TOKENIZERS)
