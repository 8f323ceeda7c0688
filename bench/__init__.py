"""Side-by-side benchmarks: lowtide against TRL, the same model and rows, each run in a process of its own.

    python -m bench.compare        measure, print ratios, record them in bench/results/; all methods, or --method dpo
    python -m bench.memory         what each memory technique saves, fine-tuning Qwen2.5-0.5B
    python -m bench.vocabulary     the peak of a DPO step at vocabularies of 32,000 and 256,000
    python -m bench.docs           write docs/benchmarks.md from bench/results/

A command is one file, or a folder where it has parts: `__main__.py`; `child.py`, which runs in a process of its own;
`cases.py`, what is run; `tables.py`, what the docs show of it. `inputs/` has the models and rows, `measuring/` the
processes, peaks and records of all of them.

A new training method is one entry in `compare/methods.py`, a new kind of data one in `inputs/rows.py`, a new rival or
set of flags one in `compare/contestants.py`, a new model one in `inputs/shapes.py`, a combination of memory techniques
one in `memory/cases.py`.
"""
