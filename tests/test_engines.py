"""Engines are opened when needed, once, and closed whatever happens."""

import contextlib
import types

import pytest

from vlmlab import engines
from vlmlab.engines import Engines, borrowed


@pytest.fixture
def opened(monkeypatch):
    """What was opened and closed, in order; the engines are stand-ins."""
    events = []

    def opens(name):
        @contextlib.contextmanager
        def open_one(*_, **options):
            events.append(f"open {name}" + ("" if options.get("wait", True) else ", not waiting"))
            try:
                yield types.SimpleNamespace(name=name, ready=lambda: events.append(f"{name} ready"))
            finally:
                events.append(f"close {name}")

        return open_one

    monkeypatch.setattr(engines, "open_hf", opens("hf"))
    monkeypatch.setattr(engines, "open_sglang", opens("sglang"))
    return events


def test_each_is_opened_once_and_sglang_begins_before_it_is_needed(checkpoint, opened, monkeypatch):
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    with Engines(checkpoint) as both:
        assert opened == []
        both.sglang_soon()
        assert both.hf() is both.hf() and both.sglang() is both.sglang()
        assert opened == ["open sglang, not waiting", "open hf", "sglang ready", "sglang ready"]
    assert opened[-2:] == ["close hf", "close sglang"]


def test_where_one_fits_the_other_is_closed_first(checkpoint, opened, monkeypatch):
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    with Engines(checkpoint) as both:
        both.sglang_soon()
        both.hf()
        both.sglang()
        both.hf()
    order = ["open hf", "close hf", "open sglang, not waiting", "sglang ready", "close sglang", "open hf", "close hf"]
    assert opened == order


def test_a_large_model_is_alone_on_a_cpu_too(checkpoint, opened, monkeypatch):
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    monkeypatch.setattr(engines, "SMALL_BYTES", checkpoint.weight_bytes - 1)
    assert not Engines(checkpoint).together


def test_both_are_closed_after_an_error_and_borrowed_ones_are_left_open(checkpoint, opened):
    with pytest.raises(ZeroDivisionError), Engines(checkpoint) as both:
        both.sglang()
        with borrowed(both, checkpoint) as same:
            assert same is both
        assert "close sglang" not in opened
        raise ZeroDivisionError
    assert opened[-1] == "close sglang"
    with borrowed(None, checkpoint) as own:
        own.hf()
    assert opened[-1] == "close hf"
