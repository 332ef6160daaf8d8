"""The built-in workload for a Hugging Face causal LM: a local directory with a config.json, local text.

With weights in the directory training goes on from them, without them from what the seed draws. Text goes through the
directory's tokenizer, each file followed by its end-of-sequence token; without a tokenizer tokens are bytes. The token
stream is cut, ordered and resumed like the bytes of the built-in GPT (`diloco.data`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diloco.corpus import corpus_files
from diloco.data import TokenStream, load_corpus, read_whole, shown_source
from diloco.hf_files import FIELD, check_hf_model, has_tokenizer, has_weights
from diloco.model import VOCAB_SIZE
from diloco.workload import Part, Shard, Workload, rows_of
from service.errors import InputError, WadilocoError

logger = logging.getLogger(__name__)


class HfCausalLM(Workload[Tensor]):
    """Batches are (batch, context + 1) tokens, int64."""

    def __init__(self, directory: Path, *, data: Sequence[Path], context: int, batch_size: int) -> None:
        """``data``: text files or folders of them; none takes Python's own library.

        Raises:
            UnavailableError: transformers is not installed.
            InputError: the directory has no model that can be used, or the model has not so long a context.
        """
        check_hf_model(directory)
        # A tokenizer's threads would take cores that --cores and --threads keep for others.
        for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
            os.environ.setdefault(name, value)
        self._directory = directory
        self._data = data
        self._context = context
        self._batch_size = batch_size
        self._config = _load_config(directory)
        longest = getattr(self._config, "max_position_embeddings", None)
        if longest is not None and context > longest:
            raise InputError(
                f"{context} tokens are more than the {longest} positions of {directory}",
                field="context",
                remedy=f"give --context {longest} or less",
            )

    def build_model(self, *, seed: int) -> nn.Module:
        """The model in fp32, its trained weights or such as torch's generator draws.

        Raises:
            InputError: transformers cannot make it.
        """
        with _blamed(self._directory, "model"):
            model = self._trained() if has_weights(self._directory) else self._drawn(seed)
        module: nn.Module = model.train()
        return module

    def _trained(self) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as progress

        progress.disable_progress_bar()
        logger.info("weights come from model=%s", self._directory)
        model, found = AutoModelForCausalLM.from_pretrained(
            self._directory,
            config=self._config,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
        missing = sorted(found["missing_keys"])
        if missing:
            raise InputError(
                f"the weights in {self._directory} lack {missing[0]} and {len(missing) - 1} others",
                field=FIELD,
                remedy="complete them, or remove them to begin with what the seed draws",
            )
        return model

    def _drawn(self, seed: int) -> Any:
        from transformers import AutoModelForCausalLM

        logger.info("no weights in model=%s, so they are drawn seed=%d", self._directory, seed)
        return AutoModelForCausalLM.from_config(self._config, trust_remote_code=False, dtype=torch.float32)

    def batches(self, shard: Shard, *, position: int) -> TokenStream:
        """The slot's token stream.

        Raises:
            InputError: the data or the tokenizer cannot be read, they do not go with the model, or the data is too
                little for so many shards.
        """
        corpus, unit = self._tokens()
        largest, vocab_size = int(corpus.max()), self._vocab_size()
        if largest >= vocab_size:
            raise InputError(
                f"token {largest} is beyond the model's vocabulary of {vocab_size}",
                field=FIELD,
                remedy="use the tokenizer that the model was made with, or set vocab_size in its config.json",
            )
        return TokenStream(
            corpus,
            slot=shard.slot,
            num_shards=shard.num_shards,
            seed=shard.seed,
            batch_size=self._batch_size,
            length=self._context,
            position=position,
            source=shown_source(self._data),
            unit=unit,
        )

    def rank_batches(self, shard: Shard, part: Part, *, position: int) -> Iterator[Tensor]:
        """The rank's rows of the batches: however many ranks there are, the island trains on the same."""
        return rows_of(self.batches(shard, position=position), part)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy (nats per token) of predicting batch[:, 1:]."""
        logits: Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def count_tokens(self, batch: Tensor) -> int:
        """Those that are predicted."""
        return batch[:, 1:].numel()

    def checkpointed_layers(self, model: nn.Module) -> Iterable[nn.Module]:
        """The decoder layers: what transformers says may not be split over devices."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        return [module for module in model.modules() if type(module).__name__ in names]

    def _vocab_size(self) -> int:
        """Of the text part, where the model has more."""
        return int(self._config.get_text_config().vocab_size)

    def _tokens(self) -> tuple[Tensor, str]:
        """The corpus in tokens of the model, and what one is called."""
        if not has_tokenizer(self._directory):
            if self._vocab_size() < VOCAB_SIZE:
                raise InputError(
                    f"{self._directory} has no tokenizer, and a vocabulary of {self._vocab_size()} is too small for"
                    " bytes",
                    field=FIELD,
                    remedy=f"put its tokenizer.json there, or set vocab_size to at least {VOCAB_SIZE}",
                )
            return load_corpus(self._data), "bytes"
        tokenizer = _load_tokenizer(self._directory)
        return encode_files(corpus_files(self._data), tokenizer), "tokens"


def encode_files(files: Iterable[Path], tokenizer: Any) -> Tensor:
    """The tokens of the files, int32, each file with an end-of-sequence token behind it where there is one.

    Raises:
        InputError: a file cannot be read, or is no UTF-8.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = []
    for file in files:
        tokens = tokenizer(decode_text(read_whole(file), file), add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(torch.tensor(tokens + end, dtype=torch.int32))
    corpus = torch.cat(parts)
    if not corpus.numel():
        raise InputError("the tokenizer makes no token of the text", field="data", remedy="give more text")
    return corpus


def decode_text(content: bytes, file: Path) -> str:
    """UTF-8 as text.

    Raises:
        InputError: it is something else, or cut within a character.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise InputError(
            f"{file} is not UTF-8 at byte {exc.start}: it is cut there, or in another encoding",
            field="data",
            remedy="fetch it anew or convert it, or leave it out",
        ) from exc


def _load_config(directory: Path) -> Any:
    from transformers import AutoConfig

    with _blamed(directory, "config.json"):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    with _blamed(directory, "tokenizer"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


@contextmanager
def _blamed(directory: Path, what: str) -> Iterator[None]:
    """Whatever transformers raises about a part of the directory is the fault of that part, in one line.

    Raises:
        InputError: it raised.
    """
    try:
        yield
    except WadilocoError:
        raise
    except Exception as exc:
        logger.exception("cannot load %s of %s", what, directory)
        first = next(iter(str(exc).splitlines()), "")
        raise InputError(
            f"transformers cannot use the {what} in {directory}: {type(exc).__name__}: {first}",
            field=FIELD,
            remedy="correct the directory: the trace is in the log",
        ) from exc
