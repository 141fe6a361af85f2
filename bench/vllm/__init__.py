"""Bench of vLLM on a GPU: the same prompts without offload, with vLLM's own, and with others.

Needs a GPU and vLLM; run it with ``python -m bench.vllm --help``. Nothing here is imported by the
other benches.
"""
