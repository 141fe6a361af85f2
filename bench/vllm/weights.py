"""Worker extension: seeded weights whose outputs depend on all of the KV, and damage to the KV.

vLLM's dummy weights are so small that attention contributes nothing and the output depends on the
last token alone: wrong KV would not change it. Here every layer's attention has weight in its
output, and it concentrates on few positions, so that one wrong block is likely to change tokens.
"""

from __future__ import annotations

import faulthandler
import math
import signal
import zlib

import torch

# Standard deviation of attention scores: softmax concentrates on few of thousands of positions.
_SCORE_DEVIATION = 4.0

faulthandler.register(signal.SIGUSR1)  # a bench that waits for too long asks for all stacks


class BenchWorker:
    """Methods that vLLM adds to its worker (``worker_extension_cls``)."""

    def seed_weights(self, seed: int) -> None:
        """Overwrite all weights, the same in each process that passes the same ``seed``."""
        model = self.model_runner.get_model()
        config = self.model_runner.model_config.hf_config
        generator = torch.Generator(device=next(model.parameters()).device)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                generator.manual_seed(seed + zlib.crc32(name.encode()))
                if weight.dim() == 1:
                    weight.fill_(1.0)
                elif "embed_tokens" in name or "lm_head" in name:
                    weight.normal_(generator=generator)
                else:
                    deviation = 1 / math.sqrt(weight.shape[-1])
                    weight.normal_(std=deviation, generator=generator)
                    if "qkv_proj" in name:
                        heads = config.num_attention_heads + config.num_key_value_heads
                        head_dim = weight.shape[0] // (heads + config.num_key_value_heads)
                        weight[: heads * head_dim].mul_(math.sqrt(_SCORE_DEVIATION))

    def damage_blocks(self, every: int) -> None:
        """Overwrite the KV of each ``every``-th device block with that of its successor.

        Args:
            every: distance of the damaged blocks. (Exchanged blocks would change nothing:
                attention does not depend on the order of keys that carry their positions.)
        """
        with torch.no_grad():
            for cache in self.model_runner.kv_caches:
                # [2, blocks, ...] or [blocks, 2, ...]
                blocks = cache.transpose(0, 1) if cache.shape[0] == 2 else cache
                damaged = torch.arange(1, blocks.shape[0] - 1, every, device=cache.device)
                blocks[damaged] = blocks[damaged + 1]
