"""Both engines generate: freely, on the same tokens, and the same tokens in other shapes of work.

capture_answers     everything one question makes of both engines, from the store or fresh
Answers, Answer     tokens and decode steps
stacked             one hook point over all steps
unexplained         tensors that a plan does not give bit for bit
end_of_text         the ids that end an answer
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmlab import store
from vlmlab.capture import Say, capture_key
from vlmlab.checkpoint import Checkpoint
from vlmlab.engine_hf import vision_output
from vlmlab.engine_sglang import SGLangEngine, engine_arguments, engine_settings
from vlmlab.engines import Engines, borrowed
from vlmlab.errors import VlmlabError
from vlmlab.inputs import Inputs
from vlmlab.replay import differing
from vlmlab.trace import Trace, load_trace, write_json

STEPS = 32  # watched by default
COPIES = 4
CHUNK = 256
ON_POLICY = "decode, rl_on_policy_target"
RUNS = {
    "sglang": "decode steps on its own tokens",
    "forced": "decode steps on Transformers' tokens",
    "prefill": "the same tokens as one prefill",
    "batch": f"the same tokens {COPIES} times in a batch",
}
REFUSED_FILE = "refused.json"

Run = tuple[tuple[Trace, ...], list[int]]  # steps, tokens


@dataclass(frozen=True)
class Answer:
    """What an engine generated.

    Attributes: tokens: [S + 1] ids; token k is the input of step k. steps: S traces. first: [1, V] logits of the
    prefill, which chose token 0. ended: why it is shorter than asked, or "".
    """

    tokens: tuple[int, ...]
    steps: tuple[Trace, ...]
    first: Tensor
    ended: str = ""

    @property
    def logits(self) -> Tensor:
        """[S + 1, V]: row k chose token k."""
        return torch.cat([self.first, *(step["logits"] for step in self.steps)])


@dataclass(frozen=True)
class Answers:
    """One question, both engines.

    Attributes: hf, sglang: each on its own tokens. forced: SGLang on Transformers' tokens. on_policy: the same with
    `rl_on_policy_target`, None where it is refused. ways: name of another way
    through an engine to {hook point: [S, D]} of the same tokens, NaN where a step was not seen; "decode" are the forced
    steps. refused: name of a way that the engine does not take here to why.
    """

    hf: Answer
    sglang: Answer
    forced: Answer
    on_policy: Answer | None
    ways: dict[str, dict[str, Tensor]]
    refused: dict[str, str]

    @property
    def pairs(self) -> tuple[tuple[Trace, Trace], ...]:
        """(Transformers', SGLang's) decode steps on the same tokens, Transformers'."""
        return tuple(zip(self.hf.steps, self.forced.steps, strict=True))


def stacked(steps: Sequence[Trace], name: str) -> Tensor:
    """One hook point over all steps. Returns: [S, D]."""
    return torch.cat([step[name] for step in steps])


def unexplained(steps: Sequence[Trace], states: Mapping[str, Tensor]) -> int:
    """Tensors of decode steps that a plan does not give bit for bit. Args: states: of replay.run_answer."""
    rows = {name: state[1:] if name == "logits" else state for name, state in states.items()}
    return sum(
        bool(differing(rows[name][k : k + 1], step[name])) for k, step in enumerate(steps) for name in step.hook_points
    )


def end_of_text(checkpoint: Checkpoint) -> frozenset[int]:
    """The ids that end an answer, of generation_config.json or config.json."""
    file = checkpoint.folder / "generation_config.json"
    text = checkpoint.config.get("text_config") or checkpoint.config
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ids = settings.get("eos_token_id", text.get("eos_token_id", checkpoint.config.get("eos_token_id")))
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def check_room(checkpoint: Checkpoint, inputs: Inputs, steps: int, arguments: Mapping[str, Any]) -> None:
    """Raises: VlmlabError: prompt and answer do not fit into the context, or no step is asked for."""
    text = checkpoint.config.get("text_config") or checkpoint.config
    limits = {"max_position_embeddings": text.get("max_position_embeddings")}
    limits |= {name: arguments.get(name) for name in ("context_length", "max_total_tokens")}
    if steps < 1:
        raise VlmlabError(f"expected at least 1 step, got {steps}")
    for name, limit in limits.items():
        if limit is not None and inputs.tokens + steps + 1 > limit:
            raise VlmlabError(
                f"a prompt of {inputs.tokens} tokens and {steps + 1} new ones do not fit into {name} = {limit}"
            )


def capture_answers(
    checkpoint: Checkpoint,
    inputs: Inputs,
    baseline: Trace,
    target: Trace,
    steps: int,
    *,
    fresh: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    shapes: bool = True,
    restarts: bool = False,
    say: Say = print,
    engines: Engines | None = None,
) -> Answers:
    """Generate with both engines, greedily, until a token ends the text or after `steps` decode steps.

    Args: baseline, target: Transformers' and SGLang's traces of the prefill; both are given the baseline's vision
    output. steps: most decode steps. shapes: also run the same tokens in other shapes of work.
    restarts: also on engines that are started for it with other arguments: a prefill in chunks, and
    `rl_on_policy_target`. Others: see capture.capture_both.
    Returns: Answers. Raises: VlmlabError: no room in the context, an empty answer, an engine cannot run here or fails.
    """
    given, attention = vision_output(baseline), baseline.info.attention
    arguments = engine_arguments(checkpoint, engine_args)
    check_room(checkpoint, inputs, steps, arguments)
    settings = {**engine_settings(checkpoint, arguments), "attention": attention}
    name = f"{capture_key(settings, checkpoint, inputs, given)}-{steps}-answers"
    store.use(name)
    with borrowed(engines, checkpoint, attention, engine_args) as opened:
        folder = store.store_folder() / name
        return _captured(opened, folder, inputs, baseline, target, steps, fresh, shapes, restarts, say)


def _captured(
    engines: Engines,
    folder: Path,
    inputs: Inputs,
    baseline: Trace,
    target: Trace,
    steps: int,
    fresh: bool,
    shapes: bool,
    restarts: bool,
    say: Say,
) -> Answers:
    checkpoint, given, ends = engines.checkpoint, vision_output(baseline), end_of_text(engines.checkpoint)
    free = _stored(folder / "hf", fresh)
    if free is None:
        engines.sglang_soon()
        say(f"Transformers: up to {steps} decode steps")
        free = _keep(folder / "hf", *engines.hf().capture_decode(inputs, folder / "hf", steps))
    mine = _until_end(Answer(tuple(free[1]), free[0], baseline["logits"][-1:]), steps, ends)
    count, tokens = len(mine.steps), mine.tokens
    following = inputs.followed_by(tokens[:count])

    def run(name: str, engine: SGLangEngine) -> Run:
        """One of SGLang's runs."""
        here, together = folder / name, max(1, count - 2 * COPIES)
        if name == "sglang":
            return engine.capture_decode(inputs, here, steps, given)
        if name == "forced":
            return engine.capture_decode(inputs, here, count, given, tokens)
        if name == "prefill":
            return engine.capture_prefill(following, here, given), []
        return engine.capture_batch(inputs, here, together, COPIES, tokens, given), []

    found: dict[str, Run] = {}
    for name, what in RUNS.items() if shapes else list(RUNS.items())[:2]:
        stored = _stored(folder / name, fresh)
        if stored is None:
            say(f"SGLang: {what}")
            stored = _keep(folder / name, *run(name, engines.sglang()))
        found[name] = stored
    theirs = Answer(tuple(found["sglang"][1]), found["sglang"][0], target["logits"][-1:])
    forced = Answer(tuple(found["forced"][1]), found["forced"][0], target["logits"][-1:])
    ways = {"decode": _rows(forced.steps, range(count))}
    refused: dict[str, str] = {}
    on_policy = None

    def elsewhere(name: str, extra: Mapping[str, Any], run: Callable[[SGLangEngine, Path], Run]) -> Run | None:
        """A run on an engine with further arguments, from the store or fresh."""
        here = folder / name.replace(" ", "_")
        stored, why = _stored(here, fresh), None if fresh else _why_refused(here)
        if stored is None and why is None:
            say(f"SGLang: starting it again for {name}")
            try:
                with Engines(checkpoint, engines.attention, {**engines.engine_args, **extra}) as others:
                    return _keep(here, *run(others.sglang(), here))
            except VlmlabError as error:
                why = _last_line(error)
                here.mkdir(parents=True, exist_ok=True)
                write_json(here / REFUSED_FILE, {"why": why})
        if stored is None and why is not None:
            refused[name] = why
        return stored

    if shapes:
        ways["prefill"] = _rows(found["prefill"][0], slice(-count, None))
        ways[f"decode, batch of {COPIES}"] = _placed(found["batch"][0], forced.steps, count)
    if restarts:
        name, passes = f"prefill in chunks of {CHUNK}", math.ceil(following.tokens / CHUNK)
        chunks = elsewhere(
            name,
            {"chunked_prefill_size": CHUNK},
            lambda engine, here: (engine.capture_prefill(following, here, given, passes), []),
        )
        if chunks is not None:
            ways[name] = _rows(chunks[0], slice(-count, None))
        policy = elsewhere(
            ON_POLICY,
            {"rl_on_policy_target": "fsdp"},
            lambda engine, here: engine.capture_decode(inputs, here, count, given, tokens),
        )
        if policy is not None:
            on_policy = Answer(tuple(policy[1]), policy[0], target["logits"][-1:])
            ways[ON_POLICY] = _rows(policy[0], range(count))
    if shapes:
        whole = _stored(folder / "hf_prefill", fresh)
        if whole is None:
            say("Transformers: the same tokens as one prefill")
            trace = engines.hf().capture(following, folder / "hf_prefill" / "step_0")
            whole = _keep(folder / "hf_prefill", [trace], [])
        ways["Transformers, prefill"] = _rows(whole[0], slice(-count, None))
        ways["Transformers, decode"] = _rows(mine.steps, range(count))
    store.prune()
    return Answers(mine, _until_end(theirs, steps, ends), forced, on_policy, ways, refused)


def _why_refused(folder: Path) -> str | None:
    """Why the engine did not take these arguments here, when it was last asked."""
    try:
        return str(json.loads((folder / REFUSED_FILE).read_text(encoding="utf-8"))["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_line(error: VlmlabError) -> str:
    return str(error).splitlines()[-1]


def _keep(folder: Path, steps: Sequence[Trace], tokens: Sequence[int]) -> Run:
    """Note a finished run beside its traces. Written last, so that a run cut short is captured again."""
    write_json(folder / "tokens.json", {"tokens": list(tokens), "steps": len(steps)})
    return tuple(steps), list(tokens)


def _stored(folder: Path, fresh: bool) -> Run | None:
    if fresh:
        return None
    try:
        noted = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        return tuple(load_trace(folder / f"step_{k}") for k in range(noted["steps"])), noted["tokens"]
    except (OSError, ValueError, KeyError, TypeError, VlmlabError):
        return None


def _until_end(answer: Answer, steps: int, ends: frozenset[int]) -> Answer:
    """The answer without what comes after its end. Raises: VlmlabError: nothing comes before."""
    place = next((k for k, token in enumerate(answer.tokens) if token in ends), None)
    if place == 0 or not answer.tokens:
        why = "the first token ends it" if answer.tokens else "the logits of the prefill are not finite"
        raise VlmlabError(f"the answer is empty: {why}")
    count, ended = len(answer.steps), ""
    if place is not None:
        count, ended = place, f"the answer ends at step {place}"
    elif count < steps:
        ended = f"logits are not finite at step {count - 1}"
    return Answer(answer.tokens[: count + 1], answer.steps[:count], answer.first, ended)


def _language(steps: Sequence[Trace]) -> list[str]:
    return [name for name in steps[0].hook_points if name.startswith("layers.") or name == "final_norm"]


def _rows(steps: Sequence[Trace], rows: slice | range) -> dict[str, Tensor]:
    return {name: stacked(steps, name)[list(rows) if isinstance(rows, range) else rows] for name in _language(steps)}


def _placed(batch: Sequence[Trace], alone: Sequence[Trace], count: int) -> dict[str, Tensor]:
    """The first row of every pass of a batch, at the step that its position says."""
    start = int(alone[0]["inputs.positions"][0, 0])
    places = [int(step["inputs.positions"][0, 0]) - start for step in batch]
    found = {}
    for name in _language(batch):
        states = torch.full((count, batch[0][name].shape[1]), torch.nan, dtype=batch[0][name].dtype)
        for step, place in zip(batch, places, strict=True):
            if 0 <= place < count:
                states[place] = step[name][0]
        found[name] = states
    return found
