"""Trains one of the tiny checkpoints from scratch on generated pictures.

    python -m data.train --family qwen3-vl --out data/checkpoints/qwen3-vl-tiny --seconds 330

One CUDA GPU; on a CPU it runs too, for a few steps, to see that it runs: `--device cpu --steps 3 --batch-tokens 3000`.
Every picture is clean and every answer is true; nothing is ever broken on purpose during training.

What made so small a model learn this in minutes: Muon for the matrices, several questions per picture with the loss on
the answers only, small pictures first, and whole steps replayed as CUDA graphs.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoTokenizer

from data import shapes
from data.make_checkpoint import ARCHITECTURES, TOKEN_ID, make_tokenizer, vocab_size, write_checkpoint
from data.model import Model, initial_positions, parameter_table, patchify, position_weights, text_rotary, vision_rotary
from vlmlab.checkpoint import load_checkpoint

# Picture sizes in rows and columns of image tokens (28 px in Qwen2-VL, 32 px in Qwen3-VL).
SMALL_GRIDS = (
    (5, 5), (6, 6), (5, 8), (8, 5), (6, 9), (9, 6), (7, 7), (8, 8), (10, 7), (7, 10), (9, 12), (12, 9), (12, 12),
)  # fmt: skip
LARGE_GRIDS = (
    (16, 16), (14, 22), (22, 14), (15, 30), (30, 15), (18, 24), (24, 18), (22, 27), (27, 22), (24, 30), (30, 24),
    (20, 31), (31, 20), (28, 28), (31, 31),
)  # fmt: skip
HELD_OUT_GRIDS = ((11, 8), (17, 29))  # never trained on


@dataclass(frozen=True)
class Mix:
    """What a run is shown.

    Attributes: single_first: how often questions about single shapes come before the lists. one_kind: how many pictures
    have shapes of one kind only, so that only the colour decides. Both are shares in 0..1, at the start of the run and
    after it. start: share of the run. start_shapes: most shapes in a picture then.
    """

    start: float
    start_shapes: int
    single_first: tuple[float, float]
    one_kind: tuple[float, float]


QWEN3_MIX = Mix(start=0.08, start_shapes=2, single_first=(0.35, 0.35), one_kind=(0.0, 0.0))
MIXES = {
    # Else it learns to find the kind that is asked for and never its colour.
    "qwen2-vl": Mix(start=0.15, start_shapes=3, single_first=(1.0, 0.5), one_kind=(1.0, 0.4)),
    "qwen3-vl": QWEN3_MIX,
    "qwen3-vl-moe": QWEN3_MIX,
}

ANSWER_SPAN = 288  # last positions of a sequence, which get logits: eight shapes listed at length just fit
MAX_TURNS = 10
ROUTER_LOSS_WEIGHT = 0.01


def grids(arch):
    """Returns: small and large grids to train on; the largest is square and the most the processor lets through."""
    side = math.isqrt(arch.max_merged_tokens)
    return SMALL_GRIDS, (*LARGE_GRIDS, (side, side))


# ---------------------------------------------------------------------------------------------------- conversations


def write_turns(picture, family, rng, single_first):
    """Questions and true answers about one picture, at most MAX_TURNS.

    Args: picture: list of Shape. rng: random.Random. single_first: how often, in 0..1, questions about single shapes
        come before the lists. Returns: list of (question, answer).
    """
    every = (shapes.LIST_QUESTION, shapes.list_answer(picture))
    every_long = (shapes.LONG_LIST_QUESTION, shapes.long_list_answer(picture))
    single = [
        (shapes.point_question(s), shapes.point_answer(s))
        if rng.random() < 0.5
        else (shapes.box_question(s), shapes.box_answer(s, family))
        for s in rng.sample(picture, len(picture))
    ]
    # What comes first is read off the picture; what comes later can partly be copied from the answers before it.
    if rng.random() < single_first:
        turns = [*single, every, every_long]
    elif rng.random() < 0.4:
        turns = [every, *single, every_long]
    else:
        turns = [every_long, every, *single]
    return turns[:MAX_TURNS]


class Writer:
    """Turns conversations into token ids and labels."""

    def __init__(self, family):
        self.family, self.tokenizer = family, make_tokenizer()
        self.encode = lru_cache(maxsize=None)(lambda text: self.tokenizer(text, add_special_tokens=False).input_ids)

    def prefix(self, system):
        """Returns: token ids of everything before the image."""
        return self.encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<|vision_start|>")

    def write(self, pictures, prefix, image_tokens, length, rng, single_first):
        """Args: pictures: list of B lists of Shape. prefix: token ids. image_tokens: N. length: S. single_first: as in
            `write_turns`.

        Returns: ids [B, S] and labels [B, ANSWER_SPAN], int64; a label is the token that follows, -100 where nothing
            is asked of the model.
        """
        conversations = [write_turns(picture, self.family, rng, single_first) for picture in pictures]
        answers = [answer + "<|im_end|>" for turns in conversations for _, answer in turns]
        encoded = iter(self.tokenizer.backend_tokenizer.encode_batch(answers, add_special_tokens=False))
        head = prefix + [TOKEN_ID["<|image_pad|>"]] * image_tokens
        ids = torch.full((len(pictures), length + 1), TOKEN_ID["<|endoftext|>"])
        labels = torch.full((len(pictures), length + 1), -100)
        for row, turns in enumerate(conversations):
            tokens, asked = list(head), [-100] * len(head)
            opening = "<|vision_end|>"
            for question, _ in turns:
                asking = self.encode(f"{opening}{question}<|im_end|>\n<|im_start|>assistant\n")
                answer = next(encoded).ids
                tokens += asking + answer
                asked += [-100] * len(asking) + answer
                opening = "\n<|im_start|>user\n"
            tokens, asked = tokens[: length + 1], asked[: length + 1]
            ids[row, : len(tokens)], labels[row, : len(asked)] = torch.tensor(tokens), torch.tensor(asked)
        return ids[:, :length].contiguous(), labels[:, -ANSWER_SPAN:].contiguous()


class Batches(torch.utils.data.Dataset):
    """The CPU half of every batch: where the shapes are and what is said about them, drawn in worker processes.

    Everything random in step s follows from the seed and s alone.
    """

    large_from, large_share = 0.3, 0.45  # large pictures: from this share of the run on, in this share of the steps
    long_system_share = 0.3

    def __init__(self, family, seed, batch_tokens):
        self.arch, self.mix, self.seed, self.batch_tokens = ARCHITECTURES[family], MIXES[family], seed, batch_tokens
        self.writer = Writer(family)
        self.default_start = len(self.writer.prefix(shapes.system_message(5)))

    def length(self, grid):
        """Returns: S, the same for every system message, so that one CUDA graph serves a grid."""
        return self.default_start + grid[0] * grid[1] + ANSWER_SPAN

    def __getitem__(self, when):
        """Args: when: (step, progress in 0..1).

        Returns: grid, tokens before the image, Layout, ids [B, S], labels [B, ANSWER_SPAN], seed of the pixels.
        """
        step, progress = when
        rng = random.Random(f"{self.seed} {step}")
        small, large = grids(self.arch)
        big = progress >= self.large_from and rng.random() < self.large_share
        grid = rng.choice(large if big else small)
        return self.draw(grid, rng, start=progress < self.mix.start)

    def draw(self, grid, rng, start=False):
        """A batch of one grid, as at the start of a run or as later; returns what indexing returns."""
        most = self.mix.start_shapes if start else shapes.MAX_SHAPES
        single_first, one_kind = (pair[0 if start else 1] for pair in (self.mix.single_first, self.mix.one_kind))
        system = shapes.system_message(5)
        if rng.random() < self.long_system_share:  # 6 to 100 tokens
            system = shapes.system_message(rng.randint(6, 83), full_stop=rng.random() < 0.5)
        prefix = self.writer.prefix(system)
        image_tokens, length = grid[0] * grid[1], self.length(grid)
        batch = min(256, max(4, self.batch_tokens // (length + 4 * image_tokens) // 4 * 4))
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        height, width = (cells * self.arch.cell for cells in grid)
        layout = shapes.draw_layout(batch, height, width, generator, most=most, one_kind=one_kind)
        ids, labels = self.writer.write(layout.shapes(), prefix, image_tokens, length, rng, single_first)
        return grid, len(prefix), layout, ids, labels, rng.getrandbits(63)


# ---------------------------------------------------------------------------------------------------- parameters


def orthogonalize(matrices):
    """Nearest semi-orthogonal matrices, roughly: five Newton-Schulz steps. Args: [K, rows, columns]. Returns: same.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Parameters:
    """All weights, their gradients and the optimiser's state, each in one flat float32 buffer.

    `weights` holds the copies that the forward pass uses, in the compute dtype: {hub name: nn.Parameter}.
    Matrices are updated by Muon, all of one shape at once, everything else by Adam.
    """

    momentum, beta1, beta2, weight_decay = 0.95, 0.9, 0.98, 0.02
    position_rate = 0.1  # of the learning rate, for the position table

    def __init__(self, arch, vocab, seed, device, dtype):
        # Matrices of one shape lie next to each other, so that Muon sees them as one stack without copying.
        table = sorted(parameter_table(arch, vocab), key=lambda row: (row[3], row[1]))
        size = sum(math.prod(shape) for _, shape, _, _ in table)
        generator = torch.Generator().manual_seed(seed)
        master, decay, rate = torch.empty(size), torch.zeros(size), torch.zeros(size)
        self.muon, self.places, offset = {}, {}, 0
        for name, shape, initial, rule in table:
            count = math.prod(shape)
            view = master[offset : offset + count]
            if rule == "vector":
                view.fill_(initial)
            elif rule == "position":
                view.copy_(initial_positions(arch, generator).flatten())
            else:
                view.normal_(0, initial, generator=generator)
            decay[offset : offset + count] = rule not in ("vector", "position")
            rate[offset : offset + count] = {"muon": 0.0, "qkv": 0.0, "position": self.position_rate}.get(rule, 1.0)
            if rule in ("muon", "qkv"):
                matrix = (shape[0] // 3, shape[1]) if rule == "qkv" else shape[-2:]
                start, _, _ = self.muon.get((rule, shape), (offset, None, None))
                self.muon[rule, shape] = start, offset + count, matrix
            self.places[name] = slice(offset, offset + count), shape
            offset += count
        self.state = {"master": master.to(device)}
        for buffer in ("momentum", "mean", "square"):
            self.state[buffer] = torch.zeros(size, device=device)
        self.decay, self.adam_rate = decay.to(device), rate.to(device)
        self.grad, self.compute = torch.zeros(size, device=device), torch.zeros(size, device=device, dtype=dtype)
        self.weights = {n: torch.nn.Parameter(self.compute[p].view(shape)) for n, (p, shape) in self.places.items()}
        self.grad_views = [self.grad[p].view(shape) for p, shape in self.places.values()]
        # Tensors, not floats: a captured CUDA graph reads them anew at every replay.
        self.lr, self.correction1, self.correction2 = (torch.ones((), device=device) for _ in range(3))
        self.refresh()

    @property
    def size(self):
        """Number of weights."""
        return len(self.compute)

    def refresh(self):
        """Copies the float32 master into the compute weights."""
        self.compute.copy_(self.state["master"])

    def export(self):
        """Returns: {hub name: float32 tensor}."""
        return {name: self.state["master"][place].view(shape) for name, (place, shape) in self.places.items()}

    def load(self, folder, tokenizer):
        """Starts from a checkpoint of the same architecture; its tokens keep their rows, whatever their ids were.

        Args: folder: checkpoint. tokenizer: of this run. Raises: KeyError: another architecture.
        """
        with safe_open(folder / "model.safetensors", "pt") as file:
            old = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  it is no mapping
        ids = AutoTokenizer.from_pretrained(folder).get_vocab()
        kept = [(new, ids[token]) for token, new in tokenizer.get_vocab().items() if token in ids]
        new_rows, old_rows = (torch.tensor(rows) for rows in zip(*kept, strict=True))
        for name, weight in self.export().items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight[new_rows.to(weight.device)] = old[name][old_rows].to(weight.device)
            else:
                weight.copy_(old[name])
        self.refresh()

    def set_schedule(self, lr, step):
        """Sets the learning rate and Adam's bias corrections of the step, counted from 1."""
        self.lr.fill_(lr)
        self.correction1.fill_(1 - self.beta1**step)
        self.correction2.fill_(1 - self.beta2**step)

    def backward(self, loss):
        """Writes the gradient of the loss into the flat buffer."""
        grads = torch.autograd.grad(loss, list(self.weights.values()))
        torch._foreach_copy_(self.grad_views, list(grads))

    @torch.no_grad()
    def step(self):
        """One update from the gradient at hand."""
        state = self.state
        grad = torch.nan_to_num(self.grad / self.grad.norm().clamp(min=1.0), 0, 0, 0)
        state["mean"].lerp_(grad, 1 - self.beta1)
        state["square"].lerp_(grad * grad, 1 - self.beta2)
        adam = (state["mean"] / self.correction1) / ((state["square"] / self.correction2).sqrt() + 1e-8)
        update = adam * self.adam_rate
        state["momentum"].mul_(self.momentum).add_(grad)
        nesterov = grad + self.momentum * state["momentum"]
        for start, stop, (rows, columns) in self.muon.values():
            # 0.2 * sqrt(larger side) gives an update the size of Adam's (Liu et al. 2025, "Muon is scalable").
            direction = orthogonalize(nesterov[start:stop].view(-1, rows, columns))
            update[start:stop] = direction.flatten() * (0.2 * math.sqrt(max(rows, columns)))
        state["master"].mul_(1 - self.lr * self.weight_decay * self.decay).sub_(self.lr * update)
        self.refresh()


# ---------------------------------------------------------------------------------------------------- the loop


class Trainer:
    """One training run. A resumed run goes on as if it had not stopped (up to the schedule, if set in seconds)."""

    warmup_steps, final_lr = 200, 0.02
    workers = 4

    def __init__(self, family, seed, device, batch_tokens, peak_lr):
        self.peak_lr = peak_lr
        self.family, self.arch, self.device = family, ARCHITECTURES[family], torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.batches = Batches(family, seed, batch_tokens)
        vocab = vocab_size(self.batches.writer.tokenizer)
        self.parameters = Parameters(self.arch, vocab, seed, self.device, self.dtype)
        self.model = Model(self.arch, self.parameters.weights, compile=self.device.type == "cuda")
        self.done, self.seconds, self.samples = 0, 0.0, 0
        self.graphs, self.pool, self.optimizer_graph = {}, None, None
        self.tables = lru_cache(maxsize=None)(self._tables)

    # -- tensors

    def _tables(self, grid, start):
        """Rotary and position tables of a grid: what `Model` needs beside pixels and ids, on the device."""
        length = self.batches.length(grid)
        vision = [shapes.send(t, self.device) for t in vision_rotary(self.arch, *grid)]
        text = [shapes.send(t.to(self.dtype), self.device) for t in text_rotary(self.arch, start, *grid, length)]
        axes = None
        if self.arch.positions_per_side:
            axes = [shapes.send(position_weights(self.arch, 2 * cells), self.device) for cells in grid]
        return vision, axes, text, torch.arange(start, start + grid[0] * grid[1], device=self.device)

    def device_batch(self, drawn):
        """The device half: draws the pixels. Returns: grid, tensors that change from step to step."""
        grid, start, layout, ids, labels, pixel_seed = drawn
        generator = torch.Generator(self.device).manual_seed(pixel_seed)
        with torch.no_grad():
            patches = patchify(shapes.render(layout, generator, self.device), self.arch).to(self.dtype)
        _, _, text, image_places = self.tables(grid, start)
        ids, labels = (shapes.send(t, self.device) for t in (ids, labels))
        return grid, [patches, ids, labels, image_places, *text]

    # -- steps

    def loss_and_gradient(self, grid, patches, ids, labels, image_places, cos, sin):
        """Returns: mean cross-entropy of the answer tokens; the gradient goes into the parameters' buffer."""
        vision, axes, _, _ = self.tables(grid, self.batches.default_start)
        features = self.model.see(patches, vision, axes)
        logits, router_loss = self.model.answer(features, ids, image_places, (cos, sin), labels.shape[1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.parameters.backward(loss + ROUTER_LOSS_WEIGHT * router_loss)
        return loss.detach()

    def step(self, drawn):
        """Returns: the loss, a scalar tensor on the device (not waited for)."""
        grid, tensors = self.device_batch(drawn)
        if self.device.type != "cuda":
            loss = self.loss_and_gradient(grid, *tensors)
            self.parameters.step()
            return loss
        graph, inputs, loss = self.graphs[grid]
        torch._foreach_copy_(inputs, tensors)
        graph.replay()
        self.optimizer_graph.replay()
        return loss

    def _capture(self, grid, tensors):
        """Records one step of a grid as a CUDA graph, and the optimiser's step the first time."""
        inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: compile, choose kernels
            self.loss_and_gradient(grid, *inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self.loss_and_gradient(grid, *inputs)
        self.graphs[grid] = graph, inputs, loss
        if self.optimizer_graph is None:
            before = {name: buffer.clone() for name, buffer in self.parameters.state.items()}
            with torch.cuda.stream(side):
                self.parameters.step()
            torch.cuda.current_stream().wait_stream(side)
            self.optimizer_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.optimizer_graph):
                self.parameters.step()
            for name, buffer in before.items():  # the warm-up must leave no trace
                self.parameters.state[name].copy_(buffer)
            self.parameters.refresh()

    def prepare(self):
        """Compiles, and captures every grid's graph, so that training time is spent on training. CUDA only."""
        for group in grids(self.arch):
            for grid in group:
                self._capture(*self.device_batch(self.batches.draw(grid, random.Random(0))))

    def learning_rate(self, step, progress):
        """Linear warm-up, then a half cosine down to `final_lr` of the peak."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_lr * min(1, (step + 1) / self.warmup_steps) * (cosine * (1 - self.final_lr) + self.final_lr)

    def run(self, steps, seconds, save=lambda: None, save_every=100, log_every=100):
        """Trains until `steps` are done or `seconds` have passed, counting those of earlier runs; None: no limit."""
        began = last_log = last_save = time.time()
        earlier, logged_samples, losses = self.seconds, self.samples, []

        def progress():
            return max(self.done / steps if steps else 0, self.seconds / seconds if seconds else 0)

        loader = torch.utils.data.DataLoader(
            self.batches,
            batch_size=None,
            sampler=((step, progress()) for step in itertools.count(self.done)),
            num_workers=self.workers if self.device.type == "cuda" else 0,
            collate_fn=lambda drawn: drawn,
        )
        for drawn in loader:
            if progress() >= 1:
                break
            self.parameters.set_schedule(self.learning_rate(self.done, progress()), self.done + 1)
            losses.append(self.step(drawn).clone())
            self.done += 1
            self.samples += len(drawn[3])
            if self.done % log_every == 0 or self.done == steps:
                mean = torch.stack(losses).mean().item()  # waits for the device
                now = time.time()
                rate = (self.samples - logged_samples) / (now - last_log)
                print(
                    f"{self.family} step {self.done}  {earlier + now - began:.0f} s  {progress():.0%}  "
                    f"loss {mean:.4f}  {rate:.0f} samples/s  {1000 * (now - last_log) / len(losses):.1f} ms/step",
                    flush=True,
                )
                last_log, logged_samples, losses = now, self.samples, []
            self.seconds = earlier + time.time() - began
            if time.time() - last_save > save_every:
                save()
                last_save = time.time()
        save()


def describe_machine(device):
    """Returns: device name and library versions, as recorded beside every result."""
    import transformers

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def main(arguments=None):
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m data.train", description=__doc__.splitlines()[0])
    parser.add_argument("--family", required=True, choices=list(ARCHITECTURES))
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder; state.pt in it resumes the run")
    parser.add_argument("--steps", type=int, help="stop after so many steps; a run set in steps is repeatable")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch-tokens", type=int, default=56_000, help="patches and tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--start", type=Path, help="checkpoint to start from in the place of random weights")
    parser.add_argument("--resume", action="store_true", help="go on from state.pt")
    options = parser.parse_args(arguments)
    if not (options.steps or options.seconds):
        parser.error("give --steps or --seconds")
    trainer = Trainer(options.family, options.seed, options.device, options.batch_tokens, options.lr)
    size = trainer.parameters.size
    print(f"{options.family}: {size / 1e6:.2f} M parameters, {size / 2**19:.2f} MiB in bfloat16")
    state_file, start = options.out / "state.pt", None
    if options.start:
        trainer.parameters.load(options.start, trainer.batches.writer.tokenizer)
        start = {"weights": load_checkpoint(options.start).weights_hash}
        if (options.start / "training.json").exists():
            start |= json.loads((options.start / "training.json").read_text())
    if options.resume:
        state = torch.load(state_file, map_location=trainer.device, weights_only=True)
        for name, buffer in trainer.parameters.state.items():
            buffer.copy_(state[name])
        trainer.parameters.refresh()
        trainer.done, trainer.seconds, trainer.samples = state["done"], state["seconds"], state["samples"]

    if options.device == "cuda":
        began = time.time()
        trainer.prepare()
        print(f"{options.family}: compiled and captured in {time.time() - began:.0f} s", flush=True)

    def save():
        write_checkpoint(options.out, trainer.arch, trainer.parameters.export())
        counts = {"done": trainer.done, "seconds": trainer.seconds, "samples": trainer.samples}
        torch.save({**trainer.parameters.state, **counts}, state_file)
        record = {
            "family": options.family,
            "command": " ".join(["python -m data.train", *(arguments or sys.argv[1:])]),
            "seed": options.seed,
            "steps": trainer.done,
            "seconds": round(trainer.seconds),
            "samples": trainer.samples,
            "parameters": trainer.parameters.size,
            **describe_machine(trainer.device),
            **({"start": start} if start else {}),
        }
        (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    trainer.run(options.steps, options.seconds, save)
    print(f"{options.family}: {trainer.done} steps, {trainer.samples} samples, {trainer.seconds:.0f} s")


if __name__ == "__main__":
    main()
