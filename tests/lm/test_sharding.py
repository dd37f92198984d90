"""Sharded equals unsharded: logits, losses, gradients and generated tokens, on eight simulated devices."""

import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from stackalign.lm import decoder, sharding
from stackalign.lm.config import DecoderConfig

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
         "num_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
         "tie_embeddings": False, "max_positions": 128}  # fmt: skip
CONFIGS = {
    "llama": DecoderConfig(**SIZES),
    "odd heads": DecoderConfig(
        **{**SIZES, "num_heads": 3, "num_kv_heads": 1, "vocab_size": 97, "tie_embeddings": True}
    ),
    "everything": DecoderConfig(
        **{**SIZES, "tie_embeddings": True}, qkv_bias=True, qk_norm=True, post_norms=True, windows=(4, None),
        local_rope_theta=1e3, norm_offset=1.0, activation="gelu_tanh", embed_scale=5.0, logit_scale=0.5,
    ),
    "parallel": DecoderConfig(**SIZES, parallel=True, norm="layer", rope_interleaved=True),
}  # fmt: skip

PROGRAM = """
import sys
import jax
hosts = sys.argv[4:]
jax.config.update("jax_num_cpu_devices", 2 if hosts else 8)
if hosts:
    jax.distributed.initialize(hosts[0], 2, int(hosts[1]))
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
import numpy as np
from stackalign.lm import decoder, generate, lora, score, sharding, training
from test_sharding import CONFIGS

config = CONFIGS[sys.argv[2]]
mesh = sharding.parse_mesh(sys.argv[3])
shape = lora.LoraConfig(rank=4, alpha=8.0)
keys = jax.random.split(jax.random.key(0), 8)
params = decoder.init(keys[0], config)
stack = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(keys[1], x.shape), lora.init(keys[2], config, shape, 2))
tokens = jax.random.randint(keys[3], (8, 12), 0, 96)
mask = np.ones((8, 12), bool)
mask[::2, :5] = False
completions = jax.random.randint(keys[4], (8, 6), 0, 96)
completion_mask = np.ones((8, 6), bool)
completion_mask[1::2, 4:] = False
rows = lora.rows(shape, 2, jnp.arange(8) % 2)

placed = sharding.place(params, config, mesh)
stack_placed = sharding.replicate(stack, mesh)
batch = sharding.place_rows((tokens, mask, completions, completion_mask), mesh)
qkv = placed["layers"][0]["qkv"]
if sys.argv[2] == "llama":
    parts = mesh.shape["fsdp"] * mesh.shape["tensor"]
    assert qkv.addressable_shards[0].data.size * parts == qkv.size, qkv.sharding

log_probs = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size", "remat", "mesh"))
one = log_probs(params, stack, config, tokens, mask, completions, completion_mask, rows, vocab_size=96)
two = log_probs(placed, stack_placed, config, *batch, rows, vocab_size=96, mesh=mesh)
np.testing.assert_allclose(sharding.fetch(two), one, atol=2e-5)

forward = jax.jit(decoder.apply, static_argnames=("config", "mesh"))
hidden = [
    forward(p, s, config, t, decoder.positions_of(m), decoder.causal_mask(m), rows=rows, mesh=on)[0]
    for p, s, (t, m), on in ((params, stack, (tokens, mask), None), (placed, stack_placed, batch[:2], mesh))
]
np.testing.assert_allclose(sharding.fetch(hidden[1]), hidden[0], atol=2e-5 * np.abs(hidden[0]).max())

def loss(values, batch):
    return -jnp.sum(values) / batch.completion_mask.sum(), jnp.sum(values)

def grouped(arrays):
    return training.Batch(*(jnp.reshape(x, (2, 4, *x.shape[1:])) for x in arrays))

step = dict(config=config, lora_config=shape, loss=loss, vocab_size=96, remat=True)
one, one_loss = training.gradient(params, stack, keys[5], grouped((tokens, mask, completions, completion_mask)), **step)
shared_out = sharding.place_rows(grouped((tokens, mask, completions, completion_mask)), mesh, axis=1)
two, two_loss = training.gradient(placed, stack_placed, keys[5], shared_out, mesh=mesh, **step)
np.testing.assert_allclose(two_loss, one_loss, rtol=1e-5)
for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
    np.testing.assert_allclose(sharding.fetch(b), a, atol=3e-5 * max(1e-3, np.abs(a).max()))

sample = dict(max_new_tokens=8, temperature=0.8, top_p=0.9, eos_ids=(3,), vocab_size=96)
one = generate.generate(params, stack, config, keys, tokens, mask, rows, **sample)
two = generate.generate(
    placed, stack_placed, config, sharding.place_rows(keys, mesh), *batch[:2], rows, mesh=mesh, **sample
)
two = sharding.fetch(two)
np.testing.assert_array_equal(one.tokens, two.tokens)
np.testing.assert_array_equal(one.mask, two.mask)
np.testing.assert_allclose(two.log_probs, one.log_probs, atol=2e-5)
print("equal")
"""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "data=2,fsdp=2,tensor=2"),
        ("llama", "fsdp=8"),
        ("odd heads", "data=2,tensor=4"),
        ("everything", "fsdp=4,tensor=2"),
        ("parallel", "tensor=8"),
    ],
)
def test_sharded_is_unsharded(name, mesh):
    here = pathlib.Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(here), name, mesh],
        cwd=here.parent.parent, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


def test_two_hosts():
    """Two processes with two devices each get what one device gives, both of them."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        where = f"localhost:{taken.getsockname()[1]}"
    here = pathlib.Path(__file__).resolve().parent
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(here), "llama", "fsdp=2,tensor=2", where, str(host)],
            cwd=here.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=300)
        assert out.endswith("equal\n"), err[-3000:]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_rule(name):
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), CONFIGS[name]))
    found = jax.tree.leaves(sharding.specs(params), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    assert len(found) == len(jax.tree.leaves(params))
    # Every matrix is cut in both directions.
    for leaf, spec in zip(jax.tree.leaves(params), found, strict=True):
        assert len(leaf.shape) < 2 or set(spec) == {"fsdp", "tensor"}


def test_an_unknown_parameter_is_named():
    with pytest.raises(KeyError, match=r"\['layers'\]\[0\]\['mystery'\]"):
        sharding.specs({"layers": ({"mystery": np.ones(2)},)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=2", "needs 2 devices; there are 1"),
        ("fsdp=0", "fsdp=0 must be at least 1"),
        ("model=1", "expected axes out of data, fsdp, tensor"),
        ("fsdp=two", "expected axes"),
        ("fsdp=1,fsdp=1", "expected axes"),
    ],
)
def test_bad_meshes(text, message):
    with pytest.raises(ValueError, match=message):
        sharding.parse_mesh(text, jax.devices()[:1])


def test_a_mesh_of_one_device():
    assert dict(sharding.parse_mesh("", jax.devices()[:1]).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
