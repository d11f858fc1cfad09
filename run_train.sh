#!/usr/bin/env bash
# Train a recipe; with nothing set, a small Llama 3 on text that is on every machine.
#
#   MODULE=... CONFIG=... NGPU=... ./run_train.sh [--section.field value ...]
#
#   MODULE, CONFIG   where the recipe is, and its name      (torchtitan train --module, --config)
#   NGPU             processes on this machine              (--ngpu; default: the GPUs, else 1 on the CPU)
#   NNODES           machines; with NODE_RANK and MASTER_ADDR, or RDZV_ENDPOINT and RDZV_ID, on each (--nnodes)
#   LOG_RANK         whose output is shown: 0, 0,1 or all   (--log-rank)
#   EXTRAS           optional packages for .venv: data, tensorboard, wandb
#
# ./run_train.sh --help lists every field of the recipe; docs/cli.md has the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
ensure_env "${EXTRAS:-}"

arguments=()
[[ -z "${MODULE:-}" ]] || arguments+=(--module "$MODULE")
[[ -z "${CONFIG:-}" ]] || arguments+=(--config "$CONFIG")
[[ -z "${NGPU:-}" ]] || arguments+=(--ngpu "$NGPU")
[[ -z "${NNODES:-}" ]] || arguments+=(--nnodes "$NNODES")
[[ -z "${LOG_RANK:-}" ]] || arguments+=(--log-rank "$LOG_RANK")
exec "$PYTHON" -m torchtitan.train ${arguments[@]+"${arguments[@]}"} "$@"
