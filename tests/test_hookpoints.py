from types import SimpleNamespace

import pytest
import torch

from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import block_of, hook_points, read, resolve

QWEN3 = {
    "model_type": "qwen3_vl",
    "vision_config": {"depth": 4, "deepstack_visual_indexes": [1, 2]},
    "text_config": {"num_hidden_layers": 3},
}


def test_names_are_unique_and_in_forward_order(checkpoint):
    names = [point.name for point in hook_points(checkpoint.config)]
    vision, text = checkpoint.config["vision_config"]["depth"], checkpoint.config["text_config"]["num_hidden_layers"]
    assert len(names) == len(set(names)) == (1 + 1 + 4 * vision + 1) + (1 + 4 * text + 2)
    first_block = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
    assert names[:6] == ["vision.patch_embed", *(f"vision.0.{name}" for name in first_block)]
    assert names[-2:] == ["final_norm", "logits"]


def test_deepstack_follows_the_block_that_feeds_it():
    names = [point.name for point in hook_points(QWEN3)]
    assert names[names.index("vision.1.resid_post") + 1] == "vision.deepstack.0"
    assert names[names.index("vision.2.resid_post") + 1] == "vision.deepstack.1"


def test_early_layers_have_a_stream_before_their_deepstack_addition_and_experts_a_router():
    block = ["attn_out", "resid_mid", "mlp_out", "before_deepstack", "resid_post"]
    names = [point.name for point in hook_points(QWEN3)]
    assert [name for name in names if name.startswith("layers.1.")] == [f"layers.1.{half}" for half in block]
    assert "layers.2.before_deepstack" not in names  # two levels, three layers
    names = [point.name for point in hook_points(QWEN3 | {"model_type": "qwen3_vl_moe"})]
    assert [name for name in names if name.endswith("router_logits")] == [f"layers.{i}.router_logits" for i in range(3)]
    assert names[names.index("layers.0.router_logits") + 1] == "layers.0.mlp_out"


def test_text_fields_at_the_top_level_as_the_hub_writes_them():
    config = {"model_type": "qwen2_vl", "vision_config": {"depth": 1}, "num_hidden_layers": 2}
    assert [p.name for p in hook_points(config)][-3:] == ["layers.1.resid_post", "final_norm", "logits"]


def test_the_stream_between_blocks_has_two_names():
    assert resolve("layers.3.resid_pre") == "layers.2.resid_post"
    assert resolve("vision.1.resid_pre") == "vision.0.resid_post"
    assert resolve("layers.0.resid_pre") == "layers.0.resid_pre"
    assert resolve("layers.3.resid_mid") == "layers.3.resid_mid"
    assert resolve("layers.0.after_deepstack") == "layers.0.resid_post"
    assert resolve("layers.0.before_deepstack") == "layers.0.before_deepstack"


def test_a_name_knows_its_block():
    assert block_of("vision.31.mlp_out") == ("vision", 31)
    assert block_of("layers.0.resid_pre") == ("layers", 0)
    assert [block_of(name) for name in ("vision.merger", "vision.deepstack.0", "logits", "inputs.input_ids")] == [
        None
    ] * 4


def test_unsupported_architecture_names_what_is_supported():
    with pytest.raises(VlmlabError, match="qwen2_vl, qwen3_vl, qwen3_vl_moe, got 'llama'"):
        hook_points({"model_type": "llama"})


def test_read_takes_the_right_tensor():
    a, b = torch.zeros(1, 4, 8), torch.ones(1, 4, 8)
    assert torch.equal(read("stream", (a,), (a, b)), b[0])
    assert torch.equal(read("stream", (a,), b), a[0])
    assert torch.equal(read("output", (a,), (b, None)), b[0])
    assert torch.equal(read("input", (a,), b), a[0])
    assert read("logits", (a,), b).shape == (1, 8)
    batch = SimpleNamespace(residual_stream=SimpleNamespace(residual=2 * b))
    summed = read("sum", (None, a, batch), b)
    b.zero_()  # SGLang adds the features in place
    assert torch.equal(summed, torch.full((4, 8), 3.0))
    assert torch.equal(read("sum", (a,), a), a[0])  # Transformers' layer puts out the stream itself
    half = SimpleNamespace(residual_stream=SimpleNamespace(residual=torch.tensor([[256.0]]).bfloat16()))
    assert read("sum", (None, a, half), torch.tensor([[1.0]]).bfloat16()).item() == 256  # in the storage dtype
    requests = SimpleNamespace(next_token_logits=torch.zeros(3, 8))  # a row a request
    assert read("logits", (a,), requests).shape == (3, 8)
    with pytest.raises(ValueError, match="expected a slot"):
        read("nonsense", (a,), b)
