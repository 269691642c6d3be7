"""Grounding cases asked of an engine, of the hybrid forward or of a server: one answer a case, in order.

ask_hf          Transformers, in process
ask_sglang      the real SGLang engine
ask_hybrid, ask_within  the hybrid forward in several ways, cases batched: Way, its plan, dtype and hypothesis
Forward         the same, one case alone or several at once, with their tokens and logits: Reply
ask_server      any server with OpenAI's chat completions

All but ask_hybrid ask one case at a time, since other cases in the batch may change its bits (the cause `batch_shape`);
what they change in ask_hybrid, vlmlab.batching counts. All ask greedily: the likeliest token, without temperature or
penalty, up to the tokenizer's end or padding token or LONGEST tokens.
Answers keep their special tokens except the end. A server does as its operator says: see ask_server.
"""

import base64
import http.client
import io
import itertools
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlmlab.causes import Plan, causes_of
from vlmlab.checkpoint import Checkpoint
from vlmlab.engine_hf import open_hf
from vlmlab.engine_sglang import open_sglang
from vlmlab.errors import VlmlabError
from vlmlab.grounding import Case, Outcome, Size, judge
from vlmlab.hybrid import Cache, Hybrid, Seen
from vlmlab.hypotheses import UNCHANGED, Hypothesis
from vlmlab.inputs import IMAGE_PLACE, Inputs, prepare_inputs
from vlmlab.replay import Asked

LONGEST = 96  # tokens; a fenced JSON box with a label takes about half
SHORT = 16  # tokens; SGLang's first try, since the engine generates as many as it is asked for
TIMEOUT_S = 120.0
GIVE_UP = 3  # requests in a row
LARGEST_REPLY = 1_000_000  # bytes
KEPT_PREFILLS = 8  # a baseline and the plans that it is compared with
TOGETHER = 16  # cases in a batch
AT_LEAST = 8  # cases, whatever the time


# ---------------------------------------------------------------------------------------------------- here


@torch.no_grad()
def ask_hf(checkpoint: Checkpoint, cases: Sequence[Case]) -> list[str]:
    """Answers of Transformers.

    Args: checkpoint: to load. cases: to ask. Returns: one answer a case.
    Raises: VlmlabError: the checkpoint does not load, or a picture is none for its processor.
    """
    from transformers import DynamicCache

    text, answers = _Text(checkpoint), []
    with open_hf(checkpoint) as engine:
        for case in cases:
            inputs = _inputs(checkpoint, case)
            cache = DynamicCache(config=engine.model.config.get_text_config())

            def step(ids: Tensor, positions: Tensor, _: None, cache: Any = cache) -> Tensor:
                ids, positions = ids.to(engine.device), positions.to(engine.device)
                return engine.model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[:, -1]

            start = int(engine.positions(inputs).max()) + 1
            ((tokens, _),) = text.greedy(engine.forward(inputs, cache), [start], step)
            answers.append(text.until_end(tokens))
    return answers


def ask_sglang(
    checkpoint: Checkpoint,
    cases: Sequence[Case],
    extra: Mapping[str, Any] | None = None,
    deepstack_order: str = "sglang",
) -> list[str]:
    """Answers of the real SGLang engine, which tokenizes the text and processes the picture itself.

    Args: checkpoint: to load. cases: to ask. extra: further `sglang.Engine` arguments. deepstack_order: see
    engine_sglang.open_sglang. Returns: one answer a case.
    Raises: VlmlabError: SGLang is missing, does not start, or refuses a case.
    """
    text, answers = _Text(checkpoint), []
    with open_sglang(checkpoint, extra, deepstack_order=deepstack_order) as engine:
        for case in cases:
            inputs = _inputs(checkpoint, case)
            tokens = engine.generate(inputs, SHORT)
            if text.ends.isdisjoint(tokens):
                tokens = engine.generate(inputs, LONGEST)
            answers.append(text.until_end(tokens))
    return answers


@dataclass(frozen=True)
class Way:
    """One way to compute. plan: of the hybrid forward. dtype: None for the checkpoint's own. hypothesis: what else."""

    plan: Plan
    dtype: torch.dtype | None = None
    hypothesis: Hypothesis = UNCHANGED


@dataclass(frozen=True)
class Reply:
    """One answer of the hybrid forward.

    Attributes: answer: text. tokens: as chosen, with the one that ended it. logits: [S, V] on the CPU; row k chose
    token k. resized: (width, height) px of the picture as the model saw it.
    """

    answer: str
    tokens: tuple[int, ...]
    logits: Tensor = field(repr=False)
    resized: Size


@dataclass(frozen=True)
class _Prefill:
    """Prompts, read at once. cache: of their tokens. logits: [B, V] after them. starts: [B] next position of each."""

    cache: Cache
    logits: Tensor
    starts: list[int]


class Forward:
    """The hybrid forward, asked. It keeps weights per dtype, and of the last cases vision outputs and a few prefills.

    Args: checkpoint: to load.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.text = checkpoint, _Text(checkpoint)
        self._hybrids: dict[torch.dtype | None, Hybrid] = {}
        self._cases: tuple[Case, ...] = ()
        self._seen: dict[tuple, tuple[Inputs, Seen]] = {}
        self._prefills: deque[tuple[Way, _Prefill]] = deque(maxlen=KEPT_PREFILLS)

    @torch.no_grad()
    def ask(self, case: Case, way: Way, forced: Sequence[int] = ()) -> Reply:
        """One answer, of the case alone.

        Args: case: to ask. way: how to compute. forced: tokens to follow before choosing.
        Raises: VlmlabError: the picture is none for the checkpoint's processor.
        """
        self._keep((case,))
        hybrid = self._hybrid(way)
        asked, resized = self._asked(hybrid, case, way)
        known = next((prefill for other, prefill in self._prefills if other is way), None)
        if known is None:
            known = _read(hybrid, [asked], way.plan)
            self._prefills.append((way, known))
        ((tokens, logits),) = self._follow(hybrid, known, way.plan, forced)
        return Reply(self.text.until_end(tokens), tuple(tokens), logits, resized)

    @torch.no_grad()
    def ask_at_once(self, cases: Sequence[Case], way: Way) -> list[Reply]:
        """Several answers: equally long prompts share every pass of the language model, TOGETHER at most.

        Cases are asked alone where a batch is another function (see FP8Weights.mixes_rows).
        Args: cases: to ask. way: how to compute. Returns: one Reply a case. Raises: as ask.
        """
        self._keep(tuple(cases))
        hybrid = self._hybrid(way)
        schemes = {way.plan.how("fp8", layer) for layer in range(hybrid.depth)}
        most = 1 if any(map(hybrid.fp8.mixes_rows, schemes)) else TOGETHER
        given = [self._asked(hybrid, case, way) for case in cases]
        alike: dict[tuple, list[int]] = {}
        for i, (asked, _) in enumerate(given):
            shapes = () if asked.seen is None else (asked.seen.features.shape, len(asked.seen.deepstack))
            alike.setdefault((len(asked.input_ids), *shapes), []).append(i)
        replies: dict[int, Reply] = {}
        for batch in (group[k : k + most] for group in alike.values() for k in range(0, len(group), most)):
            prefill = _read(hybrid, [given[i][0] for i in batch], way.plan)
            for i, (tokens, logits) in zip(batch, self._follow(hybrid, prefill, way.plan), strict=True):
                replies[i] = Reply(self.text.until_end(tokens), tuple(tokens), logits, given[i][1])
        return [replies[i] for i in range(len(cases))]

    def _keep(self, cases: tuple[Case, ...]) -> None:
        """Forget what is known of other cases."""
        if [*map(id, cases)] != [*map(id, self._cases)]:
            self._cases = cases
            self._seen.clear()
            self._prefills.clear()

    def _hybrid(self, way: Way) -> Hybrid:
        if way.dtype not in self._hybrids:
            self._hybrids[way.dtype] = Hybrid(self.checkpoint, way.dtype)
        return self._hybrids[way.dtype]

    def _asked(self, hybrid: Hybrid, case: Case, way: Way) -> tuple[Asked, Size]:
        """What the language model is given, and the picture's size as the model saw it, px."""
        inputs, seen = self._see(hybrid, case, way)
        assert inputs.image_grid_thw is not None
        positions = hybrid.positions(inputs.input_ids, inputs.image_grid_thw)
        asked = Asked(inputs.input_ids, positions, None, None, seen)
        _, rows, columns = (inputs.image_grid_thw[0] * self.checkpoint.config["vision_config"]["patch_size"]).tolist()
        return asked if way.hypothesis.asked is None else way.hypothesis.asked(asked), (columns, rows)

    def _follow(
        self, hybrid: Hybrid, prefill: _Prefill, plan: Plan, forced: Sequence[int] = ()
    ) -> list[tuple[list[int], Tensor]]:
        """Greedy tokens and logits of every sequence."""
        cache = prefill.cache.copy()

        def step(ids: Tensor, positions: Tensor, going: list[int] | None) -> Tensor:
            if going is not None:
                cache.keep(going)
            return hybrid.language(ids, positions, plan, None, cache)

        return self.text.greedy(prefill.logits, prefill.starts, step, forced)

    def fp8_by(self, scheme: str) -> str:
        """What has computed the products of an FP8 scheme so far, "" where nothing has. Args: scheme: of SCHEMES."""
        by = [hybrid.fp8.computed_by.get(scheme, set()) for hybrid in self._hybrids.values()]
        return " and ".join(sorted(set().union(*by)))

    def judge(self, case: Case, way: Way) -> Outcome:
        """One judged answer, of the case alone."""
        return self.judged(case, way, self.ask(case, way))

    def judged(self, case: Case, way: Way, reply: Reply) -> Outcome:
        """An answer to a case, judged in the frame that the way reads it in."""
        return judge(case, reply.answer, way.hypothesis.family or self.checkpoint.family, reply.resized)

    def _see(self, hybrid: Hybrid, case: Case, way: Way) -> tuple[Inputs, Seen]:
        """The vision part, once for all ways that share it."""
        picture = way.hypothesis.picture
        alike = way.plan.key(causes_of(hybrid.family, "vision"), hybrid.fp8.in_vision)
        key = (id(case), way.dtype, alike, picture)
        if key not in self._seen:
            image = case.image if picture is None else picture(case.image)
            inputs = prepare_inputs(self.checkpoint, image, IMAGE_PLACE + case.question)
            assert inputs.pixel_values is not None and inputs.image_grid_thw is not None
            self._seen[key] = inputs, hybrid.vision(inputs.pixel_values, inputs.image_grid_thw, way.plan)
        return self._seen[key]


def _read(hybrid: Hybrid, asked: Sequence[Asked], plan: Plan) -> _Prefill:
    """Prefill of equally long prompts with equally large pictures."""
    cache, seen = Cache(), [one.seen for one in asked if one.seen is not None]
    joined = None
    if seen:
        deepstack = zip(*(one.deepstack for one in seen), strict=True)
        joined = Seen(torch.cat([one.features for one in seen]), tuple(torch.cat(level) for level in deepstack))
    ids, positions = torch.stack([one.input_ids for one in asked]), torch.stack([one.positions for one in asked], 1)
    logits = hybrid.language(ids, positions, plan, joined, cache)
    return _Prefill(cache, logits, [int(one.positions.max()) + 1 for one in asked])


def ask_hybrid(forward: Forward, cases: Sequence[Case], ways: Mapping[str, Way]) -> dict[str, list[Outcome]]:
    """Judged answers of the hybrid forward: up to TOGETHER cases at once in all ways, then the next. Ways that differ
    in what they read an answer for, or not at all, compute once.

    Args: forward: of the checkpoint. cases: to ask. ways: by name.
    Returns: one Outcome a case for each name. Raises: VlmlabError: see Forward.ask.
    """
    found: dict[str, dict[int, Outcome]] = {name: {} for name in ways}
    order = sorted(range(len(cases)), key=lambda i: (cases[i].image.size, forward.text.length(cases[i].question)))
    for places in (order[k : k + TOGETHER] for k in range(0, len(order), TOGETHER)):
        posed, replies = [cases[i] for i in places], dict[tuple, list[Reply]]()
        for name, way in ways.items():
            change, alike = way.hypothesis, way.plan.key(causes_of(forward.checkpoint.family))
            key = (way.dtype, alike, change.asked, change.picture)
            if key not in replies:
                replies[key] = forward.ask_at_once(posed, way)
            for i, reply in zip(places, replies[key], strict=True):
                found[name][i] = forward.judged(cases[i], way, reply)
    return {name: [outcomes[i] for i in range(len(cases))] for name, outcomes in found.items()}


def ask_within(
    seconds: float, forward: Forward, cases: Sequence[Case], ways: Mapping[str, Way]
) -> dict[str, list[Outcome]]:
    """As ask_hybrid, for as many of the cases, from the first, as a time allows: AT_LEAST, and then as many more again
    and again while the next would end within it.

    Args: seconds: of asking. Others: see ask_hybrid.
    """
    found: dict[str, list[Outcome]] = {name: [] for name in ways}
    start, slowest = time.monotonic(), 0.0
    for place in range(0, len(cases), AT_LEAST):
        began = time.monotonic()
        if place and began - start + slowest > seconds:
            break
        for name, outcomes in ask_hybrid(forward, cases[place : place + AT_LEAST], ways).items():
            found[name] += outcomes
        slowest = time.monotonic() - began
    return found


class _Text:
    """Token ids to text. Attributes: ends: ids that end an answer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        except Exception as error:  # the library raises many unrelated types for broken files
            raise VlmlabError(
                f"expected a tokenizer in checkpoint {checkpoint.name!r}, got {type(error).__name__}: {error}"
            ) from error
        self.ends = {self._tokenizer.eos_token_id, self._tokenizer.pad_token_id}

    def until_end(self, tokens: Sequence[int]) -> str:
        """The answer that generated tokens hold."""
        kept = itertools.takewhile(lambda token: token not in self.ends, tokens)
        return str(self._tokenizer.decode(list(kept)))

    def length(self, words: str) -> int:
        """How many tokens a text has."""
        return len(self._tokenizer(words).input_ids)

    def greedy(
        self,
        logits: Tensor,
        starts: Sequence[int],
        step: Callable[[Tensor, Tensor, Any], Tensor],
        forced: Sequence[int] = (),
    ) -> list[tuple[list[int], Tensor]]:
        """The likeliest token again and again, until all sequences have ended.

        Args: logits: [B, V] after the prompts. starts: [B] next position of each. step: [b, 1] ids at [3, b, 1]
        positions, and which of the sequences of the step before go on (None: all), to [b, V] logits. forced: tokens to
        follow first.
        Returns: per sequence its tokens with the one that ended it, and [tokens, V] logits on the CPU.
        """
        tokens, rows = [list[int]() for _ in starts], [list[Tensor]() for _ in starts]
        going = list(range(len(starts)))
        while True:
            for b, row in zip(going, logits.cpu(), strict=True):
                rows[b].append(row)
                tokens[b].append(forced[len(tokens[b])] if len(tokens[b]) < len(forced) else int(row.argmax()))
            kept = [k for k, b in enumerate(going) if not self._ended(tokens[b], len(forced))]
            if not kept:
                return [(one, torch.stack(logits)) for one, logits in zip(tokens, rows, strict=True)]
            some = kept if len(kept) < len(going) else None
            going = [going[k] for k in kept]
            ids = torch.tensor([tokens[b][-1:] for b in going])
            places = torch.tensor([[starts[b] + len(tokens[b]) - 1] for b in going])
            logits = step(ids, places.expand(3, -1, -1), some)

    def _ended(self, tokens: Sequence[int], forced: int) -> bool:
        return len(tokens) >= forced and (len(tokens) >= LONGEST or tokens[-1] in self.ends)


def _inputs(checkpoint: Checkpoint, case: Case) -> Inputs:
    return prepare_inputs(checkpoint, case.image, IMAGE_PLACE + case.question)


# ---------------------------------------------------------------------------------------------------- a server


def ask_server(url: str, model: str, cases: Sequence[Case], timeout: float = TIMEOUT_S) -> list[str | VlmlabError]:
    """Answers of a server, over HTTP, with the picture as PNG inside the request.

    The request says temperature 0 and at most LONGEST tokens and nothing else. What a server adds is its own: SGLang
    takes the rest, such as a repetition penalty, from the checkpoint's generation_config.json (see
    sampling.sampling_differences), and it batches with whatever else it is asked. Redirects are not followed.

    Args: url: base URL, with the version: "http://127.0.0.1:30000/v1". model: name it is served under. cases: to ask.
    timeout: s, for each request. Returns: per case its answer, or the error in its place; after GIVE_UP errors in a row
    nothing more is asked. Raises: VlmlabError: the URL is none, the timeout no time, or no case was answered.
    Source: OpenAI API reference, POST /v1/chat/completions (message content of text and image_url). sglang@0.5.23:
    srt/arg_groups/fields/serving.py, sampling_defaults ("model" unless told otherwise).
    """
    _check_url(url)
    if not 0 < timeout < float("inf"):
        raise VlmlabError(f"expected a finite timeout of more than 0 s, got {timeout}")
    answers: list[str | VlmlabError] = []
    for case in cases:
        if len(answers) >= GIVE_UP and all(isinstance(answer, VlmlabError) for answer in answers[-GIVE_UP:]):
            answers.append(VlmlabError(f"not asked, since {GIVE_UP} requests in a row had failed"))
            continue
        content = [
            {"type": "image_url", "image_url": {"url": _data_uri(case.image)}},
            {"type": "text", "text": case.question},
        ]
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": LONGEST}
        try:
            answers.append(_text_of(_post(f"{url.rstrip('/')}/chat/completions", body, timeout)))
        except VlmlabError as error:
            answers.append(error)
    if answers and isinstance(answers[0], VlmlabError) and not any(isinstance(answer, str) for answer in answers):
        raise answers[0]
    return answers


def _check_url(url: str) -> None:
    """urllib would open files, too."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise VlmlabError(f"expected a base URL such as http://127.0.0.1:30000/v1, got {url!r}")


def _data_uri(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Nowhere: the reply counts as an HTTP error."""


def _post(url: str, body: Mapping[str, Any], timeout: float) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    late = VlmlabError(f"expected the server's reply within {timeout:g} s, got none")
    end = time.monotonic() + timeout
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout) as reply:
            content = b""
            while chunk := reply.read1(LARGEST_REPLY):
                content += chunk
                if len(content) > LARGEST_REPLY:
                    raise VlmlabError(f"expected a reply of at most {LARGEST_REPLY} bytes, got more")
                if time.monotonic() > end:
                    raise late
            return content
    except urllib.error.HTTPError as error:
        with error:
            raise VlmlabError(f"expected an answer from the server, got HTTP {error.code}{_said(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise late from error
        raise VlmlabError(f"expected a server that answers, got {type(reason).__name__}: {reason}") from error


def _said(error: urllib.error.HTTPError) -> str:
    """The beginning of an error's text, escaped: it is anything."""
    try:
        text = error.read1(300).decode(errors="replace")
    except (OSError, http.client.HTTPException, AttributeError):
        return ""
    return f": {text!a}" if text else ""


def _text_of(reply: bytes) -> str:
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise VlmlabError(f"expected JSON from the server, got {reply[:60]!a}") from error
    try:
        answer = parsed["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        answer = None
    if not isinstance(answer, str):
        raise VlmlabError(f"expected text at choices[0].message.content, got {reply[:200]!a}")
    return answer
