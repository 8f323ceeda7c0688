"""The tables of subcommands, with a line of help each. What carries them out is not imported for that."""

from __future__ import annotations

from lowtide.methods import METHODS

TOOLS = {
    "check": ("lowtide.cli.check", "whether a run is told rightly: options, files, columns, template; without weights"),
    "gpus": ("lowtide.cli.planning.gpus", "on which devices a model can be trained, and how"),
    "plan": ("lowtide.cli.planning.plan", "the fastest settings of a run that fit a memory budget"),
    "estimate": ("lowtide.cli.planning.estimate", "how much memory a run will take, before it starts"),
    "lengths": ("lowtide.cli.lengths", "how long a dataset's rows are, and which max_length to take"),
    "show": ("lowtide.cli.show", "rows of a dataset as the model will see them: what is scored, and what is dropped"),
    "profile": ("lowtide.cli.planning.profile", "run a few steps of a method, and show where their memory went"),
    "measure": (
        "lowtide.cli.planning.measure",
        "run a few steps of a method, and compare their peak with the predicted one",
    ),
    "page": ("lowtide.cli.planning.page", "write a page that shows what fits which GPU"),
    "teacher-logprobs": (
        "lowtide.cli.training.teacher_logprobs",
        "write what a teacher says of a dataset's completions, for runs of gkd that load no teacher",
    ),
    "merge": ("lowtide.cli.merge", "write a model and its adapter, or a sharded checkpoint, as one model"),
    "chat": ("lowtide.cli.after_training.chat", "talk with a trained model, an adapter or a checkpoint"),
    "generate": ("lowtide.cli.after_training.generate", "write completions of a file of prompts with a trained model"),
    "evaluate": (
        "lowtide.cli.after_training.evaluate",
        "the loss of a trained model on held-out data, and tasks of lm-eval",
    ),
    "export": ("lowtide.cli.after_training.export", "write a model as a GGUF file for llama.cpp and Ollama"),
    "convert": (
        "lowtide.cli.converting.convert",
        "write a run of Axolotl or LLaMA-Factory as a run file, naming what it leaves out",
    ),
    "recipes": ("lowtide.cli.recipes", "list run files for common runs, and copy one to begin with"),
    "vllm-serve": ("lowtide.cli.vllm_serve", "start vLLM as a server that writes completions for a training"),
    "doctor": ("lowtide.cli.doctor", "what is installed, what this machine has, and what is missing"),
    "demo": ("lowtide.cli.demo", "train a tiny model on generated arithmetic, and show what it learned"),
}
"""The other subcommands: a module, which has `add_parser(subparsers)` and sets `run`, and a line of help."""
OF_A_METHOD = {"check", "gpus", "plan", "estimate", "profile", "measure", "teacher-logprobs"}
"""Those that a method follows, whose options they take: their `add_parser(subparsers, method)` gives its parser."""

PREDICT = {"check", "gpus", "plan", "estimate"}
"""Those of them that load no weights: packages that others import and they do not use need not be loaded."""


def commands(given: str | None = None) -> dict[str, str]:
    """All subcommands with their lines of help; `given` is among them where it is a user's own method."""
    of_methods = {name: row.summary for name, row in METHODS.rows.items()}
    own = {} if given is None or given in of_methods or given not in METHODS else {given: METHODS.row(given).summary}
    return of_methods | own | {name: summary for name, (_, summary) in TOOLS.items()}


def trains(command: str) -> bool:
    """Whether a command trains, or tells of what trains."""
    return command in METHODS or command in OF_A_METHOD or command == "demo"
