"""A Hugging Face causal LM from a local directory. Runs where transformers is installed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.hf_files import check_hf_model, has_tokenizer, has_weights
from diloco.inner import InnerConfig, InnerLoop
from diloco.workload import Part, Shard
from diloco.workload_loading import build_checkpointed_module, build_module, build_optimizer, open_batches
from service.errors import InputError
from tests.diloco.agent.conftest import IslandService

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'wadiloco[train,hf]'")

from diloco.hf_causal_lm import HfCausalLM, encode_files

SHARD = Shard(slot=1, num_shards=2, seed=0)
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(1000)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return put_model(tmp_path / "model")


def put_model(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY | changes))
    return directory


def put_tokenizer(directory: Path) -> None:
    """One that knows digits and a few words, saved as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "squared", "is", *map(str, range(10))]
    special: dict[str, Any] = {"unk_token": words[0]}
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, **special))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special, eos_token=words[1])
    tokenizer.save_pretrained(directory)


def workload(model: Path, text: Path, *, context: int = 16) -> HfCausalLM:
    return HfCausalLM(model, data=[text], context=context, batch_size=4)


def losses(model: Path, text: Path, *, steps: int = 40, checkpointed: bool = False) -> list[float]:
    trained = workload(model, text)
    build = build_checkpointed_module if checkpointed else build_module
    module = build(trained, seed=0)
    config = InnerConfig(lr=1e-2, warmup_steps=0)
    inner = InnerLoop(module, config, loss=trained.loss, optimizer=build_optimizer(trained, module, config))
    seen = []
    for batch in islice(open_batches(trained, SHARD, position=0), steps):
        assert inner.take_step(batch)
        assert inner.loss is not None
        seen.append(inner.loss)
    return seen


def test_a_configuration_alone_makes_a_model_from_the_seed_that_learns_bytes(model: Path, text: Path) -> None:
    drawn = [build_module(workload(model, text), seed=seed) for seed in (0, 0, 1)]
    weights = [module.get_parameter("model.embed_tokens.weight") for module in drawn]
    assert {p.dtype for p in drawn[0].parameters()} == {torch.float32}
    assert drawn[0].training
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    seen = losses(model, text)
    assert seen[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.1)
    assert seen[-1] < seen[0] - 1


def test_activation_checkpointing_of_its_decoder_layers_changes_nothing(model: Path, text: Path) -> None:
    assert losses(model, text, steps=5) == losses(model, text, steps=5, checkpointed=True)


def test_weights_in_the_directory_are_where_training_starts(model: Path, text: Path, tmp_path: Path) -> None:
    first: Any = build_module(workload(model, text), seed=7)
    saved = tmp_path / "saved"
    first.save_pretrained(saved)
    assert has_weights(saved)
    again = build_module(workload(saved, text), seed=0)
    assert again.training
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_that_lack_a_part_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    first: Any = build_module(workload(model, text), seed=7)
    first.save_pretrained(tmp_path / "saved")
    deeper = json.loads((tmp_path / "saved" / "config.json").read_text()) | {
        "num_hidden_layers": 3,
        "layer_types": None,
    }
    (tmp_path / "saved" / "config.json").write_text(json.dumps(deeper))
    with pytest.raises(InputError, match=r"lack model\.layers\.2\..* and \d+ others .*complete them"):
        build_module(workload(tmp_path / "saved", text), seed=0)


def test_text_goes_through_the_tokenizer_of_the_directory(model: Path, text: Path) -> None:
    put_tokenizer(model)
    assert has_tokenizer(model)
    text.write_text("12 squared is 144\n" * 100)
    batch = next(open_batches(workload(model, text), SHARD, position=0))
    assert batch.dtype == torch.int64
    assert batch.shape == (4, 17)
    assert set(batch.flatten().tolist()) <= {2, 3, 5, 6, 8, 1}
    tokens = encode_files([text, text], load(model))
    assert tokens.tolist()[:8] == [5, 6, 2, 3, 5, 8, 8, 5]
    assert (tokens == 1).sum() == 2  # one behind each file
    seen = losses(model, text)
    assert seen[-1] < seen[0] - 1


def load(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize("position", [0, 1, 90, 300])
def test_a_position_means_the_same_batches_whenever_it_is_opened(
    model: Path, text: Path, tokenized: bool, position: int
) -> None:
    if tokenized:
        put_tokenizer(model)
    straight = open_batches(workload(model, text), SHARD, position=0)
    resumed = open_batches(workload(model, text), SHARD, position=position)
    for expected, batch in zip(islice(straight, position, position + 20), resumed, strict=False):
        assert torch.equal(expected, batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "has no tokenizer, and a vocabulary of 100 is too small for bytes"),
        ({"model_type": "no_such_model"}, "transformers cannot use the config.json in "),
        ({"max_position_embeddings": 8}, "context: 16 tokens are more than the 8 positions of .*give --context 8"),
        ({"hidden_size": 33, "num_attention_heads": 2}, "transformers cannot use the "),
    ],
)
def test_models_that_cannot_be_used(tmp_path: Path, text: Path, changes: dict[str, Any], message: str) -> None:
    directory = put_model(tmp_path / "other", **changes)
    with pytest.raises(InputError, match=message) as caught:
        losses(directory, text, steps=1)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, text: Path) -> None:
    directory = put_model(tmp_path / "small", vocab_size=5)
    put_tokenizer(directory)
    with pytest.raises(InputError, match=r"hf_model: token 13 is beyond the model's vocabulary of 5"):
        workload(directory, text).batches(SHARD, position=0)


def test_text_that_is_cut_within_a_character_is_refused_with_its_place(model: Path, text: Path) -> None:
    put_tokenizer(model)
    text.write_bytes("naïve".encode()[:3])
    with pytest.raises(InputError, match=r"data: .*text\.txt is not UTF-8 at byte 2: it is cut there.*fetch it anew"):
        workload(model, text).batches(SHARD, position=0)


def test_a_directory_without_a_usable_model_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"hf_model: .*nowhere is no directory"):
        check_hf_model(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no config\.json"):
        check_hf_model(tmp_path)
    pickled = put_model(tmp_path / "pickled")
    (pickled / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"pickled, and a pickle can run code .*safe_serialization"):
        check_hf_model(pickled)


@pytest.fixture
def run_hf(model: Path, text: Path) -> Iterator[Callable[..., IslandService]]:
    running: list[IslandService] = []

    def start(*options: str) -> IslandService:
        shape = ("--hf-model", str(model), "--data", str(text), "--context", "16", "--data-shards", "2")
        running.append(IslandService("island", "--port", "0", "--no-idle-priority", *shape, *options))
        return running[-1]

    yield start
    for service in running:
        service.close()


@pytest.mark.integration
def test_an_island_trains_it_syncs_and_survives_its_worker(
    serve: Callable[..., str], run_hf: Callable[..., IslandService], tmp_path: Path
) -> None:
    options = ("--slot", "0", "--synchronizer", serve(tmp_path / "sync", quorum=1), "--precision", "bf16")
    island = run_hf(*options, "--accumulation-steps", "2", "--activation-checkpointing")
    first = island.until_status(lambda s: s.worker_ready)
    reached = island.until_progress(lambda p: p.step > 10)
    assert reached.tokens >= 10 * 2 * 4 * 16
    assert first.worker_pid is not None
    os.kill(first.worker_pid, signal.SIGKILL)
    island.until_status(lambda s: s.worker_ready and s.worker_pid != first.worker_pid)
    island.until_progress(lambda p: p.step > reached.step + 10 and p.restarts == 1)
    assert island.terminate() == 0


def test_ranks_share_out_the_rows_of_a_batch(model: Path, text: Path) -> None:
    trained = workload(model, text)
    whole = trained.rank_batches(SHARD, Part(), position=3)
    parts = [trained.rank_batches(SHARD, Part(rank=rank, num_ranks=2), position=3) for rank in range(2)]
    for _ in range(5):
        first, second = (next(part) for part in parts)
        assert torch.equal(torch.stack([first, second], dim=1).flatten(0, 1), next(whole))
