"""Multi-head latent attention, naively: every position at once in float64, keys and values made."""

import numpy as np


def naive_latent_logits(config, weights, tokens):
    """The model of ``tests.models.demo.latent``, keys and values projected up; no cache."""
    x = weights.embedding[tokens].astype(np.float64)
    hidden = np.triu(np.ones((len(tokens), len(tokens)), dtype=bool), 1)
    for layer in weights.layers:
        normed = norm(config, x)
        latent, shared = np.split(normed @ layer["compress"], [config.kv_lora_rank], axis=1)
        latent, shared = norm(config, latent) * layer["latent_norm"], turn(config, shared)
        mixed = []
        for head, query in enumerate(np.split(normed @ layer["query"], config.heads, axis=1)):
            plain, turned = np.split(query, [config.qk_nope_head_dim], axis=1)
            query = np.concatenate((plain, turn(config, turned)), axis=1)
            key = np.concatenate((latent @ layer["key_up"][head].T, shared), axis=1)
            value = latent @ layer["value_up"][head]
            scores = query @ key.T / np.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
            scores[hidden] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(shares / shares.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(mixed, axis=1) @ layer["out"]
        gate, up = np.split(norm(config, x) @ layer["gate_up"], 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]
    return norm(config, x) @ weights.unembedding


def norm(config, values):
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + config.norm_epsilon)


def turn(config, vectors):
    """Pairs of numbers half a vector apart as complex numbers, each turned by its own angle."""
    half = vectors.shape[1] // 2
    speeds = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(len(vectors))[:, None] * speeds
    turned = (vectors[:, :half] + 1j * vectors[:, half:]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag), axis=1)
