#!/usr/bin/env bash
# What a machine with a GPU has to show, within 25 minutes: bash scripts/bench/on_a_gpu.sh NAME
# Its output, and the record of bench_step in docs/measurements/machines/NAME.json, are what to send back.
set -u
cd "$(dirname "$0")/../.."
name=${1:?give the machine a name}
mezo env
python -m pytest -q -m cuda -p no:cacheprovider
python scripts/bench/bench_step.py --batches 16x32 64x32 --rounds 10 --minutes 8 --out "docs/measurements/machines/$name.json"
python scripts/bench/bench_noise.py
# Killed and resumed, a run has the bits of one that was not.
runs=$(mktemp -d)
mezo train experiment=demo -q "hydra.run.dir=$runs/whole"
mezo train experiment=demo -q "hydra.run.dir=$runs/killed" & sleep 15; kill -9 $!
mezo resume "$runs/killed" -q
cmp "$runs/whole/trajectory.bin" "$runs/killed/trajectory.bin" && echo "killed and resumed: the same trajectory"
mezo verify "$runs/killed"
