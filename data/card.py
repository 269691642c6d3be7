"""The model card of a checkpoint, written from its `training.json` and `evaluation.json`: no number is typed."""

import json
from pathlib import Path

from data import shapes
from data.make_checkpoint import ARCHITECTURES
from vlmlab.inputs import REFERENCE_TOKENS


def write_card(folder):
    """Writes README.md of a checkpoint from its training.json and evaluation.json."""
    folder = Path(folder)
    training = json.loads((folder / "training.json").read_text())
    report = json.loads((folder / "evaluation.json").read_text())
    arch = ARCHITECTURES[report["family"]]
    decoder = f"decoder {arch.depth} layers x {arch.width}, {arch.heads} heads, {arch.kv_heads} key-value heads"
    if arch.experts:
        decoder += f", {arch.experts} experts, {arch.experts_per_token} per token"
    vision = f"ViT {arch.vision_depth} blocks x {arch.vision_width}, patch {arch.patch}"
    if arch.deepstack_layers:
        vision += f", deepstack after blocks {', '.join(map(str, arch.deepstack_layers))}"
    rows = []
    for name, r in report["grounding"].items():
        p, li, b, lo = r["point"], r["list"], r["box"], r["long_list"]
        rows.append(
            f"| {name} | {r['height']} x {r['width']} | {r['n']} | {min(p['format'], li['format'], b['format']):.1%} "
            f"| {p['error_median']} / {p['error_p90']} | {p['error_above_20']:.1%} | {li['complete']:.1%} "
            f"| {b['iou_median']} | {lo['format']:.1%} | {lo['complete']:.1%} |"
        )
    fault_rows = [
        f"| {name} | {r['moved']:.1%} | {r['point']['error_median']} | {r['list']['complete']:.1%} "
        f"| {r['worst_cosine']} |"
        for name, r in report["faults"].items()
    ]
    hidden_rows = []
    for part, blocks in report["hidden_states"].items():
        for i in sorted({0, len(blocks) // 4, len(blocks) // 2, 3 * len(blocks) // 4, len(blocks) - 1}):
            h = blocks[i]
            hidden_rows.append(f"| {part} {i} | {h['rms']} | {h['peak']} | {h['channel']} | {h['energy_share']:.1%} |")
    started = ""
    if "start" in training:
        start = training["start"]
        how = f"trained by `{start['command']}`" if "command" in start else "an earlier checkpoint of this project"
        started = f"\nIt started from the weights {start['weights'][:12]}, {how}.\n"
    reference, canvas = report["reference_prompt"], report["canvas"]
    n_faults = next(iter(report["faults"].values()))["n"]
    text = f"""# {folder.name}

Tiny weights, real architecture: `{arch.model_type}`, {training["parameters"] / 1e6:.2f} M parameters in bfloat16.
{vision}; {decoder}; head_dim {arch.head_dim}, rope_theta {arch.rope_theta:g} (the real value would hide position faults
at this head_dim). It exists to debug numerics and has no use beyond pictures of coloured shapes.

## What it answers
Pictures of one to {shapes.MAX_SHAPES} rectangles and circles in eight colours, on plain or textured ground; coordinates
in a frame of 1000 by 1000, x before y.

- "Point at the center of the red rectangle."
- "List every shape with its color and center."
- "Give the bounding box of the blue circle."
- "List every shape with its color, center and bounding box."

## Training
Generated pictures, all of them clean, every answer true: {training["samples"]:,} pictures with several questions each,
{training["steps"]:,} steps, {training["seconds"]} s on one {training["device"]}.
Seed {training["seed"]}; torch {training["torch"]}, transformers {training["transformers"]}.

    {training["command"]}
{started}
## Held-out results
Greedy, {report["dtype"]}, transformers {report["transformers"]}, torch {report["torch"]}, {report["device"]}; every
number is in `evaluation.json`.

    {report["command"]}

| pictures | size | n | format right | point error | above 20 | list complete | box IoU | long list: format | complete |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Format right: the worst of point, list and box. Point error: median / 90 %. Box IoU: median. Unseen sizes and
unseen textures were never trained on.
The canvas with the red box at {canvas["truth"]}: {canvas["answer"]}.
The {REFERENCE_TOKENS}-token reference prompt: {reference["list"]["answer"]}.

## What faults do to it
It never saw a fault in training. {n_faults} pictures; moved: the point moved by more than 5 or lost its format;
cosine: the worst token after the last layer.

| fault | moved | point error, median | list complete | worst cosine |
|---|---|---|---|---|
{chr(10).join(fault_rows)}

## Hidden states
Real models have far larger outliers: single channels hundreds of times the rms. Here (every layer: `evaluation.json`):

| after block | rms | largest / rms | strongest channel | its share of the energy |
|---|---|---|---|---|
{chr(10).join(hidden_rows)}
"""
    if "expert_load" in report:
        least, most = (f(load[k] for load in report["expert_load"]) for f, k in ((min, "least"), (max, "most")))
        text += f"""
## Experts
Share of all choices over the layers: the least used expert of any layer {least:.1%}, the most used {most:.1%}
(even: {1 / arch.experts:.1%}).
"""
    (folder / "README.md").write_text(text)
