"""GGUF files, written here by the format's own package, and read as a model."""

import pytest
import torch
from families import make_source

from cases import draw_tokens, gap
from equitape import adapt

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def write_gguf(model, path):
    """Llama in llama.cpp's names and its order of rotary channels: pairs beside each other, not half a head apart."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path):
    source = make_source(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    path = tmp_path / "tiny.gguf"
    write_gguf(source, path)
    model = adapt(path, "tape")
    assert model.dtype == torch.float32
    assert model.config.encoding["theta"] == 5000.0
    tokens = draw_tokens(2, 30)
    with torch.no_grad():
        assert gap(model(tokens).logits, source(tokens).logits) < 1e-5
    # nothing of the file's packing is left that would keep the model from being saved
    model.save_pretrained(tmp_path / "whole")
    half = adapt(path, "lora", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert adapt(tmp_path / "whole", "lora").config.encoding["kind"] == "tape"
