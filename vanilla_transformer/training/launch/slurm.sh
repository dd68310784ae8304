#!/bin/bash
# A run on several machines, one process for each of their GPUs:
#   sbatch --nodes 4 slurm.sh RECIPE --data DIR --output OUT
# OUT is on a disk that all machines see. A job that is put back into the queue goes on from its newest checkpoint.
#SBATCH --job-name=vanilla-transformer
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
    -m vanilla_transformer_export train "$@"
