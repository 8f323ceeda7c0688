"""lowtide: post-training of language models at the lowest peak memory that the arithmetic allows."""

__version__ = "0.1.0"
