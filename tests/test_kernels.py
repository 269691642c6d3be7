"""SGLang's kernels are loaded without SGLang; on a GPU each computes what its formula says, up to rounding."""

import os
import signal
import sys

import pytest
import torch
from transformers import PreTrainedConfig

from vlmlab import arithmetic as by
from vlmlab import kernels
from vlmlab.attribution import explain
from vlmlab.causes import CAUSES, sglang_plan
from vlmlab.engine_hf import vision_output
from vlmlab.engine_sglang import open_sglang
from vlmlab.hybrid import Hybrid
from vlmlab.machine import has_cuda, versions
from vlmlab.passes import Passes
from vlmlab.replay import asked_of, closure, local_states

TRITON = {"attention_backend": "triton", "mm_attention_backend": "triton_attn"}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")]
needs_sglang = pytest.mark.skipif(versions()["sglang"] is None, reason="needs sglang")


def test_no_kernel_is_called_on_a_cpu():
    assert kernels.available("cpu", TRITON) == {}
    assert sglang_plan(kernels.available("cpu", TRITON)) == sglang_plan()


def test_the_plan_records_where_a_kernel_is_called():
    plan = sglang_plan({"rms_norm": "sglang-kernel 1: rmsnorm"})
    assert (plan.how("rms_norm", 3), plan.how("rotary", 3)) == ("kernel", "sglang")
    assert kernels.KERNELS.keys() <= {cause.name for cause in CAUSES}


def test_attention_kernels_only_where_the_engine_chose_them(monkeypatch):
    monkeypatch.setattr(kernels, "_function", lambda module, name: print)
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "1")
    assert kernels.available("cuda", {}).keys() == {"rms_norm", "qk_norm", "residual_sum", "rotary"}
    assert kernels.available("cuda:1", TRITON).keys() == kernels.KERNELS.keys()
    assert kernels.available("cuda", {})["rms_norm"] == "sglang-kernel 1: rmsnorm"
    monkeypatch.setattr(kernels, "_function", lambda module, name: None)
    assert kernels.available("cuda", TRITON) == {}


def test_what_cannot_be_imported_is_not_available():
    assert kernels._function("sglang.no_such_module", "f") is None
    assert kernels._function("sgl_kernel", "no_such_function") is None


@needs_sglang
def test_kernel_modules_are_loaded_without_the_package():
    kernels._function.cache_clear()
    before = dict(vars(PreTrainedConfig)), signal.getsignal(signal.SIGINT), dict(os.environ)
    assert callable(kernels._function(*kernels._ROTARY)) and callable(kernels._function(*kernels._CAUSAL))
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
    assert before == (dict(vars(PreTrainedConfig)), signal.getsignal(signal.SIGINT), dict(os.environ))


def draw(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def unlike(a, b):
    """Share of the elements that differ."""
    return a.ne(b).double().mean().item()


def error(x, truth):
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.fixture
def called():
    """The kernels of this device, or a skip that says what is missing."""
    torch.manual_seed(0)
    found = kernels.available("cuda", TRITON)
    if not found:
        pytest.skip("SGLang's kernels cannot be imported")
    return found


class TestOnCuda:
    pytestmark = gpu

    def test_norms(self, called):
        x, residual, weight = draw(830, 3584, scale=4.0), draw(830, 3584, scale=9.0), draw(3584) + 1
        kernel, formula, other = (by.rms_norm(x, weight, 1e-6, how) for how in ("kernel", "sglang", "hf"))
        assert unlike(kernel, formula) < 1e-3 < 0.1 < unlike(kernel, other)
        sums = {how: by.residual_sum(residual, x, how) for how in ("kernel", "sglang", "hf")}
        assert all(torch.equal(stream, sums["hf"][0]) for stream, _ in sums.values())
        fused, formula = (by.rms_norm(sums[how][1], weight, 1e-6, how) for how in ("kernel", "sglang"))
        rounded = by.rms_norm(sums["hf"][1], weight, 1e-6, "sglang")
        assert unlike(fused, formula) < 1e-3 < 0.1 < unlike(fused, rounded)

    def test_rotation(self, called):
        x, cos, sin = draw(100, 28, 128), draw(100, 64), draw(100, 64)
        kernel, formula = (by.rotate_text(x, cos, sin, how) for how in ("kernel", "sglang"))
        truth = by.rotate_text(x.double(), cos.double(), sin.double(), "hf")
        assert error(kernel, truth) <= 1.1 * error(formula, truth)
        assert error(by.rotate_text(x, cos, -sin, "kernel"), truth) > 0.1

    def test_attention(self, called):
        q, k, v = draw(1, 28, 830, 128), draw(1, 4, 830, 128), draw(1, 4, 830, 128)
        truth = by.causal_attention(*(t.double() for t in (q, k, v)), "hf")
        wrong = by.causal_attention(*(t.double() for t in (q, k.flip(2), v)), "hf")
        kernel, formula = (by.causal_attention(q, k, v, how) for how in ("kernel", "sglang"))
        assert error(kernel, truth) < 2 * error(formula, truth) < 0.1 < error(kernel, wrong)
        q, k, v = draw(2880, 16, 80), draw(2880, 16, 80), draw(2880, 16, 80)
        truth = by.full_attention(*(t.double() for t in (q, k, v)), "hf")
        kernel, formula = (by.full_attention(q, k, v, how) for how in ("kernel", "hf"))
        assert error(kernel, truth) < 2 * error(formula, truth) < 0.1

    @pytest.mark.engine
    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
    def test_an_engine_on_cuda_is_explained_with_its_kernels(self, family, hf_engines, ask, tmp_path, called):
        inputs = ask(family, (8, 10), seed=34)
        hf = hf_engines(family).capture(inputs, tmp_path / "hf")
        checkpoint = hf_engines(family).checkpoint
        with open_sglang(checkpoint, TRITON | {"max_total_tokens": 8192}) as engine:
            sglang = engine.capture(inputs, tmp_path / "sglang", vision_output(hf))
        hybrid, exact = Hybrid(checkpoint), Hybrid(checkpoint, torch.float64)
        explained = explain(Passes(hybrid, exact), hf, sglang, say=lambda line: None)
        assert explained.word == "rounding"
        assert explained.kernels == called
        asked = asked_of(hybrid, sglang, hf)
        with_kernels, formulas = (
            closure(sglang, local_states(hybrid, sglang, asked, plan)) for plan in (sglang_plan(called), sglang_plan())
        )
        assert with_kernels.equal > formulas.equal
