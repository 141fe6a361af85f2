"""Tests of the vLLM connector against vLLM's own scheduler; `make test-vllm` installs vLLM."""
