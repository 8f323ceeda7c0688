#!/bin/sh
# From an empty folder to an answer, a trained model and a report: sh first_steps.sh PATH_OR_URL_OF_LOWTIDE [--max_steps N]
# Further words go to the demo. It needs git and Python 3.11 or newer; nothing is downloaded but packages.
set -e
source=$1
shift

git clone --quiet "$source" lowtide
python3 -m venv venv
venv/bin/python -m pip install --quiet ./lowtide --constraint lowtide/constraints.txt
venv/bin/lowtide demo --output_dir first "$@" # trains a tiny model on generated arithmetic
venv/bin/lowtide estimate sft --config first/sft.yaml --max_length 128 # what a run with longer rows would take
cat first/report.json
