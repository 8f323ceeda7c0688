"""What a prepared dataset is cached under: everything that its tokens depend on, and nothing else.

`datasets` would hash the mapped function itself, tokenizer and all; a fast tokenizer's state changes when it is
first called, so the second start would miss the cache. Here the inputs are named and hashed one by one.
"""

import dataclasses
import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset, config, is_caching_enabled
from datasets.fingerprint import (
    Hasher,
    generate_random_fingerprint,
    get_temporary_cache_files_directory,
)
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.batches.shared_rounds import Sharing
from lowtide.data.encode.truncation import Truncation
from lowtide.data.options import TokenOptions

logger = logging.getLogger(__name__)

VERSION = 15
"""Raised whenever preparation gives other numbers than before."""
NEUTRAL = (
    *("num_proc", "source", "shuffle", "seed", "packing_strategy", "prefix_sharing"),
    *("max_length", "truncation_mode", "max_prompt_length", "max_completion_length"),
)
"""Options that don't change how a single row is prepared; the limits on its length count as truncation does, and how
rounds are laid as what it comes to."""


def rows_fingerprint(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenOptions,
    truncation: Truncation,
    sharing: Sharing | None = None,
) -> str:
    """The fingerprint of a dataset's prepared rows, before they are shuffled or packed."""
    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in (*NEUTRAL, "formatting_func")
    }
    return combine(
        VERSION,
        transformers.__version__,
        fingerprint_of(dataset),
        tokenizer_fingerprint(tokenizer),
        json.dumps(values, sort_keys=True),
        function_fingerprint(getattr(options, "formatting_func", None)),
        truncation,
        sharing,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that tokenize, and render conversations, alike."""
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        rules = json.loads(backend.to_str())
        # What an earlier call left behind; we neither truncate nor pad.
        del rules["truncation"], rules["padding"]
    else:
        rules = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    return combine(
        type(tokenizer).__name__,
        json.dumps(rules, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
        repr(sorted(tokenizer.special_tokens_map.items())),
    )


def function_fingerprint(function: Callable[..., Any] | None) -> str:
    """The same for functions, or callable objects, with the same code and closure.

    `datasets` looks into functions that are defined in the running script, and knows those of a module by name only;
    for these the module's source counts too.
    """
    if function is None:
        return ""
    try:
        code = Hasher.hash(function)
    except Exception as error:  # whatever pickling raises for an object that a closure happens to hold
        name = getattr(function, "__name__", type(function).__name__)
        logger.warning("%s can't be hashed (%s), so a later start won't find what is prepared now.", name, error)
        return generate_random_fingerprint()
    defined = inspect.unwrap(getattr(function, "func", function))
    module = sys.modules.get(getattr(defined, "__module__", None) or type(defined).__module__)
    path = getattr(module, "__file__", None)
    if path is None or module is sys.modules["__main__"]:
        return code
    return combine(code, hashlib.blake2b(Path(path).read_bytes()).hexdigest())


def combine(*parts: object) -> str:
    """One fingerprint of several values; these are told apart by their order."""
    return hashlib.blake2b(json.dumps([str(part) for part in parts]).encode(), digest_size=16).hexdigest()


def cache_file(fingerprint: str) -> str:
    """Where the dataset with this fingerprint is kept: beside the other caches of `datasets`, or, if its caching is
    switched off, in its temporary folder."""
    if is_caching_enabled():
        folder = Path(config.HF_DATASETS_CACHE) / "lowtide"
    else:
        folder = Path(get_temporary_cache_files_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{fingerprint}.arrow")
