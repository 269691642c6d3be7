import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vlmlab.checkpoint import DATA
from vlmlab.cli import main
from vlmlab.trace import Trace, save_trace


def _error(capsys, *arguments):
    """Run a command that must fail: exit code 2, one message, no traceback, nothing on standard output."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_doctor_as_json(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["engines"]["hf"] and found["versions"]["torch"]
    assert found["checkpoints"][0]["ok"]
    assert code == (0 if all(found["engines"].values()) else 1)


def test_doctor_in_words(capsys):
    main(["doctor"])
    assert "hf: can run here" in capsys.readouterr().out


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    from vlmlab import machine

    real = machine.versions()
    monkeypatch.setattr(machine, "versions", lambda: real | {"sglang": None})
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert 'pip install "vlmlab[sglang]"' in out and "sglang: cannot run here" in out and "hf: can run here" in out


def test_doctor_sees_versions_that_do_not_match(capsys, monkeypatch):
    from vlmlab import machine

    if machine.versions()["sglang"] is None:
        pytest.skip('SGLang is not installed: pip install "vlmlab[sglang]"')
    real = machine.versions()
    monkeypatch.setattr(machine, "versions", lambda: real | {"transformers": "4.45.2"})
    assert main(["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert any("found 4.45.2" in check["detail"] for check in checks if not check["ok"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["--image", "gone.png"], "found none called 'gone.png'"),
        (["--prompt", "gone.txt"], "found none called 'gone.txt'"),
        (["--engine-arg", "tp_size"], "expected --engine-arg NAME=VALUE"),
        (["--traces", "gone", "gone"], "expected a trace folder"),
    ],
)
def test_bad_arguments_are_one_clear_sentence(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in _error(capsys, "compare", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_bad_pictures_and_prompts(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    assert "not an image" in _error(capsys, "compare", "--image", "text.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    assert "at least 28" in _error(capsys, "compare", "--image", "small.png")
    (tmp_path / "prompt.txt").write_text("What is this?")
    assert "expected 1 image place" in _error(capsys, "compare", "--prompt", "prompt.txt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prompt.txt", "small.png", "text.png"]


@pytest.mark.engine
def test_a_folder_that_cannot_be_written(capsys, tmp_path, traces):
    for trace in traces:
        save_trace(trace, tmp_path / trace.info.engine)
    (tmp_path / "file").write_text("in the way")
    stored = [str(tmp_path / "hf"), str(tmp_path / "sglang")]
    assert "check the path" in _error(capsys, "compare", "--traces", *stored, "--out", str(tmp_path / "file" / "out"))


def test_debug_shows_the_traceback():
    from vlmlab.errors import VlmlabError

    with pytest.raises(VlmlabError):
        main(["compare", "--model", "no-such-model", "--debug"])


def test_without_sglang_the_hf_half_is_kept_and_it_says_so(capsys, tmp_path, monkeypatch, store):
    from vlmlab import engine_sglang, machine

    real = machine.versions()
    for module in (machine, engine_sglang):  # the second makes the key of the capture, so that no stored one fits
        monkeypatch.setattr(module, "versions", lambda: real | {"sglang": None})
    message = _error(capsys, "compare", "--out", str(tmp_path / "out"))
    assert 'SGLang cannot run here: sglang: not installed; run pip install "vlmlab[sglang]"' in message
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["hf"]


def test_an_interruption_is_said_in_one_line(capsys, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setenv("VLMLAB_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr("vlmlab.engines.open_hf", interrupted)
    assert main(["compare", "--out", str(tmp_path / "out")]) == 130
    out, err = capsys.readouterr()
    assert out.strip() == "" and "interrupted" in err and "Traceback" not in err
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.engine
def test_compare_writes_both_traces_and_prints_one_object(capsys, tmp_path, traces):
    assert main(["compare", "--json", "--out", str(tmp_path / "out")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["inputs_equal"] is True
    assert (result["parts"]["vit"]["tokens"], result["parts"]["vit"]["patches"]) == (720, 2880)
    assert result["parts"]["prefill"]["tokens"] == 830
    assert {"torch", "transformers", "sglang", "device"} <= set(result["engines"]["sglang"])
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["comparison.json", "hf", "sglang"]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == result


@pytest.mark.engine
def test_what_travels_names_no_folder_of_this_machine(capsys, tmp_path, traces):
    main(["compare", "--json", "--out", str(tmp_path / "out")])
    written = capsys.readouterr().out
    for file in ("hf/run.json", "sglang/run.json", "comparison.json"):
        written += (tmp_path / "out" / file).read_text()
    assert '"/' not in written and str(tmp_path) not in written


@pytest.mark.engine
def test_stored_traces_compare_without_an_engine(capsys, tmp_path, traces):
    for trace in traces:
        save_trace(trace, tmp_path / trace.info.engine)
    assert main(["compare", "--traces", str(tmp_path / "hf"), str(tmp_path / "sglang")]) == 0
    out = capsys.readouterr().out
    assert "vision.patch_embed" in out and "inputs equal: yes" in out and "1 of 246 hook points bit-equal" in out


def _reading(folder, traces):
    for name, trace in zip(("hf", "sglang"), traces, strict=True):
        save_trace(trace, folder / name)
    return str(folder)


@pytest.mark.engine
def test_explain_prints_one_object_with_the_promised_keys(capsys, tmp_path, small_traces, one_thread):
    assert main(["explain", "--json", _reading(tmp_path / "run", small_traces)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "rounding" and result["first_outside"] is None
    for closed in result["closure"].values():
        assert closed["tensors_equal"] == closed["tensors_total"] > 200
    assert result["remainder"] == {"tensors": 0, "elements": 0}
    live = {cause["name"] for cause in result["causes"] if cause["live"]}
    assert live == {"patch_embed", "vit_attention", "rms_norm", "residual_sum"}
    assert all({"name", "live", "share", "alone"} <= set(cause) for cause in result["causes"])
    assert {row["closer"] for row in result["closer_to_truth"]} <= {"hf", "sglang", "tie"}
    assert json.loads((tmp_path / "run" / "explanation.json").read_text()) == result


@pytest.mark.engine
def test_explain_finds_a_planted_bug_in_a_stored_run(capsys, tmp_path, small_traces, one_thread):
    hf, sglang = small_traces
    broken = dict(sglang.tensors)
    broken["layers.5.mlp_out"] = broken["layers.5.mlp_out"] * 1.05
    assert main(["explain", _reading(tmp_path / "run", (hf, Trace(sglang.info, broken)))]) == 0
    last = capsys.readouterr().out
    assert "verdict: bug" in last and "sglang: bug: first at layers.5.mlp_out" in last
    assert "245 of 246 tensors bit-equal" in last and "first layers.5.mlp_out" in last
    kept = load_file(tmp_path / "run" / "unexplained-sglang.safetensors")
    assert sorted(kept) == ["captured", "computed", "input.layers.5.resid_mid"]
    assert torch.equal(kept["captured"], broken["layers.5.mlp_out"])
    assert not (tmp_path / "run" / "unexplained-hf.safetensors").exists()


@pytest.mark.engine
def test_explain_refuses_a_run_of_other_weights(capsys, tmp_path, small_traces, one_thread):
    run = _reading(tmp_path / "run", small_traces)
    message = _error(capsys, "explain", run, "--model", str(DATA / "checkpoints" / "qwen3-vl-tiny"))
    assert "pass --model" in message
    assert "expected a trace folder" in _error(capsys, "explain", str(tmp_path / "nothing"))
