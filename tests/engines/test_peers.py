"""Other trainers on the same cell: the same losses as the bundled engine, or a refusal in one line."""

from __future__ import annotations

import importlib.util

import pytest

from ndbench.config import Cell, Config, HardwareConfig
from ndbench.engines import accelerate as accelerate_engine
from ndbench.engines.accelerate import AccelerateEngine
from ndbench.engines.torchtitan import TorchtitanEngine, _theirs
from tests.engines import rank_tasks
from tests.parity.cases import case, layout, llama, training
from tests.parity.pool import pool

installed = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")


def cell(replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1, device: str = "cpu", **changes: object) -> Cell:
    parallelism = layout(replicate, shard, cp, tp)
    steps = training(**changes)
    config = Config(model=llama(), training=steps, parallelism=parallelism, world_size=parallelism.world_size)
    config.hardware = HardwareConfig(name=device, device=device)
    return Cell(parallelism.layout, "test", config)


@installed
@pytest.mark.parametrize("parallelism", [layout(2), layout(1, 2)], ids=lambda each: each.layout)
def test_accelerate_takes_the_same_steps(parallelism: object) -> None:
    """Sequences without a valid token, unequal numbers of tokens, clipping, decay and a schedule included."""
    steps = training(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1, schedule="linear", steps=6)
    at = case(parallelism, llama(initializer_range=0.05), training=steps, weight_jitter=0.0)  # type: ignore[arg-type]
    assert_the_same_steps(pool(2).run(rank_tasks.side_by_side, at))


@installed
def test_accelerates_compiled_tp_takes_the_same_steps() -> None:
    steps = training(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1, schedule="linear", compile=True)
    model = llama(initializer_range=0.05, vocab_size=132, num_hidden_layers=1)
    at = case(layout(tp=2), model, training=steps, weight_jitter=0.0)
    assert_the_same_steps(pool(2).run(rank_tasks.compiled_side_by_side, at))


def assert_the_same_steps(ranks: list[list[list[tuple[float, float, int]]]]) -> None:
    for ours, theirs in ranks:
        assert [tokens for *_, tokens in ours] == [tokens for *_, tokens in theirs]
        for (loss, norm, _), (their_loss, their_norm, _) in zip(ours, theirs, strict=True):
            assert their_loss == pytest.approx(loss, rel=1e-5)
            assert their_norm == pytest.approx(norm, rel=1e-4)


def test_shards_that_are_views_of_the_whole_weight_are_copied_and_compile() -> None:
    """As transformers slices weights that are on the GPU: all ranks' but the first begin at an offset."""
    for kept, right in pool(2).run(rank_tasks.shards_of_their_own):
        assert kept == [8 * 4 * 4]  # one parameter, tied
        assert right


@installed
def test_what_accelerate_refuses_is_told_in_its_words() -> None:
    engine = AccelerateEngine()
    assert engine.refuse_plan(cell(2)) is None
    assert engine.refuse_plan(cell(1, 2)) is None
    with_tp = engine.refuse_plan(cell(2, 1, 1, 2, device="cuda"))
    assert with_tp is not None
    assert "cannot be used with pure data parallelism" in with_tp
    on_cpu = engine.refuse_plan(cell(1, 1, 1, 2))
    assert on_cpu is not None
    assert on_cpu.startswith("accelerate: ParallelismConfig is only compatible DistributedType.FSDP")
    assert "\n" not in with_tp + on_cpu


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (AccelerateEngine, "engine=accelerate needs the package accelerate: pip install 'ndbench[accelerate]'"),
        (TorchtitanEngine, "engine=torchtitan needs the package torchtitan: pip install 'ndbench[torchtitan]'"),
    ],
)
def test_a_package_that_is_not_there_is_one_line(engine: type, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engine().refuse(cell(2)) == line


@installed
def test_an_attention_that_accelerate_cannot_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    present: list[str] = []
    monkeypatch.setattr(accelerate_engine, "distributions", lambda name: iter([name] if name in present else []))
    engine = AccelerateEngine(attention="flash_attention_4")
    asked = "engine.options.attention 'flash_attention_4'"
    assert engine.refuse(cell(2)) == f"{asked} has no kernel for device 'cpu'"
    assert engine.refuse(cell(2, device="cuda")) == f"{asked} needs the package flash-attn-4"
    present.append("flash-attn-4")
    assert engine.refuse(cell(2, device="cuda")) is None
    assert engine.refuse(cell(cp=2, device="cuda")) == f"{asked} with cp 2: Accelerate's cp takes sdpa alone"
    known = "sdpa, flash_attention_2, flash_attention_3, flash_attention_4"
    unknown = AccelerateEngine(attention="flash4").refuse(cell(2))
    assert unknown == f"engine.options.attention 'flash4' is not known; known: {known}"


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not implemented for accelerate"),
        (
            {"activation_checkpointing": "selective"},
            "activation_checkpointing 'selective' is not offered by accelerate",
        ),
        ({"activation_offload": True}, "activation_offload is not implemented for accelerate"),
        ({"max_grad_value": 0.1}, "max_grad_value 0.1 is not implemented for accelerate"),
        ({"global_batch_size": 3}, "global_batch_size 3 is not a multiple"),
    ],
)
def test_what_a_peer_is_not_asked_to_do_is_refused_with_the_value(changes: dict[str, object], needle: str) -> None:
    assert any(needle in reason for reason in accelerate_engine.peer_refusals(cell(2, **changes), "accelerate"))


def test_torchtitan_takes_the_whole_batch_of_a_rank_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolved cell always names its micro-batch; only a smaller one than the rank's share is refused."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert TorchtitanEngine().refuse(cell(2, global_batch_size=4, micro_batch_size=2)) is None
    assert TorchtitanEngine().refuse(cell(2, global_batch_size=4, micro_batch_size=1)) == (
        "micro_batch_size 1 of 2 sequences a rank is not implemented for torchtitan"
    )


def test_torchtitans_names_are_those_of_the_model_that_starts_from_the_same_weights() -> None:
    from ndbench.training.models import build_model

    ours = dict(build_model(llama()).model.named_parameters())
    modules = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "ffn_norm")
    theirs = [f"layers.1.{name}" for name in (*modules, "attention.wk", "attention.wv", "attention_norm")]
    assert {_theirs(name) for name in (*theirs, "tok_embeddings", "norm", "output")} <= ours.keys()
    assert tuple(ours[_theirs("layers.1.feed_forward.w2")].shape) == (64, 96)
