"""One thread a test process: the models are tiny, and two processes run at once."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
