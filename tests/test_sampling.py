"""Settings that are off are equal to absent ones; every other difference is named."""

import pytest

from vlmlab.errors import VlmlabError
from vlmlab.sampling import as_served, sampling_differences

GREEDY = {"do_sample": False, "max_new_tokens": 8}, {"temperature": 0.0, "max_new_tokens": 8}
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 8}, {"max_new_tokens": 8}


def differing(pair, ours=(), theirs=()):
    return [d.name for d in sampling_differences(pair[0] | dict(ours), pair[1] | dict(theirs))]


@pytest.mark.parametrize("pair", [GREEDY, SAMPLING])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"top_p": 1.0}, {}),
        ({}, {"top_p": None}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"top_k": None}, {}),
        ({"min_p": None}, {"min_p": 0.0}),
        ({"repetition_penalty": 1.0}, {}),
        ({}, {"presence_penalty": 0.0, "frequency_penalty": 0}),
        ({"eos_token_id": 7}, {"eos_token_id": [7]}),
        ({"eos_token_id": [7, 3]}, {"eos_token_id": [3], "stop_token_ids": [7]}),
        ({"eos_token_id": []}, {"ignore_eos": True, "eos_token_id": 7}),
        ({"num_beams": 1, "bos_token_id": 5, "transformers_version": "5.19.0"}, {"n": 1, "min_new_tokens": 0}),
    ],
)
def test_off_is_equal_to_absent(pair, ours, theirs):
    assert differing(pair, ours, theirs) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ({"temperature": 0.7}, {}, ["temperature"]),
        ({}, {"top_p": 0.9}, ["top_p"]),
        ({}, {"top_k": 20}, ["top_k"]),
        ({}, {"min_p": 0.1}, ["min_p"]),
        ({"repetition_penalty": 1.05}, {}, ["repetition_penalty"]),
        ({}, {"presence_penalty": 1.5}, ["presence_penalty"]),
        ({}, {"frequency_penalty": 0.5}, ["frequency_penalty"]),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 1}, ["eos_token_id"]),
        ({"eos_token_id": 1}, {}, ["eos_token_id"]),
        ({"eos_token_id": 1}, {"eos_token_id": 1, "ignore_eos": True}, ["eos_token_id"]),
        ({}, {"max_new_tokens": 9}, ["max_new_tokens"]),
        ({}, {"max_new_tokens": None}, ["max_new_tokens"]),
        ({"do_sample": False}, {"top_p": 0.9}, ["do_sample"]),
        ({"num_beams": 4}, {}, ["num_beams"]),
        ({}, {"stop": ["."]}, ["stop"]),
    ],
)
def test_a_setting_in_force_on_one_side_is_named(ours, theirs, names):
    assert differing(SAMPLING, ours, theirs) == names


def test_what_only_sampling_reads_does_not_matter_to_greedy_texts():
    assert differing(GREEDY, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.5}) == []
    assert differing(GREEDY, {"repetition_penalty": 1.1}) == ["repetition_penalty"]


def test_each_engine_has_defaults_of_its_own():
    names = [d.name for d in sampling_differences({}, {})]
    assert names == ["do_sample", "max_new_tokens"]
    kept = {key: value for key, value in SAMPLING[0].items() if key != "top_k"}
    (found,) = sampling_differences(kept, SAMPLING[1])
    assert found.sentence == "top_k differs: 50 in Transformers, no limit in SGLang"
    (found,) = sampling_differences(GREEDY[0], {"do_sample": False, "max_new_tokens": 8})  # SGLang does not read it
    assert found.sentence == "do_sample differs: greedy in Transformers, samples in SGLang"


def test_an_equal_repetition_penalty_still_differs_on_the_prompt():
    penalty = {"repetition_penalty": 1.05}
    (found,) = sampling_differences(GREEDY[0] | penalty, GREEDY[1] | penalty)
    assert found.name == "repetition_penalty" and "tokens of the prompt" in found.sentence


def test_the_installed_engine_has_the_defaults_written_here():
    from transformers import GenerationConfig

    defaults = GenerationConfig._get_default_generation_params()
    assert (defaults["do_sample"], defaults["top_k"], defaults["max_length"]) == (False, 50, 20)
    assert differing(GREEDY, {**defaults, "max_length": None}) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": "0"}, "finite number for temperature, got '0'"),
        ({"temperature": float("nan")}, "finite number for temperature"),
        ({"temperature": -1}, "temperature of at least 0"),
        ({"top_k": True}, "finite number for top_k"),
        ({"eos_token_id": "</s>"}, "token ids that end the text"),
        ({"ignore_eos": "no"}, "true or false for ignore_eos"),
        ([], "settings by name, got list"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(bad, message):
    with pytest.raises(VlmlabError, match=message):
        sampling_differences(bad, {})
    with pytest.raises(VlmlabError, match=message):
        sampling_differences({}, bad)


def test_a_checkpoint_that_says_greedy_is_not_served_greedily():
    config = {"do_sample": False, "eos_token_id": [2, 1], "temperature": 0.7, "transformers_version": "5"}
    hf, sglang = as_served(config)
    assert hf == config and sglang == {"temperature": 0.7, "eos_token_id": [2, 1]}
    assert [d.name for d in sampling_differences(hf, sglang)] == ["do_sample", "max_new_tokens"]
    sampled = as_served({"do_sample": True, "top_k": 20, "temperature": 0.7, "max_new_tokens": 128})
    assert [d.name for d in sampling_differences(*sampled)] == []
