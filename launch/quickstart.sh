#!/usr/bin/env bash
# From nothing to a trained model on a grid of ranks, in minutes on two cores: installs, makes a
# corpus of the Python standard library's sources, trains a tokenizer and a small Llama with tensor
# and pipeline parallelism (2 × 2 ranks), evaluates it and lets it write.
#
#     ./launch/quickstart.sh [--ranks 4|8] [--steps N] [--fresh]
#
#     --ranks 8    adds data parallelism: TP2 × PP2 × DP2
#     --steps N    length of the run; the recipe's by default
#     --fresh      throws away what an earlier call left; without it, this one goes on from there,
#                  on whichever grid
set -Eeuo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
recipe=recipes/quickstart.toml
folder=runs/quickstart
corpus=$folder/data/stdlib.jsonl
prefix=$folder/data/stdlib
corpus_bytes=8000000
prompt='def '

doing='reading its options'
trap 'echo "error: quickstart stopped while $doing; the reason is above" >&2' ERR

begin() {
    doing=$1
    printf '\n== %s\n' "$doing"
}

usage() {
    sed -n '/^#     /s/^# \{5\}//p' "launch/quickstart.sh"
}

mistake() {
    echo "error: $*; see ./launch/quickstart.sh --help" >&2
    exit 2
}

overrides=("logging.run_dir=$folder" "data.paths=[\"$prefix\"]" 'checkpoint.resume=latest')
ranks=4 fresh=
while (($#)); do
    option=$1
    shift
    case $option in
        --fresh) fresh=yes && continue ;;
        -h | --help) usage && exit ;;
    esac
    (($#)) || mistake "$option needs a value, or is no option"
    value=$1
    shift
    case $option in
        --ranks) ranks=$value ;;
        --steps)
            [[ $value =~ ^[1-9][0-9]*$ ]] || mistake "--steps $value is no positive number"
            overrides+=("train.steps=$value")
            ;;
        *) mistake "unknown option $option" ;;
    esac
done
case $ranks in
    4) ;;
    8) overrides+=('parallel.data_parallel_size=2') ;;
    *) mistake "--ranks $ranks must be 4 or 8" ;;
esac

begin 'installing'
./launch/venv.sh
export PATH="$PWD/.venv/bin:$PATH"
[[ -z $fresh ]] || rm -rf "$folder"
mkdir -p "$folder"

begin 'preparing the data'
# The recipe says how large the vocabulary is; data made for another size is made again.
megagrid train "$recipe" "${overrides[@]}" --show-config >"$folder/wanted.toml"
vocab_size=$(sed -n 's/^vocab_size = //p' "$folder/wanted.toml")
facts=$folder/data/facts.txt
inspect() { megagrid data inspect "$prefix" --show 0 >"$facts"; }
if [[ -f $prefix.idx ]] && inspect && tr -d , <"$facts" | grep -q "^vocabulary *$vocab_size ids"; then
    echo "$prefix is there already"
else
    python tools/make_stdlib_corpus.py "$corpus" --max-bytes "$corpus_bytes"
    megagrid data prepare --input "$corpus" --output "$prefix" \
        --train-tokenizer --vocab-size "$vocab_size"
    inspect
fi

begin "training on $ranks ranks"
megagrid train "$recipe" "${overrides[@]}"

begin 'sampling'
# A checkpoint exists once its manifest does.
checkpoint=$(dirname "$(ls "$folder"/checkpoints/step-*/manifest.json | tail -n 1)")
megagrid sample "$checkpoint" --prompt "$prompt" --tokens 96 | tee "$folder/sample.txt"

begin 'summing up'
python - "$folder/metrics.jsonl" "$facts" <<'PYTHON'
import json
import sys

metrics, facts = (open(path, encoding="utf-8").read().splitlines() for path in sys.argv[1:])
records = [json.loads(line) for line in metrics]
valid_loss = [r["valid_loss"] for r in records if r["valid_loss"] is not None][-1]
entropy = next(float(line.split()[1]) for line in facts if line.startswith("entropy"))
minutes = sum(r["step_time_s"] for r in records) / 60
print(f"steps                {records[-1]['step']}, {minutes:.1f} minutes")
print(f"training loss        {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f} nats a token")
print(f"validation loss      {valid_loss:.3f} nats a token")
print(f"unigram entropy      {entropy:.3f}: what knowing only how frequent each token is would cost")
PYTHON
cat <<END

To look at
  $folder/config.toml      every key of the run
  $folder/metrics.jsonl    every step: loss, gradient norm, tokens/s, memory, …
  $folder/sample.txt       what the model wrote
  $checkpoint
                                   weights and optimizer, loadable on any grid
END
