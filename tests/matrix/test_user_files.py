"""``--config-dir``: a user adds models, machines and suites by adding files; a shipped file is never shadowed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ndbench.matrix.expand import expand
from ndbench.matrix.sources import find_sources
from tests.matrix.conftest import Write

MODEL = """
name: mine
model_type: llama
vocab_size: 512
hidden_size: 32
intermediate_size: 64
num_hidden_layers: 1
num_attention_heads: 4
num_key_value_heads: 2
"""


def test_a_users_model_file_is_a_model(user: Write, tmp_path: Path) -> None:
    user("model/mine.yaml", MODEL)
    matrix = expand(["model=mine", "parallelism=fsdp_tp", "hardware=cpu"], tmp_path)
    assert matrix.cells[0].config.model.vocab_size == 512
    assert matrix.cells[0].config.model.head_dim == 8


def test_a_users_file_may_start_from_a_shipped_one(user: Write, tmp_path: Path) -> None:
    user("model/wide.yaml", "defaults: [llama_tiny, _self_]\nname: wide\nhidden_size: 128\n")
    model = expand(["model=wide", "hardware=cpu"], tmp_path).config.model
    assert (model.name, model.hidden_size, model.num_hidden_layers) == ("wide", 128, 2)


@pytest.mark.parametrize("folder", ["suites", "suite"])
def test_a_users_suite_file_is_a_suite(user: Write, tmp_path: Path, folder: str) -> None:
    user(f"{folder}/ours.yaml", "settings: {all: {world_size: 2}}\nlayouts: {2: [ddp2, tp2]}\n")
    matrix = expand(["suite=ours", "hardware=cpu"], tmp_path)
    assert matrix.suite == "ours"
    assert [cell.name for cell in matrix.cells] == ["ddp2", "tp2"]


def test_a_users_machine_is_hardware_with_any_number_of_devices(user: Write, tmp_path: Path) -> None:
    user("hardware/ours.yaml", "name: ours\ndevice: cuda\nmemory_bytes: 500000000000\ngpus_per_node: 4\n")
    matrix = expand(["hardware=ours_x8", "parallelism=tp", "model=llama_8b"], tmp_path, here=False)
    assert matrix.cells[0].world_size == 8
    assert matrix.warnings == [
        "tp8: a tp group spans 8 ranks and crosses hardware.gpus_per_node 4: its traffic leaves the node"
    ]


@pytest.mark.parametrize(
    "name", ["model/llama_tiny.yaml", "suites/smoke.yaml", "suite/smoke.yaml", "hardware/cpu.yaml"]
)
def test_a_users_file_named_like_a_shipped_one_is_refused_naming_both(user: Write, tmp_path: Path, name: str) -> None:
    path = user(name, "name: x\n")
    with pytest.raises(ValueError) as refused:
        find_sources(tmp_path)
    shipped = path.name
    assert str(path) in str(refused.value)
    assert str(refused.value).count(shipped) == 2
    assert "\n" not in str(refused.value)


def test_a_root_config_of_the_users_is_refused_too(user: Write, tmp_path: Path) -> None:
    user("config.yaml", "{}")
    with pytest.raises(ValueError, match=r"config\.yaml has the name of .*config\.yaml"):
        find_sources(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        find_sources(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden_sze: 3\n", r"model/bad\.yaml: .*hidden_sze.*did you mean model\.hidden_size"),
        ("hidden_size: many\n", r"model/bad\.yaml: .*hidden_size"),
        ("hidden_size: [\n", r"bad\.yaml"),
        ("hidden_size: -3\n", r"hidden_size=-3 must be at least 1.*bad\.yaml"),
        ("defaults: [llama_tiny]\nhf: {a: .nan}\n", r"model\.hf\.a is nan.*bad\.yaml"),
        ("model_type: llama\nvocab_size: 8\n", r"model=.* lacks model\.hidden_size"),
    ],
)
def test_a_mistake_in_a_users_file_is_one_line(user: Write, tmp_path: Path, text: str, said: str) -> None:
    user("model/bad.yaml", text)
    with pytest.raises(ValueError, match=said) as refused:
        expand(["model=bad", "hardware=cpu"], tmp_path)
    assert "\n" not in str(refused.value)


def hugging_face_folder(tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "my llama"
    folder.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 12345.0,
        "bos_token_id": 1,
        "transformers_version": "5.20.0",
    }
    (folder / "config.json").write_text(json.dumps(shape | changes))
    return folder


@pytest.mark.parametrize("key", ["model", "model.path"])
def test_a_hugging_face_folder_gives_the_shape(tmp_path: Path, key: str) -> None:
    folder = hugging_face_folder(tmp_path)
    text = f"{key}={folder}" if key == "model.path" else f"{key}='{folder}'"
    model = expand([text, "hardware=cpu", "parallelism=ddp", "model.num_hidden_layers=1"]).config.model
    assert model.name == "my llama"
    assert (model.vocab_size, model.hidden_size, model.num_key_value_heads, model.head_dim) == (320, 48, 2, 8)
    assert model.num_hidden_layers == 1, "the command line wins over the folder"
    assert model.hf == {"rope_theta": 12345.0}


def test_a_folders_model_is_built_as_the_record_tells_it(tmp_path: Path) -> None:
    from ndbench.measure.shape import shape_of
    from ndbench.training.models import transformers_config

    folder = hugging_face_folder(tmp_path, layer_types=["full_attention"] * 3)
    for layers in (1, 3):
        model = expand([f"model.path={folder}", "hardware=cpu", f"model.num_hidden_layers={layers}"]).config.model
        built, shape = transformers_config(model), shape_of(model)
        assert shape is not None
        assert (model.num_hidden_layers, built.num_hidden_layers, shape.layers) == (layers, layers, layers)
        assert len(built.layer_types) == layers
    model.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"num_hidden_layers 4, but layer_types names 3"):
        transformers_config(model)


def test_another_name_of_a_schema_key_in_hf_is_refused() -> None:
    from ndbench.config import ModelConfig
    from ndbench.training.models import transformers_config

    with pytest.raises(ValueError, match=r"^model\.hf\.n_layer: use model\.num_hidden_layers$"):
        transformers_config(ModelConfig(model_type="gpt2", num_hidden_layers=2, hf={"n_layer": 1}))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", r"model\.sliding_window=8: 'llama' has no sliding window"),
        ("qwen3", r"model\.sliding_window=8: 'qwen3' has a window with \+model\.hf\.use_sliding_window=true only"),
    ],
)
def test_a_window_that_the_model_would_not_have_is_refused(kind: str, said: str) -> None:
    from ndbench.config import ModelConfig
    from ndbench.training.models import transformers_config

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    with pytest.raises(ValueError, match=said):
        transformers_config(ModelConfig(model_type=kind, **sizes, **heads))
    made = transformers_config(ModelConfig(model_type="mistral", **sizes, **heads))
    assert made.sliding_window == 8


def test_a_folder_and_a_shape_by_name_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both give the shape"):
        expand(["model=llama_tiny", f"model.path={hugging_face_folder(tmp_path)}", "hardware=cpu"])


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a regular file"),
        ("[" * 100_000, r"config\.json cannot be read"),
        (f'{{"vocab_size": {"9" * 6000}}}', r"config\.json cannot be read"),
        ("5", "is not a mapping"),
    ],
    ids=["pipe", "nested", "digits", "number"],
)
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    if text is None:
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        expand([f"model.path={tmp_path}", "hardware=cpu"])


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        expand([f"model.path={tmp_path}", "hardware=cpu"])


def test_a_target_needs_a_vocabulary_and_takes_a_plan() -> None:
    with pytest.raises(ValueError, match=r"needs model\.vocab_size"):
        expand(["model.target=mine:build", "hardware=cpu"])
    matrix = expand(
        [
            "model.target=mine:build",
            "model.vocab_size=64",
            "model.tp_plan={layers.*.up: colwise, layers.*.down: rowwise}",
            "parallelism=fsdp_tp",
            "hardware=cpu",
        ]
    )
    model = matrix.config.model
    assert model.name == "build"
    assert model.tp_plan == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    assert model.hidden_size is None
