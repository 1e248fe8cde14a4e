"""Run an evaluation, from its YAML files to its scores."""
