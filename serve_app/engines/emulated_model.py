"""Makes the model that rehearsals run: a Llama of hardly any size, with another's tokenizer.

Run as a program: `python -m serve_app.engines.emulated_model LIKE FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")


def make_emulated_model(like: Path, folder: Path) -> None:
    """Write random weights, and the tokenizer of another model, into `folder`.

    Args:
        like: Folder of the model whose tokenizer it gets.
        folder: Is made.
    """
    other = AutoConfig.from_pretrained(like)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=other.vocab_size,
        max_position_embeddings=other.max_position_embeddings,
        bos_token_id=other.bos_token_id,
        eos_token_id=other.eos_token_id,
        pad_token_id=other.pad_token_id,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(like / name, folder)


if __name__ == "__main__":
    make_emulated_model(Path(sys.argv[1]), Path(sys.argv[2]))
