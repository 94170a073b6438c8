#!/usr/bin/env bash
# A Python prompt on rank 0, while the other ranks serve its calls; Ctrl-D ends the session.
# Use: bash slurm/interactive.sh       Last line of the output: "session ended"
#
#     >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
#     tensor([2., 2.])

# --- settings ---
VENV=${VENV:-$PWD/.venv}   # a Python environment with mpirpc, on a file system that all nodes see
MPI_TYPE=${MPI_TYPE:-pmix} # pmix for Open MPI, pmi2 for MPICH; "srun --mpi=list" shows what there is
NODES=${NODES:-2}
TASKS=${TASKS:-2}
TIME=${TIME:-01:00:00}
# --- your site: module load ..., network settings ---

set -euo pipefail
[ ! -x "$VENV/bin/ompi_info" ] || export OPAL_PREFIX="$VENV"
session='
import code
import readline
import torch
import mpirpc as rpc

rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    workers = ", ".join(worker.name for worker in rpc.get_worker_infos())
    code.interact(banner=f"{workers} are here; rpc is mpirpc", local={"rpc": rpc, "torch": torch}, exitmsg="")
rpc.shutdown()
'
srun --nodes="$NODES" --ntasks="$TASKS" --time="$TIME" --mpi="$MPI_TYPE" --pty "$VENV/bin/python" -c "$session"
echo "session ended"
