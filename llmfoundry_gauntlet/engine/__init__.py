"""Requests become outputs: batches, and the model that runs them."""
