"""What both engines are compared with: Hugging Face's GPT-2, and any model of the description in plain NumPy."""

import numpy as np
import torch
import transformers

from raygpt.models import value_table_of


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


def logits(parameters, model, ids):
    """Those of ids [rows, time] by a config's Model, in float64 and without a batched or fused anything: [rows, time,
    vocab]. Parameters are arrays under the description's names."""
    p = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    x = p["tokens"][ids]  # [rows, time, width]
    if model.position == "learned":
        x = x + p["positions"][: ids.shape[1]]
    if model.embedding_norm:
        x = _norm(x, p, "embedding_norm", model)
    x0 = x
    for layer in range(model.layers):
        block = {name.removeprefix("blocks."): p[name][layer] for name in p if name.startswith("blocks.")}
        if model.x0_mixing:
            x = block["residual.gain"] * x + block["x0.gain"] * x0
        x = x + _attention(_norm(x, block, "norm1", model), block, model, _value_embedding(p, model, layer, ids))
        x = x + _mlp(_norm(x, block, "norm2", model), block, model)
    x = _norm(x, p, "norm", model)
    z = x @ p["tokens" if model.tied_head else "head"].T
    return model.softcap * np.tanh(z / model.softcap) if model.softcap else z


def _norm(x, p, name, model):
    if model.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    return x * p.get(f"{name}.gain", 1.0) + p.get(f"{name}.bias", 0.0)


def _linear(x, p, name, inputs=1):
    """A product over the last axes of x, as many as the kernel has inputs; the bias, if there is one."""
    return np.tensordot(x, p[f"{name}.kernel"], inputs) + p.get(f"{name}.bias", 0.0)


def _value_embedding(p, model, layer, ids):
    """What a layer's values get from a table of tokens: [rows, time, kv_heads, head], or 0."""
    found = value_table_of(model, layer)
    if found is None:
        return 0.0
    table, place = found
    return p["value_gains"][place] * p[table][ids].reshape(*ids.shape, model.key_heads, model.size_of_head)


def _attention(x, p, model, added_to_values):
    gate = 2 / (1 + np.exp(-x[..., :12] @ p["head_gate.kernel"])) if model.head_gates else np.ones(model.heads)
    queries, keys, values = (_linear(x, p, name) for name in ("query", "key", "value"))  # [rows, time, heads, head]
    if model.qk_norm:
        queries, keys = _norm(queries, p, "query_norm", model), _norm(keys, p, "key_norm", model)
    if model.position == "rope":
        queries, keys = _rotated(queries, model), _rotated(keys, model)
    values = values + added_to_values
    time = x.shape[1]
    is_later = np.arange(time)[None, :] > np.arange(time)[:, None]  # [query, key]
    results = np.empty_like(queries)
    for head in range(model.heads):
        kv_head = head // (model.heads // model.key_heads)
        scores = queries[:, :, head] @ keys[:, :, kv_head].swapaxes(1, 2) / np.sqrt(model.size_of_head)
        scores[:, is_later] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        results[:, :, head] = shares / shares.sum(-1, keepdims=True) @ values[:, :, kv_head]
    return _linear(results * gate[..., None], p, "out", inputs=2)


def _rotated(x, model):
    """RoPE of [rows, time, heads, head]: element i of a head and element i + head/2 are a pair, and the pairs behind
    the share are not rotated."""
    half = model.size_of_head // 2
    pairs = np.arange(half)
    speed = np.where(pairs < int(model.rope_share * half), model.rope_base ** (-pairs / half), 0.0)
    angle = (np.arange(x.shape[1])[:, None] * speed)[:, None, :]  # [time, 1, half]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def _mlp(x, p, model):
    up = _linear(x, p, "up")
    if model.mlp == "gelu":
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    elif model.mlp == "relu2":
        hidden = np.maximum(up, 0) ** 2
    else:
        gate = _linear(x, p, "gate")
        hidden = gate / (1 + np.exp(-gate)) * up
    return _linear(hidden, p, "down")
