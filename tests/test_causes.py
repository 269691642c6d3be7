import ast
import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

from vlmlab import causes
from vlmlab.causes import CAUSES, NOT_SWITCHED, Plan, causes_of, hf_plan, sglang_plan
from vlmlab.hookpoints import FAMILIES

HYBRID = Path(causes.__file__).parent / "hybrid.py"
EVERY = CAUSES + NOT_SWITCHED
QWEN2, QWEN3, MOE = FAMILIES


def named(*names):
    return tuple(cause for cause in CAUSES if cause.name in names)


def test_the_hybrid_asks_for_every_cause_and_no_other():
    asked = re.findall(r'plan\.how\(\s*"(\w+)"(,)?', HYBRID.read_text())
    assert {name for name, _ in asked} == {cause.name for cause in CAUSES} | {"fp8"}  # which goes along with any
    for cause in CAUSES:
        assert {bool(layer) for name, layer in asked if name == cause.name} == {cause.layered}, cause.name


def test_names_are_unique_and_fields_filled():
    assert len({cause.name for cause in EVERY}) == len(EVERY)
    for cause in EVERY:
        assert cause.part in ("vision", "language", "inputs")
        assert set(cause.families) <= set(FAMILIES) and cause.families
        texts = (cause.title, cause.explanation, cause.hf, cause.sglang, cause.matters)
        assert all(texts)
        assert all(text.isascii() for text in texts)
        assert cause.explanation.endswith(".")
        assert ". " not in cause.explanation  # one sentence
    assert {cause.part for cause in CAUSES} == {"vision", "language"}


def test_causes_of_a_family_and_part():
    assert {cause.name for cause in causes_of(QWEN2, "vision")} == {
        "patch_embed", "vit_rotary", "vit_norm_eps", "vit_attention",
    }  # fmt: skip
    assert {c.name for c in CAUSES} - {c.name for c in causes_of(QWEN3)} == {"router_weights", "expert_combine"}
    assert {c.name for c in CAUSES} - {c.name for c in causes_of(MOE)} == {"gate_up_linear"}
    assert len(causes_of(MOE)) == len(causes_of(MOE, "vision")) + len(causes_of(MOE, "language"))


def test_plan_per_layer():
    plan = Plan("hf", {"rotary": ("hf", "sglang", "sglang"), "head": "sglang"})
    assert [plan.how("rotary", i) for i in (0, 1, 2)] == ["hf", "sglang", "sglang"]
    assert plan.how("rotary", 3) == plan.how("rotary") == "sglang"  # the final norm has the last layer's way
    assert plan.how("head") == plan.how("head", 7) == "sglang"
    assert plan.how("attention", 0) == "hf"


def test_switched_everywhere_and_in_some_layers():
    plan = hf_plan().switched("rms_norm", "sglang")
    assert [plan.how("rms_norm", i) for i in range(3)] == ["sglang"] * 3
    assert plan.how("residual_sum", 0) == "hf"
    some = hf_plan().switched("rms_norm", "sglang", [0, 2], depth=4)
    assert [some.how("rms_norm", i) for i in range(4)] == ["sglang", "hf", "sglang", "hf"]
    more = some.switched("rms_norm", "sglang", range(1, 2), depth=4)
    assert [more.how("rms_norm", i) for i in range(4)] == ["sglang", "sglang", "sglang", "hf"]
    assert [some.how("rms_norm", i) for i in range(4)] == ["sglang", "hf", "sglang", "hf"]  # unchanged itself
    back = sglang_plan().switched("rms_norm", "hf", [3], depth=4)
    assert [back.how("rms_norm", i) for i in range(4)] == ["sglang", "sglang", "sglang", "hf"]


def test_engine_plans():
    assert all(hf_plan().how(cause.name, 0) == "hf" for cause in CAUSES)
    assert all(sglang_plan().how(cause.name, 0) == "sglang" for cause in CAUSES)
    eager = {cause.name for cause in CAUSES if hf_plan("eager").how(cause.name, 0) == "eager"}
    assert eager == {"vit_attention", "attention"}


def test_key_tells_apart_only_what_the_causes_change():
    one, other = hf_plan(), hf_plan().switched("head", "sglang")
    assert one.key(named("rotary", "attention")) == other.key(named("rotary", "attention"))
    assert one.key(named("rotary", "head")) != other.key(named("rotary", "head"))
    assert one.switched("head", "hf").key(CAUSES) == one.key(CAUSES)
    assert hash(other.switched("rotary", "sglang", [1], depth=3).key(CAUSES)) is not None


# ---------------------------------------------------------------------------------------------------- sources


def places(source):
    """(package, version, [(path, name), ...]) of a source text."""
    package, version, rest = re.fullmatch(r"(\w+)@([\d.]+): (.+)", source).groups()
    return package, version, [tuple(place.split(", ")) for place in rest.split("; ")]


def defined(path):
    """Functions, classes and `Class.method`s of a source file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds)}
    return found


@pytest.mark.parametrize("package", ["transformers", "sglang"])
@pytest.mark.parametrize("cause", EVERY, ids=lambda cause: cause.name)
def test_sources_exist(cause, package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed, so its sources cannot be looked up")
    named_package, version, found = places(cause.hf_source if package == "transformers" else cause.sglang_source)
    assert (named_package, version) == (package, metadata.version(package))
    for path, name in found:
        assert name in defined(Path(spec.submodule_search_locations[0]) / path)


def test_the_source_check_can_fail():
    found = defined(HYBRID)
    assert {"Hybrid", "Hybrid.logits", "Cache"} <= found
    assert "Hybrid.no_such_method" not in found
    assert places("sglang@0.5.23: a/b.py, C.d; e.py, f") == ("sglang", "0.5.23", [("a/b.py", "C.d"), ("e.py", "f")])
