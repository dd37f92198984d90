"""The same decoder in PyTorch: transformers for decoding, PEFT for training. Both come with the test extra."""

import importlib.util
from typing import Any

import numpy as np

from stackalign.lm.config import DecoderConfig

NEEDED = ("torch", "transformers", "peft")
INSTALL = 'pip install -e ".[test]"'


def missing() -> list[str]:
    """Which of the packages are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def model(config: DecoderConfig, params: Any):
    """The Llama model of `transformers` with the same float32 weights, in evaluation mode."""
    import torch
    import transformers

    if config.rope_scaling is not None:
        raise ValueError("the reference is built for models without rotary scaling")
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=config.max_positions,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    state = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    state["lm_head.weight"] = params.get("lm_head", params["embed"])
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(params["layers"]):
        parts = {
            "input_layernorm": layer["attn_norm"],
            "post_attention_layernorm": layer["mlp_norm"],
            "self_attn.q_proj": layer["qkv"][:q],
            "self_attn.k_proj": layer["qkv"][q : q + kv],
            "self_attn.v_proj": layer["qkv"][q + kv :],
            "self_attn.o_proj": layer["o"],
            "mlp.gate_proj": layer["gate_up"][: config.intermediate_size],
            "mlp.up_proj": layer["gate_up"][config.intermediate_size :],
            "mlp.down_proj": layer["down"],
        }
        state |= {f"model.layers.{index}.{name}.weight": value for name, value in parts.items()}
    reference.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    return reference.eval()


def cast(reference, dtype: str):
    """A copy of the model in another dtype; itself where it has it."""
    import copy

    import torch

    dtype = getattr(torch, dtype)
    return reference if reference.dtype == dtype else copy.deepcopy(reference).to(dtype)


def generate(reference, prompts: np.ndarray, new_tokens: int, *, temperature: float, top_p: float):
    """`[rows, P + new_tokens]`: `transformers`' own generation with its key-value cache; temperature 0 is greedy."""
    import torch

    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    tokens = torch.from_numpy(prompts).long()
    with torch.inference_mode():
        return reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, use_cache=True, **sampling
        )


def dpo_trainer(reference, *, rank: int, alpha: float, targets: tuple[str, ...], beta: float, learning_rate: float):
    """A DPO step on a PEFT-LoRA of the model.

    Returns:
      `step(tokens [2B, P + C], prompt_length) -> loss`, chosen rows first: reference log-probabilities without
      gradient, policy, loss, backward, clipping, AdamW. Logits are formed for the completion's positions only.
    """
    import peft
    import torch

    names = [f"{name}_proj" for name in targets]
    policy = peft.get_peft_model(
        reference, peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names)
    )
    policy.train()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)

    def log_probs(tokens, prompt_length):
        length = tokens.shape[1] - prompt_length
        logits = policy(input_ids=tokens, logits_to_keep=length + 1, use_cache=False).logits[:, :-1]
        chosen = tokens[:, prompt_length:, None]
        return torch.log_softmax(logits, -1).gather(2, chosen)[..., 0].sum(1)

    def step(tokens: np.ndarray, prompt_length: int) -> float:
        tokens = torch.from_numpy(tokens).long()
        with torch.no_grad(), policy.disable_adapter():
            before = log_probs(tokens, prompt_length)
        chosen, rejected = torch.chunk(log_probs(tokens, prompt_length) - before, 2)
        loss = -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step
