"""The starter model: a small causal LM with a character tokenizer, made from a config, no download.

`make_tokenizer` gives one token per character and one per role marker, so a prompt of eight characters is
eleven tokens long. `make_model_folder` writes config, random weights and tokenizer in Hugging Face layout;
`moorage sft` then warms it up.

The sizes are measured (docs/performance.md): hidden size 128 is the smallest that reliably learns to reverse
strings within a few hundred steps on one CPU core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PAD, END, UNK = "<|pad|>", "<|end|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
VOCAB_SIZE = 128

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{%- else -%}{{ message['content'] + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SHARED},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHARED,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character and newline, and role markers.

    Ids 0..6 are pad, end, the four roles and unknown; the vocabulary is filled up to 128.
    """
    specials = [PAD, END, *(f"<|{role}|>" for role in ROLES), UNK]
    tokens = specials + [chr(code) for code in range(32, 127)] + ["\n"]
    tokens += [f"<|extra_{index}|>" for index in range(len(tokens), VOCAB_SIZE)]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in tokens if t.startswith("<|") and len(t) > 2]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model_folder(
    folder: Path, architecture: str = "qwen3", seed: int = 0, overrides: dict[str, Any] | None = None
) -> Path:
    """Write a randomly initialised model and its tokenizer to `folder` and return it.

    `architecture` is a key of `ARCHITECTURES`; `overrides` replace config fields. Raises KeyError for an
    unknown architecture.
    """
    fields = {**ARCHITECTURES[architecture], **(overrides or {})}
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    generation = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder
