"""The real SGLang engine. One started engine serves most tests; those that kill it start their own."""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from sampled import sampled

from vlmlab.capture import capture_key
from vlmlab.causes import sglang_plan
from vlmlab.engine_hf import vision_output
from vlmlab.engine_sglang import STANDIN, SGLangEngine, decisive_lines, engine_arguments, engine_settings, open_sglang
from vlmlab.errors import VlmlabError
from vlmlab.hookpoints import hook_points
from vlmlab.hypotheses import ORDERS
from vlmlab.inputs import prepare_inputs
from vlmlab.metrics import bitwise_equal
from vlmlab.replay import asked_of, closure, run_plan
from vlmlab.sglang_worker import DEEPSTACK_ORDERS

pytestmark = pytest.mark.engine


def _engine_processes():
    """Processes of this test session's engines: descendants of this process, by id."""
    return [child for child in psutil.Process().children(recursive=True) if child.is_running()]


def _gone(processes, timeout_s=30.0):
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_every_hook_point_is_captured(traces, checkpoint):
    assert set(traces[1].hook_points) == {point.name for point in hook_points(checkpoint.config)}
    assert traces[1]["vision.merger"].shape == (720, 128)
    assert traces[1]["layers.27.resid_post"].shape == (830, 128)
    assert traces[1].info.flags["language_input"] == "given vision output"


def test_two_captures_agree_bit_for_bit(traces, sglang_engine, inputs, tmp_path):
    again = sglang_engine.capture(inputs, tmp_path / "again", vision_output(traces[0]))
    assert set(again.tensors) == set(traces[1].tensors)
    assert all(bitwise_equal(again[name], traces[1][name]) for name in again.tensors)


def test_captured_halves_add_up_bit_for_bit(traces):
    sglang = traces[1]
    pre, attn, mid = (sglang[f"vision.7.{name}"] for name in ("resid_pre", "attn_out", "resid_mid"))
    assert bitwise_equal(pre + attn, mid)
    pre, attn, mid = (sglang[f"layers.11.{name}"] for name in ("resid_pre", "attn_out", "resid_mid"))
    assert bitwise_equal(pre + attn, mid)  # the carried residual is rounded; what is normalised is not


def test_given_embeddings_enter_the_language_model(traces, sglang_engine, inputs, tmp_path):
    hf, sglang = traces
    assert bitwise_equal(hf["layers.0.resid_pre"], sglang["layers.0.resid_pre"])
    other = torch.zeros_like(vision_output(hf))
    changed = sglang_engine.capture(inputs, tmp_path / "zeros", other)
    here = inputs.image_positions
    assert not changed["layers.0.resid_pre"][here].any()
    assert bitwise_equal(changed["layers.0.resid_pre"][~here], hf["layers.0.resid_pre"][~here])
    assert not bitwise_equal(changed["logits"], sglang["logits"])


def test_its_own_vision_output_enters_the_language_model_otherwise(traces, sglang_engine, inputs, tmp_path):
    own = sglang_engine.capture(inputs, tmp_path / "own")
    assert own.info.flags["language_input"] == "own vision output"
    assert bitwise_equal(own["layers.0.resid_pre"][inputs.image_positions], own["vision.merger"])
    assert bitwise_equal(own["vision.merger"], traces[1]["vision.merger"])


def test_text_only_and_another_picture_on_the_same_engine(sglang_engine, checkpoint, inputs, tmp_path):
    question = "<image>Point at the center of the red rectangle."
    text = sglang_engine.capture(prepare_inputs(checkpoint, None, question[7:]), tmp_path / "text")
    assert not any(name.startswith("vision.") for name in text.hook_points)
    flipped = prepare_inputs(checkpoint, inputs.image.transpose(0), question)
    first = sglang_engine.capture(prepare_inputs(checkpoint, inputs.image, question), tmp_path / "first")
    second = sglang_engine.capture(flipped, tmp_path / "second")
    assert not bitwise_equal(first["vision.merger"], second["vision.merger"])


def test_hooks_record_only_when_asked(sglang_engine, inputs):
    before = sorted(sglang_engine._control.iterdir())
    tokens = sglang_engine.generate(inputs, max_new_tokens=3)
    assert len(tokens) == 3
    assert sorted(sglang_engine._control.iterdir()) == before


def test_decode_steps_of_one_request(sglang_engine, hf_engine, small_inputs, tmp_path):
    steps, tokens = sglang_engine.capture_decode(small_inputs, tmp_path / "first", 3)
    again, same = sglang_engine.capture_decode(small_inputs, tmp_path / "again", 3)
    assert tokens == same == sglang_engine.generate(small_inputs, 4)
    language = {point.name for point in hook_points(sglang_engine.checkpoint.config) if point.part == "language"}
    hf, _ = hf_engine.capture_decode(small_inputs, tmp_path / "hf", 3, tokens)
    for k, step in enumerate(steps):
        assert set(step.hook_points) == language
        assert all(len(step[name]) == 1 for name in language)
        assert set(again[k].tensors) == set(step.tensors)
        assert all(bitwise_equal(step[name], again[k][name]) for name in step.tensors)
        assert torch.equal(step["inputs.input_ids"], torch.tensor([tokens[k]]))
        assert torch.equal(step["inputs.positions"], hf[k]["inputs.positions"])
        assert int(step["logits"].argmax()) == tokens[k + 1]
        assert bitwise_equal(step["layers.0.resid_pre"], hf[k]["layers.0.resid_pre"])
        assert step.info.flags["decode_step"] == k


def test_decode_steps_after_given_vision_output(sglang_engine, hf_engine, small_inputs, tmp_path):
    given = vision_output(hf_engine.capture(small_inputs, tmp_path / "hf"))
    steps, tokens = sglang_engine.capture_decode(small_inputs, tmp_path / "given", 2, given)
    assert tokens == sglang_engine.generate(small_inputs, 3, given)
    start = int(hf_engine.positions(small_inputs).max()) + 1
    assert [step["inputs.positions"].tolist() for step in steps] == [[[start + k]] * 3 for k in range(2)]
    assert steps[1].info.flags["language_input"] == "given vision output"
    other, _ = sglang_engine.capture_decode(small_inputs, tmp_path / "zeros", 2, torch.zeros_like(given))
    assert not bitwise_equal(other[0]["logits"], steps[0]["logits"])


def test_decode_follows_forced_tokens_also_unlikely_ones(sglang_engine, hf_engine, small_inputs, tmp_path):
    free, greedy = sglang_engine.capture_decode(small_inputs, tmp_path / "free", 3)
    same, tokens = sglang_engine.capture_decode(small_inputs, tmp_path / "same", 3, forced=greedy)
    assert tokens == greedy
    names = ("layers.0.resid_pre", "final_norm", "logits")  # logits are recorded before they are overruled
    assert all(bitwise_equal(a[name], b[name]) for a, b in zip(free, same, strict=True) for name in names)
    unlikely = [int(step["logits"].argmin()) for step in free]
    steps, tokens = sglang_engine.capture_decode(small_inputs, tmp_path / "unlikely", 2, forced=unlikely)
    assert tokens == unlikely
    hf, _ = hf_engine.capture_decode(small_inputs, tmp_path / "hf", 2, unlikely)
    assert [int(step["inputs.input_ids"]) for step in steps] == unlikely[:2]
    assert all(bitwise_equal(a["layers.0.resid_pre"], b["layers.0.resid_pre"]) for a, b in zip(hf, steps, strict=True))


def test_a_batch_of_equal_requests_and_a_prefill_over_the_answer(sglang_engine, small_inputs, tmp_path):
    tokens = sglang_engine.generate(small_inputs, 9)
    alone, _ = sglang_engine.capture_decode(small_inputs, tmp_path / "alone", 8, forced=tokens)
    batch = sglang_engine.capture_batch(small_inputs, tmp_path / "batch", 3, 4, tokens, None)
    first = int(alone[0]["inputs.positions"][0, 0])
    for step in batch:
        places = step["inputs.positions"][0] - first
        assert step["logits"].shape[0] == 4 and len(set(places.tolist())) == 1
        assert step["inputs.input_ids"].tolist() == [tokens[int(places[0])]] * 4
    text = prepare_inputs(sglang_engine.checkpoint, None, "List every shape with its color and center.")
    (prefill,) = sglang_engine.capture_prefill(text.followed_by(tokens[:3]), tmp_path / "prefill")
    assert len(prefill["layers.0.resid_pre"]) == text.tokens + 3
    with pytest.raises(VlmlabError, match="needs the picture's vision output"):
        sglang_engine.generate(small_inputs.followed_by(tokens))


def test_decode_steps_after_text_only(sglang_engine, checkpoint, tmp_path):
    text = prepare_inputs(checkpoint, None, "List every shape with its color and center.")
    steps, _ = sglang_engine.capture_decode(text, tmp_path, 2)
    assert [step["inputs.positions"].tolist() for step in steps] == [[[text.tokens + k]] * 3 for k in range(2)]


def test_a_request_cut_short_leaves_nothing_to_the_next(sglang_engine, small_inputs, tmp_path, monkeypatch):
    generate, control = sglang_engine.generate, sglang_engine._control
    with monkeypatch.context() as patch:
        patch.setattr(sglang_engine, "generate", lambda inputs, **request: generate(inputs, 2))
        with pytest.raises(VlmlabError, match="hooks recorded nothing"):
            sglang_engine.capture_decode(small_inputs, tmp_path / "short", 3)
    assert list((tmp_path / "short").iterdir()) == []
    generate(small_inputs, 4)
    assert {path.name for path in control.iterdir()} <= {"engine.log", "embeddings.safetensors"}
    trace = sglang_engine.capture(small_inputs, tmp_path / "trace")
    assert set(trace.hook_points) == {point.name for point in hook_points(sglang_engine.checkpoint.config)}
    assert len(trace["layers.0.resid_pre"]) == small_inputs.tokens
    assert "decode_step" not in trace.info.flags


def test_a_write_that_fails_in_the_scheduler_comes_back_and_the_engine_lives_on(sglang_engine, inputs, tmp_path):
    with pytest.raises(VlmlabError, match="No such file or directory"):
        sglang_engine._record([None, tmp_path / "no" / "folder"], ["language"], inputs, max_new_tokens=2)
    assert sglang_engine.alive
    assert len(sglang_engine.generate(inputs)) == 1


def test_a_refused_request_leaves_the_engine_usable(sglang_engine, checkpoint, inputs):
    with pytest.raises(VlmlabError, match="expected 720 rows of vision output, got 3"):
        sglang_engine.generate(inputs, embeddings=torch.zeros(3, 128, dtype=torch.bfloat16))
    with pytest.raises(VlmlabError, match="refused the request"):
        sglang_engine.generate(dataclasses.replace(inputs, text=inputs.text + " word" * 9000))
    assert len(sglang_engine.generate(inputs)) == 1


def test_an_answer_that_takes_too_long_ends_the_engine(inputs, monkeypatch):
    engine = _silent_engine()
    monkeypatch.setattr("vlmlab.engine_sglang.REQUEST_TIMEOUT_S", 0.5)
    with pytest.raises(VlmlabError, match=r"did not answer within 0 s; its log ends:\nstill thinking"):
        engine.generate(inputs)
    with pytest.raises(VlmlabError, match="is shut down; open a new one"):
        engine.generate(inputs)


def test_an_interrupted_wait_ends_the_engine(inputs, monkeypatch):
    engine = _silent_engine()
    monkeypatch.setattr("vlmlab.engine_sglang.select.select", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(inputs)
    assert not engine.alive


def _interrupt(*_):
    raise KeyboardInterrupt


def _silent_engine():
    """An engine that started and never answers."""
    engine = object.__new__(SGLangEngine)
    folder = tempfile.TemporaryDirectory()
    engine._folder, engine._control, engine.log = folder, Path(folder.name), Path(folder.name) / "engine.log"
    engine.log.write_text("still thinking\n")
    engine.seconds = {"start": 0.0}
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    engine._process = subprocess.Popen(silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    return engine


def test_the_stand_in_is_on_the_path_of_the_children_only(sglang_engine):
    assert "sglang" not in sys.modules and "sgl_kernel" not in sys.modules
    assert str(STANDIN) not in sys.path and str(STANDIN) not in os.environ.get("PYTHONPATH", "")


# ---------------------------------------------------------------------------------------------------- deepstack order


@pytest.fixture(scope="module")
def ordered_engines(checkpoints, sglang_engines):
    """(family, deepstack order) to a started engine; of those with an order of their own, the last one is open."""
    with contextlib.ExitStack() as stack:
        last = {}

        def started(family, order):
            if order == "sglang":
                return sglang_engines(family)
            if (family, order) not in last:
                stack.close()
                last.clear()
                last[family, order] = stack.enter_context(open_sglang(checkpoints[family], deepstack_order=order))
            return last[family, order]

        yield started


@pytest.fixture(scope="module")
def ordered(ordered_engines, ask, hf_engines, tmp_path_factory):
    """(family, deepstack order) to (inputs, HF trace, SGLang trace, SGLang trace of a text alone), each run once."""

    @functools.cache
    def captured(family, order):
        folder, inputs = tmp_path_factory.mktemp("ordered"), ask(family, (8, 10), seed=34)
        hf = hf_engines(family).capture(inputs, folder / "hf")
        engine = ordered_engines(family, order)
        trace = engine.capture(inputs, folder / "sglang", vision_output(hf))
        text = engine.capture(prepare_inputs(engine.checkpoint, None, "Describe it."), folder / "text")
        return inputs, hf, trace, text

    return captured


@pytest.mark.parametrize(
    ("family", "order"),
    sampled(
        [("qwen3_vl", "hf"), ("qwen3_vl", "residual_first"), ("qwen3_vl_moe", "hf")],
        keep=lambda family, order: (family, order) == ("qwen3_vl", "hf"),
    ),
)
def test_another_deepstack_order_is_that_plan_bit_for_bit_and_no_other(family, order, ordered, hybrids):
    _, hf, trace, _ = ordered(family, order)
    hybrid = hybrids(family)
    asked = asked_of(hybrid, trace, hf)
    assert trace.info.flags["deepstack_order"] == order
    assert closure(trace, run_plan(hybrid, asked, sglang_plan().switched("deepstack_order", order))).first is None
    for other in set(DEEPSTACK_ORDERS) - {order}:  # the check can fail, for every other order
        plan = sglang_plan().switched("deepstack_order", other)
        assert closure(trace, run_plan(hybrid, asked, plan)).first == "layers.0.resid_post"


@pytest.mark.parametrize("order", sampled(["hf", "residual_first"], keep=lambda order: order == "hf"))
def test_another_deepstack_order_changes_the_picture_and_what_sees_it_and_nothing_else(order, ordered):
    inputs, _, default, default_text = ordered("qwen3_vl", "sglang")
    assert "deepstack_order" not in default.info.flags
    start, image = int(inputs.image_positions.int().argmax()), inputs.image_positions
    _, _, trace, text = ordered("qwen3_vl", order)
    changed = [name for name in trace.hook_points if not bitwise_equal(trace[name], default[name])]
    assert changed[0] == "layers.0.resid_post"
    same = {name for name in trace.hook_points if name.startswith("vision.")}
    same |= {"layers.0.resid_pre", "layers.0.attn_out", "layers.0.resid_mid", "layers.0.mlp_out"}
    same.add("layers.0.before_deepstack")
    assert set(changed) == set(trace.hook_points) - same
    first, other = trace["layers.0.resid_post"], default["layers.0.resid_post"]
    assert bitwise_equal(first[~image], other[~image])
    assert 0.05 < (first[image] != other[image]).float().mean() < 0.9
    for name in set(changed) - {"logits"}:  # tokens before the picture do not see it
        assert bitwise_equal(trace[name][:start], default[name][:start])
    assert all(bitwise_equal(text[name], default_text[name]) for name in default_text.hook_points)


def test_every_order_of_the_hypotheses_can_be_started():
    assert set(ORDERS.values()) == set(DEEPSTACK_ORDERS)


def test_an_order_that_is_unknown_or_has_no_deepstack_is_refused_before_anything_starts(checkpoints, monkeypatch):
    monkeypatch.setattr("vlmlab.engine_sglang.subprocess.Popen", lambda *_, **__: pytest.fail("started"))
    with (
        pytest.raises(VlmlabError, match="expected a deepstack order of sglang, hf, residual_first, once, got 'HF'"),
        open_sglang(checkpoints["qwen3_vl"], deepstack_order="HF"),
    ):
        pass
    with (
        pytest.raises(VlmlabError, match=r"qwen2-vl-tiny \(qwen2_vl\) has no deepstack whose order could be 'hf'"),
        open_sglang(checkpoints["qwen2_vl"], deepstack_order="hf"),
    ):
        pass


def test_captures_of_different_deepstack_orders_have_different_names(checkpoints, ask):
    checkpoint, inputs = checkpoints["qwen3_vl"], ask("qwen3_vl", (8, 10))
    arguments = engine_arguments(checkpoint)
    keys = {
        capture_key(engine_settings(checkpoint, arguments, order), checkpoint, inputs, None)
        for order in DEEPSTACK_ORDERS
    }
    assert len(keys) == len(DEEPSTACK_ORDERS)
    assert engine_settings(checkpoint, arguments, "sglang") == engine_settings(checkpoint, arguments)


def test_arguments_pass_through(checkpoint):
    assert engine_arguments(checkpoint, {"tp_size": 2, "mem_fraction_static": 0.1})["tp_size"] == 2
    assert engine_arguments(checkpoint, {"mem_fraction_static": 0.1})["mem_fraction_static"] == 0.1


def test_decisive_lines_name_the_error_and_no_folder():
    log = "INFO start\nTraceback\n  File '/home/me/x.py'\nValueError: no /opt/secret/place/model.bin here\nINFO bye\n"
    assert decisive_lines(log) == "ValueError: no model.bin here"
    assert decisive_lines("a\nb\n") == "a\nb"


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(checkpoint):
    before = _engine_processes()
    with (
        pytest.raises(VlmlabError, match=r"did not start(.|\n)*no_such_backend"),
        open_sglang(checkpoint, {"attention_backend": "no_such_backend"}),
    ):
        pass
    assert _gone([process for process in _engine_processes() if process not in before])


def test_an_engine_that_does_not_start_in_time_keeps_its_log(checkpoint, tmp_path):
    before = _engine_processes()
    log = tmp_path / "logs" / "engine.log"
    with (
        pytest.raises(VlmlabError, match="did not start within 2 s"),
        open_sglang(checkpoint, timeout=2.0, log=log),
    ):
        pass
    assert log.is_file()
    assert _gone([process for process in _engine_processes() if process not in before])


def test_an_engine_that_dies_half_way(ordered, ordered_engines, tmp_path):
    inputs, *_ = ordered("qwen3_vl", "hf")
    engine = ordered_engines("qwen3_vl", "hf")  # needed no more: its traces are made
    owner = psutil.Process(engine._process.pid)
    started = [owner, *owner.children(recursive=True)]
    scheduler = next(process for process in started if "scheduler" in " ".join(process.cmdline()))
    scheduler.kill()
    with pytest.raises(VlmlabError, match="it died"):
        for _ in range(3):
            engine.capture(inputs, tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []
    engine.close()
    assert _gone(started)


# Killed, an owner cleans nothing up. What an interruption says is shown without an engine in test_cli.py too.
@pytest.mark.parametrize("how", sampled([signal.SIGINT, signal.SIGKILL], keep=lambda how: how == signal.SIGKILL))
def test_no_engine_outlives_its_owner(how, tmp_path):
    environment = os.environ | {"VLMLAB_CACHE": str(tmp_path)}
    # As from a terminal: a shell that starts this suite in the background would hand down an ignored SIGINT.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from vlmlab.cli import main"
    command = [sys.executable, "-c", f"{start}; sys.exit(main())", "compare", "--out", str(tmp_path / "out")]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        family = _wait_for_scheduler(owner.pid)
        owner.send_signal(how)
        _, errors = owner.communicate(timeout=60)
    finally:
        owner.kill()
    assert _gone(family)
    if how == signal.SIGINT:
        assert owner.returncode == 130
        assert "interrupted" in errors and "Traceback" not in errors
    assert not list((tmp_path / "out").glob(".*")), "half-written folders"


def _wait_for_scheduler(pid, timeout_s=120.0):
    """All descendants of `pid`, once SGLang's scheduler is among them."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        family = psutil.Process(pid).children(recursive=True)
        if any("spawn_main" in " ".join(child.cmdline()) for child in family if child.is_running()):
            return family
        time.sleep(0.2)
    raise AssertionError("no scheduler process appeared")
