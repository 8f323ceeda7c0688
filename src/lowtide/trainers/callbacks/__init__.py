"""Callbacks that scripts pass to a trainer, under TRL's names."""
