"""Everything in a checkpoint but the weights: architecture, config, tokenizer, processor; and `write_checkpoint`.

The architectures have the real depths and the real structure; only widths and vocabulary are small.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from data import shapes

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<|box_start|>", "<|box_end|>",
)  # fmt: skip
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

# The pre-tokenizer of Qwen2 and Qwen3: a digit is always a token of its own.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type']=='image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type']=='video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Architecture:
    """Sizes of one family. Widths are channels; `text_mlp` is per expert in a mixture of experts."""

    model_type: str
    patch: int  # px
    vision_depth: int
    vision_width: int
    vision_heads: int
    vision_mlp: int
    depth: int
    width: int
    heads: int
    kv_heads: int
    text_mlp: int
    mrope_section: tuple  # rotary frequencies given to time, height, width; sums to head_dim / 2
    pixel_mean: tuple
    pixel_std: tuple
    max_merged_tokens: int  # largest picture, in merged 2 x 2 patches
    deepstack_layers: tuple = ()  # vision blocks whose output is also added after language layers 0, 1, ...
    positions_per_side: int = 0  # side of the learned position table; 0: no table
    experts: int = 0
    experts_per_token: int = 0

    # With head_dim 32 the real rope_theta (1e6 or more) leaves nearly all rotary angles near zero and position faults
    # invisible; 100 spreads them.
    head_dim = 32
    rope_theta = 100.0
    vision_rope_theta = 10000.0
    merge = 2
    temporal_patch = 2
    norm_eps = 1e-6

    @property
    def is_qwen2(self):
        """Qwen2-VL, as against Qwen3-VL, dense or mixture of experts."""
        return self.model_type == "qwen2_vl"

    @property
    def cell(self):
        """Side in px of the square of pixels behind one image token."""
        return self.patch * self.merge


QWEN3_VISION = dict(
    patch=16, vision_depth=27, vision_width=64, vision_heads=2, vision_mlp=192, deepstack_layers=(8, 16, 24),
    positions_per_side=48, pixel_mean=(0.5,) * 3, pixel_std=(0.5,) * 3, max_merged_tokens=32 * 32,
)  # fmt: skip
ARCHITECTURES = {
    "qwen2-vl": Architecture(
        model_type="qwen2_vl", patch=14, vision_depth=32, vision_width=64, vision_heads=2, vision_mlp=256,
        depth=28, width=128, heads=4, kv_heads=2, text_mlp=256, mrope_section=(4, 6, 6), max_merged_tokens=36 * 36,
        pixel_mean=(0.48145466, 0.4578275, 0.40821073), pixel_std=(0.26862954, 0.26130258, 0.27577711),
    ),
    "qwen3-vl": Architecture(
        model_type="qwen3_vl", depth=36, width=96, heads=4, kv_heads=2, text_mlp=192, mrope_section=(6, 5, 5),
        **QWEN3_VISION,
    ),
    # The real decoder has 48 layers; 30 of this width fit into 10 MiB. 2 * text_mlp differs from width on purpose:
    # otherwise the two layouts of the expert weights could not be told apart by shape.
    "qwen3-vl-moe": Architecture(
        model_type="qwen3_vl_moe", depth=30, width=96, heads=4, kv_heads=2, text_mlp=32, mrope_section=(6, 5, 5),
        experts=8, experts_per_token=2, **QWEN3_VISION,
    ),
}  # fmt: skip


def make_tokenizer():
    """A byte-level BPE with Qwen's pre-tokenizer and chat template, in which every word of the tasks is one token.

    Returns: PreTrainedTokenizerFast, the same every time.
    """
    names = [shapes.Shape(color, kind, (0, 0, 0, 0)) for color in shapes.COLORS for kind in shapes.KINDS]
    corpus = [
        "system\n",
        "user\n",
        "assistant\n",
        shapes.system_message(12),
        shapes.LIST_QUESTION,
        shapes.LONG_LIST_QUESTION,
    ]
    for shape in names:
        corpus += [shapes.point_question(shape), shapes.box_question(shape)]
        corpus += [shapes.box_answer(shape, family) for family in ("qwen2-vl", "qwen3-vl")]
        corpus += [shapes.list_answer([shape, shape]), shapes.long_list_answer([shape, shape])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than the corpus can fill: merging stops when every word is whole
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 2, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def vocab_size(tokenizer):
    """Rows of the embedding: the tokens, rounded up to 64 with at least one row to spare.

    The spare row keeps the last id unused: SGLang's `input_token_logprobs` reports it as id 0.
    """
    return len(tokenizer) // 64 * 64 + 64


def make_config(arch, tokenizer):
    """Returns: the Transformers config of an `Architecture` as a dict, in the layout that both engines read."""
    text = dict(
        vocab_size=vocab_size(tokenizer), hidden_size=arch.width, num_hidden_layers=arch.depth,
        num_attention_heads=arch.heads, num_key_value_heads=arch.kv_heads, max_position_embeddings=4096,
        rms_norm_eps=arch.norm_eps, intermediate_size=arch.text_mlp, bos_token_id=TOKEN_ID["<|endoftext|>"],
        eos_token_id=TOKEN_ID["<|im_end|>"], pad_token_id=TOKEN_ID["<|endoftext|>"],
        rope_parameters=dict(rope_type="default", rope_theta=arch.rope_theta, mrope_section=list(arch.mrope_section)),
    )  # fmt: skip
    vision = dict(
        depth=arch.vision_depth, num_heads=arch.vision_heads, patch_size=arch.patch,
        spatial_merge_size=arch.merge, temporal_patch_size=arch.temporal_patch,
    )  # fmt: skip
    if arch.is_qwen2:
        vision.update(embed_dim=arch.vision_width, hidden_size=arch.width)
        vision.update(mlp_ratio=arch.vision_mlp // arch.vision_width)
    else:
        text.update(head_dim=arch.head_dim)
        text["rope_parameters"].update(mrope_interleaved=True)
        vision.update(hidden_size=arch.vision_width, out_hidden_size=arch.width, intermediate_size=arch.vision_mlp)
        vision.update(num_position_embeddings=arch.positions_per_side**2, hidden_act="gelu_pytorch_tanh")
        vision.update(deepstack_visual_indexes=list(arch.deepstack_layers))
    if arch.experts:
        text.update(num_experts=arch.experts, num_experts_per_tok=arch.experts_per_token, norm_topk_prob=True)
        text.update(moe_intermediate_size=arch.text_mlp, decoder_sparse_step=1, mlp_only_layers=[])
        # Read only by dense layers, of which there are none; a width that cannot be mistaken for an expert's.
        text.update(intermediate_size=arch.text_mlp * arch.experts)
    make, architecture = {
        "qwen2_vl": (Qwen2VLConfig, "Qwen2VLForConditionalGeneration"),
        "qwen3_vl": (Qwen3VLConfig, "Qwen3VLForConditionalGeneration"),
        "qwen3_vl_moe": (Qwen3VLMoeConfig, "Qwen3VLMoeForConditionalGeneration"),
    }[arch.model_type]
    config = make(
        text_config=text, vision_config=vision, tie_word_embeddings=False, dtype="bfloat16",
        architectures=[architecture], image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"], vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
    )  # fmt: skip
    written = json.loads(config.to_json_string())
    # Transformers says in_channels, SGLang reads in_chans; each ignores the other's word.
    written["vision_config"].update(in_channels=3, in_chans=3)
    if arch.experts:  # Transformers always renormalises and drops the word; SGLang reads it.
        written["text_config"].update(norm_topk_prob=True)
    return written


def make_processor(arch, tokenizer):
    """Returns: the family's processor; pictures whose sides are multiples of `arch.cell` pass it unresized."""
    image_processor = Qwen2VLImageProcessor(
        patch_size=arch.patch, merge_size=arch.merge, temporal_patch_size=arch.temporal_patch,
        image_mean=list(arch.pixel_mean), image_std=list(arch.pixel_std),
        size=dict(shortest_edge=4 * arch.cell**2, longest_edge=arch.max_merged_tokens * arch.cell**2),
    )  # fmt: skip
    make, video_processor = (
        (Qwen2VLProcessor, Qwen2VLVideoProcessor()) if arch.is_qwen2 else (Qwen3VLProcessor, Qwen3VLVideoProcessor())
    )
    return make(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=video_processor,
        chat_template=CHAT_TEMPLATE,
    )


def write_checkpoint(folder, arch, weights):
    """Writes a checkpoint that Transformers and SGLang load unchanged.

    Args: folder: path, created if missing. arch: Architecture. weights: {name: tensor}, names and layouts of the hub
        (expert weights [experts, in, out], as `data.model` holds them), any float dtype; stored in bfloat16.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    make_processor(arch, tokenizer).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(make_config(arch, tokenizer), indent=1) + "\n")
    generation = dict(
        bos_token_id=TOKEN_ID["<|endoftext|>"],
        eos_token_id=TOKEN_ID["<|im_end|>"],
        pad_token_id=TOKEN_ID["<|endoftext|>"],
        do_sample=False,
    )
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    stored = {name: tensor.bfloat16().cpu().contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
