"""A page that answers "what do I need?" without a command line: one HTML file that asks nothing of the network.

Its numbers are the grid that `lowtide gpus` answers from too (`kept_grid`): what each phase holds at two sizes of a
micro-batch, and how long three sizes take, between which a small script draws lines as the command does. The script is
all that computes; nothing that anybody types leaves the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from lowtide.html_shell import page

STYLE, SCRIPT = "page.css", "page.js"


def file_text(name: str) -> str:
    """A file that lies beside this one."""
    return files("lowtide.planner.answers").joinpath(name).read_text(encoding="utf-8")


def html_of(traced: Mapping[str, Any]) -> str:
    """The page of a grid."""
    models = _options([name for name, shape in traced["models"].items() if shape in traced["peaks"]], "Qwen/Qwen2.5-7B")
    methods = "".join(f'<option value="{escape(name)}">{escape(said)}</option>' for name, said in METHODS.items()
                      if name in traced["methods"])  # fmt: skip
    devices = _options([each["name"] for each in traced["devices"]], "RTX-4090")
    body = f"""<h1>What do I need to train it?</h1>
<p class="about">Predicted by lowtide from traces of a training step without weights, {escape(traced["date"])}. bfloat16
mixed precision, AdamW, LoRA of rank 16, one GPU. <code>lowtide gpus</code> says the same.</p>
<form id="asked" onsubmit="return false">
<label>Model <select id="model">{models}</select></label>
<label>Method <select id="method">{methods}</select></label>
<label>Device <select id="device">{devices}</select></label>
<label for="length">Tokens of a row <output id="length_said" for="length"></output>
<input id="length" type="range" min="8" max="17" step="0.5" value="10"></label>
<label for="rows">Rows of a batch <output id="rows_said" for="rows"></output>
<input id="rows" type="range" min="1" max="64" step="1" value="8"></label>
</form>
<section class="advice" aria-live="polite"><p class="label" id="best_label"></p><p class="value" id="best"></p>
<p id="best_more"></p></section>
<h2 id="ways_title">Ways to train it</h2>
<div id="ways" class="ways" role="list"></div>
<h2>The smallest GPU with bfloat16 that works</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Devices"><table id="devices"></table></div>
<p class="note">Each way is tried with lowtide's own techniques, and the fastest settings that fit are shown: adapters
without gradient checkpointing, then with it, then with activations in host memory and MLPs in tiles; all weights with
checkpointing, then also with activations and the optimizer's states in host memory and the optimizer in backward, or
in 16 bits with stochastic rounding. A batch that does not fit whole is cut into micro-batches of whole rows
(tokens_per_microbatch). But for the ways' own remarks none of this changes a number. Prompts and answers are packed
without padding, a pair shares its prompt, and no logits of all tokens are ever held.</p>
<p class="note">5% of a device are left for what a prediction may miss. Longer rows than the model has positions for are
not offered. A pair has two sequences of the tokens that are chosen, half of them the prompt; its longest row counts all
of its parts. <code>DATA</code> stands for your rows. Speeds are a roofline at the rates of data sheets, for an order of
magnitude. For older GPUs, CPUs, your own model, data and settings: <code>lowtide gpus METHOD --model M</code>,
<code>lowtide plan METHOD --model M --dataset D</code>, which searches among more settings.</p>
<noscript><p class="note">This page computes with JavaScript, which is switched off here; <code>lowtide gpus</code>
answers on a command line.</p></noscript>
<script type="application/json" id="grid">{_embedded(traced)}</script>"""
    return page("What do I need to train it?", body, style=file_text(STYLE), script=file_text(SCRIPT))


METHODS = {"sft": "SFT: texts and conversations", "dpo": "DPO: pairs of completions"}


def _options(names: Any, chosen: str) -> str:
    return "".join(
        f'<option value="{escape(name)}"{" selected" if name == chosen else ""}>{escape(name)}</option>'
        for name in names
    )


def _embedded(traced: Mapping[str, Any]) -> str:
    """As JSON that ends no script."""
    return json.dumps(traced, separators=(",", ":")).replace("<", "\\u003c")
