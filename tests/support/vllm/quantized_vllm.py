"""What vLLM writes with a folder, greedily: `python -m tests.support.vllm.quantized_vllm FOLDER` prints it as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT, COUNT = [5, 6, 7, 8], 8


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=2)
    asked = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0)
    prompt: Any = {"prompt_token_ids": PROMPT}
    written = model.generate(prompt, asked, use_tqdm=False)[0].outputs[0]
    logprobs = [found[token].logprob for token, found in zip(written.token_ids, written.logprobs or [], strict=True)]
    print("WRITTEN " + json.dumps([list(written.token_ids), logprobs]))


if __name__ == "__main__":
    main(sys.argv[1])
