#!/bin/bash
# Three seeds of theta + LoRA and of theta + TAPE 2 + LoRA next to the original, in one folder of `equitape extend`; TAPE 2
# updates in all blocks, and in one more column, with one seed, in every fifth, as the plan has it.
#
#   BASE=SmolLM2-135M-Instruct TEXTS=data bash benchmarks/extend_seeds.sh runs/seeds [more options of equitape extend]
#
# TEXTS has books/train, books/test, proofs/train and proofs/test. Every column is a process (--only), AT_ONCE at a time;
# each needs about 43 GB while it trains rows of 4,096 tokens, 34 GB with --compile. The original is measured once, and all columns get the same
# prompts. Run it again to continue. BASE as a folder of safetensors starts faster than a GGUF file.
set -u
out=$1
shift
AT_ONCE=${AT_ONCE:-3}
all=theta+tape2+lora@tape.layers=all
columns=(extended $all original theta+lora@seed=1 $all,seed=1 theta+tape2+lora theta+lora@seed=2 $all,seed=2)
options=(
    --to 65536 --data "$TEXTS/books/train" --data "$TEXTS/proofs/train" --eval-data "$TEXTS/books/test" --eval-data "$TEXTS/proofs/test"
    --eval-lengths 8192,16384,32768,65536,131072 --needle-lengths 8192,32768 --text-lengths 8192,32768,65536
    --samples 20 --windows 1 --seed 0 "$@"
)
for column in "${columns[@]}"; do
    case $column in original | extended) ;; *) options+=(--compare "$column") ;; esac
done
mkdir -p "$out"
for column in "${columns[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do wait -n; done
    equitape extend "$BASE" "${options[@]}" --out "$out/table" --only "$column" > "$out/$column.log" 2>&1 &
    sleep 2
done
wait
equitape extend "$BASE" "${options[@]}" --out "$out/table" --resume
