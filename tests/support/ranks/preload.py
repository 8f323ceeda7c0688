"""Imported once by the server that cases are forked from: all that a run imports. Nothing here computes, since threads
do not survive a fork."""

import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

import lowtide
import lowtide.cli.training.train

for name in lowtide.__all__:
    getattr(lowtide, name)
torch.set_num_threads(1)
