"""A tokenizer folder for scripted engines: one token per character, and Qwen3's chat markers.

The starter model's template knows no tools; with this folder the `qwen3` renderer renders tool calls,
reasoning and continued turns, so every kind of environment can be driven without a model that plays well.
"""

from __future__ import annotations

import json
from pathlib import Path

END = "<|im_end|>"
MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|unk|>",
)
RENDERER = "qwen3"


def make_chatty_folder(folder: Path) -> Path:
    """Write tokenizer and a config.json (no weights) to `folder` and return it."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokens = [*MARKERS, *(chr(code) for code in range(32, 127)), "\n"]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", unk_token="<|unk|>"
    )
    fast.chat_template = (
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(tokens)}))
    return folder
