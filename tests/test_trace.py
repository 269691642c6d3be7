import errno
import json

import pytest
import torch

from vlmlab import trace as trace_module
from vlmlab.errors import VlmlabError
from vlmlab.trace import Recorder, RunInfo, Trace, load_trace, save_trace, write_json, write_run, write_trace

INFO = RunInfo(
    engine="hf",
    model="m",
    family="qwen2_vl",
    weights_hash="w",
    input_hash="i",
    dtype="bfloat16",
    attention="sdpa",
    device={"type": "cpu"},
    threads=1,
    versions={"torch": "0"},
    flags={},
    created="2026-01-01T00:00:00+00:00",
    config={"model_type": "qwen2_vl"},
)
TENSORS = {
    "inputs.input_ids": torch.arange(3),
    "vision.patch_embed": torch.randn(4, 2).bfloat16(),
    "vision.0.resid_post": torch.randn(4, 2).bfloat16(),
    "vision.1.resid_mid": torch.randn(4, 2).bfloat16(),
    "logits": torch.randn(1, 5),
}


@pytest.fixture
def saved(tmp_path):
    save_trace(Trace(INFO, TENSORS), tmp_path / "trace")
    return tmp_path / "trace"


def test_round_trip(saved):
    loaded = load_trace(saved)
    assert loaded.info == INFO
    assert list(loaded.tensors) == list(TENSORS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert "inputs.input_ids" not in loaded.hook_points
    assert torch.equal(loaded["vision.1.resid_pre"], TENSORS["vision.0.resid_post"])
    assert "vision.1.resid_pre" in loaded and "vision.7.resid_pre" not in loaded


def test_a_recorder_copies_so_that_later_writes_in_place_do_not_reach_it(tmp_path):
    live = torch.ones(2, 2)
    recorder = Recorder(tmp_path)
    recorder.add("logits", live)
    live.zero_()
    recorder.flush()
    assert torch.equal(trace_module.ShardedTensors(tmp_path, recorder.shards)["logits"], torch.ones(2, 2))


def test_a_recorder_holds_one_block_at_a_time(tmp_path):
    recorder = Recorder(tmp_path)
    for block in range(3):
        for name in ("attn_out", "resid_post"):
            recorder.add(f"layers.{block}.{name}", torch.ones(1, 1))
        assert set(recorder._pending) == {f"layers.{block}.attn_out", f"layers.{block}.resid_post"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["layers.00.safetensors", "layers.01.safetensors"]


def test_one_tensor_twice_is_an_error(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.add("logits", torch.ones(1))
    with pytest.raises(VlmlabError, match="logits was produced twice"):
        recorder.add("logits", torch.ones(1))
    recorder.add("layers.0.mlp_out", torch.ones(1))
    recorder.add("layers.1.mlp_out", torch.ones(1))
    with pytest.raises(VlmlabError, match=r"layers\.0\.resid_post was produced twice"):
        recorder.add("layers.0.resid_post", torch.ones(1))


def test_tensors_outside_the_blocks_do_not_close_a_block(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.add("layers.0.mlp_out", torch.ones(1))
    recorder.add("inputs.input_ids", torch.ones(1))
    recorder.add("layers.0.resid_post", torch.zeros(1))
    recorder.flush()
    stored = trace_module.ShardedTensors(tmp_path, recorder.shards)
    assert [stored[name].item() for name in stored] == [1.0, 1.0, 0.0]


def test_nothing_is_left_of_a_failed_capture(tmp_path):
    with pytest.raises(KeyboardInterrupt), write_trace(tmp_path / "trace") as partial:
        Recorder(partial).add("logits", torch.ones(1))
        raise KeyboardInterrupt
    with pytest.raises(VlmlabError, match="without a run record"), write_trace(tmp_path / "trace"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_older_trace_is_replaced_only_by_a_finished_one(saved):
    with pytest.raises(RuntimeError), write_trace(saved):
        raise RuntimeError
    assert load_trace(saved).info == INFO
    with write_trace(saved) as partial:
        recorder = Recorder(partial)
        recorder.add("logits", torch.zeros(1, 5))
        recorder.flush()
        write_run(partial, INFO, recorder.shards)
    assert list(load_trace(saved).tensors) == ["logits"]
    assert [entry.name for entry in saved.parent.iterdir()] == ["trace"]


def test_a_full_disk_is_one_clear_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace_module, "save_file", full)
    with pytest.raises(VlmlabError, match="the disk is full"):
        save_trace(Trace(INFO, TENSORS), tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_other_disk_errors_are_not_called_full(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(trace_module, "save_file", broken)
    with pytest.raises(OSError, match="Input/output"):
        save_trace(Trace(INFO, TENSORS), tmp_path / "trace")


def _rewrite(folder, change):
    content = json.loads((folder / "run.json").read_text())
    change(content)
    (folder / "run.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["tensors"].update({"../../evil": "../../evil.safetensors"}),
        lambda c: c["tensors"].update({"logits": "/etc/passwd"}),
        lambda c: c["tensors"].update({"logits": 3}),
        lambda c: c.update(tensors={}),
        lambda c: c.update(tensors=[]),
    ],
)
def test_a_trace_may_name_only_what_vlmlab_writes(saved, change):
    _rewrite(saved, change)
    with pytest.raises(VlmlabError, match="never writes"):
        load_trace(saved)


@pytest.mark.parametrize("change", [lambda c: c["run"].pop("dtype"), lambda c: c["run"].update(extra=1)])
def test_a_foreign_run_record_is_refused(saved, change):
    _rewrite(saved, change)
    with pytest.raises(VlmlabError, match="expected a trace folder"):
        load_trace(saved)


def test_a_missing_folder_file_or_half_a_file(saved):
    with pytest.raises(VlmlabError, match="expected a trace folder"):
        load_trace(saved.parent / "gone")
    shard = saved / "vision.00.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(VlmlabError, match=r"'vision\.00\.safetensors' is corrupt, truncated or gone"):
        load_trace(saved)["vision.0.resid_post"]
    shard.unlink()
    with pytest.raises(VlmlabError, match=r"lacks its file 'vision\.00\.safetensors'"):
        load_trace(saved)


def test_json_is_strict_and_never_half_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []
