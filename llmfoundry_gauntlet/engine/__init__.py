"""Requests to outputs: what is batched with what, and the model that runs it."""
