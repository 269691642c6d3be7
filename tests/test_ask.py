"""The same questions asked of every engine and of servers, good and bad ones."""

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import torch
from PIL import Image

from vlmlab import ask, engine_sglang
from vlmlab.ask import Forward, Way, ask_hf, ask_hybrid, ask_server, ask_sglang
from vlmlab.causes import hf_plan, sglang_plan
from vlmlab.cli import main
from vlmlab.engine_sglang import engine_arguments
from vlmlab.errors import VlmlabError
from vlmlab.grounding import BOX_QUESTION, case_of, cases, judge, read_point
from vlmlab.hypotheses import HYPOTHESES, Hypothesis
from vlmlab.inputs import prepare_inputs, token_texts
from vlmlab.machine import has_sglang

SIZE = (112, 140)
COLORS = ("red", "blue", "green")


def by_hybrid(checkpoint, posed, *way):
    """Answers of the hybrid forward."""
    return [outcome.answer for outcome in ask_hybrid(Forward(checkpoint), posed, {"": Way(*way)})[""]]


@pytest.fixture(scope="module")
def posed():
    """Three questions about small pictures."""
    return [case_of(SIZE, (20 + 9 * i, 30, 60 + 9 * i, 80), color, "rectangle") for i, color in enumerate(COLORS)]


@pytest.fixture(scope="module")
def by_hf(checkpoint, posed):
    return ask_hf(checkpoint, posed)


@contextlib.contextmanager
def serving(reply):
    """A server on loopback. reply: (number of the request, its JSON, handler) to (status, body).

    Yields: base URL, list of the requests' (path, JSON).
    """
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            status, content = reply(len(seen) - 1, body, self)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), "Location": "/elsewhere"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# ---------------------------------------------------------------------------------------------------- here


def test_the_hybrid_answers_as_transformers_and_rightly(checkpoint, posed, by_hf):
    assert by_hybrid(checkpoint, posed, hf_plan()) == by_hf
    assert all(judge(case, answer, checkpoint.family, margin=5).hit for case, answer in zip(posed, by_hf, strict=True))
    assert len(set(by_hf)) == 3


def test_transformers_own_generate_answers_alike(checkpoint, posed, by_hf, hf_engine):
    for case, answer in zip(posed, by_hf, strict=True):
        inputs = prepare_inputs(checkpoint, case.image, f"<image>{case.question}")
        ids = inputs.input_ids[None]
        generated = hf_engine.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=inputs.image_positions[None].int(),
            pixel_values=inputs.pixel_values,
            image_grid_thw=inputs.image_grid_thw,
            do_sample=False,
            max_new_tokens=ask.LONGEST,
        )
        assert "".join(token_texts(checkpoint, generated[0, inputs.tokens :])) == answer + "<|im_end|>"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_hybrid_answers_as_transformers_in_every_family(family, checkpoints, posed):
    boxes = [case_of((128, 160), (30, 40, 90, 100), "red", "circle", question=BOX_QUESTION)]
    answers = ask_hf(checkpoints[family], boxes)
    assert by_hybrid(checkpoints[family], boxes, hf_plan()) == answers
    assert [judge(case, a, family).status for case, a in zip(boxes, answers, strict=True)] == ["ok"]


def test_plan_and_dtype_reach_the_forward(checkpoint, posed, monkeypatch):
    used = []

    class Watched(ask.Hybrid):
        def language(self, ids, positions, plan, *others):
            used.append((plan, self.dtype))
            return super().language(ids, positions, plan, *others)

    monkeypatch.setattr(ask, "Hybrid", Watched)
    (answer,) = by_hybrid(checkpoint, posed[:1], sglang_plan(), torch.float64)
    assert judge(posed[0], answer, checkpoint.family).hit
    assert set(map(str, used)) == {str((sglang_plan(), torch.float64))}
    assert len(used) > 5


def test_ways_share_a_vision_part_and_hypotheses_reach_picture_model_and_frame(checkpoint, posed, monkeypatch):
    seen = []

    class Watched(ask.Hybrid):
        def vision(self, pixels, *others):
            seen.append(len(pixels))
            return super().vision(pixels, *others)

    monkeypatch.setattr(ask, "Hybrid", Watched)
    halved = Hypothesis(picture=lambda image: image.resize((56, 84)))
    ways = {
        "hf": Way(hf_plan()),
        "norm": Way(hf_plan().switched("rms_norm", "sglang")),
        "flat": Way(hf_plan(), hypothesis=HYPOTHESES["1-D positions"]),
        "halved": Way(hf_plan(), hypothesis=halved),
        "frame": Way(hf_plan(), hypothesis=Hypothesis(family="qwen2_5_vl")),
    }
    found = ask_hybrid(Forward(checkpoint), posed[:2], ways)
    assert len(seen) == 4 and seen[0] == seen[1] > seen[2] == seen[3]
    assert [o.hit for o in found["hf"]] == [o.hit for o in found["norm"]] == [True, True]
    assert all(a.answer != b.answer for a, b in zip(found["hf"], found["flat"], strict=True))
    assert [o.answer for o in found["hf"]] == [o.answer for o in found["frame"]]
    assert [o.status for o in found["frame"]] == ["out_of_range"] * 2


@pytest.mark.parametrize(("family", "passes"), [("qwen2_vl", 2), ("qwen3_vl", 1)])
def test_fp8_shares_a_vision_part_where_that_has_none(checkpoints, family, passes, monkeypatch):
    seen = []

    class Watched(ask.Hybrid):
        def vision(self, *given):
            seen.append(super().vision(*given))
            return seen[-1]

    monkeypatch.setattr(ask, "Hybrid", Watched)
    (_, case), fp8 = cases(2, (140, 168)), Way(hf_plan().switched("fp8", "channel/token"))
    ask_hybrid(Forward(checkpoints[family]), [case], {"hf": Way(hf_plan()), "fp8": fp8})
    assert len(seen) == passes
    ask_hybrid(Forward(checkpoints[family]), [case], {"fp8": fp8})
    assert torch.equal(seen[-1].features, seen[-2].features) and len(seen) == passes + 1


def test_forced_tokens_give_their_logits_and_the_greedy_ones_the_same(checkpoint, posed):
    forward, way = Forward(checkpoint), Way(hf_plan())
    free = forward.ask(posed[0], way)
    kept = forward.ask(posed[0], way, free.tokens)  # from the prefill at hand
    assert kept.tokens == free.tokens and torch.equal(kept.logits, free.logits)
    assert forward.ask(posed[1], way).tokens != free.tokens
    again = forward.ask(posed[0], Way(hf_plan()), free.tokens)
    assert again.tokens == free.tokens and torch.equal(again.logits, free.logits)
    assert free.logits.argmax(-1).tolist() == list(free.tokens) and free.tokens[-1] in forward.text.ends
    assert free.resized == SIZE
    other = forward.ask(posed[0], Way(hf_plan()), (*free.tokens[:1], free.tokens[1] + 1))
    assert other.tokens[:2] == (free.tokens[0], free.tokens[1] + 1) and other.tokens[-1] in forward.text.ends
    assert torch.equal(other.logits[:2], free.logits[:2]) and not torch.equal(other.logits[2], free.logits[2])


def test_an_answer_without_an_end_stops(checkpoint, posed, monkeypatch):
    monkeypatch.setattr(ask, "LONGEST", 3)
    for answers in (ask_hf(checkpoint, posed[:1]), by_hybrid(checkpoint, posed[:1], hf_plan())):
        assert len(answers[0]) == 3 and judge(posed[0], answers[0], checkpoint.family).status == "unparsable"


@pytest.mark.engine
def test_sglang_answers_and_stops_at_the_end(checkpoint, posed, by_hf, sglang_engine, monkeypatch):
    opened = []

    @contextlib.contextmanager
    def already_open(checkpoint, extra, deepstack_order):
        opened.append((extra, deepstack_order))
        yield sglang_engine

    monkeypatch.setattr(ask, "open_sglang", already_open)
    answers = ask_sglang(checkpoint, posed, {"tp_size": 1})
    assert opened == [({"tp_size": 1}, "sglang")]
    for answer, other in zip(answers, by_hf, strict=True):
        assert_close(answer, other)
    monkeypatch.setattr(ask, "SHORT", 2)
    monkeypatch.setattr(ask, "LONGEST", 12)
    assert ask_sglang(checkpoint, posed[:1]) == answers[:1]


def assert_close(answer, other, tolerance=5):
    """Two points within so many of 1000."""
    a, b = (read_point(text, "qwen2_vl").values for text in (answer, other))
    assert all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True)), (answer, other)


def test_the_tolerance_can_be_missed():
    assert_close("(500, 500)", "(505, 495)")
    with pytest.raises(AssertionError):
        assert_close("(500, 500)", "(506, 500)")


# ---------------------------------------------------------------------------------------------------- servers


def test_a_server_gets_picture_question_and_greedy_settings(posed):
    with serving(lambda i, body, _: (200, said(f"({i}, 7)"))) as (url, seen):
        assert ask_server(url + "/", "tiny", posed) == ["(0, 7)", "(1, 7)", "(2, 7)"]
    path, body = seen[1]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0, ask.LONGEST)
    picture, question = body["messages"][0]["content"]
    assert question == {"type": "text", "text": posed[1].question}
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == posed[1].image.tobytes()


def test_one_failing_request_of_three_loses_only_itself(posed):
    with serving(lambda i, *_: (500, b"out of \x1b[1mmemory") if i == 1 else (200, said("(1, 2)"))) as (url, _):
        first, failed, last = ask_server(url, "tiny", posed)
    assert (first, last) == ("(1, 2)", "(1, 2)")
    assert isinstance(failed, VlmlabError)
    assert str(failed) == r"expected an answer from the server, got HTTP 500: 'out of \x1b[1mmemory'"


def test_prose_is_an_answer_and_unparsable(posed, checkpoint):
    prose = ["I see no rectangle.", "", "(1, 2) or (3, 4)"]
    with serving(lambda i, *_: (200, said(prose[i]))) as (url, _):
        answers = ask_server(url, "tiny", posed)
    assert answers == prose
    assert {judge(c, a, checkpoint.family).status for c, a in zip(posed, answers, strict=True)} == {"unparsable"}


BAD_REPLIES = {
    "no JSON": ((200, b"<html>"), "expected JSON from the server, got b'<html>'"),
    "no bytes": ((200, b""), "expected JSON from the server"),
    "other bytes": ((200, b"\xff\xfe\xff"), "expected JSON from the server"),
    "a bomb of lists": ((200, b"[" * 200_000), "expected JSON from the server"),
    "too long": ((200, b" " * 1_000_001), "at most 1000000 bytes"),
    "a list": ((200, b"[]"), r"expected text at choices\[0\].message.content, got b'\[\]'"),
    "no choice": ((200, b'{"choices": []}'), "expected text at"),
    "null": ((200, said(None)), "expected text at"),
    "parts": ((200, said([{"text": "(1, 2)"}])), "expected text at"),
    "not found": ((404, b""), "got HTTP 404$"),
    "moved": ((302, b"elsewhere"), "got HTTP 302"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_one_sentence_and_the_third_ends_the_asking(name, posed):
    reply, message = BAD_REPLIES[name]
    with serving(lambda *_: reply) as (url, seen), pytest.raises(VlmlabError, match=message) as raised:
        ask_server(url, "tiny", [*posed, *posed])
    assert "\n" not in str(raised.value)
    assert [path for path, _ in seen] == ["/v1/chat/completions"] * 3


def test_what_was_answered_before_a_server_dies_is_kept(posed):
    with serving(lambda i, *_: (503, b"") if i > 1 else (200, said("(1, 2)"))) as (url, seen):
        answers = ask_server(url, "tiny", posed * 3)
    assert answers[:2] == ["(1, 2)"] * 2
    assert [str(answer) for answer in answers[2:]] == ["expected an answer from the server, got HTTP 503"] * 3 + [
        "not asked, since 3 requests in a row had failed"
    ] * 4
    assert len(seen) == 5


def test_an_unreachable_server_is_one_sentence(posed):
    with pytest.raises(VlmlabError, match="expected a server that answers, got ConnectionRefusedError"):
        ask_server(f"http://127.0.0.1:{free_port()}/v1", "tiny", posed)


def drip(handler):
    """A reply that never ends, a blank every 50 ms."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.05)


@pytest.mark.parametrize("slow", [lambda _: time.sleep(1), drip], ids=["silent", "dripping"])
def test_a_slow_server_is_one_sentence_in_time(slow, posed):
    began = time.perf_counter()
    with serving(lambda i, body, handler: (slow(handler), (200, said("(1, 2)")))[1]) as (url, _):
        with pytest.raises(VlmlabError, match=r"expected the server's reply within 0.2 s, got none"):
            ask_server(url, "tiny", posed, timeout=0.2)
        assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "file:///etc/hostname", "ftp://host/v1", "http://", "http://a:x"]
)
def test_only_http_is_asked(url, posed):
    with pytest.raises(VlmlabError, match="expected a base URL such as"):
        ask_server(url, "tiny", posed)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_time(timeout, posed):
    with pytest.raises(VlmlabError, match="expected a finite timeout"):
        ask_server("http://127.0.0.1:1/v1", "tiny", posed, timeout)


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def small(monkeypatch):
    """`vlmlab ground` on three small pictures; the first of `cases` takes seconds."""
    monkeypatch.setattr("vlmlab.grounding.cases", lambda n, size, seed, question: cases(4, SIZE, seed, question)[1:])


def test_ground_prints_one_object_with_exactly_the_promised_keys(small, capsys):
    arguments = ["--engines", "hf", "--hybrid", "hf,float64", "--fp8", "channel/token", "--json"]
    assert main(["ground", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["conditions"]
    for condition in found["conditions"]:
        assert list(condition) == ["name", "engine", "n", "hit_rate", "ci95", "drift_px", "unparsable", "out_of_range"]
        assert list(condition["drift_px"]) == ["median", "p90", "max"]
        assert (condition["n"], condition["hit_rate"], condition["unparsable"]) == (3, 1.0, 0)
    names = [(condition.pop("name"), condition.pop("engine")) for condition in found["conditions"]]
    forwards = ["hybrid hf", "hybrid float64"]
    forwards += [f"{name}, FP8 channel/token (emulated)" for name in forwards]
    assert names == [("hf", "hf"), *((name, "hybrid") for name in forwards)]
    assert found["conditions"][1] != found["conditions"][3]
    assert found["conditions"][0] == found["conditions"][1]


def test_ground_in_words_says_what_a_server_left_out(small, capsys):
    replies = [(200, said("(0, 0)")), (500, b""), (200, said("it is red"))]
    with serving(lambda i, *_: replies[i]) as (url, _):
        assert main(["ground", "--hybrid", "hf", "--base-url", url, "--served-model", "tiny"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("hybrid hf (hybrid): 100.0% of 3 hit")
    assert lines[1].startswith("tiny (server): ") and "of 2 hit" in lines[1] and "1 unparsable, 0 out of" in lines[1]
    assert lines[2].startswith("tiny against hybrid hf: shift median ") and "McNemar p = " in lines[2]
    assert "tiny: 1 of 3 cases have no answer and are left out; the first: expected an answer" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0x448"], "expected a size of two whole numbers of at least 44 px, got (0, 448)"),
        (["--size", "448"], "expected --size WIDTHxHEIGHT in px, got '448'"),
        (["--size=-1x9"], "expected --size WIDTHxHEIGHT"),
        (["--size", "99999999x99999999"], "at most 100000000 pixels"),
        (["--n", "0"], "expected at least one case"),
        (["--engines", "hf,vllm"], "expected --engines with some of hf,sglang, got 'vllm'"),
        (["--hybrid", ""], "expected --hybrid with some of hf,sglang,float64, got ''"),
        (["--fp8", "channel/token"], "expected --hybrid or --hypotheses with --fp8"),
        (["--hybrid", "hf", "--fp8", "int4"], "expected --fp8 with some of tensor/token,"),
        (["--deepstack-orders", "sorted"], "expected --deepstack-orders with some of hf,"),
        (["--deepstack-orders", "hf", "--n", "1"], "qwen2-vl-tiny (qwen2_vl) has no deepstack"),
        (["--base-url", "http://127.0.0.1:1"], "expected --base-url and --served-model together"),
        (["--base-url", "file:///x", "--served-model", "x", "--n", "1"], "expected a base URL such as"),
        (["--engine-arg", "x"], "expected --engine-arg NAME=VALUE"),
        (["--model", "no-such-model"], "unknown model 'no-such-model'"),
    ],
)
def test_bad_arguments_are_one_clear_sentence(arguments, message, capsys):
    assert main(["ground", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


# ---------------------------------------------------------------------------------------------------- a real server


@contextlib.contextmanager
def sglang_server(checkpoint, log):
    """A started `sglang.launch_server` as a process group of its own. Yields: its base URL, its process."""
    port = free_port()
    flags = {"model_path": checkpoint.folder, "host": "127.0.0.1", "port": port, "served_model_name": "tiny"}
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in (engine_arguments(checkpoint) | flags).items():
        command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=engine_sglang._environment({}), start_new_session=True
        )
    started = [psutil.Process(process.pid)]
    try:
        end = time.monotonic() + engine_sglang.START_TIMEOUT_S
        while b"fired up and ready" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        started += started[0].children(recursive=True)
        assert len(started) > 2
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(started, timeout=20)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.engine
def test_a_real_sglang_server_answers_as_transformers(checkpoint, posed, by_hf, tmp_path):
    if not has_sglang():
        pytest.skip('SGLang is not installed: pip install "vlmlab[sglang]"')
    import openai

    with sglang_server(checkpoint, tmp_path / "server.log") as url:
        served = ask_server(url, "tiny", posed)
        with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
            picture = {"type": "image_url", "image_url": {"url": ask._data_uri(posed[0].image)}}
            content = [picture, {"type": "text", "text": posed[0].question}]
            reply = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=ask.LONGEST
            )
    for answer, other in zip(served, by_hf, strict=True):
        assert_close(answer, other)
    assert_close(reply.choices[0].message.content, by_hf[0])
