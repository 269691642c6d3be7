import dataclasses

import pytest
import torch

from vlmlab import engines, store
from vlmlab.capture import capture_both, capture_hf, capture_key
from vlmlab.engine_hf import hf_settings


def test_the_key_sees_everything_that_can_change_a_capture(checkpoint, inputs, monkeypatch):
    settings = hf_settings(checkpoint, "sdpa")
    given = torch.zeros(2, 2)

    def key(settings=settings, checkpoint=checkpoint, inputs=inputs, given=given):
        return capture_key(settings, checkpoint, inputs, given)

    keys = [
        key(),
        key(settings=hf_settings(checkpoint, "eager")),
        key(settings={**settings, "dtype": "float32"}),
        key(settings={**settings, "versions": {**settings["versions"], "torch": "0"}}),
        key(settings={**settings, "device": {"type": "cuda"}}),
        key(checkpoint=dataclasses.replace(checkpoint, weights_hash="other")),
        key(inputs=dataclasses.replace(inputs, hash="other")),
        key(inputs=dataclasses.replace(inputs, pixel_values=inputs.pixel_values + 1)),
        key(given=given + 1),
        key(given=None),
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    keys.append(key())
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(store, "_code_hash", lambda modules: "changed code")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key() == keys[0]


def test_a_stored_capture_is_reused_recaptured_when_asked_and_when_broken(
    checkpoint, small_inputs, monkeypatch, tmp_path
):
    inputs = small_inputs
    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path))
    said = []
    first = capture_hf(checkpoint, inputs, say=said.append)
    assert said[-1] == "Transformers: capturing"
    capture_hf(checkpoint, inputs, say=said.append)
    assert said[-1] == f"Transformers: stored capture of {first.info.created}"
    capture_hf(checkpoint, inputs, fresh=True, say=said.append)
    assert said[-1] == "Transformers: capturing"
    (stored,) = tmp_path.iterdir()
    (stored / "run.json").write_text("{")
    capture_hf(checkpoint, inputs, say=said.append)
    assert said[-1] == "Transformers: capturing"
    assert [entry.name for entry in tmp_path.iterdir()] == [stored.name]


@pytest.mark.engine
def test_sglang_is_started_once_for_many_readers(traces, checkpoint, inputs, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a stored capture must not start an engine")

    monkeypatch.setattr(engines, "open_sglang", never)
    monkeypatch.setattr(engines, "open_hf", never)
    hf, sglang = capture_both(checkpoint, inputs, say=lambda _: None)
    assert (hf.info.created, sglang.info.created) == (traces[0].info.created, traces[1].info.created)
