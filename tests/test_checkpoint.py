import json
import shutil

import pytest

from vlmlab.checkpoint import DEFAULT_CHECKPOINT, load_checkpoint
from vlmlab.errors import VlmlabError


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "copy")


def _edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_the_embedded_checkpoint_loads(checkpoint):
    assert (checkpoint.name, checkpoint.family, checkpoint.dtype) == ("qwen2-vl-tiny", "qwen2_vl", "bfloat16")
    assert checkpoint.weight_bytes < 12 * 2**20


def test_the_hash_sees_one_bit(copy, checkpoint):
    assert load_checkpoint(copy).weights_hash == checkpoint.weights_hash
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load_checkpoint(copy).weights_hash != checkpoint.weights_hash


@pytest.mark.parametrize("model", ["no-such-folder", "./no/such/folder", "a/b/c", "/nowhere"])
def test_unknown_model(model):
    with pytest.raises(VlmlabError, match="unknown model"):
        load_checkpoint(model)


def test_a_hub_id_without_a_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(VlmlabError, match="the hub did not serve it"):
        load_checkpoint("nobody/no-such-model")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(VlmlabError, match=r"without one"):
        load_checkpoint(tmp_path)


def test_unsupported_architecture(copy):
    _edit(copy, model_type="llava")
    with pytest.raises(VlmlabError, match="got 'llava'"):
        load_checkpoint(copy)


def test_broken_config(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(VlmlabError, match=r"readable JSON in config\.json"):
        load_checkpoint(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(VlmlabError, match="a JSON object"):
        load_checkpoint(copy)


@pytest.mark.parametrize("keep", [0, 4, 10_000, 12_000_000])
def test_truncated_weights(copy, keep):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(VlmlabError, match="corrupt or truncated"):
        load_checkpoint(copy)


def test_weights_that_would_be_unpickled_are_not_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(VlmlabError, match="unpickled formats are not read"):
        load_checkpoint(copy)
