"""A batch script for slurm: starts Ray on the allocation, trains, and is requeued before its time is over."""

from raygpt.deploy.deployment import Deployment
from raygpt.deploy.names import mebibytes
from raygpt.deploy.options import SAVE_S
from raygpt.errors import NOT_RETRIED


def script(deployment: Deployment) -> str:
    """The file for `sbatch`."""
    return f"""\
{_directives(deployment)}set -u

# Put here what brings raygpt into PATH, e.g.: source ~/venv/bin/activate
for program in raygpt ray; do
  if ! command -v "$program" >/dev/null; then
    echo "error: $program is not in PATH; activate its environment in this script" >&2
    exit 1
  fi
done

signalled=
driver=
trap 'signalled=yes; [ -z "$driver" ] || kill -TERM "$driver"' USR1 TERM
folder=$(mktemp -d)
cat >"$folder/recipe.yaml" <<'RECIPE'
{deployment.recipe.to_yaml()}RECIPE

# Only who has this token can run code on the cluster; srun passes it on.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
# Jobs may share a node, so the port depends on the job.
port=$((20000 + SLURM_JOB_ID % 10000))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {{print $1}}'):$port
gpus={deployment.gpus_per_node}
cpus=${{SLURM_CPUS_PER_TASK:-{deployment.cpus_per_pod}}}
size=(--num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block)

# Since slurm 22.05 srun does not take --cpus-per-task from sbatch, and would bind Ray to one core.
srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$head" \\
  ray start --head --node-ip-address="${{address%:*}}" --port="$port" --include-dashboard=false "${{size[@]}}" &
for _ in $(seq 60); do
  ray health-check --address "$address" >/dev/null 2>&1 && break
  sleep 2
done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  # Ray gives up after 30 s where nodes are busy or many join at once; slurm ends the loop with the job.
  srun --nodes="$others" --ntasks="$others" --cpus-per-task="$cpus" --exclude="$head" \\
    bash -c 'until ray start "$@"; do sleep 5; done' ray --address="$address" "${{size[@]}}" &
fi

# The driver waits for nodes that have not joined, and for the lock of one that was killed.
RAY_ADDRESS="$address" raygpt train "$folder/recipe.yaml" --unattended &
driver=$!
[ -z "$signalled" ] || kill -TERM "$driver"  # signalled while Ray started
wait "$driver"
status=$?
while kill -0 "$driver" 2>/dev/null; do  # a signal ends `wait` before the driver has saved
  wait "$driver"
  status=$?
done
rm -r "$folder"
if [ "$status" -eq {NOT_RETRIED} ]; then
  echo "not requeued: the error above would come again"
elif [ -n "$signalled" ] && [ "$status" -ne 0 ]; then
  echo "asked to save by slurm: requeued, and goes on from its checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _directives(deployment: Deployment) -> str:
    """The lines that `sbatch` reads."""
    gpus = f"#SBATCH --gpus-per-node={deployment.gpus_per_node}\n" if deployment.gpus_per_node else ""
    asked = deployment.options.memory
    memory = f"#SBATCH --mem={mebibytes(asked)}M\n" if asked else ""
    return f"""\
#!/bin/bash
# The run {deployment.recipe.run.name}, made by raygpt deploy: `sbatch` of this file starts it, or goes on with it.
#SBATCH --job-name={deployment.name}
#SBATCH --nodes={_nodes(deployment)}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={deployment.cpus_per_pod}
{memory}#SBATCH --time={deployment.time}
#SBATCH --output=%x-%j.log
# A job that is requeued, by slurm after a lost node or by itself below, adds to its log.
#SBATCH --requeue
#SBATCH --open-mode=append
# {SAVE_S} s before its time is over the script gets USR1, saves, and requeues itself.
#SBATCH --signal=B:USR1@{SAVE_S}
"""


def _nodes(deployment: Deployment) -> str:
    low, high = deployment.min_replicas, deployment.max_replicas
    return str(high) if low == high else f"{low}-{high}"
