#!/usr/bin/env bash
# From nothing to an adaptive training run and its report, in minutes and on two ranks:
# makes .venv, trains a small language model on the source of Python's standard library, prints where the report is.
# Arguments are passed on, such as policy.target_efficiency=0.8
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" lm
exec .venv/bin/torchrun --standalone --nproc-per-node 2 recipes/lm/train.py experiment=quickstart "$@"
