"""Checkpoints: what is read is what was written, and every kind of damage is an error that names it."""

import json
import pathlib

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import save_file

from stackalign.lm import weights
from stackalign.lm.config import DecoderConfig, RopeScaling, UnsupportedModelError
from stackalign.lm.weights import CheckpointError, fetch, gguf_config, hf_config

HF = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 5e4, "hidden_act": "silu", "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    norm_eps=1e-5, rope_theta=5e4, rope_scaling=None, tie_embeddings=False, max_positions=128,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def tensors(dtype=np.float32, tied=False):
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)}
    if not tied:
        shapes["lm_head.weight"] = (40, 32)
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (32,),
            f"model.layers.{i}.post_attention_layernorm.weight": (32,),
            f"model.layers.{i}.self_attn.q_proj.weight": (32, 32),
            f"model.layers.{i}.self_attn.k_proj.weight": (16, 32),
            f"model.layers.{i}.self_attn.v_proj.weight": (16, 32),
            f"model.layers.{i}.self_attn.o_proj.weight": (32, 32),
            f"model.layers.{i}.mlp.gate_proj.weight": (64, 32),
            f"model.layers.{i}.mlp.up_proj.weight": (64, 32),
            f"model.layers.{i}.mlp.down_proj.weight": (32, 64),
        }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, arrays, **fields):
    (folder / "config.json").write_text(json.dumps(HF | fields))
    save_file(arrays, folder / "model.safetensors")
    return folder


def write_shards(folder, arrays, weight_map=None):
    (folder / "config.json").write_text(json.dumps(HF))
    names = sorted(arrays)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, held in shards.items():
        save_file({name: arrays[name] for name in held}, folder / shard)
    weight_map = weight_map or {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_holds(params, arrays, dtype=np.float32, **tolerance):
    """Compares fused parameters with the separate tensors they were made of."""
    def same(actual, *parts):
        assert actual.dtype == np.dtype(dtype)
        expected = np.concatenate([arrays[part].astype(dtype) for part in parts])
        np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), **tolerance or {"rtol": 0})

    same(params["embed"], "model.embed_tokens.weight")
    same(params["final_norm"], "model.norm.weight")
    assert ("lm_head" in params) == ("lm_head.weight" in arrays)
    if "lm_head" in params:
        same(params["lm_head"], "lm_head.weight")
    for i, layer in enumerate(params["layers"]):
        p = f"model.layers.{i}"
        same(layer["attn_norm"], f"{p}.input_layernorm.weight")
        same(layer["qkv"], *(f"{p}.self_attn.{x}_proj.weight" for x in "qkv"))
        same(layer["o"], f"{p}.self_attn.o_proj.weight")
        same(layer["mlp_norm"], f"{p}.post_attention_layernorm.weight")
        same(layer["gate_up"], f"{p}.mlp.gate_proj.weight", f"{p}.mlp.up_proj.weight")
        same(layer["down"], f"{p}.mlp.down_proj.weight")


# --- configuration ---


def test_config_reads_every_field():
    assert hf_config.from_hf(HF) == CONFIG
    assert hash(hf_config.from_hf(HF)) == hash(CONFIG)


def test_config_absent_fields_mean_what_the_format_says():
    short = {k: v for k, v in HF.items() if k not in ("num_key_value_heads", "head_dim", "rope_theta",
                                                      "tie_word_embeddings", "architectures")}  # fmt: skip
    config = hf_config.from_hf(short)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tie_embeddings) == (4, 8, 10000.0, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e4}},
        {"rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_parameters": LLAMA3 | {"rope_theta": 5e4}},
    ],
)
def test_config_rope_spellings(fields):
    config = hf_config.from_hf(HF | fields)
    assert config.rope_theta == 5e4
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_config_default_rope_is_none(spelling):
    assert hf_config.from_hf(HF | {spelling: {"rope_type": "default"}}) == CONFIG


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "falcon"}, "falcon"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta=10000.0"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, "contradicts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"rms_norm_eps": None}, "'rms_norm_eps'"),
        ({"max_position_embeddings": 0}, "max_positions=0"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_config_refuses_by_name(fields, named):
    with pytest.raises(UnsupportedModelError) as error:
        hf_config.from_hf(HF | fields)
    assert named in str(error.value)


@pytest.mark.parametrize("field", ["pretraining_tp", "torch_dtype", "attention_dropout", "initializer_range"])
def test_config_ignores_what_does_not_change_the_function(field):
    assert hf_config.from_hf(HF | {field: 2}) == CONFIG


# --- safetensors ---


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_folder_round_trip(tmp_path, stored, dtype):
    arrays = tensors(stored)
    config, params = weights.load(write(tmp_path, arrays), dtype=dtype)
    assert config == CONFIG
    assert isinstance(params["layers"], tuple)
    assert_holds(params, {name: array.astype(np.float32) for name, array in arrays.items()}, dtype)


def test_num_parameters_counts_what_is_stored():
    assert weights.num_parameters(CONFIG) == sum(array.size for array in tensors().values())


def test_tied_folder_and_old_extras(tmp_path):
    arrays = tensors(tied=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
             "lm_head.weight": arrays["model.embed_tokens.weight"]}  # fmt: skip
    config, params = weights.load(write(tmp_path, arrays | extra, tie_word_embeddings=True))
    assert config.tie_embeddings
    assert_holds(params, arrays)


def test_tied_folder_with_another_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="lm_head.weight.*tie"):
        weights.load(write(tmp_path, tensors(), tie_word_embeddings=True))


def test_shards(tmp_path):
    arrays = tensors()
    _, params = weights.load(write_shards(tmp_path, arrays))
    assert_holds(params, arrays)


def test_missing_tensor(tmp_path):
    arrays = tensors()
    del arrays[K]
    with pytest.raises(CheckpointError) as error:
        weights.load(write(tmp_path, arrays))
    assert K in str(error.value) and "(16, 32)" in str(error.value) and str(tmp_path) in str(error.value)


def test_extra_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="q_proj.bias"):
        weights.load(write(tmp_path, tensors() | {Q.replace("weight", "bias"): np.zeros(32, np.float32)}))


def test_wrong_shape(tmp_path):
    arrays = tensors()
    arrays[K] = np.ascontiguousarray(arrays[K].T)
    with pytest.raises(CheckpointError) as error:
        weights.load(write(tmp_path, arrays))
    message = str(error.value)
    assert all(part in message for part in (K, "(32, 16)", "(16, 32)", "transposed", "model.safetensors"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(tmp_path, value):
    arrays = tensors()
    arrays[Q][3, 4] = value
    with pytest.raises(CheckpointError, match=r"q_proj.*1 values that are not finite"):
        weights.load(write(tmp_path, arrays))


def test_overflow_of_the_target_type(tmp_path):
    arrays = tensors()
    arrays[Q][3, 4] = 1e5
    weights.load(write(tmp_path, arrays))
    with pytest.raises(CheckpointError, match="not finite as float16"):
        weights.load(tmp_path, dtype=np.float16)


def test_integer_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="q_proj.*I8"):
        weights.load(write(tmp_path, tensors() | {Q: np.zeros((32, 32), np.int8)}))


@pytest.mark.parametrize("keep", [4, 200, -10])
def test_truncated_file(tmp_path, keep):
    file = write(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        weights.load(tmp_path)


def test_shard_faults(tmp_path):
    folder = write_shards(tmp_path, tensors())
    second = folder / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match="00002-of-00002.*truncated"):
        weights.load(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002.*missing shard"):
        weights.load(folder)
    save_file({"model.norm.weight": tensors()["model.norm.weight"]}, second)
    with pytest.raises(CheckpointError, match="00002-of-00002.*is missing, though"):
        weights.load(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3])
def test_index_stays_in_the_folder(tmp_path, shard):
    with pytest.raises(CheckpointError, match="not the name of a file"):
        weights.load(write_shards(tmp_path, tensors(), {Q: shard}))


def test_folder_without_weights_or_config(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(CheckpointError, match="neither model.safetensors"):
        weights.load(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder"):
        weights.load(tmp_path / "absent")


def test_unsupported_dtype(tmp_path):
    with pytest.raises(ValueError, match="dtype=int8"):
        weights.load(write(tmp_path, tensors()), dtype=np.int8)


@pytest.mark.parametrize("tied", [False, True])
def test_reads_what_transformers_writes(tmp_path, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied,
            rope_parameters={**LLAMA3, "rope_theta": 5e5},
        )  # fmt: skip
    )
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    config, params = weights.load(tmp_path)
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192) and config.rope_theta == 5e5
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    if tied:
        del arrays["lm_head.weight"]
    assert_holds(params, arrays)
    assert weights.num_parameters(config) == model.num_parameters()


# --- GGUF ---

NATIVE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
          "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
          "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}  # fmt: skip
F32 = gguf.GGMLQuantizationType.F32


def native(name):
    name = name.removesuffix(".weight").replace("model.layers.", "blk.")
    for ours, theirs in NATIVE.items():
        name = name.replace(ours, theirs)
    return f"{name}.weight"


def interleave(array, heads):
    """The converter's row order: row `2 j + s` of a head is the original's row `j + s * head_dim / 2`."""
    size = array.shape[0] // heads
    order = [h * size + j + s * (size // 2) for h in range(heads) for j in range(size // 2) for s in range(2)]
    return array[order]


def write_gguf(file, arrays, kind=F32, extra=(), fields=(), rope_factors=None, skip=()):
    writer = gguf.GGUFWriter(file, "llama")
    for add, value in [
        (writer.add_vocab_size, 40), (writer.add_context_length, 128), (writer.add_embedding_length, 32),
        (writer.add_block_count, 2), (writer.add_feed_forward_length, 64), (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 5e4),
        (writer.add_rope_dimension_count, 8),
    ]:  # fmt: skip
        if add.__name__ not in skip:
            add(value)
    for key, value in fields:
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    for name, array in arrays.items():
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, 4 if "q_proj" in name else 2)
        stored = F32 if array.ndim == 1 else kind
        if stored == gguf.GGMLQuantizationType.F64:
            writer.add_tensor(native(name), array.astype(np.float64))
        else:
            writer.add_tensor(native(name), quantize(array, stored), raw_dtype=stored)
    for name, array in extra:
        writer.add_tensor(name, array)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_round_trip(tmp_path, tied):
    arrays = tensors(tied=tied)
    config, params = weights.load(write_gguf(tmp_path / "a.gguf", arrays))
    assert config.tie_embeddings == tied
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_positions) == (4, 2, 8, 128)
    assert config.norm_eps == pytest.approx(1e-5) and config.rope_theta == 5e4 and config.vocab_size == 40
    assert_holds(params, arrays)


@pytest.mark.parametrize(("kind", "atol"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.35),
                                            ("Q4_0", 0.5)])  # fmt: skip
def test_gguf_types(tmp_path, kind, atol):
    arrays = tensors()
    _, params = weights.load(write_gguf(tmp_path / "a.gguf", arrays, gguf.GGMLQuantizationType[kind]))
    assert_holds(params, arrays, atol=atol)


def test_gguf_matches_transformers(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    arrays = tensors()
    write_gguf(tmp_path / "a.gguf", arrays, gguf.GGMLQuantizationType.Q8_0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype="float32")
    _, params = weights.load(tmp_path / "a.gguf")
    assert_holds(params, {name: value.numpy() for name, value in reference.state_dict().items()})


def divisors(factor, low=1.0, high=4.0, original=8192, theta=5e4, half=4):
    result = []
    for i in range(half):
        wavelength = 2 * np.pi * theta ** (i / half)
        smooth = (original / wavelength - low) / (high - low)
        blend = 1 / ((1 - smooth) / factor + smooth)
        result.append(1.0 if wavelength < original / high else factor if wavelength > original / low else blend)
    return result


def test_gguf_rope_factors(tmp_path):
    config, _ = weights.load(write_gguf(tmp_path / "a.gguf", tensors(), rope_factors=divisors(32.0)))
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight"):
        weights.load(write_gguf(tmp_path / "b.gguf", tensors(), rope_factors=[1.0, 2.0, 3.0, 32.0]))


def test_gguf_unsupported_type_names_the_tensor(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", tensors(), gguf.GGMLQuantizationType.F64)
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' has type F64"):
        weights.load(file)


@pytest.mark.parametrize("keep", [2, 30, 500, 3000, -100])
def test_gguf_truncated(tmp_path, keep):
    file = write_gguf(tmp_path / "a.gguf", tensors())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"a\.gguf.*truncated"):
        weights.load(file)


def test_gguf_faults(tmp_path):
    arrays = tensors()
    with pytest.raises(CheckpointError, match="attn_q.bias"):
        bias = ("blk.0.attn_q.bias", np.zeros(32, np.float32))
        weights.load(write_gguf(tmp_path / "a.gguf", arrays, extra=[bias]))
    with pytest.raises(CheckpointError, match=r"blk.1.attn_k.weight.*\(32, 32\).*\(16, 32\)"):
        weights.load(write_gguf(tmp_path / "b.gguf", arrays | {K: np.ones((32, 32), np.float32)}))
    with pytest.raises(CheckpointError, match="blk.0.attn_q.weight.*missing"):
        weights.load(write_gguf(tmp_path / "c.gguf", {name: a for name, a in arrays.items() if name != Q}))
    arrays[Q][0, 0] = np.nan
    with pytest.raises(CheckpointError, match="blk.0.attn_q.weight.*not finite"):
        weights.load(write_gguf(tmp_path / "d.gguf", arrays))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([("llama.expert_count", 8)], "llama.expert_count=8"),
        ([("llama.rope.scaling.type", "yarn")], "llama.rope.scaling.type='yarn'"),
        ([("llama.attention.value_length", 16)], "llama.attention.value_length=16"),
        ([("llama.some_new_field", 1)], "llama.some_new_field=1"),
    ],
)
def test_gguf_refuses_fields_by_name(tmp_path, fields, named):
    with pytest.raises(UnsupportedModelError) as error:
        weights.load(write_gguf(tmp_path / "a.gguf", tensors(), fields=fields))
    assert named in str(error.value)


def test_gguf_architecture_and_missing_field():
    with pytest.raises(UnsupportedModelError, match="general.architecture='falcon'"):
        gguf_config.from_gguf({"general.architecture": "falcon"}, tie_embeddings=True)
    with pytest.raises(UnsupportedModelError, match="'llama.embedding_length'"):
        gguf_config.from_gguf(
            {"general.architecture": "llama", "llama.attention.head_count": 4}, tie_embeddings=True
        )


def test_gguf_required_fields_are_named(tmp_path):
    with pytest.raises(UnsupportedModelError, match="llama.feed_forward_length"):
        weights.load(write_gguf(tmp_path / "a.gguf", tensors(), skip=["add_feed_forward_length"]))


@pytest.mark.real_weights
def test_smollm2():
    path = fetch.smollm2()
    assert isinstance(path, pathlib.Path) and path.name == fetch.GGUF
    config, params = weights.load(path)
    assert config == DecoderConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, norm_eps=config.norm_eps, rope_theta=1e5, rope_scaling=None, tie_embeddings=True,
        max_positions=8192,
    )  # fmt: skip
    assert config.norm_eps == pytest.approx(1e-5)
    assert weights.num_parameters(config) == 134_515_008
    assert len(params["layers"]) == 30 and params["layers"][29]["qkv"].shape == (960, 576)
