"""Language models: the decoder, adapters, weights, tokenizers, generation, scoring, training and the pool."""

from stackalign.lm import char_tokenizer, decoder, generate, lora, pool, score, sharding, tokenizer, training, weights
from stackalign.lm.config import DecoderConfig, RopeScaling, UnsupportedModelError
from stackalign.lm.lora import LoraConfig
from stackalign.lm.pool import Agent, Answer, Base, Pool, Sampling

__all__ = [
    "Agent",
    "Answer",
    "Base",
    "DecoderConfig",
    "LoraConfig",
    "Pool",
    "RopeScaling",
    "Sampling",
    "UnsupportedModelError",
    "char_tokenizer",
    "decoder",
    "generate",
    "lora",
    "pool",
    "score",
    "sharding",
    "tokenizer",
    "training",
    "weights",
]
