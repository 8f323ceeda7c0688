"""A tiny model of each family that transformers lists as taking images and text, and images as processors make them.

No hub is needed: configs are made in code, and pixels are random numbers of the shapes that a processor would make.
`NOT_BUILT` says which families are left out, and why.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lowtide.engine.heads.head import body
from lowtide.engine.image_proof import ShownRow
from lowtide.engine.images import TYPES
from lowtide.ragged import SegmentImage
from tests.support.models.encoders import with_larger_weights

IMAGE, VOCABULARY = 300, 320
SIDE, PATCH = 16, 4
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 32,
    "embed_dim": 32,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
WHOLE_MROPE = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}

Inputs = dict[str, Tensor]


def _random(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def square(number: int, channels: int = 3) -> Inputs:
    """One size for all images."""
    return {"pixel_values": _random(number, 1, channels, SIDE, SIDE)}


def grid(number: int, *, temporal: int = 2, merge: int = 2) -> Inputs:
    """Patches end to end, as many as the image has."""
    height, width = ((2, 3), (3, 2), (2, 2))[number % 3]
    height, width = height * merge, width * merge
    shape = height * width, 3 * temporal * PATCH * PATCH
    return {"pixel_values": _random(number, *shape), "image_grid_thw": torch.tensor([[1, height, width]])}


def flat_grid(number: int) -> Inputs:
    return grid(number, temporal=1)


def patch_grid(number: int) -> Inputs:
    """Patches of their own shape, each a small picture."""
    made = grid(number, temporal=1)
    return {**made, "pixel_values": made["pixel_values"].view(-1, 3, PATCH, PATCH)}


def merged_grid(number: int) -> Inputs:
    return {**grid(number, temporal=1), "image_merge_sizes": torch.tensor([2])}


def tiles(number: int) -> Inputs:
    """Rows of tiles, each with the mask of its pixels; another number of them for other images."""
    count = (1, 3, 2)[number % 3]
    pixels = _random(number, 1, count, 3, SIDE, SIDE)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, count, SIDE, SIDE, dtype=torch.long)}


def known_tiles(number: int) -> Inputs:
    """Rows of tiles, and which of them are there."""
    made = tiles(number)
    return {**made, "pixel_attention_mask": torch.ones(made["pixel_values"].shape[:2], dtype=torch.bool)}


def anyres(number: int) -> Inputs:
    """The whole image, and tiles of it: as many as its size needs."""
    count, size = ((3, (16, 30)), (5, (30, 28)), (4, (14, 44)))[number % 3]
    return {"pixel_values": _random(number, 1, count, 3, SIDE, SIDE), "image_sizes": torch.tensor([size])}


def crops(number: int) -> Inputs:
    """Tiles end to end."""
    return {"pixel_values": _random(number, (1, 3, 2)[number % 3], 3, SIDE, SIDE)}


def sized(number: int) -> Inputs:
    """Pixels of an image of any size."""
    height, width = ((8, 16), (16, 8), (16, 16))[number % 3]
    return {"pixel_values": _random(number, 1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}


def siglip2(number: int) -> Inputs:
    height, width = ((2, 4), (4, 2), (4, 4))[number % 3]
    seen = torch.zeros(1, 16, dtype=torch.long)
    seen[:, : height * width] = 1
    return {
        "pixel_values": _random(number, 1, 16, 3 * PATCH * PATCH) * seen[..., None],
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": seen,
    }


def gemma4(number: int) -> Inputs:
    """Patches padded to the most, with their places."""
    height, width = ((3, 6), (6, 3), (6, 6))[number % 3]
    places = torch.full((1, 36, 2), -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places[0, : height * width] = torch.stack([columns.flatten(), rows.flatten()], -1)
    pixels = _random(number, 1, 36, 3 * PATCH * PATCH).sigmoid() * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}


def merged_patches(number: int) -> Inputs:
    """Pictures end to end, each as large as a token of the text sees."""
    rows, columns = ((2, 3), (3, 2), (2, 2))[number % 3]
    pixels = _random(number, rows * columns, 2 * PATCH, 2 * PATCH, 3)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def strip(number: int) -> Inputs:
    """Patches side by side in one long picture."""
    height, width = ((4, 8), (8, 4), (8, 8))[number % 3]
    pixels = _random(number, 1, 3, PATCH, height * width * PATCH)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[height, width]])}


def pooled(number: int) -> Inputs:
    """Patches of crops, and which of them make one token."""
    return {
        "pixel_values": _random(number, 1, 16, 3 * PATCH * PATCH),
        "image_token_pooling": torch.arange(16).view(4, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
        "image_num_crops": torch.tensor([1]),
    }


def large(number: int) -> Inputs:
    """One size for all images, large enough for a tower that halves it four times."""
    return {"pixel_values": _random(number, 1, 3, 4 * SIDE, 4 * SIDE)}


def twice(number: int) -> Inputs:
    """An image in two sizes."""
    return {**square(number), "high_res_pixel_values": large(number + 9)["pixel_values"]}


class Family(NamedTuple):
    """How a tiny model of a family is made."""

    image: Callable[[int], Inputs] = square
    text: Mapping[str, Any] = {}
    tower: Mapping[str, Any] = {}
    own: Mapping[str, Any] = {}
    """Of the config itself."""
    dtype: torch.dtype = torch.float64
    """Grouped products of experts know no float64."""


QWEN3 = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
QFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "encoder_hidden_size": 32,
    "vocab_size": VOCABULARY,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SAM = {
    **{name: TOWER[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")},
    **{"output_channels": 8, "image_size": 4 * SIDE, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48},
}
TWO_TOWERS = {
    "sam_config": SAM | {"downsample_channels": [16, 32]},
    "encoder_config": {**TOWER, "num_key_value_heads": 4, "image_size": 4 * SIDE, "patch_size": 16},
}
SOUNDS = {
    **{"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32, "output_dim": 32},
    **{"num_mel_bins": 8, "downsample_hidden_size": 8},
}
OCR_TEXT = EXPERTS | {
    **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "bos_token_id": 1},
    "mlp_layer_types": ["dense", "sparse"],
}
MINICPM = Family(strip, LINEAR, {"insert_layer_id": 0}, {"merger_times": 1}, dtype=torch.float32)
FAMILIES: dict[str, Family] = {
    "aria": Family(
        text=EXPERTS | {"moe_num_experts": 4}, own={"projector_patch_to_query_dict": {16: 4}}, dtype=torch.float32
    ),
    "aya_vision": Family(crops),
    "blip-2": Family(own={"qformer_config": QFORMER}),
    "cohere2_vision": Family(crops),
    "cohere_compass": Family(
        grid,
        {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), MROPE["rope_parameters"])}
        | {"bos_token_id": 1},
        QWEN3,
    ),
    "cosmos3_edge": Family(flat_grid, {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 1, 1]}}),
    "ernie4_5_vl_moe": Family(
        flat_grid,
        MROPE
        | {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2, "mlp_layer_types": ["dense", "sparse"]},
        dtype=torch.float32,
    ),
    "exaone4_5": Family(
        grid, {"model_type": "exaone4"}, {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 4}
    ),
    "glm5_next": Family(grid, {**EXPERTS, "num_key_value_heads": 4}, dtype=torch.float32),
    "mllama": Family(text={"bos_token_id": 1, "cross_attention_layers": [1]}),
    "step3p7": Family(text={"sliding_window": 64}),
    "dots3_note": Family(
        flat_grid,
        EXPERTS
        | LATENT
        | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 512, "mlp_layer_types": ["dense", "sparse"]},
        {
            "mlp_layer_types": ["dense", "dense"],
            "pyramid_num_routed": [-1, -1],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        {
            "audio_config": {
                **{name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
                **{"num_hidden_layers": 1, "downsample_hidden_size": 8},
                **{"adapter_input_size": 32, "adapter_out_dim": 32},
            }
        },
        dtype=torch.float32,
    ),
    "inkling2": Family(
        merged_patches,
        EXPERTS
        | {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 64}
        | {"unpadded_vocab_size": VOCABULARY - 5},
        {"text_hidden_size": 32, "projection_hidden_dim": 32, "posemb_grid_size": 8},
        dtype=torch.float32,
    ),
    "kimi_k25": Family(
        patch_grid,
        EXPERTS | LATENT | {"bos_token_id": 1},
        {"pos_emb_height": 8, "pos_emb_width": 8},
        {"projection_hidden_size": 32},
        dtype=torch.float32,
    ),
    "minicpm_ocr": MINICPM,
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": MINICPM,
    "mistral_large4": Family(
        sized, EXPERTS | LATENT, own={"spatial_merge_size": 2, "vision_feature_layer": -1}, dtype=torch.float32
    ),
    "molmo2": Family(
        pooled,
        {"additional_vocab_size": 8},
        {"image_size": [SIDE, SIDE], "head_dim": 8, "num_key_value_heads": 4},
        {
            "image_patch_id": IMAGE,
            "adapter_config": {
                **{name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
                **{"num_key_value_heads": 4, "head_dim": 8, "text_hidden_size": 32, "vision_feature_layer": [-1, -2]},
            },
        },
        dtype=torch.float32,
    ),
    "muse_glimmer": Family(
        grid,
        tower={"pos_emb_height": 8, "pos_emb_width": 8},
        own={"out_hidden_size": 128, "projector_hidden_size": 32},
        dtype=torch.float32,
    ),
    "muse_spark": Family(
        grid,
        EXPERTS | {"moe_hidden_size": 16, "sliding_window": 64},
        {"pos_emb_height": 8, "pos_emb_width": 8},
        {
            **{"out_hidden_size": 128, "projector_hidden_size": 32},
            "audio_config": {
                **{"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2},
                "out_hidden_size": 32,
            },
        },
        dtype=torch.float32,
    ),
    "qwen4_exp": Family(
        grid,
        MROPE
        | LINEAR
        | EXPERTS
        | {"shared_expert_intermediate_size": 16, "hidden_size_per_layer_input": 4, "bos_token_id": 1}
        | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
        | {"indexer_budget": 64, "indexer_compress_ratio": 4},
        {"num_position_embeddings": 16},
        dtype=torch.float32,
    ),
    "deepseek_ocr2": Family(large, OCR_TEXT, TWO_TOWERS, dtype=torch.float32),
    "unlimited_ocr": Family(large, OCR_TEXT, TWO_TOWERS, dtype=torch.float32),
    "deepseek_vl_hybrid": Family(twice, own={"high_res_vision_config": SAM | {"model_type": "sam_vision_model"}}),
    "qwen2_5_omni_thinker": Family(
        grid,
        MROPE,
        {"window_size": 16, "fullatt_block_indexes": [1]},
        {"audio_config": SOUNDS, "vision_start_token_id": 301},
    ),
    "qwen3_omni_moe_thinker": Family(
        grid,
        MROPE | EXPERTS,
        QWEN3,
        {"audio_config": SOUNDS, "vision_start_token_id": 301},
        dtype=torch.float32,
    ),
    "blip": Family(),
    "pix2struct": Family(),
    "kosmos-2": Family(),
    "pp_formulanet": Family(),
    "cosmos3_omni": Family(grid, MROPE, QWEN3),
    "deepseek_vl": Family(),
    "fuyu": Family(),
    "gemma3": Family(text=GEMMA_LAYERS, own={"mm_tokens_per_image": 4}),
    "gemma4": Family(
        gemma4,
        GEMMA_LAYERS
        | {"global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY},
        {"pooling_kernel_size": 3, "position_embedding_size": 64, "head_dim": 8, "num_key_value_heads": 4},
        {"audio_config": None},
    ),
    "gemma4_vision": Family(
        gemma4,
        GEMMA_LAYERS
        | {
            "use_bidirectional_attention": "vision",
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
        },
        {"pooling_kernel_size": 3, "position_embedding_size": 64, "head_dim": 8, "num_key_value_heads": 4},
        {"audio_config": None},
    ),
    "gemma4_unified": Family(gemma4, GEMMA_LAYERS | {"global_head_dim": 8}),
    "glm46v": Family(grid, WHOLE_MROPE),
    "glm4v": Family(grid, WHOLE_MROPE),
    "glm4v_moe": Family(grid, WHOLE_MROPE | EXPERTS, dtype=torch.float32),
    "glm_ocr": Family(grid, WHOLE_MROPE),
    "glmga": Family(grid, WHOLE_MROPE),
    "got_ocr2": Family(),
    "granite_docling": Family(known_tiles),
    "granite4_vision": Family(
        anyres,
        tower={"hidden_size": 64},
        own={"image_grid_pinpoints": PINPOINTS, "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]}
        | {"spatial_target_layers": [0, 0, 1, 1], "qformer_config": {"num_hidden_layers": 1, "intermediate_size": 48}},
    ),
    "hunyuan_vl": Family(
        flat_grid, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}}
    ),
    "hyperclovax_vision_v2": Family(grid, tower={"window_size": 16, "fullatt_block_indexes": [1]}),
    "idefics2": Family(
        tiles, own={"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1, "hidden_size": 32}}
    ),
    "idefics3": Family(tiles, own={"scale_factor": 2}),
    "internvl": Family(crops),
    "janus": Family(
        tower={"projection_dim": 32, "mlp_ratio": 2.0, "num_image_tokens": 16, "depth": 1},
        own={
            "vq_config": {
                **{"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
                **{"num_embeddings": 16, "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4},
                "num_hidden_layers": 1,
            }
        },
    ),
    "lfm2_vl": Family(siglip2, {"layer_types": ["full_attention", "conv"]}, {"num_patches": 16}),
    "lfm3_vl": Family(grid),
    "lighton_ocr": Family(sized),
    "llama4": Family(
        text=EXPERTS,
        tower={
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
            "intermediate_size": 128,
        },
        dtype=torch.float32,
    ),
    "llava": Family(own={"vision_feature_layer": -1}),
    "llava_next": Family(anyres, own={"image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1}),
    "llava_next_video": Family(anyres, own={"image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1}),
    "llava_onevision": Family(anyres, own={"image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1}),
    "minimax_m3_vl": Family(grid, EXPERTS, dtype=torch.float32),
    "mistral3": Family(sized, own={"spatial_merge_size": 2, "vision_feature_layer": -1}),
    "ovis2": Family(
        tower={"num_visual_indicator_tokens": 5, "vocab_size": 64}, own={"hidden_size": 32}, dtype=torch.float32
    ),
    "paddleocr_vl": Family(patch_grid, MROPE),
    "pp_chart2table": Family(),
    "qianfan_ocr": Family(crops),
    "qwen2_5_vl": Family(grid, MROPE, {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen2_vl": Family(grid, MROPE, {"mlp_ratio": 2}),
    "qwen3_5": Family(grid, MROPE | LINEAR, {"num_position_embeddings": 16}),
    "qwen3_5_moe": Family(grid, MROPE | LINEAR | EXPERTS, {"num_position_embeddings": 16}, dtype=torch.float32),
    "qwen3_vl": Family(grid, MROPE, QWEN3),
    "qwen3_vl_moe": Family(grid, MROPE | EXPERTS, QWEN3, dtype=torch.float32),
    "shieldgemma2": Family(text=GEMMA_LAYERS, own={"mm_tokens_per_image": 4}),
    "smolvlm": Family(tiles, own={"scale_factor": 2}),
    "video_llama_3": Family(merged_grid),
    "video_llava": Family(),
    "vipllava": Family(own={"vision_feature_layers": [-1, -2]}),
}
TYPE_OF = {"gemma4_vision": "gemma4"}
"""The model type of a family that is named otherwise."""
NOT_BUILT = {
    "apertus1p5": "its images and sounds are tokens of ranges beyond a small vocabulary",
    "chameleon": "a picture is a row of tokens of an image tokenizer, whose vocabulary maps come with a checkpoint",
    "emu3": "the same",
    "nemotron_h_omni": "not made small so far: it hears too, and its tower reads grids of its own",
    "inkling2_loop": "not made small so far: its tower must be as wide as its text",
    "inkling_mm_model": "needs scipy",
    "diffusion_gemma": "writes by diffusion, with no next token",
    "evolla": "takes proteins, and transformers makes no such model by its auto class",
    "fast_vlm": "needs timm",
    "gemma3n": "needs timm",
    "perception_lm": "needs timm",
    "florence2": "an encoder-decoder; its tower has stages with sizes of their own",
    "git": "its config takes no parts, and images stand before the text without tokens",
    "hy_v4_vl": "not made small so far: its tower takes patches of a grid of its own",
    "idefics": "cross attention, with a config of its own",
    "instructblip": "its second tower reads the prompt again, so that no image is encoded alone",
    "instructblipvideo": "videos",
    "kosmos-2.5": "its config takes no parts",
    "mistral4": "a text model",
    "pi0": "writes actions of a robot",
    "t5gemma2": "an encoder-decoder",
    "udop": "an encoder-decoder that takes boxes of words",
    "vision-encoder-decoder": "an encoder-decoder of two other models",
}
"""Families of which no tiny model is built, and why."""
LISTED = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def family_config(name: str) -> Any:
    made = copy.deepcopy(FAMILIES[name])  # configs write into what they are given
    return AutoConfig.for_model(
        TYPE_OF.get(name, name),
        **{
            "text_config": {**TEXT, **made.text},
            "vision_config": {**TOWER, **made.tower},
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
            **made.own,
        },
    )


def family_model(name: str) -> Any:
    """A tiny model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(family_config(name), dtype=torch.float32)
    return with_larger_weights(model).to(FAMILIES[name].dtype).eval()


def segment_image(model: Any, name: str, number: int) -> SegmentImage:
    """An image, with as many tokens as the tower makes features of it."""
    inputs = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in FAMILIES[name].image(number).items()}
    read: Any = body(model).get_image_features
    taken = inspect.signature(read).parameters
    with torch.no_grad():
        made = read(**{n: v for n, v in inputs.items() if n in taken}, return_dict=True)
    found = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    count = _count(made.deepstack_features[0][1] if found is None else found)
    return SegmentImage(inputs, 0, count, 1000 + number, (IMAGE,))


def _count(features: Any) -> int:
    return math.prod(features.shape[:-1]) if isinstance(features, Tensor) else sum(_count(each) for each in features)


def shown_row(model: Any, images: Sequence[SegmentImage], seed: int) -> ShownRow:
    """A row that shows images, and what the model's own forward takes of it."""
    rng = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=rng).tolist()

    tokens, placed = words(3), []
    for image in images:
        placed.append(replace(image, start=len(tokens)))
        tokens += [IMAGE] * image.tokens + words(2)
    tokens += words(7)
    ids = torch.tensor([tokens])
    inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_together(images)}
    taken = inspect.signature(type(body(model)).forward).parameters
    inputs |= {name: (ids == IMAGE).long() for name in TYPES if name in taken}
    return ShownRow(tokens, placed, inputs)


def _together(images: Sequence[SegmentImage]) -> Inputs:
    """The images of a row as a processor makes them at once: padded to the largest; tiles side by side in their row."""
    along = 1 if "pixel_attention_mask" in images[0].inputs and images[0].inputs["pixel_values"].ndim == 5 else 0
    made = {}
    for name in images[0].inputs:
        parts = [image.inputs[name] for image in images]
        if name == "pixel_values" and "target_sizes" in images[0].inputs:
            made[name] = torch.cat(parts, -1)
            continue
        largest = [max(part.shape[axis] for part in parts) for axis in range(parts[0].ndim)]
        wide = []
        for part in parts:
            size = [part.shape[axis] if axis == along else largest[axis] for axis in range(part.ndim)]
            whole = part.new_zeros(size)
            whole[tuple(slice(n) for n in part.shape)] = part
            wide.append(whole)
        made[name] = torch.cat(wide, along)
    return made
