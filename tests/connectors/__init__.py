"""Tests of the connectors to other servers."""
