"""This machine's kernels are revealed and replay bit for bit, or are said not to tell."""

import json

import pytest
import torch

from vlmlab.cli import main
from vlmlab.machine import has_cuda
from vlmlab.reveal import reveal_order
from vlmlab.reveal_ops import OPS, attention, linear
from vlmlab.summation import leaves, same_order, text_form

pytestmark = pytest.mark.usefixtures("one_thread")

COARSE = ("layer_norm", "rms_norm", "hf_norm", "sglang_norm", "softmax")


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_kernels_are_revealed_and_replay(op, dtype):
    found = reveal_order(OPS[op](192, dtype))
    if op == "layer_norm" or (op in COARSE and dtype == torch.bfloat16):
        assert found.tree is None and found.why
    else:
        assert sorted(leaves(found.tree)) == list(range(192))
        # The weights of attention in bf16 come from a rough exponential: its scale is not exactly 1 / n.
        assert found.certain or (op, dtype) == ("attention", torch.bfloat16), found.why


def test_a_norm_adds_its_squares_as_torchs_mean_does():
    assert same_order(reveal_order(OPS["hf_norm"](96)).tree, reveal_order(OPS["mean"](96)).tree)
    assert same_order(reveal_order(OPS["sglang_norm"](96)).tree, reveal_order(OPS["mean"](96)).tree)


@pytest.mark.parametrize("n", [64, 192, 512])
def test_a_mean_in_fp16_is_told_within_its_small_range(n):
    assert reveal_order(OPS["mean"](n, torch.float16)).certain


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensor_cores_are_wide_nodes_that_replay(dtype):
    found = reveal_order(linear(256, dtype, "cuda", tokens=830))
    assert found.certain and found.fused_adder and "{" in text_form(found.tree)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", ["sum", "mean", "dot", "matmul", "linear", "rms_norm", "hf_norm", "softmax"])
def test_kernels_on_cuda_replay_in_fp32(op):
    assert reveal_order(OPS[op](128, torch.float32, "cuda")).certain


def test_channels_of_one_attention_head_are_judged_one_by_one():
    found = [reveal_order(attention(16, torch.float32, channel=channel)) for channel in (0, 63)]
    assert all(one.certain for one in found)


def test_a_linear_at_the_models_shape_takes_few_calls():
    found = reveal_order(linear(1024, torch.bfloat16, tokens=830, row=7, width=4096))
    assert found.replay_bitwise_equal and found.calls <= 20 and sorted(leaves(found.tree)) == list(range(1024))


def test_the_command_line(capsys):
    assert main(["reveal", "linear", "--n", "64", "--dtype", "bfloat16", "--rows", "16", "--row", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"op", "tree", "calls", "probes", "seconds", "replay_bitwise_equal", "certain"}
    assert wanted <= found.keys() and found["replay_bitwise_equal"] is True
    assert main(["reveal", "sum"]) == 0 and "replay bit-equal" in capsys.readouterr().out
    for wrong in (["sum", "--rows", "4"], ["linear", "--row", "1"], ["sum", "--n", "1"]):
        assert main(["reveal", *wrong]) == 2 and "vlmlab: " in capsys.readouterr().err
