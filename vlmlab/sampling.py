"""Settings that make two texts differ before any rounding does.

sampling_differences    what Transformers' generate and SGLang's sampling parameters do differently
as_served               the settings that a checkpoint's generation config gives both engines
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmlab.errors import VlmlabError

# Of other settings, the value that does nothing, where it is not 0, false or empty.
OFF = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "beam_width": 1,
    "n": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0,
}
# Settings that choose no token of one text.
WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("use_cache", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_dict_in_generate", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_lookbehind"),
    *("assistant_confidence_threshold", "target_lookbehind", "length_penalty", "early_stopping"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
}
NAMED = {
    *("do_sample", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("eos_token_id", "stop_token_ids", "ignore_eos", "max_new_tokens"),
}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


SERVED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def as_served(generation_config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each engine makes of a checkpoint's generation_config.json when nobody says otherwise.

    Args: generation_config: its content. Returns: settings of Transformers' generate, of SGLang's server, as
    sampling_differences takes them.
    Source: transformers@5.19.0: generation/utils.py, _prepare_generation_config. sglang@0.5.23:
    srt/configs/model_config.py, get_default_sampling_params.
    """
    ends = {"eos_token_id": generation_config.get("eos_token_id")}
    taken = {name: generation_config[name] for name in SERVED if generation_config.get(name) is not None}
    return dict(generation_config), taken | ends


@dataclass(frozen=True)
class SettingDifference:
    """A setting that stops a claim of drift. Attributes: name. baseline, target: in force, in words. sentence: one."""

    name: str
    baseline: str
    target: str
    sentence: str


def sampling_differences(
    baseline_settings: Mapping[str, Any], target_settings: Mapping[str, Any]
) -> tuple[SettingDifference, ...]:
    """Settings in force that differ: each stops a claim that the texts drift apart by rounding.

    A key that is absent has its engine's own default, which is not always "off": Transformers does not sample, keeps
    the 50 likeliest when it does, and stops after 20 tokens; SGLang samples at temperature 1 and stops after 128. Off
    are temperature 0, top_p 1 or None, top_k 0, -1 or None, min_p 0 or None, a repetition penalty of 1, others of 0.
    SGLang has no do_sample: its temperature decides. What only sampling reads is compared when both sample. A
    repetition penalty differs even when equal: Transformers penalises the prompt's tokens, too, SGLang generated ones
    only.

    Args: baseline_settings: of Transformers' generate, with the checkpoint's generation config merged in; leave out
    what that does not set. target_settings: of SGLang's sampling_params, with what its endpoint takes from the
    generation config merged in. The eos ids are part of both.
    Returns: differences by name; empty when none.
    Raises: VlmlabError: a value of the wrong type.
    Source: transformers@5.19.0: generation/configuration_utils.py, _get_default_generation_params; generation/utils.py,
    _get_logits_processor and _prepare_generated_length. sglang@0.5.23: srt/sampling/sampling_params.py, SamplingParams;
    srt/sampling/penaltylib/repetition_penalty.py; srt/managers/schedule_batch.py, _check_token_based_finish.
    """
    ours, theirs = _in_force(baseline_settings, sglang=False), _in_force(target_settings, sglang=True)
    both_sample = ours["do_sample"] and theirs["do_sample"]
    only_sampling = ("temperature", "top_p", "top_k", "min_p")
    found = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name in only_sampling and not both_sample:
            continue
        a, b = ours.get(name), theirs.get(name)
        words = _said(name, a), _said(name, b)
        if a != b:
            sentence = f"{name} differs: {words[0]} in Transformers, {words[1]} in SGLang"
        elif name == "repetition_penalty" and a != 1.0:
            sentence = f"{name} is {a:g} in both, and only Transformers applies it to the tokens of the prompt"
        else:
            continue
        found.append(SettingDifference(name, *words, sentence))
    return tuple(found)


def _in_force(settings: Mapping[str, Any], sglang: bool) -> dict[str, Any]:
    """The settings as an engine reads them; None is off."""
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise VlmlabError(f"expected settings by name, got {type(settings).__name__}")
    temperature = _numeric(settings, "temperature", 1.0)
    if temperature < 0:
        raise VlmlabError(f"expected a temperature of at least 0, got {temperature}")
    greedy = temperature < 1e-6
    top_k = _numeric(settings, "top_k", -1 if sglang or "top_k" in settings else 50)
    if sglang:
        greedy |= top_k == 1
    elif not _flag(settings, "do_sample"):
        greedy = True
    force: dict[str, Any] = {
        "do_sample": not greedy,
        "temperature": temperature,
        "top_p": min(_numeric(settings, "top_p", 1.0), 1.0),
        "top_k": None if top_k <= 0 or top_k >= 2**30 else top_k,
        "min_p": _numeric(settings, "min_p", 0.0),
    }
    force |= {name: _numeric(settings, name, off) for name, off in PENALTIES.items()}
    force["eos_token_id"] = _stops(settings)
    limit: float | None
    if sglang:
        limit = None if "max_new_tokens" in settings else 128
    else:
        limit = 20 if settings.get("max_length") is None else None
    if settings.get("max_new_tokens") is not None:
        limit = _numeric(settings, "max_new_tokens", 0)
    force["max_new_tokens"] = limit
    skipped = NAMED | WITHOUT_EFFECT | ({"max_length"} if settings.get("max_new_tokens") is not None else set())
    for name, value in settings.items():
        if name not in skipped and value and value != OFF.get(name):
            force[name] = value
    return force


def _numeric(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise VlmlabError(f"expected a finite number for {name}, got {value!r}")
    return value


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise VlmlabError(f"expected true or false for {name}, got {value!r}")
    return bool(value)


def _stops(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Ids that end the text, sorted; () when none does; None when nothing is said."""
    if _flag(settings, "ignore_eos"):
        return ()
    said = [settings[name] for name in ("eos_token_id", "stop_token_ids") if settings.get(name) is not None]
    ids: set[int] = set()
    for value in said:
        members = [value] if isinstance(value, int) else value
        if not isinstance(members, list | tuple | set | frozenset) or not all(type(i) is int for i in members):
            raise VlmlabError(f"expected token ids that end the text, got {value!r}")
        ids |= set(members)
    return tuple(sorted(ids)) if said else None


def _said(name: str, value: Any) -> str:
    if name == "do_sample":
        return "samples" if value else "greedy"
    if name == "eos_token_id":
        return "not stated" if value is None else "none" if not value else ", ".join(map(str, value))
    if name in ("top_k", "max_new_tokens") and value is None:
        return "no limit"
    return "not stated" if value is None else str(value)
