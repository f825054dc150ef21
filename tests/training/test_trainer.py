"""A resumed run is the run that was never killed, bit for bit; evaluation is one number whatever the layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ndbench.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.training.data import IGNORED, build_split
from tests.parity import reference
from tests.parity.cases import Case, layout
from tests.parity.pool import pool
from tests.training import trainer_tasks as tasks

MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.1,
)
N, M, AT = 5, 4, 4
"""Killed before step N + 1, the last checkpoint is of step AT; then up to N + M."""


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Files of 20 to 110 bytes."""
    files = [tmp_path / f"{number}.txt" for number in range(16)]
    for number, file in enumerate(files):
        file.write_text("".join(f"{number} times {n} is {number * n}. " for n in range(1 + number * 7 % 6)))
    return [str(file) for file in files]


def config(text: list[str], parallelism: ParallelismConfig, **changes: Any) -> Config:
    """Eight sequences of 16 bytes a step in micro-steps of one, of a text with about 40 such sequences an epoch."""
    return Config(
        model=MODEL,
        parallelism=parallelism,
        training=TrainingConfig(
            steps=N + M,
            global_batch_size=8,
            micro_batch_size=1,
            sequence_length=16,
            learning_rate=1e-2,
            schedule="cosine",
            warmup_steps=2,
        ),
        data=DataConfig(name="text", files=text, valid_fraction=0.7),
        evaluation=EvaluationConfig(every=3, batches=1, fraction=0.1),
        world_size=parallelism.world_size,
        **({"checkpoint": CheckpointConfig(every=2)} | changes),
    )


LAYOUTS = {
    "ddp": layout(4),
    "fsdp": layout(1, 4),
    "fsdp_cp": layout(1, 2, 2),
    "offload": layout(1, 4, cpu_offload=True),
    "hsdp_tp": layout(2, 2, 1, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_run_goes_on_bit_for_bit_and_reads_no_sequence_twice(
    name: str, text: list[str], tmp_path: Path
) -> None:
    made = config(text, LAYOUTS[name])
    ranks = pool(LAYOUTS[name].world_size)
    whole = ranks.run(tasks.train, made, str(tmp_path / "whole"))
    killed = ranks.run(tasks.train, made, str(tmp_path / "cut"), N + 1)
    resumed = ranks.run(tasks.train, dataclasses.replace(made, resume="auto"), str(tmp_path / "cut"))
    assert [each["began"] for each in resumed] == [AT] * len(resumed)
    assert killed[0]["read"] == [step * 8 for step in range(N)]
    assert resumed[0]["read"] == [step * 8 for step in range(AT, N + M)], "where the checkpoint was, none left out"
    epoch = build_split(made)[0].sequences
    assert epoch is not None
    assert AT * 8 < epoch < (N + M - 1) * 8, "killed in the middle of the first epoch, ended in the second"
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"])
    for one, other in zip(whole[0]["log"], resumed[0]["log"], strict=True):
        for key in ("step", "loss", "grad_norm", "learning_rate", "tokens", "epoch", "validation_loss"):
            assert one.get(key) == other.get(key), (key, one["step"])
    assert [line["step"] for line in resumed[0]["log"]] == list(range(1, N + M + 1))
    assert resumed[0]["outcome"].checkpoint == str(tmp_path / "cut" / f"step-{N + M:08d}")


def test_a_checkpoint_of_other_data_is_refused_and_left_alone(text: list[str], tmp_path: Path) -> None:
    made = config(text, layout())
    pool(1).run(tasks.train, made, str(tmp_path / "run"))
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    other = dataclasses.replace(made, resume="auto", data=dataclasses.replace(made.data, seed=1))
    with pytest.raises(RuntimeError, match=r"step-0000000\d was trained on other data"):
        pool(1).run(tasks.train, other, str(tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_loss_that_is_no_number_ends_the_run_before_a_checkpoint_of_it(text: list[str], tmp_path: Path) -> None:
    made = config(text, layout())
    made.training = dataclasses.replace(made.training, learning_rate=1e38, max_grad_norm=None, warmup_steps=0)
    with pytest.raises(RuntimeError, match=r"is (nan|inf) at step 2: nothing sound comes after it"):
        pool(1).run(tasks.train, made, str(tmp_path))
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(("documents", "chunk"), [("stream", None), ("packed", 3), ("padded", None)])
def test_evaluation_is_the_mean_over_tokens_for_every_layout(
    documents: str, chunk: int | None, text: list[str]
) -> None:
    """The validation text has fewer sequences than the batches asked for, and they have different numbers of labels."""
    made = config(text, layout())
    made.model = dataclasses.replace(MODEL, initializer_range=0.2)
    made.data.documents, made.evaluation.fraction = documents, 0.3 if documents == "padded" else 0.27
    _, held = build_split(made)
    assert held is not None
    assert held.sequences is not None
    assert 8 < held.sequences < 24
    assert held.sequences % 8, "the last batch is not full"
    model = reference.build(Case(made.model, training=made.training, weight_jitter=0.0))
    inputs, labels, positions, ids = (None if x is None else torch.from_numpy(x) for x in held._rows(0, held.sequences))
    with torch.no_grad():
        logits = model(
            input_ids=inputs, position_ids=positions, **({} if ids is None else {"document_ids": ids})
        ).logits
    assert labels is not None
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    made.training.loss_chunk_size = chunk
    layouts = LAYOUTS.values() if documents == "stream" else (LAYOUTS["fsdp_cp"], LAYOUTS["hsdp_tp"])
    for parallelism in (layout(), *layouts):
        made.parallelism = parallelism
        for loss, counted, as_without in pool(parallelism.world_size).run(tasks.evaluated, made, 3):
            assert loss == pytest.approx(float(expected), rel=1e-6), parallelism.layout
            assert counted == int((labels != IGNORED).sum())
            assert as_without == [True, True], "evaluation leaves no trace in training"


def test_eight_ranks_learn_the_curve_of_one_process_and_one_goes_on_where_eight_stopped(tmp_path: Path) -> None:
    made = Config(
        model=ModelConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8
        ),
        training=TrainingConfig(
            steps=14, global_batch_size=16, sequence_length=32, learning_rate=5e-3, schedule="cosine", warmup_steps=4
        ),
        data=DataConfig(name="source", max_bytes=100_000),
        checkpoint=CheckpointConfig(every=10),
        evaluation=EvaluationConfig(batches=2),
    )
    one = pool(1).run(tasks.train, made, str(tmp_path / "one"))[0]
    wide = dataclasses.replace(made, parallelism=layout(2, 2, 1, 2))
    eight = pool(8).run(tasks.train, wide, str(tmp_path / "eight"))[0]
    again = dataclasses.replace(made, resume=str(tmp_path / "eight" / "step-00000010"))
    narrow = pool(1).run(tasks.train, again, str(tmp_path / "narrow"))[0]
    assert [line["step"] for line in narrow["log"]] == [11, 12, 13, 14]
    assert one["log"][-1]["loss"] < one["log"][0]["loss"] - 1
    for other in (eight["log"], [*eight["log"][:10], *narrow["log"]]):
        for line, expected in zip(other, one["log"], strict=True):
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-4)
            assert line["learning_rate"] == expected["learning_rate"]
        assert other[-1]["validation_loss"] == pytest.approx(one["outcome"].validation_loss, abs=1e-4)


def test_training_begins_with_the_weights_of_a_hugging_face_folder(text: list[str], tmp_path: Path) -> None:
    made = config(text, layout(), checkpoint=CheckpointConfig(mode="hf"))
    made.training.steps = 2
    trained = pool(1).run(tasks.train, made, str(tmp_path / "run"))[0]
    made.checkpoint = CheckpointConfig(weights=str(tmp_path / "run" / "step-00000002"))
    fresh = pool(1).run(tasks.train, made, None, 1)[0]
    assert all(torch.equal(fresh["weights"][name], trained["weights"][name]) for name in trained["weights"])


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_run_and_learn(tmp_path: Path) -> None:
    for rank in pool(4).run(tasks.example, str(EXAMPLES / "engine_alone.py"), {"steps": 10}):
        assert rank[-1] < rank[0] - 0.4
    run = {"folder": tmp_path / "run", "steps": 3}
    (outcome, *_) = pool(4).run(tasks.example, str(EXAMPLES / "train_hsdp_tp.py"), run)
    assert outcome.step == 3
    assert outcome.validation_loss < 5.5
    assert outcome.checkpoint == str(tmp_path / "run" / "step-00000003")
    (outcome, *_) = pool(4).run(tasks.example, str(EXAMPLES / "train_fsdp_cp.py"), {"steps": 2, "length": 256})
    assert outcome.step == 2
    assert outcome.checkpoint is None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
