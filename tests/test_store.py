"""Keys that see everything, entries that are whole or absent, and room made from the longest unused."""

import json
import os
import subprocess
import sys
import time

import pytest

from vlmlab import store
from vlmlab.cli import main
from vlmlab.errors import VlmlabError


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_it_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path))
    assert store.store_folder() == tmp_path
    monkeypatch.delenv("VLMLAB_CACHE")
    assert store.store_folder().name == "vlmlab"


def test_a_key_sees_content_code_processors_and_environment(monkeypatch):
    keys = [store.key_of("x", {"a": 1}, ("floats",)), store.key_of("x", {"a": 2}, ("floats",))]
    keys += [store.key_of("y", {"a": 1}, ("floats",)), store.key_of("x", {"a": 1}, ("floats", "metrics"))]
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "something")
            keys.append(store.key_of("x", {"a": 1}, ("floats",)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
        keys.append(store.key_of("x", {"a": 1}, ("floats",)))
    assert len(set(keys)) == len(keys)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # how threads wait changes no bit
    assert store.key_of("x", {"a": 1}, ("floats",)) == keys[0]


def test_an_entry_is_whole_or_not_there(folder):
    assert store.read_json("a-1") is None and store.use("a-1") is None
    written = store.partial("a-1")
    written.write_text("{")
    assert store.use("a-1") is None and store.entries() == []  # nobody sees it half-written
    written.unlink()
    store.write_json("a-1", {"value": [1.5, float("inf")]})
    assert store.read_json("a-1") == {"value": [1.5, float("inf")]}
    (folder / "a-1").write_text("{")
    assert store.read_json("a-1") is None  # broken by hand: as if it were not there
    assert [path.name for path in folder.iterdir()] == ["a-1"]


def test_a_reader_beside_a_writer_never_sees_half(folder):
    code = (
        "from vlmlab import store\nfor k in range(300):\n    store.write_json('shared-1', [k] * 2000)\nprint('done')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        seen = 0
        while writer.poll() is None:
            path = store.use("shared-1")
            if path is not None:
                values = json.loads(path.read_text())
                assert len(values) == 2000 and len(set(values)) == 1
                seen += 1
        assert writer.returncode == 0 and seen > 10


def make(name, size, age):
    written = store.partial(name)
    written.write_bytes(b"x" * size)
    path = store.finish(written, name)
    os.utime(path, (time.time() - age,) * 2)


def test_the_longest_unused_go_first_and_none_in_use(folder):
    day = 24 * 3600
    for name, age in (("old-1", 3 * day), ("old-2", 2 * day), ("new-1", day), ("now-1", 10)):
        make(name, 1000, age)
    assert [entry.name for entry in store.entries()] == ["old-1", "old-2", "new-1", "now-1"]
    store.use("old-1")  # read: now the newest
    assert [entry.name for entry in store.prune(3000)] == ["old-2"]
    assert [entry.name for entry in store.prune(0)] == ["new-1"]  # the other two were used within the hour
    assert {entry.name for entry in store.entries()} == {"old-1", "now-1"}


def test_writing_keeps_the_limit_and_removes_what_died_half_written(folder, monkeypatch):
    monkeypatch.setenv("VLMLAB_CACHE_GIB", str(2500 / 2**30))
    dead = store.partial("dead-1")
    dead.write_bytes(b"x")
    os.utime(dead, (time.time() - 2 * store.ABANDONED_S,) * 2)
    for k in range(4):
        make(f"entry-{k}", 1000, 2 * store.IN_USE_S - k)
    store.write_json("last-1", 1)
    assert [entry.name for entry in store.entries()] == ["entry-2", "entry-3", "last-1"]
    assert not dead.exists()


@pytest.mark.parametrize("size", ["much", "-1", "inf", "nan"])
def test_a_limit_that_is_no_size_is_refused(size, monkeypatch):
    monkeypatch.setenv("VLMLAB_CACHE_GIB", size)
    with pytest.raises(VlmlabError, match="expected VLMLAB_CACHE_GIB to be a size"):
        store.limit_bytes()


def test_the_log_keeps_every_line(folder):
    assert store.noted() == []
    for k in range(3):
        store.note({"k": k})
    assert store.noted() == [{"k": 0}, {"k": 1}, {"k": 2}]


def test_the_command_shows_and_clears(folder, capsys):
    make("pass-1", 2_000_000, 60)
    make("hf-1", 1_000_000, 30)
    assert main(["store"]) == 0
    shown = capsys.readouterr().out
    assert "pass" in shown and "2 entries" in shown and "of 20 GiB" in shown and str(folder.parent) not in shown
    assert main(["store", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["bytes"] == 3_000_000 and [entry["name"] for entry in content["entries"]] == ["pass-1", "hf-1"]
    assert main(["store", "--clear"]) == 0
    assert store.entries() == [] and "removed 2 entries" in capsys.readouterr().out
