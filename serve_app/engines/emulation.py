"""A replica that stands in for missing hardware: a small model, slowed down to its pace.

Everything is real but the speed: requests are admitted, batched, computed and streamed, and every
iteration is made to last as long as the performance model states for the hardware that is named.
So replicas of one machine can be as unequal as a fleet is, and do not wait for each other's cores.

The small model is a Llama of random weights with another's tokenizer. Run as a program, this module
makes it: `python -m serve_app.engines.emulation LIKE FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from tokenyard.types import FloatArray

TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")
_CATCH_UP_S = 0.02
"""An iteration that ends later than it should lets the next one begin as much earlier, to here."""


class Pace:
    """Makes iterations last as long as they should."""

    def __init__(self, iteration: FloatArray) -> None:
        self._base_s, self._prefill_s, self._sequence_s, self._kv_s = map(float, iteration)
        self._due_s = 0.0

    def begin(self) -> float:
        """Return when the iteration that begins now was due to begin, by `time.perf_counter`."""
        now_s = time.perf_counter()
        return self._due_s if now_s - self._due_s < _CATCH_UP_S else now_s

    def hold(self, begun_s: float, prefill_tokens: int, sequences: int, kv_tokens: int) -> None:
        """Wait until an iteration that began at `begun_s`, as `begin` returned it, should end.

        It computed so many tokens of prompts, decoded so many sequences, and read the keys and
        values of so many tokens.
        """
        takes_s = (
            self._base_s
            + self._prefill_s * prefill_tokens
            + self._sequence_s * sequences
            + self._kv_s * kv_tokens
        )
        self._due_s = begun_s + takes_s
        time.sleep(max(0.0, self._due_s - time.perf_counter()))


def make_emulated_model(like: Path, folder: Path) -> None:
    """Write random weights, and the tokenizer of the model in `like`, into a new folder."""
    # Only the process that makes it needs them.
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

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
