"""Checkpoints: written whole or not at all, checked before a run resumes from one, and written when a run is stopped.

- `whole`: how a checkpoint is written, on all ranks; `durable`, `manifest` and `write_errors` are its parts
- `resuming`: what is checked and loaded when a run resumes; `soundness` (is a file damaged), `choosing` (the last
  whole checkpoint), `run_record` (what run it is of) and `weights` (do they fit the model) are its parts
- `lock`: one run at a time in an output folder
- `stopping`: what happens on Ctrl-C and SIGTERM; `signals` receives them
"""
