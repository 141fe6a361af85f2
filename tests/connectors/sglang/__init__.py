"""A whole SGLang server on the CPU, over the connector; `make test-sglang` installs SGLang."""
