"""What is exported is what transformers loads, with the engine's logits; what transformers saves is read by slices."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ndbench.config import ModelConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.training.models import transformers_config
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.pool import pool
from tests.state import ranks
from tests.state.test_damage import Bomb
from tests.state.whole import assemble

EIGHT_HEADS = llama(num_key_value_heads=8)
TIED = replace(EIGHT_HEADS, tie_word_embeddings=True)
QWEN3 = replace(EIGHT_HEADS, model_type="qwen3", head_dim=8, tie_word_embeddings=True)
GEMMA = replace(EIGHT_HEADS, model_type="gemma", head_dim=16, tie_word_embeddings=True)
LARGE = 5 * 10**9


def of(parallelism: ParallelismConfig, model: ModelConfig = EIGHT_HEADS) -> Case:
    return case(parallelism, model, training=training(learning_rate=0.1), silent=0)


def in_transformers(folder: Path) -> tuple[Any, torch.Tensor]:
    """The folder in plain transformers, with its eager attention, and its logits."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    transformers.utils.logging.set_verbosity(before)
    assert not any(info.values()), info
    with torch.no_grad():
        return loaded, loaded.eval()(input_ids=ranks.tokens(of(layout()))).logits


def keys(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found += file.keys()
    return found


@pytest.mark.parametrize(
    ("parallelism", "model", "max_bytes"),
    [
        (layout(), EIGHT_HEADS, LARGE),
        (layout(2, 2, 1, 2), EIGHT_HEADS, 60_000),
        (layout(tp=4), TIED, LARGE),
        (layout(1, 2), TIED, 40_000),
        (layout(1, 2, 1, 2, cpu_offload=True), QWEN3, LARGE),
        (layout(tp=2), GEMMA, 60_000),
        (layout(cp=2), EIGHT_HEADS, LARGE),
    ],
    ids=lambda value: value.layout if isinstance(value, ParallelismConfig) else None,
)
def test_logits_in_transformers_are_the_engines(
    parallelism: ParallelismConfig, model: ModelConfig, max_bytes: int, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    done = pool(parallelism.world_size).run(ranks.export, of(parallelism, model), folder, max_bytes)
    loaded, logits = in_transformers(folder)
    weights = dict(loaded.named_parameters())
    for name, whole in assemble([held for held, _ in done]).items():
        assert torch.equal(whole, weights[name]), name  # type: ignore[arg-type]
    if parallelism.cp_size == 1:
        parts = [each for _, each in done[: parallelism.tp_size]]
        whole_logits = torch.cat(parts, dim=-1) if parts[0].shape != logits.shape else parts[0]
        torch.testing.assert_close(whole_logits, logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    names = keys(folder)
    assert sorted(names) == sorted(weights)  # tied ones once
    if max_bytes == LARGE:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        assert sorted(set(index["weight_map"].values())) == files
        assert len(files) > 1
        for file in files:
            tensors = load_file(folder / file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= max_bytes
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [""]


def test_a_checkpoint_in_this_mode_is_loaded_by_transformers(tmp_path: Path) -> None:
    before = pool(4).run(ranks.save, of(layout(tp=4), TIED), tmp_path, "hf", 1)
    (path,) = tmp_path.iterdir()
    loaded, _ = in_transformers(path)
    whole = assemble([each["held"] for each in before])
    for name, weight in loaded.named_parameters():
        assert torch.equal(whole[name], weight), name  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model as transformers itself saves it, in several files."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(EIGHT_HEADS))
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    "parallelism", [layout(1, 8), layout(tp=4), layout(1, 2, 1, 2, cpu_offload=True)], ids=lambda value: value.layout
)
def test_each_rank_reads_its_slices_only(
    parallelism: ParallelismConfig, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, expected = saved
    done = pool(parallelism.world_size).run(ranks.load_exported, of(parallelism), folder)
    for name, whole in assemble([held for _, held, _ in done]).items():
        assert torch.equal(whole, expected[name]), name  # type: ignore[arg-type]
    for text, held, read in done:
        assert text == ""
        assert read == sum(piece[2].nbytes for piece in held.values() if piece is not None)
    total = sum(weight.nbytes for weight in expected.values())
    assert max(read for _, _, read in done) < 1.1 * total / parallelism.world_size + 5 * 64 * 4


def test_tied_weights_are_read_under_either_name_and_in_another_dtype(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(transformers_config(TIED)).bfloat16()
    state = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for text, held, _ in pool(2).run(ranks.load_exported, of(layout(tp=2), TIED), tmp_path):
        assert text == ""
        offset, _, values = held["model.embed_tokens.weight"]
        assert torch.equal(values, state["lm_head.weight"][offset[0] : offset[0] + len(values)].float())


def no_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "trace")))


def a_shard_less(folder: Path) -> None:
    next(folder.glob("model-00002-of-*")).unlink()


def a_shard_cut(folder: Path) -> None:
    path = next(folder.glob("model-00002-of-*"))
    path.write_bytes(path.read_bytes()[:-8])


def a_shard_of_pickle(folder: Path) -> None:
    next(folder.glob("model-00002-of-*")).write_bytes(pickle.dumps(Bomb(folder / "trace")))


def index_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002", "../model-00002"))


def index_broken(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def one_more(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "more.safetensors"
    path.write_text(json.dumps(index))
    save_file({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, folder / "more.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_files, "model.safetensors is missing; pytorch_model.bin is a pickle, which is never loaded"),
        (a_shard_less, "model-00002-of-"),
        (a_shard_cut, "model-00002-of-"),
        (a_shard_of_pickle, "model-00002-of-"),
        (index_outside, "model.safetensors.index.json names the file '../model-00002"),
        (index_broken, "model.safetensors.index.json is not an index"),
        (one_more, "is not of this model, which lacks model.layers.9.mlp.up_proj.weight"),
    ],
)
def test_a_folder_that_is_not_right_is_refused(
    damage: Callable[[Path], None], words: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    for text, held, _ in pool(2).run(ranks.load_exported, of(layout(1, 2)), tmp_path):
        assert words in text
        assert all(bool((piece[2] == 7.0).all()) for piece in held.values() if piece is not None)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(EIGHT_HEADS, num_hidden_layers=3), "it lacks model.layers.2.input_layernorm.weight and 8 more"),
        (replace(EIGHT_HEADS, num_hidden_layers=1), "which lacks model.layers.1.input_layernorm.weight and 8 more"),
        (replace(EIGHT_HEADS, intermediate_size=80), "has shape [96, 64], this model's has [80, 64]"),
    ],
)
def test_weights_of_another_model_are_refused(
    other: ModelConfig, words: str, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    for text, _, _ in pool(2).run(ranks.load_exported, of(layout(1, 2), other), saved[0]):
        assert text.startswith(f"{saved[0]} is not of this model")
        assert words in text


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "mine").touch()
    with pytest.raises(RuntimeError, match="exported exists already: nothing is overwritten"):
        pool(2).run(ranks.export, of(layout(1, 2)), tmp_path / "exported", LARGE)
    assert [path.name for path in (tmp_path / "exported").iterdir()] == ["mine"]
