"""What a configuration asks for and the engine lacks is said before ranks start, in every layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndbench.config import Cell, Config, ModelConfig
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.bundled_refusals import plan_refusals
from ndbench.parallel.config import ParallelismConfig
from tests.parity.cases import layout, llama, training


def refused(model: ModelConfig, parallelism: ParallelismConfig, **changes: Any) -> str | None:
    config = Config(
        model=model, parallelism=parallelism, training=training(**changes), world_size=parallelism.world_size
    )
    return BundledEngine().refuse(Cell("cell", "suite", config))


def test_attention_that_is_not_implemented_is_refused_without_tp_too(tmp_path: Path) -> None:
    dropout = "attention_dropout is 0.1: attention with dropout is not implemented"
    assert refused(llama(hf={"attention_dropout": 0.1}), layout(2)) == dropout
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "attention_dropout": 0.1}))
    assert refused(llama(path=str(tmp_path)), layout()) == dropout
    assert refused(llama(hf={"attention_dropout": 0.0}), layout(2)) is None


def test_defaults_of_a_configuration_class_are_refused_without_tp_too() -> None:
    model = llama(model_type="gemma2", num_attention_heads=8, head_dim=8)
    (reason,) = plan_refusals(model, layout(1, 1, 2))
    assert reason.startswith("attn_logit_softcapping is 50.0: not implemented under cp_method=ring (cp 2)")
    assert plan_refusals(model, layout(2)) == []


def test_a_shape_that_the_configuration_class_refuses_is_one_line() -> None:
    (reason,) = plan_refusals(llama(hidden_size=44), layout(2))
    assert reason == "model type 'llama': The hidden size (44) is not a multiple of the number of attention heads (8)."


@pytest.mark.parametrize(("loss_parallel", "expected"), [(True, False), (False, True)])
def test_chunks_of_whole_logits_are_refused_under_tp(loss_parallel: bool, expected: bool) -> None:
    found = refused(llama(), layout(tp=2, loss_parallel=loss_parallel), loss_chunk_size=8)
    assert (found is not None) == expected
    if found is not None:
        assert found.startswith("loss_chunk_size 8 under tp 2 needs parallelism.loss_parallel")


def test_refusing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from ndbench.config import *; from ndbench.engines.bundled import BundledEngine;"
        "c = Config(model=ModelConfig(hf={'attention_dropout': 0.1}), world_size=1);"
        "assert 'dropout' in BundledEngine().refuse(Cell('c', 's', c));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
