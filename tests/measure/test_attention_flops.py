"""Attention's FLOPs are the same whichever kernel computes it, with and without grouped keys."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ndbench.measure.attention_flops import attention_formulas, backward_flops, forward_flops


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_cpu_kernel_counts_two_matmuls_forward_and_five_backward(kv_heads: int) -> None:
    query = torch.randn(2, 8, 32, 16, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, 32, 16, requires_grad=True) for _ in range(2))
    counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
    with counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).sum().backward()
    matmul = 2 * 2 * 8 * 32 * 32 * 16
    assert counter.get_total_flops() == 7 * matmul


def test_the_formulas_take_the_shapes_of_a_gpu_kernel_with_grouped_keys() -> None:
    query, grouped = (1, 32, 8192, 64), (1, 8, 8192, 64)
    matmul = 2 * 32 * 8192 * 8192 * 64
    assert forward_flops(query, grouped, grouped, 0.0, True, out_shape=query) == 2 * matmul
    assert backward_flops(query, query, grouped, grouped, out_shape=None) == 5 * matmul
