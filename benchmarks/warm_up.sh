#!/bin/sh
# Fill torch's compile cache for a later `equitape bench` with the same options: one process per encoding, all at once.
# Usage: sh benchmarks/warm_up.sh --shape 155m --batch 16 --length 1024 --workload train
for encoding in rope tape llama tape2 'tape2 decay_inside=true' 'tape layers=[0]'; do
  equitape bench --quick --runs 1 --once --encoding "$encoding" "$@" > /dev/null 2>&1 &
done
wait
