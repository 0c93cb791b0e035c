"""Hugging Face's GPT-2, which both engines are compared with."""

import torch
import transformers


def hugging_face(layers, heads, width, context, vocab, tied):
    """With random weights, and no dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,  # large weights: a wrong place shows
    )
    reference = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms too, which begin at 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    return reference
