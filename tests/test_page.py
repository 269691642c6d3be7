"""Each promise of a page, and the hostile text or page that would break it."""

import base64
import errno
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from vlmlab.errors import VlmlabError
from vlmlab.page import addresses, assemble, embed_json, number, policy, text, token_strip, write_page

HALF = b"\xe2\x82".decode("utf-8", "surrogateescape")


class Seen(HTMLParser):
    """What a reader of HTML finds: names of elements, and all text that is not inside a script."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.scripts, self.policies = [], "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policies.append(dict(attrs)["content"])

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


@pytest.mark.parametrize(
    "hostile, shown",
    [
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("\" onload='x' &amp;", "\" onload='x' &amp;"),
        (HALF, r"\udce2\udc82"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("\x1b[31mred\x00\x7f\x85", r"\x1b[31mred\x00\x7f\x85"),
        ("one\ntwo\ttab\r", r"one\ntwo\ttab\r"),
        ("\u200b\u200e\u2028\u2029\u2066\u2069\ufeff\ue000", r"\u200b\u200e\u2028\u2029\u2066\u2069\ufeff\ue000"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_hostile_text_is_shown_and_does_nothing(hostile, shown):
    html = text(hostile)
    assert Seen(html).tags == [] and Seen(html).text == shown
    assert '"' not in html and "'" not in html
    html.encode()


@pytest.mark.parametrize("harmless", ["Qwen/Qwen2-VL", "10⁻³, naïve", "图像 🖼", "q\u0308", "a b", "\ufffd"])
def test_other_text_stays_as_it_is(harmless):
    assert text(harmless) == harmless


@pytest.mark.parametrize("word", ["שלום", "سلام", "x ٣"])
def test_right_to_left_text_is_isolated(word):
    assert text(f"<{word}>") == f"<bdi>&lt;{word}&gt;</bdi>"


def test_anything_is_shown_as_its_text():
    assert text(None) == "None" and text(3.5) == "3.5" and text(Path("a<b")) == "a&lt;b"


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_numbers_that_are_none_say_so(value):
    assert number(value) == "n/a"


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.25, 1.23456e-9, 123456.0)] == ["0", "0.25", "1.23e-09", "1.23e+05"]
    assert number(np.float32(0.5)) == "0.5" and number(0.123456, 5) == "0.12346"


def strict(embedded):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(embedded, parse_constant=refuse)


def test_embedded_json_is_strict_whatever_is_in_it():
    value = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], "c": np.float64("nan"), "d": [True, None]}
    with pytest.raises(ValueError, match="NaN"):
        strict(json.dumps(value))
    assert strict(embed_json(value)) == {"a": [1.5, None, [None, {"b": None}]], "c": None, "d": [True, None]}
    assert embed_json({"a": [1, 2]}) == '{"a":[1,2]}'


def test_embedded_json_cannot_leave_its_script():
    value = f"</script><!--<script>&\u2028\u2029\u202e{HALF}"
    embedded = embed_json({value: value})
    assert not set("<>&\u2028\u2029") & set(embedded) and embedded.isascii()
    assert strict(embedded) == {value: value}
    assert Seen(assemble("t", "", scripts=[f"d={embedded}"])).tags.count("script") == 1


def test_json_that_is_not_json_is_refused():
    with pytest.raises(TypeError):
        embed_json({"a": {1, 2}})


def test_a_page_is_whole_and_its_title_cannot_break_out():
    page = assemble("</title><script>x</script>\u202e", "<p>body</p>", "p { color: red }", lang='e"n')
    seen = Seen(page)
    assert page.startswith('<!doctype html>\n<html lang="e&quot;n">')
    assert seen.tags == ["html", "head", "meta", "meta", "meta", "title", "style", "body", "p"]
    assert r"</title><script>x</script>\u202e" in seen.text and "body" in seen.text
    assert page.index("Content-Security-Policy") < page.index("<title>")


def rules(page):
    (content,) = Seen(page).policies
    return {name: values for name, *values in (rule.split() for rule in content.split(";"))}


def test_a_page_without_scripts_may_run_none_and_load_nothing():
    found = rules(assemble("t", "b"))
    assert found == {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "style-src": ["'unsafe-inline'"],
        "font-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "script-src": ["'none'"],
    }
    assert policy() in assemble("t", "b")


def allowed(page):
    """Whether the policy allows each script, by the bytes a browser would hash."""
    sources = rules(page)["script-src"]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" in sources for s in scripts]


def test_the_policy_allows_exactly_the_given_scripts():
    page = assemble("t", "<p>b</p>", scripts=["\nlet a = 'é';\n", "f(a < 2)"])
    assert allowed(page) == [True, True]
    assert len(rules(page)["script-src"]) == 3 and "'unsafe-eval'" in rules(page)["script-src"]
    assert allowed(page.replace("a < 2", "a < 3")) == [True, False]
    assert page.index("<p>b</p>") < page.index("<script>")


@pytest.mark.parametrize("script", ["'</script>'", "'</SCRIPT '", "'<!--'", "a\r\nb", "'\0'"])
def test_a_script_that_would_end_early_or_be_read_otherwise_is_refused(script):
    with pytest.raises(ValueError, match="script of a page"):
        assemble("t", "b", scripts=["fine()", script])


def test_a_style_that_would_end_early_is_refused():
    with pytest.raises(ValueError, match="style of a page"):
        assemble("t", "b", "p {}</STYLE><p>")


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<img alt='' src='//example/x.png'>",
        '<link rel="stylesheet" href="http://example/x.css">',
        "<style>a { background: url(https://example/x.png) }</style>",
        '<style>@import "https://example/x.css";</style>',
        '<script type="module">import("https://example/x.js")</script>',
    ],
)
def test_every_way_to_load_is_seen(page):
    assert addresses(page)


def test_links_names_and_data_are_not_loads():
    page = '<a href="https://example">x</a><img src="data:image/png;base64,AA"><svg xmlns="http://www.w3.org/2000/svg">'
    assert addresses(page) == []


@pytest.mark.parametrize(
    "body",
    ['<img src="https://example/x.png">', '<SCRIPT defer src="https://example/x.js">f()</SCRIPT>', "<script>url(//x)"],
)
def test_a_page_that_loads_is_not_written(tmp_path, body):
    with pytest.raises(VlmlabError, match=r"page\.html would load"):
        write_page(assemble("t", body), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_addresses_inside_a_script_are_not_loads(tmp_path):
    script = "const names = ['url(https://example/x)', '<img src=\"https://example/y\">'];"
    file = write_page(assemble("t", "b", scripts=[script]), tmp_path / "deep" / "page.html")
    assert script in file.read_text() and allowed(file.read_text()) == [True]
    assert [f.name for f in file.parent.iterdir()] == ["page.html"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder whose name HTML and JSON write otherwise."""
    folder = tmp_path / "R&D été"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("spelled", [str, text, embed_json], ids=["raw", "html", "json"])
def test_a_page_that_names_a_folder_is_not_written(here, spelled):
    page = assemble("t", f"<p>{spelled(f'{here}/secret')}</p>")
    with pytest.raises(VlmlabError, match="name a folder of this machine"):
        write_page(page, here / "page.html")
    assert not list(here.iterdir())
    written = write_page(page, here / "page.html", {str(here): "R&D"}).read_text()
    assert f"<p>{spelled('R&D/secret')}</p>" in written


def test_the_home_and_the_interpreter_are_folders_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somebody/home")
    for folder in ("/somebody/home", sys.prefix):
        with pytest.raises(VlmlabError, match="name a folder"):
            write_page(assemble("t", f"{folder}/x"), tmp_path / "page.html")


def test_a_script_stays_allowed_when_a_private_text_in_it_is_replaced(here):
    page = assemble("t", "", scripts=["f()", f"d={embed_json(str(here))}"])
    written = write_page(page, here / "page.html", {str(here): "model"}).read_text()
    assert 'd="model"' in written and allowed(written) == [True, True]


def test_half_a_character_does_not_stop_a_page(tmp_path):
    written = write_page(assemble("t", HALF, scripts=[f"'{HALF}'"]), tmp_path / "page.html").read_text(encoding="utf-8")
    assert written.count(r"\udce2\udc82") == 2 and allowed(written) == [True]


def test_a_failed_write_leaves_the_old_page_and_no_other_file(tmp_path, monkeypatch):
    file = write_page(assemble("old", ""), tmp_path / "page.html")
    for failing in ("write_bytes", "replace"):

        def full(path, *_):
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Path, failing, full)
            with pytest.raises(VlmlabError, match="disk is full"):
                write_page(assemble("new", ""), file)
        assert [f.name for f in tmp_path.iterdir()] == ["page.html"] and "<title>old" in file.read_text()


def test_a_token_strip_escapes_its_words_and_frames_one():
    strip = token_strip(["a b", "<script>", "\u202e"], [0.5, 2.0, -1.0], mark=1)
    assert "a&nbsp;b" in strip and "&lt;script&gt;" in strip and "<script" not in strip and "\u202e" not in strip
    assert strip.count("outline") == 1 and "0.50)" in strip and "1.00)" in strip and "0.00)" in strip
    with pytest.raises(ValueError, match="zip"):
        token_strip(["a"], [0.1, 0.2])
