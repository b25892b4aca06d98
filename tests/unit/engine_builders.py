"""Tiny models and prompts that several engine tests share."""

import random


def a_tiny_llama(folder, **fields):
    """Save a random Llama in fp32, whose heads and layers four ranks can share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Large weights, or every position would be as likely as any other.
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(**(shape | fields))).save_pretrained(folder)


def prompts_of(*lengths):
    """Random prompts of these lengths, the same at every call."""
    rng = random.Random(0)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]
