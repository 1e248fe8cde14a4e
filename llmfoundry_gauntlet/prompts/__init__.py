"""Shots, text and token ids of a prompt."""
