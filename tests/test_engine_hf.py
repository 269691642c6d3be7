import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmlab import engine_hf
from vlmlab.checkpoint import load_checkpoint
from vlmlab.engine_hf import open_hf, recording, vision_output
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import HookPoint, hook_points
from vlmlab.inputs import prepare_inputs
from vlmlab.metrics import bitwise_equal


def _hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture(scope="module")
def trace(hf_engine, inputs, tmp_path_factory):
    return hf_engine.capture(inputs, tmp_path_factory.mktemp("hf") / "trace")


def test_every_hook_point_is_captured_in_forward_order(trace, checkpoint):
    assert trace.hook_points == tuple(point.name for point in hook_points(checkpoint.config))
    assert trace["vision.0.resid_pre"].shape == (2880, 64)
    assert trace["vision.merger"].shape == (720, 128)
    assert trace["layers.27.resid_post"].shape == (830, 128)
    assert trace["inputs.positions"].shape == (3, 830)


def test_captured_halves_add_up_bit_for_bit(trace):
    for block in ("vision.7", "layers.11"):
        pre, attn, mid = (trace[f"{block}.{name}"] for name in ("resid_pre", "attn_out", "resid_mid"))
        mlp, post = (trace[f"{block}.{name}"] for name in ("mlp_out", "resid_post"))
        assert bitwise_equal(pre + attn, mid)
        assert bitwise_equal(mid + mlp, post)


def test_capture_does_not_change_the_answer(trace, hf_engine, inputs):
    assert bitwise_equal(hf_engine.forward(inputs), trace["logits"])


def test_two_captures_agree_and_leave_no_hook(trace, hf_engine, inputs, tmp_path):
    before = _hooks(hf_engine.model)
    again = hf_engine.capture(inputs, tmp_path / "again")
    assert all(bitwise_equal(trace[name], again[name]) for name in trace.tensors)
    assert _hooks(hf_engine.model) == before


def test_hooks_go_after_an_exception_and_nothing_is_kept(hf_engine, inputs, tmp_path, monkeypatch):
    before = _hooks(hf_engine.model)
    monkeypatch.setattr(hf_engine, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf_engine.capture(inputs, tmp_path / "trace")
    assert _hooks(hf_engine.model) == before
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_module_is_named_and_leaves_no_hook(hf_engine):
    before = _hooks(hf_engine.model)
    points = (
        HookPoint("logits", "language", None, "lm_head", "", "logits"),
        HookPoint("x", "language", None, "model.no_such", "", "output"),
    )
    with (
        pytest.raises(VlmlabError, match=r"expected a module 'model\.no_such'"),
        recording(hf_engine.model, points, lambda *_: None),
    ):
        pass
    assert _hooks(hf_engine.model) == before


def test_a_hook_point_that_is_never_reached_is_an_error(hf_engine, inputs, tmp_path, monkeypatch):
    points = hook_points(hf_engine.checkpoint.config)
    monkeypatch.setattr(engine_hf, "recording", lambda model, points, add: recording(model, points[:-1], add))
    with pytest.raises(VlmlabError, match=rf"never reached {points[-1].name}"):
        hf_engine.capture(inputs, tmp_path / "trace")


def test_text_only_has_no_vision_part(hf_engine, checkpoint, tmp_path):
    text = prepare_inputs(checkpoint, None, "List every shape with its color and center.")
    trace = hf_engine.capture(text, tmp_path / "trace")
    assert not any(name.startswith("vision.") for name in trace.hook_points)
    assert vision_output(trace) is None
    assert torch.equal(trace["inputs.positions"], torch.arange(text.tokens).expand(3, -1))


@pytest.fixture(scope="module")
def greedy(hf_engine, small_inputs):
    """Three decode steps as Transformers does them by itself: tokens, logits, positions in the rotary module."""
    return _plain_decode(hf_engine, small_inputs)


@torch.no_grad()
def _plain_decode(engine, inputs, steps=3):
    model = engine.model
    model.model.rope_deltas = None
    seen, tokens, logits = [], [], []
    rotary = model.model.language_model.rotary_emb
    handle = rotary.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[1]), with_kwargs=True
    )
    batch = {"input_ids": inputs.input_ids[None], "mm_token_type_ids": inputs.image_positions[None].int()}
    if inputs.pixel_values is not None:
        batch |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
    try:
        answer = model(**batch, use_cache=True, logits_to_keep=1)
        for _ in range(steps):
            tokens.append(int(answer.logits[0, -1].argmax()))
            cache = answer.past_key_values
            answer = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            logits.append(answer.logits[0])
    finally:
        handle.remove()
    return tokens, logits, [positions[-3:, 0] for positions in seen[1:]]


def test_decode_steps_are_those_of_the_plain_model(greedy, hf_engine, small_inputs, tmp_path):
    before = _hooks(hf_engine.model)
    tokens, logits, positions = greedy
    steps, _ = hf_engine.capture_decode(small_inputs, tmp_path, len(tokens), tokens)
    assert _hooks(hf_engine.model) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0", "step_1", "step_2"]
    language = tuple(point.name for point in hook_points(hf_engine.checkpoint.config) if point.part == "language")
    start = int(hf_engine.positions(small_inputs).max()) + 1
    assert start < small_inputs.tokens
    for k, step in enumerate(steps):
        assert step.hook_points == language
        assert all(len(step[name]) == 1 for name in language)
        assert bitwise_equal(step["logits"], logits[k])
        assert step["inputs.input_ids"].tolist() == [tokens[k]]
        assert step["inputs.positions"].tolist() == [[start + k]] * 3 == positions[k].tolist()
        assert step.info.flags["decode_step"] == k


def test_another_token_gives_another_answer(greedy, hf_engine, small_inputs, tmp_path):
    tokens, logits, _ = greedy
    wrong = [tokens[0], (tokens[1] + 1) % 100, tokens[2]]
    steps, _ = hf_engine.capture_decode(small_inputs, tmp_path, len(wrong), wrong)
    same = [bitwise_equal(step["logits"], plain) for step, plain in zip(steps, logits, strict=True)]
    assert same == [True, False, False]


def test_text_only_decode_does_not_inherit_the_position_of_an_earlier_picture(hf_engine, checkpoint, inputs, tmp_path):
    text = prepare_inputs(checkpoint, None, "List every shape with its color and center.")
    tokens, logits, positions = _plain_decode(hf_engine, text)
    hf_engine.forward(inputs)  # leaves its rope delta in the model
    steps, _ = hf_engine.capture_decode(text, tmp_path, len(tokens), tokens)
    for k, step in enumerate(steps):
        assert bitwise_equal(step["logits"], logits[k])
        assert step["inputs.positions"].tolist() == [[text.tokens + k]] * 3 == positions[k].tolist()


def test_a_checkpoint_without_its_weights_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VlmlabError, match=r"down_proj"), open_hf(load_checkpoint(folder)):
        pass
