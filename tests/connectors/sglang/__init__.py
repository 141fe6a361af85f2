"""A whole SGLang server on the CPU with the connector; `make test-sglang` installs SGLang."""
